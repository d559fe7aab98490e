"""A checkpoint in its vault: a shard's part, the manifest over all parts, and the way back.

Not for an event loop: every function waits for the vault.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import ValidationError

from diloco_shared.checkpoints.checkpoints_io import CheckpointError, RunCheckpoints
from diloco_shared.numerics.arrays import SafetensorsBlob, digest_array, pack, unpack
from diloco_shared.protocol.checkpoints import (
    CheckpointManifest,
    LearnerPart,
    Object,
    ShardPart,
    reference,
)
from diloco_shared.protocol.messages import TapeRestore
from diloco_shared.protocol.records import ShardLease
from diloco_shared.spec.run import RunSpec, written
from diloco_syncer.checkpoints.aside_io import blobs_aside
from diloco_syncer.events import Capture, Seal
from diloco_syncer.history.history import History
from diloco_syncer.history.replay import RestoredState
from diloco_syncer.merging.store import PREVIOUS, FragmentStore, Shelf, in_memory

SHARD = "shard-"
LEARNER = "learner-"


def write_part(
    spec: RunSpec,
    shard: int,
    root: str,
    number: int,
    history: dict[str, Any],
    store: dict[str, Any],
    arrays: dict[str, NDArray[Any]],
) -> Object:
    """Write a syncer shard's part whole; what the manifest shall say of it.

    `arrays` is emptied: what is written is let go, for rounds replace it meanwhile. Raises KeyError
    where somebody else has emptied it, who waits no longer: then no part is there.
    """
    there, ref, name = RunCheckpoints(root), reference(spec.folder, number), f"{SHARD}{shard}"
    objects = there.write_arrays(ref, name, _packed(arrays))
    part = ShardPart(shard=shard, history=history, store=store, arrays=objects)
    return there.write_part(ref, name, part)


def _packed(arrays: dict[str, NDArray[Any]]) -> Iterator[SafetensorsBlob]:
    """In blobs, taken out of `arrays` a fragment at a time."""
    # Named before the first is written: whoever waits no longer empties `arrays`, and what is
    # missing then must not pass for written.
    for names in _by_fragment(arrays):
        yield from pack({name: arrays.pop(name) for name in names})


def _by_fragment(arrays: Iterable[str]) -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for name in arrays:
        found.setdefault(name.partition(".")[0], []).append(name)
    return list(found.values())


def written_part(
    spec: RunSpec, shard: int, root: str, number: int
) -> tuple[dict[str, Any], Object] | None:
    """(`History.meta`, what the manifest shall say) of a shard's part, if it is written."""
    ref = reference(spec.folder, number)
    part = RunCheckpoints(root).written_part(ref, f"{SHARD}{shard}", ShardPart)
    return None if part is None else (part[0].history, part[1])


