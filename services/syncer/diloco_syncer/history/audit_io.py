"""A run's tape looked at from outside: is it whole, does executing it give the same bytes?

Reads the bus and snapshot folders, writes nothing, takes part in nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from diloco_shared.bus.blobs import BlobIncomplete, get_blob
from diloco_shared.bus.port import Bus
from diloco_shared.checkpoints.tape_archive_io import TapeReader, archives_of
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import parse_reference
from diloco_shared.protocol.messages import (
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeSnapshot,
)
from diloco_shared.protocol.wire import WireError
from diloco_shared.spec.run import RunSpec
from diloco_syncer.checkpoints import gone_back_io as gone_back
from diloco_syncer.checkpoints.parts_io import load_recorded
from diloco_syncer.history.follow_io import blob_of
from diloco_syncer.history.history import History, TapeFault, is_of
from diloco_syncer.history.replay import RestoredState, payloads_needed, replay
from diloco_syncer.merging.store import FragmentStore, in_memory
from diloco_syncer.snapshots.snapshots_io import SnapshotStore

# Of one shard: those of a long tape are read anew whenever somebody looks at them.
Records = Sequence[tuple[int, TapeRecord]] | TapeReader

# Time to read a contribution, in seconds, and for its bytes: it lies whole on a disk, or it is
# damaged there and never comes.
BLOB_S, BLOB_BYTES_PER_S = 5.0, 10_000_000
# Manifests that are read at a time, of some hundred bytes.
BATCH_MANIFESTS = 256
# Faults listed at most: a purged stream has one for every contribution.
FAULTS_MAX = 100


@dataclass(frozen=True, slots=True)
class TapeDifference:
    """Something is not as it should be; `subject` names the contribution, if it is one."""

    seq: int
    subject: str
    text: str
    purged: bool = False  # the contribution, or the record, is not there, or not all of it


@dataclass(frozen=True, slots=True)
class Replayed:
    """What executing a tape again came to."""

    began_at: int  # record that the starting snapshot covers; 0: the initial parameters
    records: int  # executed
    rounds: int  # committed ones among them: three digests each
    fault: TapeDifference | None


@dataclass(frozen=True, slots=True)
class Verified:
    """What a tape's records and contributions came to."""

    records: int
    contributions: int  # fetched and compared
    covered: int  # not needed: a snapshot covers them
    faults: tuple[TapeDifference, ...]
    # Records at which it began again from what was published: nothing of before makes what follows.
    rebirths: tuple[int, ...] = ()
    # A restore whose checkpoint is gone since a snapshot covers it, and whose history was not kept:
    # what follows it was not followed; 0: all was.
    unfollowed: int = 0
    removed: int = 0  # the newest restore whose checkpoint is gone; 0: none


async def verify(
    spec: RunSpec, data: Bus, records: Records, checkpoint_root: str, shard: int = 0
) -> Verified:
    """Records follow each other; every contribution not yet covered is there, byte for byte."""
    faults = await _missing(spec, data, checkpoint_root)
    found = await _followed(spec, shard, records, checkpoint_root)
    fault = found.fault
    missing = any(f.purged and f.seq < fault.seq for f in faults) if fault is not None else False
    if fault is not None and (found.lost or not missing):  # else what is missing is why
        faults.append(fault)
    covers = 0 if spec.keeping.contributions == "all" else found.covers
    compared = 0
    async for seq, record in _after(records, covers):
        for subject in payloads_needed(record):
            compared += 1
            _, why, purged = await _contribution(spec.name, data, record, subject)
            if why and len(faults) < FAULTS_MAX:
                faults.append(TapeDifference(seq, subject, why, purged))
    return Verified(
        found.records,
        compared,
        found.needed - compared,
        tuple(faults),
        tuple(found.born),
        found.unfollowed,
        found.removed,
    )


async def _after(records: Records, seq: int) -> AsyncIterator[tuple[int, TapeRecord]]:
    """Those with a larger sequence, one by one."""
    if isinstance(records, TapeReader):
        async for pair in records.after(seq):
            yield pair
        return
    for pair in records:
        if pair[0] > seq:
            yield pair


