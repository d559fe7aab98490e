"""What earlier versions left is read, executed again and gone on with (docs/how-to/upgrade.md)."""

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
from old import stored
from old.hub import READ, RUNS, SHARDS, VERSIONS, Hub, all_messages, kind_of, snapshots, within

from diloco_coordinator.runs.registry_io import NOTES
from diloco_learner.recovery.checkpoint_io import LocalCheckpoints
from diloco_learner.recovery.moments import views
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import MANIFEST, LearnerPart, ShardPart
from diloco_shared.protocol.messages import TapeRecord, TapeRestore, TapeSetting
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import decode, encode
from diloco_shared.spec.run import RunSpec, written
from diloco_syncer.checkpoints.parts_io import load
from diloco_syncer.history.audit_io import reexecute, verify
from diloco_syncer.history.history import History
from diloco_syncer.history.replay import payloads_needed
from diloco_syncer.merging.store import FragmentStore
from diloco_syncer.snapshots.snapshots_io import SnapshotStore

pytestmark = pytest.mark.virtual

EVERY_SHARD = [("over", 0), *SHARDS]
KINDS = {kind.__name__ for kind in get_args(get_args(TapeRecord)[0])}
assert READ, "nothing is kept of this wire version yet: run tests/old/make.py"
NEWEST = READ[-1]

each = pytest.mark.parametrize("version", READ, ids=lambda path: path.name)


# --- bytes -------------------------------------------------------------------------------------


@each
def test_every_message_is_understood(version: Path) -> None:
    for _, data in all_messages(version):
        decode(data, kind_of(stored.name_of(data)))


def test_every_message_is_written_as_it_was() -> None:
    """A field more, less or elsewhere is another message, which processes of the release refuse.

    So whoever changes one raises WIRE_VERSION, says in docs/how-to/upgrade.md what becomes of older
    data, and keeps bytes of the new form beside these.
    """
    for where, data in all_messages(NEWEST):
        again = encode(decode(data, kind_of(stored.name_of(data))))
        assert again == data, where


def test_a_run_is_written_as_the_last_release_wrote_it() -> None:
    """A setting that it does not have makes a record that its processes refuse."""
    found = [
        decode(data, RunRecord).spec
        for _, data in all_messages(NEWEST)
        if stored.name_of(data) == "RunRecord"
    ]
    assert found
    for spec in found:
        assert written(RunSpec.model_validate(spec)) == spec


def test_every_kind_of_record_is_kept() -> None:
    assert {stored.name_of(data) for _, data in all_messages(NEWEST)} >= KINDS


def files(folder: Path) -> dict[str, Any]:
    """Names and bytes; of the list of files not its order, which is that of their writing."""
    found: dict[str, Any] = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    meta = json.loads(found["meta.json"])
    meta["files"] = sorted(meta["files"], key=lambda file: str(file["name"]))
    return found | {"meta.json": json.dumps(meta)}


@pytest.mark.parametrize(("run", "shard"), EVERY_SHARD)
async def test_a_snapshot_is_written_as_it_was(run: str, shard: int, tmp_path: Path) -> None:
    hub = Hub(NEWEST, run, tmp_path)
    spec, found = await hub.spec(), snapshots(hub.disk, shard)
    assert found
    for n, (there, covers) in enumerate(found):
        meta, arrays = there.load(covers)
        history = History.restore(spec, meta["history"])
        store = FragmentStore.restore(meta["store"], arrays, spec.algorithm)
        again = {"history": history.meta(), "store": store.meta()}
        written = SnapshotStore(tmp_path / str(n)).save(covers, again, store.state_arrays())
        assert files(written) == files(there.folder / written.name), there.folder


@pytest.mark.parametrize("run", ("one", "two"))
def test_a_checkpoint_is_written_as_it_was(run: str) -> None:
    there = RunCheckpoints(str(NEWEST / run / stored.DISK / "checkpoints"))
    refs = there.complete()
    assert refs
    for ref in refs:
        manifest, _ = there.manifest(ref)
        body = there.vault.read(f"{ref}/{MANIFEST}")
        assert manifest.model_dump_json(indent=1).encode() == body
        for objects, kind in (
            (manifest.shards, ShardPart),
            (manifest.learners.values(), LearnerPart),
        ):
            for stored_ in objects:
                part = there.part(ref, stored_, kind)
                assert part.model_dump_json().encode() == there.vault.read(f"{ref}/{stored_.key}")
                assert sum(map(len, there.blobs(ref, part))) > 0


# --- what is done with them --------------------------------------------------------------------


@each
@pytest.mark.parametrize(("run", "shard"), EVERY_SHARD)
async def test_a_tape_is_executed_again(
    version: Path, run: str, shard: int, tmp_path: Path
) -> None:
    """Every contribution is there and every digest the same; `one` has all from its beginning."""
    hub = Hub(version, run, tmp_path)
    spec, tape = await hub.spec(), await hub.tape(shard)
    verified = await verify(spec, hub.bus, tape, hub.checkpoints, shard)
    assert verified.faults == ()
    assert verified.records == len(tape)
    assert verified.contributions > 0 or run == "over", "a run that is over may be covered whole"
    folders = sorted({store.folder for store, _ in snapshots(hub.disk, shard)})
    replayed = await reexecute(spec, hub.bus, tape, folders, hub.checkpoints, shard)
    assert replayed.fault is None
    assert replayed.rounds > 0 or run == "over"
    # A run that is over may still have all that it ever merged.
    assert run == "over" or (replayed.began_at == 0) == (run == "one")


