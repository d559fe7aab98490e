"""Run-wide checkpoints at the leader: its own part, the manifest, and the way back."""

import asyncio
import time
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
from diloco_syncer.checkpoints import PARTS_S
from diloco_syncer.edges.outbox import until_done
from diloco_syncer.events import Capture, Event, Kept, Loaded, Seal, Sealed
from diloco_syncer.history import History
from diloco_syncer.replay import State
from diloco_syncer.store import FragmentStore

log = structlog.get_logger()

SHARD = "shard-"
LEARNER = "learner-"
# Between two looks at whether another shard has written its part, in seconds.
PART_LOOK_S = 0.5


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
        """The manifest over what is there; then what is too old goes. By one shard for all."""
        assert self.captured is not None
        if self.shard:
            self.put(Sealed(effect.number))
            return
        captured, history, shard = self.captured
        try:
            others = await self._other_shards(effect.number)
            learners = await asyncio.to_thread(
                self._seal, captured, [(history, shard), *others], effect
            )
        except (OSError, ValueError) as error:
            self.put(Sealed(effect.number, fault=str(error)[:400]))
            return
        self.put(Sealed(effect.number, tuple(sorted(learners))))
        try:
            await asyncio.to_thread(self._prune, effect)
        except OSError as error:
            log.warning("old checkpoints not removed", error=str(error))

    async def _other_shards(self, number: int) -> list[tuple[dict[str, Any], Object]]:
        """`History.meta` of every other shard's part, once all are there."""
        there, ref = Checkpoints(self.root), reference(self.spec.folder, number)
        found: list[tuple[dict[str, Any], Object]] = []
        until = time.monotonic() + PARTS_S
        for n in range(1, self.spec.algorithm.shards):
            name = f"{SHARD}{n}"
            while True:
                part = await asyncio.to_thread(there.written_part, ref, name, ShardPart)
                if part is not None:
                    found.append((part[0].history, part[1]))
                    break
                if time.monotonic() > until:
                    raise CheckpointError(f"syncer shard {n} gave no part in {PARTS_S:.0f} s")
                await asyncio.sleep(PART_LOOK_S)
        return found

    def _seal(
        self, captured: Capture, parts: list[tuple[dict[str, Any], Object]], seal: Seal
    ) -> dict[str, Object]:
        there, ref = Checkpoints(self.root), reference(self.spec.folder, captured.number)
        learners: dict[str, Object] = {}
        for learner, incarnation in seal.invited.items():
            found = there.written_part(ref, f"{LEARNER}{learner}", LearnerPart)
            if found is not None and found[0].incarnation == incarnation:
                learners[learner] = found[1]
        states = []
        for n, (history, _) in enumerate(parts):
            states.append(History(self.spec, n))
            states[n].load(history)
        places = [place for state in states for place in state.ledger.places.items()]
        newest = {n: max(place for m, place in places if m == n) for n, _ in places}
        there.seal(
            ref,
            CheckpointManifest(
                run=self.spec.name,
                run_id=self.spec.id,
                number=captured.number,
                reason=captured.reason,
                at=captured.at,
                epoch=states[0].epoch,
                stamp=min((s.stamp for s in states), key=lambda stamp: stamp.steps),
                versions=tuple(
                    max(of_p) for of_p in zip(*(s.versions for s in states), strict=True)
                ),
                parameters=sum(sum(s.sizes_P) for s in states),
                spec=self.spec.model_dump(mode="json"),
                shards=tuple(part for _, part in parts),
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
                    for n, (passes, sequences) in sorted(newest.items())
                ),
                incarnations=dict(states[0].ledger.newest),
                bytes=sum(o.bytes for o in (*(part for _, part in parts), *learners.values())),
            ),
        )
        return learners

    def _prune(self, seal: Seal) -> None:
        """Keep the newest complete ones, and nothing of those that were never completed."""
        there, folder = Checkpoints(self.root), self.spec.folder
        kept = {*seal.needed, *there.complete(folder)[-self.spec.keeping.run_checkpoints :]}
        for ref in there.begun(folder):
            if ref not in kept and ref < reference(folder, seal.number):
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
