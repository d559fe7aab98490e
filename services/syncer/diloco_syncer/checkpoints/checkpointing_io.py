"""Run-wide checkpoints at the leader: its own part, the manifest, and the way back."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, ParamSpec, TypeVar

import structlog
from numpy.typing import NDArray

from diloco_shared import ambient
from diloco_shared.bus.port import BusError, Conflict, KeyEntry
from diloco_shared.bus.repeating import some_at_once, until_done
from diloco_shared.bus.stored_records import readable, write_if
from diloco_shared.checkpoints.checkpoints_io import CheckpointError
from diloco_shared.checkpoints.needed_io import needed_by_runs
from diloco_shared.checkpoints.place_threads_io import REMOVE_S
from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import Object
from diloco_shared.protocol.pace import ANSWER_S, stored_within_s
from diloco_shared.protocol.records import Restore, ShardLease
from diloco_shared.protocol.wire import encode
from diloco_syncer.checkpoints import gone_back_io as gone_back
from diloco_syncer.checkpoints.parts_io import (
    belongs,
    bytes_of,
    clear,
    leases_of,
    load,
    newest_there,
    prune,
    seal,
    write_part,
    written_part,
)
from diloco_syncer.context import RunContext
from diloco_syncer.events import Capture, Event, Kept, Loaded, NumberFound, Seal, Sealed
from diloco_syncer.history.replay import RestoredState
from diloco_syncer.merging.store import FragmentStore

log = structlog.get_logger()

T = TypeVar("T")
P = ParamSpec("P")

# Between two looks at whether another shard has written its part, in seconds.
PART_LOOK_S = 0.5
# The history of a restore is small. No record follows until it is kept: where its place hangs for
# so many seconds, the run goes on without it.
GONE_BACK_S = 30.0


class Checkpointer:
    """Of one leader's term: one checkpoint at a time."""

    def __init__(
        self,
        context: RunContext,
        put: Callable[[Event], None],
        ours: Callable[[], Awaitable[None]],
    ) -> None:
        """`ours`: returns while nobody else may lead, and raises Deposed once another does."""
        self.spec, self.shard = context.spec, context.shard
        self.root, self.control = context.checkpoint_root, context.control
        self.places = context.checkpoint_places
        self.threads = context.place_threads
        self.put, self.ours = put, ours
        self.shelf = context.snapshots.shelf  # of stores that are loaded
        self.aside = context.snapshots.folder  # for their arrays: the run's own are in memory
        self.captured: tuple[Capture, dict[str, Any], Object] | None = None  # with `History.meta`
        self.captured_bytes = 0  # of its arrays
        self.loaded: dict[int, RestoredState] = {}  # by serial of the wish: the newest one

    async def _asked(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the place says of something small. Raises what `work` does, and VaultError."""
        return await self.threads.within(ANSWER_S, self.root, work, *args, **kwargs)

    # --- making --------------------------------------------------------------------------------

    async def look(self) -> None:
        """Which numbers are taken by anything that lies there."""
        newest = 0
        try:
            newest = await self._asked(newest_there, self.spec, self.root)
        except OSError as error:  # whoever may only write there has its checkpoint all the same
            log.warning("numbers of checkpoints not looked for", error=str(error))
        self.put(NumberFound(newest))

    async def capture(
        self,
        effect: Capture,
        history: dict[str, Any],
        store: dict[str, Any],
        arrays: dict[str, NDArray[Any]],
    ) -> None:
        """Write the state as it was handed over, between two events of the machine."""
        if history["checkpoint"] != effect.number:  # of a shard that is over: its tape has no mark
            history = history | {"mark": effect.number, "mark_at": effect.at}
        if not self.shard:
            try:
                await self.threads.within(
                    REMOVE_S, self.root, clear, self.spec, self.root, effect.number
                )
            except OSError as error:  # whoever may only write there has its checkpoint all the same
                log.warning("remains of checkpoints not removed", error=str(error))
        size = sum(array.nbytes for array in arrays.values())
        try:
            written = await self.threads.within(
                stored_within_s(size),
                self.root,
                write_part,
                self.spec,
                self.shard,
                self.root,
                effect.number,
                history,
                store,
                arrays,
            )
        except OSError as error:
            log.warning("part of a checkpoint not written", number=effect.number, error=str(error))
            self.put(Sealed(effect.number, fault=str(error)[:400]))
            return
        self.captured, self.captured_bytes = (effect, history, written), size
        self.put(Kept(effect.number))

    async def seal(self, effect: Seal) -> None:
        """The manifest over what is there; then what is too old goes. By one shard for all."""
        assert self.captured is not None
        if self.shard:
            self.put(Sealed(effect.number))
            return
        captured, history, shard = self.captured
        try:
            # Theirs are about as large, and they began to write when this one did.
            patience_s = stored_within_s(self.captured_bytes)
            others = await self._other_shards(effect.number, history, patience_s)
            parts = [(history, shard), *others]
            # Who leads by now has told that this one failed, and may have removed parts of it.
            await self.ours()
            learners = await self._asked(seal, self.spec, self.root, captured, parts, effect)
        except (OSError, ValueError) as error:
            self.put(Sealed(effect.number, fault=str(error)[:400]))
            return
        self.put(Sealed(effect.number, tuple(sorted(learners))))
        try:
            runs = await needed_by_runs(self.control)
            needed = {ref for _, refs in runs for ref in refs}
            await self.threads.within(
                REMOVE_S, self.root, prune, self.spec, self.root, effect, needed
            )
        except (OSError, BusError) as error:  # with the next one
            log.warning("old checkpoints not removed", error=str(error))

    async def _other_shards(
        self, number: int, own: dict[str, Any], patience_s: float
    ) -> list[tuple[dict[str, Any], Object]]:
        """`History.meta` of every other shard's part, once all are there.

        `own`: that of this one. Raises CheckpointError where another has gone back to a checkpoint
        and this one had not, or the other way round, and where a part is missing for too long.
        """
        found: list[tuple[dict[str, Any], Object]] = []
        until = ambient.monotonic() + patience_s
        for n in range(1, self.spec.algorithm.shards):
            while True:
                part = await self._asked(written_part, self.spec, n, self.root, number)
                if part is not None and belongs(number, part[0], own):
                    found.append(part)
                    break
                if ambient.monotonic() > until:
                    raise CheckpointError(f"syncer shard {n} gave no part in {patience_s:.0f} s")
                await asyncio.sleep(PART_LOOK_S)
        return found

    # --- going back ----------------------------------------------------------------------------

    async def load(self, restore: Restore) -> None:
        """Read a checkpoint; the store is kept for `install`, or until `unload`."""
        try:
            which = self.spec, self.shard, restore.source, self.root
            state = await self.threads.read(
                self.root,
                partial(bytes_of, *which, self.places),
                load,
                *which,
                shelf=self.shelf,
                further=self.places,
                aside=self.aside,
            )
        except (OSError, ValueError, KeyError) as error:
            self.put(Loaded(restore, fault=str(error)[:400]))
            return
        if restore.serial >= max(self.loaded, default=0):
            self.loaded = {restore.serial: state}
        self.put(Loaded(restore, state.manifest.run, state.history, state.digest))

    def merged(self, serial: int) -> dict[int, tuple[int, int]]:
        """How far each data shard was merged in this shard of the syncer, at a loaded checkpoint:
        (passes, sequences)."""
        places = self.loaded[serial].history["ledger"]["places"]
        return {shard: (passes, sequences) for shard, passes, sequences in places}

    async def rewind(self, serial: int) -> None:
        """Keep the history that is gone back to. Data is read on from where the checkpoint's
        parameters have it; other data from its beginning.

        That by one shard for all. Before the restore is on the tape: should this process die
        between, the wish is still open.
        """
        state = self.loaded[serial]
        what = self.spec, self.shard, self.root, serial, state
        try:
            await self.threads.within(GONE_BACK_S, self.root, gone_back.keep, *what)
        except OSError as error:  # it is in the checkpoint, as long as that is there
            log.warning("the history that is gone back to is not kept", error=str(error))
        if not self.shard:
            await self.lease_from(state.leases)

    async def leases_of(self, source: str) -> tuple[ShardLease, ...]:
        """How far data were read at a checkpoint. Raises OSError or ValueError."""
        return await self._asked(leases_of, self.spec, source, self.root, self.places)

    async def lease_from(self, leases: Iterable[ShardLease], *, beyond: bool = False) -> None:
        """Every data shard that was ever read is free, and read on from there; `beyond`: only those
        that are leased from further on."""
        there = {lease.shard: lease for lease in leases}
        free = ShardLease(shard=0, holder="", incarnation=-1, sequences=0, passes=0)
        run = self.spec.name
        read = await until_done(
            lambda: self.control.kv_all(subjects.SHARDS, f"{run}.>"), "leases of data"
        )
        known = range(self.spec.data.virtual_shards)  # most may never have been read
        of = (n for n in known if n in there or f"{run}.{n}" in read)
        leased = (there.get(n, free.model_copy(update={"shard": n})) for n in of)
        await some_at_once(
            self._set_back(lease, read.get(f"{run}.{lease.shard}"), beyond) for lease in leased
        )

    async def _set_back(self, lease: ShardLease, entry: KeyEntry | None, beyond: bool) -> None:
        """Over whoever holds it by `entry`, or took it since: its life ends with the restore, and
        its next write conflicts. So does ours, where a request of before comes late and another
        leads by then."""
        place = subjects.SHARDS, f"{self.spec.name}.{lease.shard}"

        async def written() -> None:
            nonlocal entry
            now = readable(entry.value, ShardLease) if entry else None
            if beyond and now is not None and now.began <= lease.began:
                return
            await self.ours()
            known = 0 if entry is None else entry.revision
            try:
                await write_if(self.control, *place, encode(lease), known)
            except Conflict:
                entry = await self.control.kv_get(*place)
                raise

        await until_done(written, f"lease of data shard {lease.shard}")

    def unload(self, serial: int) -> None:
        """Keep a store no longer that will not be installed: on the disk it is as large as the
        run's own."""
        self.loaded.pop(serial, None)

    def install(self, serial: int) -> FragmentStore:
        """The store that was loaded, once."""
        return self.loaded.pop(serial).store
