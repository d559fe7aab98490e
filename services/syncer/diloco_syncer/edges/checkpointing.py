"""Run-wide checkpoints at the leader: its own part, the manifest, and the way back."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from numpy.typing import NDArray

from diloco_shared.config import RunSpec
from diloco_shared.edges.bus import Bus
from diloco_shared.edges.checkpoints import CheckpointError, Checkpoints
from diloco_shared.numerics.arrays import pack, unpack
from diloco_shared.numerics.digest import digest_array
from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import (
    CheckpointManifest,
    LearnerPart,
    Object,
    ShardPart,
    reference,
)
from diloco_shared.protocol.messages import TapeRestore
from diloco_shared.protocol.records import Restore, ShardLease
from diloco_shared.protocol.wire import encode
from diloco_syncer.edges.outbox import until_done
from diloco_syncer.events import Capture, Event, Kept, Loaded, Seal, Sealed
from diloco_syncer.history import History
from diloco_syncer.replay import State
from diloco_syncer.store import FragmentStore

log = structlog.get_logger()

SHARD = "shard-"
LEARNER = "learner-"


class Checkpointer:
    """Of one leader's term: one checkpoint at a time."""

    def __init__(
        self, spec: RunSpec, shard: int, root: str, control: Bus, put: Callable[[Event], None]
    ) -> None:
        self.spec = spec
        self.shard = shard
        self.root = root
        self.control = control
        self.put = put
        self.captured: tuple[Capture, dict[str, Any], Object] | None = None  # with `History.meta`
        self.loaded: dict[int, State] = {}  # by serial of the wish; the newest

    # --- making --------------------------------------------------------------------------------

    async def capture(
        self,
        effect: Capture,
        history: dict[str, Any],
        store: dict[str, Any],
        arrays: dict[str, NDArray[Any]],
    ) -> None:
        """Write the state as it was handed over, between two events of the machine."""

        def write() -> Object:
            there, ref = Checkpoints(self.root), reference(self.spec.folder, effect.number)
            name = f"{SHARD}{self.shard}"
            objects = there.write_arrays(ref, name, pack(arrays))
            part = ShardPart(shard=self.shard, history=history, store=store, arrays=objects)
            return there.write_part(ref, name, part)

        try:
            written = await asyncio.to_thread(write)
        except OSError as error:
            self.put(Sealed(effect.number, fault=str(error)[:400]))
            return
        self.captured = (effect, history, written)
        self.put(Kept(effect.number))

    async def seal(self, effect: Seal) -> None:
        """The manifest over what is there; then what is too old goes."""
        assert self.captured is not None
        captured, history, shard = self.captured
        try:
            learners = await asyncio.to_thread(self._seal, captured, history, shard, effect)
        except (OSError, ValueError) as error:
            self.put(Sealed(effect.number, fault=str(error)[:400]))
            return
        self.put(Sealed(effect.number, tuple(sorted(learners))))
        try:
            await asyncio.to_thread(self._prune, effect.number)
        except OSError as error:
            log.warning("old checkpoints not removed", error=str(error))

    def _seal(
        self, captured: Capture, history: dict[str, Any], shard: Object, seal: Seal
    ) -> dict[str, Object]:
        there, ref = Checkpoints(self.root), reference(self.spec.folder, captured.number)
        learners: dict[str, Object] = {}
        for learner, incarnation in seal.invited.items():
            found = there.written_part(ref, f"{LEARNER}{learner}", LearnerPart)
            if found is not None and found[0].incarnation == incarnation:
                learners[learner] = found[1]
        state = History(self.spec)
        state.load(history)
        there.seal(
            ref,
            CheckpointManifest(
                run=self.spec.name,
                run_id=self.spec.id,
                number=captured.number,
                reason=captured.reason,
                at=captured.at,
                epoch=state.epoch,
                stamp=state.stamp,
                versions=tuple(state.versions),
                parameters=sum(state.sizes_P),
                spec=self.spec.model_dump(mode="json"),
                shards=(shard,),
                learners=learners,
                missing={
                    m: seal.late.get(m, "it gave none")
                    for m in sorted(seal.invited)
                    if m not in learners
                },
                leases=tuple(
                    ShardLease(
                        shard=n, holder="", incarnation=-1, sequences=sequences, passes=passes
                    )
                    for n, (passes, sequences) in sorted(state.ledger.places.items())
                ),
                incarnations=dict(state.ledger.newest),
                bytes=shard.bytes + sum(o.bytes for o in learners.values()),
            ),
        )
        return learners

    def _prune(self, number: int) -> None:
        """Keep the newest complete ones, and nothing of those that were never completed."""
        there, folder = Checkpoints(self.root), self.spec.folder
        kept = set(there.complete(folder)[-self.spec.keeping.run_checkpoints :])
        for ref in there.begun(folder):
            if ref not in kept and ref < reference(folder, number):
                there.remove(ref)

    # --- going back ----------------------------------------------------------------------------

    async def load(self, restore: Restore) -> None:
        """Read a checkpoint; the store is kept for `install`."""
        try:
            state = await asyncio.to_thread(load, self.spec, self.shard, restore.source, self.root)
        except (OSError, ValueError, KeyError) as error:
            self.put(Loaded(restore, fault=str(error)[:400]))
            return
        self.loaded = {restore.serial: state}
        self.put(Loaded(restore, state.manifest.run, state.history, state.digest))

    async def rewind(self, serial: int) -> None:
        """Data is read on from where the checkpoint's parameters have it.

        By one shard for all. Before the restore is on the tape: should this process die between,
        the wish is still open.
        """
        if self.shard:
            return
        there = {lease.shard: lease for lease in self.loaded[serial].manifest.leases}
        free = ShardLease(shard=0, holder="", incarnation=-1, sequences=0, passes=0)
        run = self.spec.name
        read = await until_done(lambda: self.control.kv_all(subjects.SHARDS))
        for n in range(self.spec.data.virtual_shards):
            if n not in there and f"{run}.{n}" not in read:
                continue  # never read
            value = encode(there.get(n, free.model_copy(update={"shard": n})))
            await until_done(
                lambda k=f"{run}.{n}", v=value: self.control.kv_put(  # type: ignore[misc]
                    subjects.SHARDS, k, v
                )
            )

    def install(self, serial: int) -> FragmentStore:
        """The store that was loaded, once."""
        return self.loaded.pop(serial).store


