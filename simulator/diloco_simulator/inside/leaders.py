"""Leaders from within: what their machines decide, hold and tell, shown to the checkers.

A hub shows what leaders say. What they hold in memory, how they account for every token, and whom
they have heard of before they ask, only their own machines show; so each is looked at whenever it
handles an event.
"""

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Beat, Grant, Pull, TapeEnd, TapeRound, TapeSnapshot
from diloco_shared.protocol.wire import decode_tape
from diloco_simulator.checkers import heard
from diloco_simulator.checkers.heard import Heard
from diloco_simulator.checkers.limits import LeaderHolds, records_in_stream
from diloco_simulator.checkers.watch import RunWatch, WatchedScene
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.net import GIVEN_UP_S, RETRY_S, SLOW
from diloco_simulator.inside.losses import Losses
from diloco_syncer.events import (
    Append,
    Appended,
    BusBack,
    Capture,
    Effect,
    Event,
    InstallLoaded,
    JoinSeen,
    Led,
    ProgressSeen,
    PurgeUp,
    SendBeat,
    SendGrant,
    SendPull,
    Tell,
)
from diloco_syncer.history.replay import payloads_needed
from diloco_syncer.leadership.leader_io import Leader
from diloco_syncer.machine import Machine
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.snapshots.snapshots_io import SnapshotStore
from diloco_syncer.status.status import status

# A leader that is silent about the hub's full disk for longer, in virtual seconds, says nothing.
# Three of its looks may each meet two requests without an answer (of five seconds) and a try (of
# one), and they are as many as three seconds apart.
NAMED_S = 45.0
# Between two beats of a leader that does not stand still, in virtual seconds: half of this.
STILL_S = 2.0
# Last words may be under way this many mean delays: a longer delay is one in e^23.
LATE_DELAYS = 12


class SeenLeaders:
    """Of one world. `watch_of` gives the watch of a run by its name; None: nobody looks at it."""

    def __init__(
        self, scene: WatchedScene, broker: MemoryBroker, watch_of: Callable[[str], RunWatch | None]
    ) -> None:
        self.scene = scene
        self.broker = broker
        self.watch_of = watch_of
        # By the ids of its machine, its outbox and its snapshots, which it holds.
        self.terms: dict[int, SeenTerm] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Until the end of the block every leader's machine is looked at."""
        handle, run = Machine.handle, Leader.run
        purge, save, rewind = Outbox.purge_up, SnapshotStore.save, Leader._up_rewound
        queue = Outbox._queue

        async def led(leader: Leader) -> str:
            if (watch := self.watch_of(leader.spec.name)) is not None:
                term = SeenTerm(self.scene, watch, leader, self.broker)
                for known in (leader.machine, leader.outbox, leader.snapshots):
                    self.terms[id(known)] = term
            return await run(leader)

        def rewound(leader: Leader, end: int, certain: bool) -> None:
            rewind(leader, end, certain)
            if (term := self.terms.get(id(leader.machine))) is not None:
                term.rewound(end)

        def saved(snapshots: SnapshotStore, *what: Any) -> Path:
            path = save(snapshots, *what)
            if (term := self.terms.get(id(snapshots))) is not None:
                pinned = snapshots.pinned.values()  # somebody fetches them
                kept = [covers for covers in snapshots.covers() if covers not in pinned]
                term.of.limits.keeps(term.name, len(kept))
                term.saved(min(snapshots.covers(), default=0))
            return path

        def queued(outbox: Outbox, told: Tell) -> None:
            queue(outbox, told)
            if (term := self.terms.get(id(outbox))) is not None:
                term.losses.tells(told)

        async def purged(outbox: Outbox, below: Callable[[], Awaitable[int]]) -> None:
            if (term := self.terms.get(id(outbox))) is None:
                return await purge(outbox, below)
            until = term.covered_until

            async def seen() -> int:
                return term.purges(await below())

            await purge(outbox, seen)
            if until is not None:
                term.purged(until)

        def handled(machine: Machine, event: Event, now: float) -> list[Effect]:
            term = self.terms.get(id(machine))
            if term is None:
                return handle(machine, event, now)
            term.meets(event, now)
            effects = handle(machine, event, now)
            term.decides(effects, now)
            return effects

        Leader.run, Machine.handle = led, handled  # type: ignore[method-assign, assignment]
        Outbox.purge_up, SnapshotStore.save = purged, saved  # type: ignore
        Leader._up_rewound, Outbox._queue = rewound, queued  # type: ignore
        try:
            yield
        finally:
            Leader.run, Machine.handle = run, handle  # type: ignore[method-assign]
            Outbox.purge_up, SnapshotStore.save = purge, save  # type: ignore
            Leader._up_rewound, Outbox._queue = rewind, queue  # type: ignore[method-assign]


