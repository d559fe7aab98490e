"""A simulated syncer's lease, and its way along the tape until it leads: the product's lease
machine and replay around the hub."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco_shared.edges.checkpoints import CheckpointError
from diloco_shared.protocol.messages import TapeRebirth, TapeRecord, TapeRestore
from diloco_simulator.syncer_stuck import Stuck, read_recorded
from diloco_syncer.edges.parts import load_recorded
from diloco_syncer.edges.published import Unpublished
from diloco_syncer.history import History
from diloco_syncer.lease import (
    Away,
    Event,
    Fitness,
    Held,
    Lease,
    Look,
    Looked,
    Lost,
    Request,
    TimePassed,
    Written,
)
from diloco_syncer.rebirth import Reborn
from diloco_syncer.replay import State, payloads_needed, replay
from diloco_syncer.store import FragmentStore

if TYPE_CHECKING:
    from diloco_simulator.syncer_life import SyncerLife

# Between two looks at the tape's end, and after trouble, in virtual seconds.
FOLLOW_S, RETRY_S = 0.4, 2.0


class Following:
    """Of one process. Calls `life.lead()` once it holds the lease and has executed all."""

    def __init__(self, life: "SyncerLife") -> None:
        self.life = life
        self.node = life.node
        self.hub, self.world = life.hub, life.world
        self.shard, self.leases = life.shard, life.checks.leases
        spec = self.hub.spec
        self.history, self.store = self.node.newest()
        self.stuck = Stuck(self.node)
        self.reborn: Reborn | None = None
        self.shows = "coming"  # or fit, or unfit: what its member record tells others
        self.covered = self.history.seq
        process = self.node.process
        lease_s = spec.membership.leader_lease_s
        self.lease = Lease(process, life.leader, process, lease_s)
        self.lapsed = False
        self.asked_ahead = life.origin  # its clock against the world's when it last asked
        self.led = False  # a leader that is deposed begins anew: nobody follows after leading

    def begin(self) -> None:
        self._handle(TimePassed())
        self._read()

    # --- the lease -----------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        was, now = self.lease.leading, self.life.now
        request = self.lease.handle(event, now)
        ahead = self.life.origin
        # What was asked before its own clock stood still, no clock can vouch for.
        if isinstance(event, Written) and self.lease.leading and ahead == self.asked_ahead:
            self.leases.held(
                self.node.process, event.sent_at - ahead, self.lease.until - ahead, now - ahead
            )
        if request is not None:
            if self._dies(f"a {type(request).__name__} of the lease"):
                return
            self._ask(request, now)
        elif (deadline := self.lease.deadline) is not None:
            self._at(deadline, self._ring)
        if self.lease.leading:
            self._at(self.lease.until, self._look_at_lapse)
            self._look_at_lapse()
        elif was:
            self.leases.gone(self.node.process)
            if self.led:
                self.life.deposed()

    def _dies(self, before: str) -> bool:
        rate, role = self.world.options.syncer_crash, "leader" if self.led else "standby"
        if self.world.dies(role, rate, before):
            self.node.gone(self.life, self.world.rng.uniform(0.5, 6.0))
            return True
        return False

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self.life.ring_at(when, action)

    def _ring(self) -> None:
        deadline = self.lease.deadline
        if deadline is not None and self.life.now >= deadline:
            self._handle(TimePassed())

    def _look_at_lapse(self) -> None:
        """As the leader's edge looks: no round opens while the lease is not renewed."""
        lapsed = self.lease.lapsed(self.life.now)
        if lapsed != self.lapsed:
            self.lapsed = lapsed
            self.world.counts["lapses"] += lapsed
            self.life.suspended("cannot renew" if lapsed else "")

    def _ask(self, request: Request, sent_at: float) -> None:
        self.asked_ahead = self.life.origin

        def answer(result: tuple[Held | None, int] | None) -> None:
            self.life.enter(lambda: self._handle(self._event(request, result, sent_at)))

        self.world.request(self.node.process, lambda: self._at_hub(request), answer)

    def _at_hub(self, request: Request) -> tuple[Held | None, int]:
        """(the key, revision of our write or 0)."""
        shard, lease = self.shard, self.lease
        if isinstance(request, Look):
            return shard.lease, 0
        if request.revision != (shard.lease.revision if shard.lease else 0):
            return shard.lease, -1
        shard.lease_revision += 1
        holder = "" if request.give_back else lease.me
        shard.lease = Held(holder, lease.boot, lease.lock, shard.lease_revision)
        return shard.lease, shard.lease_revision

    @staticmethod
    def _event(request: Request, result: tuple[Held | None, int] | None, sent_at: float) -> Event:
        if result is None:
            return Away()
        held, revision = result
        if isinstance(request, Look):
            return Looked(held)
        return Lost() if revision < 0 else Written(revision, sent_at)

    # --- the tape ------------------------------------------------------------------------------

    def _read(self) -> None:
        leading = self.lease.leading

        def answer(result: Any) -> None:
            self.life.enter(lambda: self._execute(result, leading))

        self.world.request(self.node.process, self._records, answer)

    def _records(self) -> list[tuple[TapeRecord, dict[str, bytes] | None]] | None:
        """What follows on the tape, with payloads (None: purged); None if the tape is shorter."""
        tape, found = self.shard.tape, []
        if len(tape) < self.history.seq:
            return None
        for record in tape[self.history.seq :]:
            items = {s: self.hub.up.by_subject.get(s) for s in payloads_needed(record)}
            gone = any(item is None for item in items.values())
            there = {s: item.payload for s, item in items.items() if item is not None}
            found.append((record, None if gone else there))
        return found

    def _execute(self, found: list[Any] | None, leading: bool) -> None:
        if found is None:
            self.world.after(RETRY_S, lambda: self.life.enter(self._read))
            return
        for record, payloads in found:
            if payloads is None or self.reborn is not None:
                self._cannot()
                return
            if self._dies("a record"):
                return
            try:
                self.store = execute(self.life, self.history, self.store, record, payloads)
            except (CheckpointError, Unpublished):
                self._cannot()  # what it goes back to was removed
                return
            if not self._cover():
                return
        if not found:
            self.shows = "fit"
            self._handle(Fitness(""))
            if leading and self.lease.leading:
                self.led = True
                self.life.lead(self.history, self.store, self.reborn)
                return
        self.world.after(FOLLOW_S, lambda: self.life.enter(self._read))

    def _cover(self) -> bool:
        """A snapshot of its own once the leader's allows UP to be purged; False if that kills it.

        The thread that writes holds up what follows, but not the lease.
        """
        if self.store is None or self.history.snapshot_covers <= self.covered:
            return True
        self.covered = self.history.seq
        meta = {"history": self.history.meta(), "store": self.store.meta()}
        arrays = dict(self.store.state_arrays())
        self.life.writing = meta, arrays
        if self._dies("a snapshot"):
            return False
        self.life.writing = None
        refused = self.world.chance(self.world.options.disk_full, "standby's disk full")
        if not refused and not self.node.disk_full:
            self.node.disk.save(meta, arrays)
        return True

    def _cannot(self) -> None:
        """The tape cannot be executed from here: go on from elsewhere, as soon as that can be."""
        self.shows = "unfit"
        self._handle(Fitness("a contribution is gone"))
        elsewhere, lease, now = "", self.lease, self.life.now
        if not (lease.leading or (lease.sure and lease.free(now))):
            elsewhere = lease.holder or "somebody"
        begun = self.stuck.way_on(self.history, now, elsewhere) if self._reads() else None
        if begun is not None:
            self.history, self.store, self.reborn = begun
            self.covered = self.node.disk.covers()
        self.world.after(RETRY_S, lambda: self.life.enter(self._read))

    def _reads(self) -> bool:
        link = self.world.link(self.node.process)
        return link.out and link.into