def load(spec: RunSpec, shard: int, source: str, root: str, digest: str = "") -> State:
    """The state of a checkpoint, every digest checked. Not for an event loop.

    `digest`: of the manifest, if it must be a certain one. Raises CheckpointError, VaultError (an
    OSError), or another ValueError for what this program would cut otherwise.
    """
    there, ref = Checkpoints.at(source, root)
    manifest, found = there.manifest(ref)
    if digest and found != digest:
        raise CheckpointError(f"the manifest of {source} is another one than was restored")
    if len(manifest.shards) != spec.algorithm.shards:
        raise CheckpointError(
            f"{source} is of {len(manifest.shards)} syncer shards, the run has "
            f"{spec.algorithm.shards}: set algorithm.shards = {len(manifest.shards)}"
        )
    part = there.part(ref, manifest.shards[shard], ShardPart)
    arrays: dict[str, NDArray[Any]] = {}
    for blob in there.blobs(ref, part):
        arrays |= unpack(blob)
    store = FragmentStore.restore(part.store, arrays, spec.algorithm)
    for p, wanted in enumerate(part.history["anchor_digests"]):
        if wanted and digest_array(store.anchor(p)) != wanted:
            raise CheckpointError(f"the anchor of fragment {p} in {source} is not the one recorded")
    return State(manifest, found, part.history, store)


def load_recorded(spec: RunSpec, shard: int, record: TapeRestore, root: str) -> State:
    """What a restore on the tape speaks of."""
    return load(spec, shard, record.source, root, record.digest)
