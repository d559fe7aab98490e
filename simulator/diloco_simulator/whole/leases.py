"""Leader leases from within: whoever trusts one tells since when and for how long (I7)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from diloco_simulator.checkers import Leases
from diloco_simulator.virtual_loop import Hosted, current
from diloco_simulator.whole.watch import Watch
from diloco_syncer.edges.lease import LeaseKeeper
from diloco_syncer.lease import Event, Lease, Request, Written


@dataclass(slots=True)
class Kept:
    """One process's lease of one shard."""

    lease: Lease  # held, so that no other has its id
    name: str
    process: Hosted | None
    of: Leases


@dataclass(slots=True)
class Trust:
    """Of one world. `watch_of` gives the watch of a run by its name; None: nobody looks at it."""

    watch_of: Callable[[str], Watch | None]
    kept: dict[int, Kept] = field(default_factory=dict)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Until the end of the block every lease is looked at."""
        handle, keep = Lease.handle, LeaseKeeper.keep

        async def keeping(keeper: LeaseKeeper) -> None:
            self._begins(keeper)
            await keep(keeper)

        def handled(lease: Lease, event: Event, now: float) -> Request | None:
            was = lease.leading
            request = handle(lease, event, now)
            if (kept := self.kept.get(id(lease))) is not None:
                self._moved(kept, event, was, now)
            return request

        LeaseKeeper.keep, Lease.handle = keeping, handled  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            LeaseKeeper.keep, Lease.handle = keep, handle  # type: ignore[method-assign]

    def _begins(self, keeper: LeaseKeeper) -> None:
        run, _, shard = keeper.key.rpartition(".")
        if (watch := self.watch_of(run)) is not None:
            trusted = watch.of[int(shard)].leases
            name = f"{keeper.lease.me} of boot {keeper.lease.boot[:6]}"
            self.kept[id(keeper.lease)] = Kept(keeper.lease, name, current(), trusted)

    def _moved(self, kept: Kept, event: Event, was: bool, now: float) -> None:
        lease = kept.lease
        if isinstance(event, Written) and lease.leading:
            for other in self.kept.values():
                # The dead trust nothing, and tell nobody so.
                if other.of is kept.of and other.process is not None and other.process.killed:
                    kept.of.gone(other.name)
            kept.of.held(kept.name, event.sent_at, lease.until, now)
        elif was and not lease.leading:
            kept.of.gone(kept.name)
