"""`tape verify` and `replay`: what is whole says so (I9), and what is not is named."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from syncer.recording import SPEC, Recording
from syncer.small_run import TENSORS

from diloco_shared import ambient
from diloco_shared.bus.blobs import put_blob
from diloco_shared.bus.port import StreamSpec, Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    Blob,
    ContributionManifest,
    InitManifest,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeSnapshot,
)
from diloco_shared.protocol.wire import decode, encode
from diloco_shared.spec.run import config_hash
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.checkpoints import gone_back_io as gone_back
from diloco_syncer.history import audit_io as audit
from diloco_syncer.history import follow_io as follow
from diloco_syncer.history.audit_io import reexecute, verify
from diloco_syncer.history.follow_io import payloads_of
from diloco_syncer.history.history import History
from diloco_syncer.history.replay import RestoredState
from diloco_syncer.snapshots.snapshots_io import SnapshotStore

pytestmark = pytest.mark.virtual

ROUNDS = 6


async def bus_with(recording: Recording) -> MemoryBus:
    """UP as the learners of the recording left it."""
    bus = MemoryBus(MemoryBroker(), "test")
    for name, captured in subjects.run_streams("t").items():
        await bus.ensure_stream(StreamSpec(name, (captured,), 1 << 24))
    init = recording.tape[1]
    for p, subject in enumerate(init.subjects):  # type: ignore[union-attr]
        fields: dict[str, Any] = {"run": "t", "learner": "a", "incarnation": 0, "fragment": p}
        await put(bus, subject, recording, InitManifest, layout=TENSORS, **fields)
    for r in recording.tape:
        for v in r.verdicts if isinstance(r, TapeRound) else ():
            fields = {"learner": v.learner, "incarnation": 0, "epoch": 0, "term": 1}
            fields |= {"round": r.round, "fragment": r.fragment, "base": v.base}
            fields |= {"step_from": v.step_from, "step_to": v.step_to, "cursor": None}
            fields |= {"tokens_from": v.tokens_from, "tokens_to": v.tokens_to, "codec": "bf16"}
            values = len(recording.payloads[v.subject]) // 2
            await put(
                bus, v.subject, recording, ContributionManifest, run="t", values=values, **fields
            )
    return bus


async def put(bus: MemoryBus, subject: str, recording: Recording, kind: Any, **more: Any) -> None:
    blob = await put_blob(bus, subject, recording.payloads[subject])
    manifest = kind(config_hash=config_hash(SPEC), blob=blob, **more)
    await bus.append(subject + ".m", encode(manifest))


@pytest.fixture
def recording() -> Recording:
    recorded = Recording()
    recorded.begin()
    for _ in range(ROUNDS):
        recorded.round()
    return recorded


def numbered(recording: Recording) -> list[tuple[int, TapeRecord]]:
    return list(enumerate(recording.tape, 1))


def keep_snapshot(folder: Path, rounds: int) -> None:
    """As a syncer writes one after so many rounds of the same recording."""
    early = Recording()
    early.begin()
    for _ in range(rounds):
        early.round()
    assert early.store is not None
    meta = {"history": early.history.meta(), "store": early.store.meta()}
    SnapshotStore(folder).save(early.history.seq, meta, early.store.state_arrays())


async def test_a_whole_run_verifies_and_replays_from_the_beginning(recording: Recording) -> None:
    bus, tape = await bus_with(recording), numbered(recording)
    verified = await verify(SPEC, bus, tape, "")
    assert (verified.records, verified.faults) == (len(tape), ())
    assert (verified.contributions, verified.covered) == (2 + 3 * ROUNDS, 0)
    replayed = await reexecute(SPEC, bus, tape, [], "")
    assert (replayed.began_at, replayed.rounds, replayed.fault) == (0, ROUNDS, None)


async def test_a_contribution_that_is_not_the_one_merged_is_named(recording: Recording) -> None:
    subject = "up.t.b.0.1.3.1"
    tape = numbered(recording)
    recording.payloads[subject] = bytes(len(recording.payloads[subject]))
    bus = await bus_with(recording)
    for fault in ((await verify(SPEC, bus, tape, "")).faults[0], (await replay(bus, tape)).fault):
        assert fault is not None
        assert (fault.seq, fault.subject) == (6, subject)
        assert f"{subject} has digest " in fault.text and ", the tape says " in fault.text


@pytest.mark.parametrize("others", [1, 40])
@pytest.mark.parametrize("before", [False, True])
async def test_of_several_manifests_of_a_subject_the_one_counts_that_was_merged_i9(
    recording: Recording, before: bool, others: int
) -> None:
    """Others are of another life of the learner, or of one that lies; or nobody can read them."""
    subject, tape = "up.t.b.0.1.3.1", numbered(recording)
    bus = await bus_with(recording)
    stream = subjects.up_stream("t")
    merged = await bus.last(stream, subject + ".m")
    assert merged is not None
    there = await bus.fetch(stream, subject)
    if before:
        await bus.purge(stream, subject)
        await bus.purge(stream, subject + ".m")
    known = decode(merged.payload, ContributionManifest)
    for n in range(others):
        payload = bytes([n]) * known.blob.bytes
        blob = await put_blob(bus, subject, payload)
        lie = known.model_copy(update={"blob": blob, "incarnation": 1})
        await bus.append(subject + ".m", encode(lie))
        await bus.append(subject + ".m", b"junk")
    if before:
        for chunk in there:
            await bus.append(subject, chunk.payload, headers=chunk.headers)
        await bus.append(subject + ".m", merged.payload)
    assert (await verify(SPEC, bus, tape, "")).faults == ()
    replayed = await replay(bus, tape)
    assert (replayed.rounds, replayed.fault) == (ROUNDS, None)
    payloads = await payloads_of("t", bus, recording.tape[5])
    assert payloads[subject] == recording.payloads[subject]


async def test_what_a_record_needs_is_fetched_side_by_side(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another, each with its round trips, takes longer than the next round to come."""
    bus, real = await bus_with(recording), follow.get_blob
    at_once, most = [0], [0]

    async def fetching(*args: Any, **more: Any) -> Any:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        await asyncio.sleep(0.01)
        try:
            return await real(*args, **more)
        finally:
            at_once[0] -= 1

    monkeypatch.setattr(follow, "get_blob", fetching)
    record = recording.tape[5]
    payloads = await payloads_of("t", bus, record)
    assert most[0] == len(payloads) > 1
    monkeypatch.setattr(follow, "FETCHES", 1)
    most[0] = 0
    assert await payloads_of("t", bus, record) == payloads and most[0] == 1