def belongs(number: int, history: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether another shard's part may be in checkpoint `number` with the first shard's.

    `history` and `own` are their `History.meta`. False for what lies there under a number that the
    tape has lost since: it is of an older epoch, and the true part will replace it. Raises
    CheckpointError where the true one cannot belong, because one shard was captured before a
    restore, and the other one after it. A shard may be in a newer epoch than the first one, which
    follows it.
    """
    mark = history.get("mark", history["checkpoint"])
    if mark != number or history["epoch"] < own["epoch"]:
        return False
    if history["restores"] != own["restores"]:
        raise CheckpointError(
            "the run was going back to a checkpoint, and syncer shards 0 and "
            f"{history['shard']} were not equally far: ask again"
        )
    return True


def newest_there(spec: RunSpec, root: str) -> int:
    """The newest number of a run of which anything lies there, complete or not; 0 for none."""
    return RunCheckpoints(root).newest(spec.folder)


def seal(
    spec: RunSpec,
    root: str,
    captured: Capture,
    parts: Sequence[tuple[dict[str, Any], Object]],
    sealing: Seal,
) -> dict[str, Object]:
    """Write the manifest over `parts`, one of every shard in order; the learners' parts in it.

    Raises CheckpointError where a shard's part is gone. Another leader, of which this one does not
    know yet, has removed it with all of a checkpoint that it takes for failed.
    """
    there, ref = RunCheckpoints(root), reference(spec.folder, captured.number)
    learners: dict[str, Object] = {}
    for learner, incarnation in sealing.invited.items():
        found = there.written_part(ref, f"{LEARNER}{learner}", LearnerPart)
        if found is not None and found[0].incarnation == incarnation:
            learners[learner] = found[1]
    states = []
    for n, (history, _) in enumerate(parts):
        states.append(History(spec, n))
        states[n].load(history)
    newest = furthest(state.ledger.places for state in states)
    for _, stored in parts:
        there.part(ref, stored, ShardPart)
    there.seal(
        ref,
        CheckpointManifest(
            run=spec.name,
            run_id=spec.id,
            number=captured.number,
            reason=captured.reason,
            at=captured.at,
            epoch=states[0].epoch,
            stamp=min((s.stamp for s in states), key=lambda stamp: stamp.steps),
            versions=tuple(max(of_p) for of_p in zip(*(s.versions for s in states), strict=True)),
            parameters=sum(sum(s.sizes_P) for s in states),
            spec=written(spec),
            shards=tuple(part for _, part in parts),
            learners=learners,
            missing={
                m: sealing.late.get(m, "it gave none")
                for m in sorted(sealing.invited)
                if m not in learners
            },
            leases=tuple(
                ShardLease(shard=n, holder="", incarnation=-1, sequences=sequences, passes=passes)
                for n, (passes, sequences) in sorted(newest.items())
            ),
            incarnations=dict(states[0].ledger.newest),
            bytes=sum(o.bytes for o in (*(part for _, part in parts), *learners.values())),
        ),
    )
    return learners


def furthest(each: Iterable[Mapping[int, tuple[int, int]]]) -> dict[int, tuple[int, int]]:
    """How far each data shard is merged in whatever shard of the syncer: each place is looked at
    once, for there may be hundreds of thousands."""
    newest: dict[int, tuple[int, int]] = {}
    for places in each:
        for n, place in places.items():
            newest[n] = max(newest.get(n, place), place)
    return newest


def prune(spec: RunSpec, root: str, sealed: Seal, others: Collection[str]) -> None:
    """Keep the newest complete ones, and nothing of those that were never completed.

    `others`: that other runs need, FOLDER/NUMBER."""
    there, folder = RunCheckpoints(root), spec.folder
    kept = {*sealed.needed, *others, *there.complete(folder)[-spec.keeping.run_checkpoints :]}
    for ref in there.begun(folder):
        if ref not in kept and ref < reference(folder, sealed.number):
            there.remove(ref)


def clear(spec: RunSpec, root: str, number: int) -> None:
    """Remove what is left of those before `number` that were never completed: the disk may be full
    of it."""
    there, folder = RunCheckpoints(root), spec.folder
    for ref in there.unfinished(folder):
        if ref < reference(folder, number):
            there.remove(ref)


def load(
    spec: RunSpec,
    shard: int,
    source: str,
    root: str,
    digest: str = "",
    shelf: Shelf = in_memory,
    further: Sequence[str] = (),
    aside: Path | None = None,
) -> RestoredState:
    """The state of a checkpoint, every digest checked. Not for an event loop.

    `digest`: of the manifest, if it must be a certain one; `shelf`: of the store; `further`: where
    it may be, besides `root`; `aside`: a folder for the arrays, of a process that has a store in
    memory. Raises CheckpointError, VaultError (an OSError), OSError where that folder has no room,
    or another ValueError for what this program would cut otherwise.
    """
    there, ref = RunCheckpoints.at(source, root, further)
    manifest, found = there.manifest(ref)
    if digest and found != digest:
        raise CheckpointError(f"the manifest of {source} is another one than was restored")
    if len(manifest.shards) != spec.algorithm.shards:
        raise CheckpointError(
            f"{source} is of {len(manifest.shards)} syncer shards, the run has "
            f"{spec.algorithm.shards}: set algorithm.shards = {len(manifest.shards)}"
        )
    part = there.part(ref, manifest.shards[shard], ShardPart)
    store = read_store(there, ref, part, spec, shelf, aside)
    for p, wanted in enumerate(part.history["anchor_digests"]):
        if wanted and digest_array(store.anchor(p)) != wanted:
            raise CheckpointError(f"the anchor of fragment {p} in {source} is not the one recorded")
    if _reads_on(spec, manifest):
        return RestoredState(manifest, found, part.history, store, manifest.leases)
    ledger = part.history["ledger"] | {"places": []}
    return RestoredState(manifest, found, part.history | {"ledger": ledger}, store)


def bytes_of(spec: RunSpec, shard: int, source: str, root: str, further: Sequence[str] = ()) -> int:
    """How much `load` reads. Raises what it does of the manifest."""
    there, ref = RunCheckpoints.at(source, root, further)
    parts = there.manifest(ref)[0].shards
    if shard >= len(parts):
        raise CheckpointError(f"{source} is of {len(parts)} syncer shards alone")
    return parts[shard].bytes


def leases_of(
    spec: RunSpec, source: str, root: str, further: Sequence[str] = ()
) -> tuple[ShardLease, ...]:
    """How far its data were read at a checkpoint, where this run reads them on; else nothing.

    Raises CheckpointError or VaultError.
    """
    there, ref = RunCheckpoints.at(source, root, further)
    manifest, _ = there.manifest(ref)
    return manifest.leases if _reads_on(spec, manifest) else ()


def _reads_on(spec: RunSpec, manifest: CheckpointManifest) -> bool:
    """Whether a place in the checkpoint's data is the same place in this run's."""
    try:
        return RunSpec.model_validate(manifest.spec).data_order == spec.data_order
    except ValidationError:  # of a later release, and so not of this run
        return False


def read_store(
    there: RunCheckpoints,
    ref: str,
    part: ShardPart,
    spec: RunSpec,
    shelf: Shelf = in_memory,
    aside: Path | None = None,
) -> FragmentStore:
    """The numbers of a part: in memory, anchors of before on the shelf; or all of them aside."""
    arrays: dict[str, NDArray[Any]] = {}
    if aside is not None:
        for blob in blobs_aside(there, ref, part, aside):
            arrays |= unpack(blob)
        return FragmentStore.restore(part.store, arrays, spec.algorithm, shelf)
    for blob in there.blobs(ref, part):
        arrays |= {
            name: shelf(array) if name.endswith(f".{PREVIOUS}") else array
            for name, array in unpack(blob).items()
        }
        del blob
    return FragmentStore.restore(part.store, arrays, spec.algorithm, shelf)


def load_recorded(
    spec: RunSpec,
    shard: int,
    record: TapeRestore,
    root: str,
    shelf: Shelf = in_memory,
    further: Sequence[str] = (),
    aside: Path | None = None,
) -> RestoredState:
    """What a restore on the tape speaks of."""
    return load(spec, shard, record.source, root, record.digest, shelf, further, aside)
