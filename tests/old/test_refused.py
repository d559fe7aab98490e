"""What an older wire version left is refused by name, and left alone."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from old import stored
from old.hub import REFUSED, RUNS, SHARDS, Hub, all_messages, kind_of, snapshots, wire_of, within

from diloco_cli.commands.tape import _recorded
from diloco_cli.words import CliError
from diloco_learner.recovery.checkpoint_io import LocalCheckpoints
from diloco_learner.recovery.moments import pack
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import WireError, decode, encode
from diloco_shared.spec.run import RunSpec
from diloco_syncer.history.history import History
from diloco_syncer.merging.store import FragmentStore

# A run that needs larger streams than those that are there.
LARGE = {
    "model": {"factory": "my_models:make", "parameters": 10**9},
    "algorithm": {"fragments": 24},
    "budget": {"steps": 96},
}

pytestmark = [
    pytest.mark.virtual,
    pytest.mark.parametrize("version", REFUSED, ids=lambda path: path.name),
]


def says_so(version: Path) -> str:
    return f"wire version {wire_of(version)}, this side speaks"


def old_spec(version: Path, run: str) -> RunSpec:
    """Of a run whose record cannot be read; its checkpoints tell it."""
    there = RunCheckpoints(str(version / run / stored.DISK / "checkpoints"))
    return RunSpec.model_validate(there.manifest(there.complete()[-1])[0].spec)


def test_every_message_is_refused(version: Path) -> None:
    for _, data in all_messages(version):
        with pytest.raises(WireError, match=says_so(version)):
            decode(data, kind_of(stored.name_of(data)))


@pytest.mark.parametrize(("run", "shard"), SHARDS)
async def test_a_snapshot_is_read(version: Path, run: str, shard: int, tmp_path: Path) -> None:
    hub, spec = Hub(version, run, tmp_path), old_spec(version, run)
    found = snapshots(hub.disk, shard)
    assert found
    for there, covers in found:
        meta, arrays = there.load(covers)
        history = History.restore(spec, meta["history"])
        store = FragmentStore.restore(meta["store"], arrays, spec.algorithm)
        assert history.seq == covers
        for p in spec.algorithm.owned(shard):
            assert store.version(p) == history.versions[p] > 0
            assert store.anchor_digest(p) == history.anchor_digests[p]


@pytest.mark.parametrize("run", RUNS)
def test_a_learner_passes_over_its_own_checkpoint(version: Path, run: str, tmp_path: Path) -> None:
    """Its moments then come from a donor; what it cannot read it does not remove."""
    folders = sorted((version / run / stored.DISK).glob("learner-*/checkpoints/*"))
    assert folders
    for folder in folders:
        copy = shutil.copytree(folder, tmp_path / folder.parts[-3])
        before = sorted(copy.rglob("*"))
        own = LocalCheckpoints(copy, 1)
        assert own.load(lambda state: None) == (None, [])
        own.save(1, [pack({"w": np.zeros(2, np.float32)})])
        assert set(before) < set(copy.rglob("*")) and own.newest == 1


@pytest.mark.parametrize("run", RUNS)
async def test_the_cluster_of_this_release_leaves_it_alone(
    version: Path, run: str, tmp_path: Path
) -> None:
    """Neither given to anybody nor replaced by a run of the same name, even on a full server."""
    hub = Hub(version, run, tmp_path)
    streams = subjects.run_streams(run)
    buckets = [f"KV_{name}" for name in (subjects.RUNS, subjects.INCARNATIONS, subjects.SHARDS)]
    before = {name: hub.kept(name) for name in (*streams, *buckets)}
    hub.broker.storage_max = hub.broker.storage().reserved
    async with hub.coordinator() as desk:
        assert desk.registry.runs == {}
        answer = await desk.ask("POST", "/v1/runs", {**LARGE, "name": run})
        assert (answer.status_code, answer.json()["title"]) == (409, "The name is taken")
        # Those of another run will do: `over` was never asked for one.
        shutil.copytree(
            version / "one" / stored.DISK / "checkpoints", hub.checkpoints, dirs_exist_ok=True
        )
        there = RunCheckpoints(hub.checkpoints)
        refs = there.complete()
        assert refs
        for ref in refs:
            path = f"/v1/checkpoints/submit?checkpoint={ref}"
            body = {**there.manifest(ref)[0].spec, "name": run}
            answer = await desk.ask("POST", path, body)
            assert (answer.status_code, answer.json()["title"]) == (409, "The name is taken")
    assert {name: hub.kept(name) for name in before} == before


async def test_a_syncer_that_is_given_the_tape_says_why_it_cannot_lead(
    version: Path, tmp_path: Path
) -> None:
    hub, spec = Hub(version, "one", tmp_path), old_spec(version, "one")
    record = RunRecord(
        name="one", spec=spec.model_dump(mode="json"), desired="running", quorum=1, created_at=0.0
    )
    await hub.bus.kv_put(subjects.RUNS, "one", encode(record))
    before = {name: hub.kept(name) for name in subjects.run_streams("one")}
    for data in (None, tmp_path / "empty"):
        name = "syncer-1" if data is None else "elsewhere"
        async with hub.syncer(name, data=data):
            member = await within(hub.shows(name, "ineligible"))
        assert says_so(version) in member.reason
    assert {name: hub.kept(name) for name in before} == before


async def test_the_tools_say_so(version: Path, tmp_path: Path) -> None:
    hub = Hub(version, "one", tmp_path)
    with pytest.raises(CliError, match=says_so(version)):
        await _recorded(hub.bus, "one", 0, hub.checkpoints)