class SeenTerm:
    """One process that leads one shard, until it ends or is deposed."""

    def __init__(
        self, scene: WatchedScene, watch: RunWatch, leader: Leader, broker: MemoryBroker
    ) -> None:
        self.scene = scene
        self.broker = broker
        self.watch = watch
        self.leader = leader
        self.machine = leader.machine
        history = self.machine.history
        self.of = watch.of[history.shard]
        self.name = f"{leader.leader} of boot {leader.lease.lease.boot[:6]} at {history.seq}"
        self.told = False  # a beat, since what it holds was last looked at
        self.accounted = -1  # record of the ledger that was last looked at
        spec = watch.spec
        self.heard = Heard(spec.algorithm.fragments, spec.membership.lease_s)
        self.losses = Losses(first=history.shard == 0)
        self.newest: Mapping[str, int] = {}  # learner -> its newest life on the tape
        self.wall_offset = 0.0  # from its clock to the wall's
        # Newest sequence on UP that it had seen when it first pulled a round; and below that of all
        # rounds that no snapshot covers, when a purge was last wanted.
        self.first_pulled: dict[int, int] = {}
        self.asked: dict[str, int] = {}  # where an answer to a pull lies on UP -> its round
        self.covered_until: int | None = None
        self.covers = -1  # record up to which its oldest snapshot does; -1: none of this term
        self.covered_round = -1  # the newest that a snapshot of this term covers
        self.up = subjects.up_stream(watch.spec.name)
        self.noticed = len(self._ends)  # so often UP had lost its tail, when it last noticed that
        # When it beat, and since when its beats have said nothing of a full disk that keeps it from
        # renewing its lease.
        self.beaten_at = self.silent_since = -math.inf
        # So often the hub had lost the newest of its streams, when this was last looked at; and
        # until when, by its own clock, rounds that were open then may wait for what is lost.
        self.tails_lost = scene.counts["tails lost"]
        self.lost_until = -math.inf

    @property
    def _ends(self) -> list[int]:
        return self.broker.ends.get(self.up, [])

    # --- before an event -----------------------------------------------------------------------

    def meets(self, event: Event, at: float) -> None:
        """What the effects before this event have left; and whom the leader hears of. `at`: by its
        own clock."""
        self._waits_for_what_is_lost()
        if self.told:
            self.told = False
            self._holds()
            for learner in sorted(self.losses.stale()):
                self.of.report("I10", f"{self.name} tells nobody that {learner} is alive again")
        now, members = self.scene.now, self.of.members
        match event:
            case Led():
                self._begins(event)
                self.wall_offset = event.at - at
            case Appended() if not self.machine.leading:
                self.heard.since = at
            case ProgressSeen(progress=p):
                members.heard(self._term, p.learner, p.incarnation, now)
                if self.heard.progress(p, self._taped(), at):
                    self.watch.claims.told(p)
                    if p.state == "finished":
                        members.goodbye(p.learner, p.incarnation)
            case JoinSeen(join=j):
                members.heard(self._term, j.learner, j.incarnation, now)
            case BusBack():
                self.heard.forgives(at)
                self.silent_since = now  # its link may be cut
                if self.machine.leading or self.machine.appending is not None:
                    members.forgiven_at = now
            case _:
                pass

    def _waits_for_what_is_lost(self) -> None:
        """A contribution that the hub lost after it had acknowledged it is waited for in vain until
        the deadline of its round, which was open then. What is asked for later is not lost by it.
        """
        if (lost := self.scene.counts["tails lost"]) != self.tails_lost:
            deadlines = (r.deadline for r in self.machine.rounds.open)
            self.tails_lost, self.lost_until = lost, max([self.lost_until, *deadlines])

    @property
    def _term(self) -> int:
        """Its own, or the one that it is about to begin."""
        history = self.machine.history
        return history.term + (not self.machine.leading and not history.outcome)

    def _begins(self, led: Led) -> None:
        """What it has of the run, it has executed."""
        history, store = self.machine.history, self.leader.numbers.store
        if store is not None and led.reborn is None:
            for p in history.owned:
                key = history.epoch, p, history.versions[p]
                self.watch.anchors.held(*key, store.anchor_digest(p), self.name)

    def _holds(self) -> None:
        machine, numbers = self.machine, self.leader.numbers
        has = LeaderHolds(
            initialised=machine.history.initialised and not numbers.building,
            in_flight=len(machine.rounds.open),
            payloads=len(self.leader.payloads.held),
            staged=len(numbers.staged),
            to_publish=len(numbers.installed),
            to_append=len(machine.to_append),
            donations=len(machine.admission.donations.under_way),
        )
        self.of.limits.holds(self.name, has)
        if most := self.leader.context.payload_bytes_max:
            held = sum(map(len, self.leader.payloads.held.values()))
            self.of.limits.payload_bytes(self.name, held, most)
        history = machine.history
        self.of.limits.covers(self.name, history.snapshot_round, history.next_round)

    # --- after it ------------------------------------------------------------------------------

    def decides(self, effects: list[Effect], now: float) -> None:
        """What comes of an event; before it is carried out."""
        for effect in effects:
            match effect:
                case Tell():
                    self.losses.decides(effect, now)
                    self._loses(effect)
                case SendBeat():
                    self._beat(effect.beat, now)
                case SendPull():
                    self._pull(effect.pull)
                case Append(record=TapeRound() | TapeEnd() as record):
                    self._records(record, now)
                case SendGrant():
                    self._grant(effect.grant, now)
                case PurgeUp():
                    later = (at for n, at in self.first_pulled.items() if n > effect.last_round)
                    self.covered_until = min(later, default=self.leader.inbox.up_seq)
                    self.covered_round = effect.last_round
                case InstallLoaded():
                    # Rounds go back.
                    self.first_pulled, self.covered_until, self.covered_round = {}, None, -1
                    self.asked.clear()
                case Capture() if self.machine.history.outcome and self.machine.history.shard:
                    self.watch.reached("part of a shard that is over")
                case _:
                    pass

    def rewound(self, end: int) -> None:
        """UP lost what came after `end`: its sequences come again, for rounds of now."""
        self.first_pulled = {n: min(seq, end) for n, seq in self.first_pulled.items()}
        if self.covered_until is not None:
            self.covered_until = min(self.covered_until, end)
        self.noticed = len(self._ends)

    def purges(self, below: int) -> int:
        """What is below goes now: chunks and manifests alike, and none of a round of this term that
        no snapshot covers, nor any that the tape needs, which may be another one than before."""
        run, named = self.watch.spec.name, self._named()
        if self.broker.exists(self.up):
            there = (m for m in self.broker.select(self.up, f"up.{run}.>", 1) if m.seq < below)
            needed = [m.subject for m in there if self._needed(m.subject, named)]
            self.of.limits.purges(self.name, needed)
        return below

    def _needed(self, subject: str, named: Set[str]) -> bool:
        """Whether it is of an answer to a pull. Anybody may write anywhere."""
        place = subject.removesuffix(".m")
        return place in named or self.asked.get(place, -1) > self.covered_round

    def _named(self) -> set[str]:
        """What the hub's tape names, and no snapshot on it covers: places on UP."""
        stream = subjects.tape_stream(self.watch.spec.name)
        if not self.broker.exists(stream):
            return set()
        place = subjects.tape(self.watch.spec.name, self.machine.history.shard)
        stored = self.broker.select(stream, place, 1)
        tape = [(message.seq, decode_tape(message.payload)) for message in stored]
        covers = max((r.covers for _, r in tape if isinstance(r, TapeSnapshot)), default=0)
        return {name for seq, r in tape if seq > covers for name in payloads_needed(r)}

    def purged(self, until: int) -> None:
        """What was wanted is done, unless UP has lost its tail meanwhile: what has the sequences of
        what was lost came later, and a leader that has not seen any of it has yet to notice."""
        run, owned = self.watch.spec.name, self.machine.history.owned
        if not self.broker.exists(self.up) or self.covered_until is None:
            return
        until = min([until, self.covered_until, *self._ends[self.noticed :]])
        there = self.broker.select(self.up, f"up.{run}.*.*.*.*.*.m", 1)
        left = [m for m in there if m.seq <= until and int(m.subject.split(".")[4]) in owned]
        self.of.limits.purged(self.name, len(left))

    def _pull(self, pull: Pull) -> None:
        options = self.scene.options
        self.first_pulled.setdefault(pull.round, self.leader.inbox.up_seq)
        late_s = LATE_DELAYS * options.delay_s * (SLOW if options.slow_links else 1.0)
        if options.partitions or options.outages or options.clogs or options.storms:
            late_s += GIVEN_UP_S + RETRY_S  # what met a cut is still under way
        asked = next(r for r in self.machine.rounds.open if r.n == pull.round)
        run, place = self.watch.spec.name, (pull.epoch, pull.fragment, pull.round, pull.term)
        self.asked |= {
            subjects.contribution(run, learner, *place): pull.round for learner in pull.participants
        }
        now = self.scene.now
        self.of.members.pull(self.name, pull, asked.participants, now, late_s)

    def _grant(self, grant: Grant, now: float) -> None:
        if grant.accepted:
            self.heard.granted(grant, now)
            self.of.members.grant(self.name, grant.learner, grant.incarnation)

    def _beat(self, beat: Beat, now: float) -> None:
        self.told = True
        self.watch.anchors.heads(self.name, beat.epoch, beat.versions)
        self.watch.data.beat(beat.live, self.scene.now, beat.shard, beat.term)
        if not self.scene.faulty:
            # Who waits for what the hub has lost knows no reason, and says so. It closes the round
            # with the first look after its deadline.
            look_s = self.watch.spec.membership.heartbeat_s
            if beat.state == "stuck" and now > self.lost_until + look_s:
                why = f"{self.name} is stuck although all is well: {beat.reason}"
                self.of.report("liveness", why)
            self.of.alive.beat(beat, self.scene.now)
        self._names_full_disk(beat)
        self._tells_who_is_lost(now)
        self._tape()
        self._account(now)

    def saved(self, covers: int) -> None:
        """A snapshot is written; `covers`: what the oldest of those that are kept does."""
        self.covers = covers

    def _tape(self) -> None:
        """It holds what snapshots do not cover, and little more: where one syncer has the shard,
        whom nobody follows, and no checkpoint needs what came after its mark."""
        h, options, limits = self.machine.history, self.scene.options, self.of.limits
        waits = options.syncers > 1 or options.losses or h.checkpoint_open or h.outcome
        stream = subjects.tape_stream(self.watch.spec.name)
        away = self.scene.faulty or waits or self.covers < 0 or not self.broker.exists(stream)
        if away or self.broker.info(stream).messages <= records_in_stream():
            limits.tape_within_at = self.scene.now
            return
        subject = subjects.tape(self.watch.spec.name, h.shard)
        seqs = [message.seq for message in self.broker.select(stream, subject, 1)]
        uncovered = sum(seq > self.covers for seq in seqs)
        limits.tape(self.name, len(seqs), uncovered, self.scene.now)

    def _names_full_disk(self, beat: Beat) -> None:
        """Whoever cannot renew its lease on a full disk says that it is full (I6)."""
        now, hub = self.scene.now, self.broker
        waits = "renew its lease" in beat.reason
        still, self.beaten_at = now - self.beaten_at < STILL_S, now
        # Before the first parameters its state is another one, since learners go by it.
        said = beat.state == "full" or "disk is full" in beat.reason
        if said:
            self.scene.counts["the hub's disk full: said by the leader"] += hub.disk_full
            tried = hub.disk_full and "STATE cannot be written" in beat.reason
            self.scene.counts["the hub's disk full: found by a try"] += tried
            early = hub.disk_full and beat.state != "full"
            self.scene.counts["the hub's disk full: said before the first parameters"] += early
        other = hub.squeezed or hub.leaderless  # and that is what answers, or does not
        if not (hub.disk_full and waits and still) or other or said:
            self.silent_since = now
        elif now - self.silent_since > NAMED_S:
            self.silent_since = now
            why = f"{self.name} says {beat.reason!r} while the hub's disk is full"
            self.of.report("liveness", why)

    def _tells_who_is_lost(self, now: float) -> None:
        """Whoever falls silent without a goodbye is told of, also where leaders changed (I10)."""
        h, known = self.machine.history, self.losses.known(now)
        if h.outcome or (n := self.of.number_of(h.seq, h.tail)) < 0:
            return
        missing = self.heard.missing(self.of.tokens.fates[n], now, self.of.members.goodbyes)
        if missing:
            self.watch.report.looked("I10")
        for learner in sorted(missing - known):
            # An earlier leader has given up who was silent for long, and a snapshot of that has
            # forgotten such a life. It had told of it.
            if not self.of.members.heard_within(learner, heard.GONE_S, self.scene.now):
                continue
            self.of.report("I10", f"{self.name} tells nobody that {learner} is silent for a lease")

    def _loses(self, tell: Tell) -> None:
        """Whoever has said goodbye to it is not lost."""
        if tell.kind != "learner-lost":
            return
        learner = tell.data["learner"]
        self.watch.report.looked("I10")
        if self.heard.left(learner):
            self.of.report("I10", f"{self.name} tells {learner} as lost, which has said goodbye")

    def _taped(self) -> Mapping[str, int]:
        """Newest lives, as of what it has executed; of what it was before the hub lost that."""
        h = self.machine.history
        if (n := self.of.number_of(h.seq, h.tail)) >= 0:
            self.newest = self.of.tokens.fates[n].newest
        return self.newest

    def _records(self, record: TapeRound | TapeEnd, now: float) -> None:
        """What it is about to put on the tape."""
        h = self.machine.history
        if (n := self.of.number_of(h.seq, h.tail)) >= 0:
            at = now if record.at == now + self.wall_offset else -math.inf
            self.of.tokens.records(self.name, n, record, self.heard, now, at)

    def _account(self, now: float) -> None:
        """What the leader would show of every token, now."""
        h, tokens = self.machine.history, self.of.tokens
        if (n := self.of.number_of(h.seq, h.tail)) < 0:
            return
        if n != self.accounted:
            self.accounted = n
            tokens.ledger(self.name, n, h.ledger.meta())
        # What users see, and not what it is made of: that may be put together in a wrong way.
        shown = status(self.machine, now, 0.0, bytes_up=0, bytes_down=0)
        tokens.shown(self.name, n, shown, self.heard, now)