@dataclass(slots=True)
class _Looked:
    """What a tape says as a whole."""

    records: int = 0
    needed: int = 0  # contributions and initial parameters
    covers: int = 0  # the newest record that a snapshot covers, also of one not followed
    born: list[int] = field(default_factory=list)  # rebirths
    restores: list[tuple[int, TapeRestore]] = field(default_factory=list)
    gone: int = 0  # the newest record that needs what UP has not

    def look(self, seq: int, record: TapeRecord, there: Container[str] | None = None) -> None:
        """At the next record. `there`: subjects of the manifests in UP; None: nobody asks."""
        needed = [*payloads_needed(record)]
        self.records += 1
        self.needed += len(needed)
        if there is not None and any(s + ".m" not in there for s in needed):
            self.gone = seq
        match record:
            case TapeSnapshot():
                self.covers = max(self.covers, record.covers)
            case TapeRebirth():
                self.born.append(seq)
            case TapeRestore():
                self.restores.append((seq, record))


@dataclass(slots=True)
class _Followed(_Looked):
    """And whether its records follow each other."""

    fault: TapeDifference | None = None  # the first one
    lost: bool = False  # it is a restore whose checkpoint cannot be had
    unfollowed: int = 0  # as `Verified` has them
    removed: int = 0


async def _followed(spec: RunSpec, shard: int, records: Records, root: str) -> _Followed:
    """One look at all of a tape: nothing of it is kept."""
    found, history = _Followed(), History(spec, shard)
    lost: list[tuple[int, str]] = []  # restores whose checkpoint cannot be had, and why not
    async for seq, record in _after(records, 0):
        found.look(seq, record)
        if found.fault is not None or found.unfollowed:
            continue
        meta = None
        if isinstance(record, TapeRestore):
            meta, why = await _meta_of(spec, shard, record, root)
            if why:
                lost.append((seq, why))
            if meta is None:
                found.unfollowed = seq
                continue
        try:
            if meta is not None and isinstance(record, TapeRestore):
                history.resume(meta, record, seq)
            else:
                history.apply(record, seq)
        except TapeFault as fault:
            found.fault = TapeDifference(seq, "", str(fault))
    # A snapshot that covers a restore stands behind it. Nothing counts after one that needs its
    # checkpoint.
    for seq, why in lost:
        found.removed = seq
        if seq > found.covers:
            found.fault, found.lost, found.unfollowed = TapeDifference(seq, "", why), True, 0
            break
    return found


async def reexecute(
    spec: RunSpec,
    data: Bus,
    records: Records,
    folders: Sequence[Path],
    checkpoint_root: str,
    shard: int = 0,
) -> Replayed:
    """Execute all that can be, from the earliest place possible; every digest is compared.

    That place is the initial parameters, or the oldest snapshot in `folders` after which every
    contribution is there. The fault is the first difference. Where the run began again from what
    was published, no merge made that: it is the oldest snapshot after the newest such record; and
    after the newest restore whose checkpoint was removed, since a snapshot covers it.
    """
    looked = _Looked()
    there = await _manifests(spec.name, data)
    async for seq, record in _after(records, 0):
        looked.look(seq, record, there)
    gone, why_gone = await _unreachable(spec, shard, looked, checkpoint_root)
    while True:
        known = {n: await _record(records, n) for n in _snapshots(folders)} if gone else {}
        place = await asyncio.to_thread(_begin, spec, shard, folders, known, gone, why_gone)
        found = await _executed(spec, shard, data, records, checkpoint_root, place, gone)
        fault = found.fault
        if fault is None or not fault.purged or not gone < fault.seq <= looked.covers:
            return found
        gone, why_gone = fault.seq, f"{fault.text}, which a snapshot covers"


def _snapshots(folders: Sequence[Path]) -> set[int]:
    """The records that their snapshots cover."""
    return {covers for folder in folders for covers in SnapshotStore(folder).covers()}


async def _record(records: Records, seq: int) -> TapeRecord | None:
    """The one of this sequence, if the tape has it."""
    async for there, record in _after(records, seq - 1):
        return record if there == seq else None
    return None