@each
@pytest.mark.parametrize(("run", "shard"), SHARDS)
async def test_a_syncer_goes_on(version: Path, run: str, shard: int, tmp_path: Path) -> None:
    """The user resumes the run: its record follows those of the version that is kept."""
    hub, name = Hub(version, run, tmp_path), f"syncer-{shard + 1}"
    before, term = await hub.tape(shard), await hub.term(shard)
    await hub.want(desired="running")
    async with hub.syncer(name, shard):
        await within(hub.led_by(name, term, shard))
        await within(hub.comes(lambda r: isinstance(r, TapeSetting) and r.term > term, shard))
    assert (await hub.tape(shard))[: len(before)] == before


@each
async def test_a_syncer_goes_on_from_the_tape_alone(version: Path, tmp_path: Path) -> None:
    hub = Hub(version, "one", tmp_path)
    term = await hub.term()
    async with hub.syncer("elsewhere", data=tmp_path / "empty"):
        await within(hub.led_by("elsewhere", term))


@each
async def test_a_syncer_goes_on_from_the_snapshot_alone(version: Path, tmp_path: Path) -> None:
    """Contributions that it covers are gone, and with them the way from the beginning."""
    hub = Hub(version, "one", tmp_path)
    shutil.rmtree(hub.checkpoints)
    term, covers = await hub.term(), max(covers for _, covers in snapshots(hub.disk))
    for seq, record in await hub.tape():
        for subject in payloads_needed(record) if seq <= covers else ():
            await hub.bus.purge(subjects.up_stream("one"), f"{subject}.m")
    async with hub.syncer("syncer-1"):
        await within(hub.led_by("syncer-1", term))


@pytest.mark.parametrize("run", ["one", "two"])
@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_a_checkpoint_is_read(version: Path, run: str) -> None:
    """Its arrays are those that its history names, whichever version wrote it."""
    root = str(version / run / stored.DISK / "checkpoints")
    refs = RunCheckpoints(root).complete()
    assert refs
    for ref in refs:
        spec = RunSpec.model_validate(RunCheckpoints(root).manifest(ref)[0].spec)
        for shard in range(spec.algorithm.shards):
            state = load(spec, shard, ref, root)
            assert [state.store.version(p) for p in spec.algorithm.owned(shard)] == [
                state.manifest.versions[p] for p in spec.algorithm.owned(shard)
            ]


@pytest.mark.parametrize("run", ["one", "two"])
@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
@pytest.mark.parametrize("server", ["new", "the same"])
async def test_a_new_run_begins_with_a_checkpoint(
    version: Path, run: str, server: str, tmp_path: Path
) -> None:
    """The way of an upgrade: asked for over REST, carried out by syncers."""
    hub = Hub(version, run, tmp_path / "old")
    if server == "new":
        kept, hub = hub.checkpoints, Hub(None, "again", tmp_path / "new")
        shutil.copytree(kept, hub.checkpoints)
    hub.run = "again"
    ref = RunCheckpoints(hub.checkpoints).complete()[-1]
    manifest, _ = RunCheckpoints(hub.checkpoints).manifest(ref)
    async with hub.coordinator() as desk:
        body = {**manifest.spec, "name": "again"}
        path = f"/v1/checkpoints/submit?checkpoint={ref}"
        answer = await desk.ask("POST", path, body)
        assert answer.status_code == 201, answer.text
        for shard in range(manifest.spec["algorithm"]["shards"]):
            async with hub.syncer(f"new-{shard}", shard):
                back = await within(hub.comes(lambda r: isinstance(r, TapeRestore), shard))
            assert isinstance(back, TapeRestore)
            owned = [p for p, digest in enumerate(back.anchor_digests) if digest]
            assert owned == list(range(shard, 2, manifest.spec["algorithm"]["shards"]))
            assert [back.versions[p] for p in owned] == [manifest.versions[p] for p in owned]


@each
async def test_the_coordinator_reads_the_buckets(version: Path, tmp_path: Path) -> None:
    hub = Hub(version, "two", tmp_path)
    kept = {
        name.removeprefix("KV_"): {m[1].split(".", 2)[2] for m in stream.messages if m[3]}
        for name, stream in hub.streams.items()
        if name.startswith("KV_")
    }
    async with hub.coordinator() as desk:
        registry = desk.registry
        assert set(registry.runs) == kept[subjects.RUNS] == set(RUNS)
        assert set(registry.assignments) == kept[subjects.ASSIGNMENTS]
        assert set(registry.roll.notes) == kept[NOTES]
        assert set(registry.roll.living) >= {"learner-1", "learner-2", "syncer-1", "syncer-2"}
        view = await desk.get("/v1/runs/two")
        assert view["status"]["versions"] == list(registry.statuses["two"].versions)
        assert view["spec"]["algorithm"]["shards"] == 2
        assert len((await desk.get("/v1/events"))["events"]) > 0
        assert len((await desk.get("/v1/runs/one/checkpoints"))["checkpoints"]) == 0
        assert len((await desk.get("/v1/runs/two/checkpoints"))["checkpoints"]) == 1


@each
@pytest.mark.parametrize("run", RUNS)
def test_a_learner_reads_its_own_checkpoint(version: Path, run: str, tmp_path: Path) -> None:
    folders = sorted((version / run / stored.DISK).glob("learner-*/checkpoints/*"))
    assert folders
    for folder in folders:
        copy = shutil.copytree(folder, tmp_path / folder.parts[-3])
        found, faults = LocalCheckpoints(copy, 1).load(lambda state: None)
        assert found is not None and faults == []
        assert len(views(found)) > 1
