"""Leader leases from within: whoever trusts one tells since when and for how long (I7)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from diloco_simulator.checkers.promises import LeaderLeases
from diloco_simulator.checkers.watch import RunWatch
from diloco_simulator.virtual_loop import Hosted, current
from diloco_syncer.leadership.lease import Event, Lease, Request, Written
from diloco_syncer.leadership.lease_io import LeaseKeeper


@dataclass(slots=True)
class SeenLease:
    """One process's lease of one shard."""

    lease: Lease  # held, so that no other has its id
    name: str
    process: Hosted | None
    watch: RunWatch
    of: LeaderLeases
    behind_s: float = 0.0  # its process's clock, when it was given the lease

    @property
    def counts(self) -> bool:
        """The dead trust nothing, and tell nobody so. Whose clock stood still trusts its lease for
        longer than it may: only the tape fences that."""
        p = self.process
        still = p is None or (p.suspended_at is None and p.behind_s == self.behind_s)
        return still and not (p is not None and p.killed)

    @property
    def trusts(self) -> bool:
        """Whether it leads, or will when its machine goes on, for all that it knows."""
        p = self.process
        return p is not None and not p.killed and not self.lease.lapsed(p.monotonic)

    def given(self, sent_at: float, now: float) -> None:
        """The lease or a renewal. What it asked before its clock stood still counts for nothing."""
        ahead_s = 0.0 if self.process is None else self.process.behind_s
        if self.process is None or sent_at > self.process.woke_at:
            self.behind_s = ahead_s
            self.of.held(self.name, sent_at + ahead_s, self.lease.until + ahead_s, now + ahead_s)


@dataclass(slots=True)
class Trust:
    """Of one world. `watch_of` gives the watch of a run by its name; None: nobody looks at it."""

    watch_of: Callable[[str], RunWatch | None]
    kept: dict[int, SeenLease] = field(default_factory=dict)

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
            self.kept[id(keeper.lease)] = SeenLease(keeper.lease, name, current(), watch, trusted)

    def _moved(self, kept: SeenLease, event: Event, was: bool, now: float) -> None:
        lease = kept.lease
        if isinstance(event, Written) and lease.leading:
            for other in self.kept.values():
                if other.of is kept.of and not other.counts:
                    kept.of.gone(other.name)
                    if other.trusts:
                        kept.watch.reached("two leaders at once")
            kept.given(event.sent_at, now)
        elif was and not lease.leading:
            kept.of.gone(kept.name)