async def _unreachable(
    spec: RunSpec, shard: int, looked: _Looked, checkpoint_root: str
) -> tuple[int, str]:
    """The newest record that cannot be executed, and why not; 0: all may be."""
    gone = looked.gone
    why_gone = f"contributions of record {gone} and before are gone"
    born = max(looked.born, default=0)
    if born >= max(gone, 1):
        gone, why_gone = born, f"record {born} begins again from what was published"
    restored, why_restored = await _newest_gone_back(spec, shard, looked, checkpoint_root)
    return (restored, why_restored) if restored >= max(gone, 1) else (gone, why_gone)


async def _executed(
    spec: RunSpec,
    shard: int,
    data: Bus,
    records: Records,
    checkpoint_root: str,
    place: tuple[History, FragmentStore | None, str],
    gone: int,
) -> Replayed:
    """From `place` on, up to the first difference."""
    history, store, why = place
    if why:
        return Replayed(0, 0, 0, TapeDifference(gone, "", why))
    began_at, rounds, done = history.seq, 0, 0
    for missing in await _missing(spec, data, checkpoint_root):
        if missing.seq > began_at:
            return Replayed(began_at, done, rounds, missing)
    async for seq, record in _after(records, began_at):
        payloads: dict[str, bytes] = {}
        for subject in payloads_needed(record):
            payload, why, purged = await _contribution(spec.name, data, record, subject)
            if why:
                return Replayed(began_at, done, rounds, TapeDifference(seq, subject, why, purged))
            payloads[subject] = payload
        try:
            back = await _back(spec, shard, record, checkpoint_root)
            store = await asyncio.to_thread(replay, history, store, record, seq, payloads, back)
        except TapeFault as fault:
            return Replayed(began_at, done, rounds, TapeDifference(seq, "", str(fault)))
        done += 1
        rounds += isinstance(record, TapeRound) and record.outcome == "committed"
    return Replayed(began_at, done, rounds, None)


async def _missing(spec: RunSpec, data: Bus, checkpoint_root: str) -> list[TapeDifference]:
    """Records of any shard that the server counts, and neither it nor the archive gives.

    What left the stream was archived, but perhaps by a syncer that keeps its archive elsewhere.
    """
    run, stream = spec.name, subjects.tape_stream(spec.name)
    info = await data.stream_info(stream)
    there = bytearray(info.last_seq + 1)
    for archive in archives_of(spec, checkpoint_root):
        async for stored in TapeReader(data, run, archive, info.last_seq).stored():
            there[stored.seq] = True
    gone = (n for n in range(1, info.last_seq + 1) if not there[n])
    lost = "is not given: it is damaged on the message server's disk"
    place = spec.keeping.run_checkpoint_root or checkpoint_root
    elsewhere = f"left the stream, and no archive in {place} has it: is that where checkpoints are?"
    why = {n: elsewhere if n < info.first_seq else lost for n in islice(gone, FAULTS_MAX)}
    return [TapeDifference(n, "", f"record {n} {w}", w is elsewhere) for n, w in why.items()]


async def _back(
    spec: RunSpec, shard: int, record: TapeRecord, checkpoint_root: str
) -> RestoredState | None:
    """The state that a restore goes back to; TapeFault when it cannot be had."""
    if not isinstance(record, TapeRestore):
        return None
    root = spec.keeping.run_checkpoint_root or checkpoint_root
    try:
        # Whoever audits reads by a command of their own, and a leader has let this place through.
        recorded = (parse_reference(record.source)[0],)
        return await asyncio.to_thread(load_recorded, spec, shard, record, root, further=recorded)
    except (OSError, ValueError, KeyError) as error:
        raise TapeFault(f"{record.source}, which cannot be read: {error}") from None


async def _meta_of(
    spec: RunSpec, shard: int, restore: TapeRestore, checkpoint_root: str
) -> tuple[dict[str, Any] | None, str]:
    """`History.meta` that a restore goes back to, and why its checkpoint cannot be had."""
    try:
        back = await _back(spec, shard, restore, checkpoint_root)
    except TapeFault as fault:
        return await _kept(spec, shard, restore, checkpoint_root), str(fault)
    assert back is not None
    return back.history, ""


async def _kept(
    spec: RunSpec, shard: int, restore: TapeRestore, checkpoint_root: str
) -> dict[str, Any] | None:
    root = spec.keeping.run_checkpoint_root or checkpoint_root
    try:
        return await asyncio.to_thread(gone_back.found, spec, shard, root, restore)
    except (OSError, ValueError):
        return None