async def test_what_is_removed_while_it_is_read_is_not_awaited(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby that is to lead would wait as long as for chunks of the slowest link."""
    bus, real = await bus_with(recording), follow.get_blob

    async def purged(data: MemoryBus, stream: str, blob: Blob, **more: Any) -> Any:
        await data.purge(stream, blob.subject)
        await data.purge(stream, blob.subject + ".m")
        return await real(data, stream, blob, **more)

    monkeypatch.setattr(follow, "get_blob", purged)
    began = ambient.monotonic()
    with pytest.raises(follow.Purged, match="was purged from UP-t while it was read"):
        await payloads_of("t", bus, recording.tape[5])
    assert ambient.monotonic() - began <= 2 * follow.THERE_S, "in virtual seconds"


async def test_a_hub_that_is_away_for_a_moment_ends_no_transfer(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, real, begun = await bus_with(recording), follow.get_blob, list[Blob]()

    async def long(data: MemoryBus, stream: str, blob: Blob, **more: Any) -> Any:
        begun.append(blob)
        monkeypatch.setattr(bus, "last", away)
        await asyncio.sleep(3 * follow.THERE_S)
        return await real(data, stream, blob, **more)

    async def away(*args: Any) -> None:
        raise Unavailable("no answer")

    monkeypatch.setattr(follow, "get_blob", long)
    monkeypatch.setattr(follow, "FETCHES", 8)
    payloads = await payloads_of("t", bus, recording.tape[5])
    assert len(payloads) == len(begun) > 1


async def replay(bus: MemoryBus, tape: list[tuple[int, TapeRecord]], *folders: Path) -> Any:
    return await reexecute(SPEC, bus, tape, folders, "")


async def test_a_record_with_another_digest_is_the_first_difference(recording: Recording) -> None:
    bus, tape = await bus_with(recording), numbered(recording)
    tape[4] = (5, tape[4][1].model_copy(update={"anchor_digest": "0" * 32}))
    result = await replay(bus, tape)
    assert (result.records, result.fault.seq) == (4, 5)


async def test_a_record_that_is_missing_is_found(recording: Recording) -> None:
    bus, tape = await bus_with(recording), numbered(recording)
    del tape[4]
    (fault,) = (await verify(SPEC, bus, tape, "")).faults
    assert fault.seq == 6


async def test_a_record_that_the_server_counts_and_does_not_give_is_named(
    recording: Recording,
) -> None:
    bus, tape = await bus_with(recording), numbered(recording)
    for record in recording.tape:
        await bus.append(subjects.tape("t", 0), encode(record))
    assert (await verify(SPEC, bus, tape, "")).faults == ()
    gone = len(tape) - 1  # a server leaves out what its own checksum does not match
    bus.broker._streams[subjects.tape_stream("t")].remove(gone)
    del tape[gone - 1]
    for fault in ((await verify(SPEC, bus, tape, "")).faults[0], (await replay(bus, tape)).fault):
        assert fault is not None
        assert fault.seq == gone


async def test_records_in_an_archive_that_is_not_here_are_named_as_that(
    recording: Recording, tmp_path: Path
) -> None:
    """Of a syncer on another machine, say: what follows them is not called wrong."""
    bus, tape = await bus_with(recording), numbered(recording)
    for record in recording.tape:
        await bus.append(subjects.tape("t", 0), encode(record))
    await bus.purge(subjects.tape_stream("t"), "tape.t.>", below_seq=4)
    faults = (await verify(SPEC, bus, tape[3:], str(tmp_path))).faults
    said = f"left the stream, and no archive in {tmp_path} has it: is that where checkpoints are?"
    assert [f.text for f in faults] == [f"record {n} {said}" for n in (1, 2, 3)]
    assert all(f.purged for f in faults)


async def test_what_a_snapshot_covers_need_not_be_there(
    recording: Recording, tmp_path: Path
) -> None:
    bus = await bus_with(recording)
    covers = 5  # term, init, three rounds
    recording.append(TapeSnapshot(term=1, covers=covers, round=2, path="x", at=9.0))
    tape = numbered(recording)
    last = (await bus.last(subjects.up_stream("t"), "up.t.c.0.0.2.1.m")).seq  # type: ignore[union-attr]
    await bus.purge(subjects.up_stream("t"), "up.t.>", below_seq=last + 1)
    verified = await verify(SPEC, bus, tape, "")
    assert (verified.contributions, verified.covered, verified.faults) == (9, 2 + 9, ())
    nowhere = await replay(bus, tape)
    assert "contributions of record 5 and before are gone, and no snapshot" in nowhere.fault.text
    keep_snapshot(tmp_path, rounds=2)
    early = await replay(bus, tape, tmp_path)
    assert "the snapshot of record 4 is too old" in early.fault.text
    keep_snapshot(tmp_path, rounds=4)
    keep_snapshot(tmp_path, rounds=3)
    result = await replay(bus, tape, tmp_path)
    assert (result.began_at, result.rounds, result.fault) == (covers, 3, None)


async def test_a_contribution_that_is_gone_too_early_is_named(recording: Recording) -> None:
    bus, tape = await bus_with(recording), numbered(recording)
    await bus.purge(subjects.up_stream("t"), "up.t.b.0.1.3.1.m")
    (fault,) = (await verify(SPEC, bus, tape, "")).faults
    assert (fault.seq, fault.subject) == (6, "up.t.b.0.1.3.1")


async def test_a_snapshot_of_a_record_that_was_lost_is_no_place_to_begin(
    recording: Recording, tmp_path: Path
) -> None:
    """Another record stands there now: what follows it would differ, and nobody is at fault."""
    keep_snapshot(tmp_path / "lost", 2)
    keep_snapshot(tmp_path / "kept", 3)
    lost = next((tmp_path / "lost").glob("*/meta.json"))
    body = json.loads(lost.read_text("utf-8"))
    body["meta"]["history"]["tail"][1] += 0.5  # made at another time
    lost.write_text(json.dumps(body), "utf-8")
    tape = numbered(recording)
    bus = await bus_with(recording)
    await bus.purge(subjects.up_stream("t"), "up.t.a.init.>")
    found = await replay(bus, tape, tmp_path / "lost", tmp_path / "kept")
    assert (found.began_at, found.fault) == (5, None)


async def test_a_restore_whose_checkpoint_was_removed_is_no_fault_once_a_snapshot_covers_it(
    recording: Recording, tmp_path: Path
) -> None:
    back = TapeRestore(
        epoch=1,
        term=1,
        serial=1,
        source=f"{SPEC.folder}/000001",
        digest="0" * 32,
        run="t",
        versions=(1, 0),
        anchor_digests=("1" * 32, "2" * 32),
        at=9.0,
    )
    bus = await bus_with(recording)
    tape, root = numbered(recording), str(tmp_path / "checkpoints")
    seq = len(tape) + 1
    tape.append((seq, back))
    (fault,) = (await verify(SPEC, bus, tape, root)).faults
    assert fault.seq == seq and "cannot be read" in fault.text
    tape.append((seq + 1, TapeSnapshot(term=1, covers=seq, round=2, path="x", at=9.5)))
    verified = await verify(SPEC, bus, tape, root)
    assert (verified.faults, verified.unfollowed, verified.removed) == ((), seq, seq)
    nowhere = await reexecute(SPEC, bus, tape, [], root)
    assert nowhere.fault is not None and f"record {seq} goes back to" in nowhere.fault.text


async def test_what_follows_a_restore_is_followed_where_its_history_was_kept(
    recording: Recording, tmp_path: Path
) -> None:
    bus, tape, root = await bus_with(recording), numbered(recording), str(tmp_path)
    history = History(SPEC)
    for seq, record in tape:
        history.apply(record, seq)
    back = TapeRestore(
        epoch=1,
        term=1,
        serial=1,
        source=f"{SPEC.folder}/000001",
        digest="0" * 32,
        run="t",
        versions=tuple(history.versions),
        anchor_digests=tuple(history.anchor_digests),
        at=9.0,
    )
    nothing: Any = None
    gone_back.keep(SPEC, 0, root, 1, RestoredState(nothing, "0" * 32, history.meta(), nothing))
    seq = len(tape) + 1
    tape.append((seq, back))
    tape.append((seq + 1, TapeSnapshot(term=1, covers=seq, round=2, path="x", at=9.5)))
    verified = await verify(SPEC, bus, tape, root)
    assert (verified.faults, verified.unfollowed, verified.removed) == ((), 0, seq)


@pytest.mark.parametrize("covers", [3, 4])
async def test_a_contribution_half_of_which_was_purged_is_gone_and_not_damaged(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, covers: int
) -> None:
    """Its chunk was sent long before its manifest, and a purge went up to between the two."""
    monkeypatch.setattr(audit, "BLOB_S", 0.2)
    bus, seq = await bus_with(recording), 3
    recording.append(TapeSnapshot(term=1, covers=covers, round=1, path="x", at=9.0))
    tape = numbered(recording)
    await bus.purge(subjects.up_stream("t"), "up.t.a.0.0.0.1")
    nowhere = await replay(bus, tape)
    assert f"of {seq}" not in nowhere.fault.text and "which a snapshot covers" in nowhere.fault.text
    keep_snapshot(tmp_path, rounds=2)
    result = await replay(bus, tape, tmp_path)
    assert (result.began_at, result.fault) == (4, None)
    await bus.purge(subjects.up_stream("t"), "up.t.a.0.1.5.1")
    result = await replay(bus, tape, tmp_path)
    assert (result.fault.subject, result.fault.purged) == ("up.t.a.0.1.5.1", True)