class Lone:
    """A syncer that is alone: it needs no lease, and leads from its first moment on if it can."""

    def __init__(self, life: "SyncerLife") -> None:
        self.life = life
        self.history, self.store = life.node.newest()
        self.reborn: Reborn | None = None
        self.stuck = Stuck(life.node)

    def begin(self) -> None:
        """All of the tape at once."""
        life = self.life
        while self.reborn is None and self.history.seq < len(life.shard.tape):
            record = life.shard.tape[self.history.seq]
            items = {s: life.hub.up.by_subject.get(s) for s in payloads_needed(record)}
            payloads = {s: item.payload for s, item in items.items() if item is not None}
            try:
                if len(payloads) < len(items):
                    raise Unpublished("a contribution is gone")
                self.store = execute(life, self.history, self.store, record, payloads)
            except (CheckpointError, Unpublished):
                begun = self.stuck.way_on(self.history, life.now, "")
                if begun is None:
                    life.world.after(RETRY_S, lambda: life.enter(self.begin))
                    return
                self.history, self.store, self.reborn = begun
        life.lead(self.history, self.store, self.reborn)


def execute(
    life: "SyncerLife",
    history: History,
    store: FragmentStore | None,
    record: TapeRecord,
    payloads: dict[str, bytes],
) -> FragmentStore | None:
    """The next record; CheckpointError or Unpublished if what it goes back to is not there."""
    back: State | FragmentStore | None = None
    if isinstance(record, TapeRebirth):
        back = read_recorded(life.hub, history, record)
    elif isinstance(record, TapeRestore):
        back = load_recorded(history.spec, history.shard, record, life.hub.vault)
        if life.following is not None:
            life.watch.reached("restore executed by a standby")
    store = replay(history, store, record, history.seq + 1, payloads, back)
    life.checks.executed(life.leader, record, history, store)
    return store