async def _newest_gone_back(
    spec: RunSpec, shard: int, looked: _Looked, checkpoint_root: str
) -> tuple[int, str]:
    """The newest restore that a snapshot covers and whose checkpoint cannot be had, and why not."""
    for seq, record in reversed(looked.restores):
        if seq <= looked.covers:
            try:
                await _back(spec, shard, record, checkpoint_root)
            except TapeFault as fault:
                return seq, f"record {seq} goes back to {fault}"
    return 0, ""


async def _manifests(run: str, data: Bus) -> set[str]:
    """Subjects of those that UP has, of contributions and of initial parameters."""
    stream, there = subjects.up_stream(run), set[str]()
    for every in (f"up.{run}.*.*.*.*.*.m", f"up.{run}.*.init.*.*.m"):
        after = 0
        while batch := await data.fetch(stream, every, start_seq=after + 1, limit=BATCH_MANIFESTS):
            there |= {stored.subject for stored in batch}
            after = batch[-1].seq
    return there


def _begin(
    spec: RunSpec,
    shard: int,
    folders: Sequence[Path],
    known: Mapping[int, TapeRecord | None],
    gone: int,
    why_gone: str,
) -> tuple[History, FragmentStore | None, str]:
    """(history, store, why not): the oldest place from which everything is there."""
    if not gone:
        return History(spec, shard), None, ""
    faults: list[str] = []
    for covers, folder in sorted((n, f) for f in folders for n in SnapshotStore(f).covers()):
        if covers not in known:
            continue  # it was written a moment ago
        if covers < gone:
            faults.append(f"the snapshot of record {covers} is too old")
            continue
        try:
            meta, arrays = SnapshotStore(folder, shelf=in_memory).load(covers)
            record = known[covers]
            if record is not None and not is_of(meta["history"], record):
                faults.append(f"the snapshot of record {covers} is of one that the tape has lost")
                continue
            store = FragmentStore.restore(meta["store"], arrays, spec.algorithm)
            return History.restore(spec, meta["history"]), _sound(store, meta), ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            faults.append(f"the snapshot of record {covers} in {folder}: {error}")
    there = "; ".join(faults) or f"no snapshot in {', '.join(map(str, folders)) or 'any folder'}"
    return (
        History(spec, shard),
        None,
        f"{why_gone}, and {there}: name the syncers' "
        'folders with --snapshots, or keep contributions = "all" in the next run',
    )


def _sound(store: FragmentStore, meta: dict[str, Any]) -> FragmentStore:
    """The same store; ValueError when its anchors are not those of its own history."""
    for p, digest in enumerate(meta["history"]["anchor_digests"]):
        if digest and digest_array(store.anchor(p)) != digest:
            raise ValueError(f"the anchor of fragment {p} is not the one of its history")
    return store


async def _contribution(
    run: str, data: Bus, record: TapeRecord, subject: str
) -> tuple[bytes, str, bool]:
    """(payload, what is wrong, whether it was purged): compared with the digests of manifest and
    tape.

    A purge goes up to a sequence: chunks that were sent long before their manifest may go alone.
    """
    stream = subjects.up_stream(run)
    try:
        blob = await blob_of(data, stream, record, subject)
    except WireError as error:
        return b"", f"{subject} is damaged: {error}", False
    if blob is None:
        why = f"{subject} is not in {stream} (of a live run, perhaps since a moment ago)"
        return b"", why, True
    try:
        patience_s = BLOB_S + blob.bytes / BLOB_BYTES_PER_S
        payload = await get_blob(data, stream, blob, timeout_s=patience_s)
    except BlobIncomplete as error:
        there = len(await data.fetch(stream, subject))
        if there < blob.chunks:
            return b"", f"{there} of {blob.chunks} chunks of {subject} are in {stream}", True
        return b"", f"{subject} is damaged: {error}", False
    if isinstance(record, TapeRound):
        named = next((v.digest for v in record.verdicts if v.subject == subject), "")
        if named != blob.digest:
            why = f"{subject} has digest {blob.digest}, the tape says {named}"
            return payload, why, False
    return payload, "", False
