"""What the leader tells everybody: the run's state and why, heads, and who has which duty."""

import math

from diloco_shared.protocol.chunks import CHUNK_BYTES
from diloco_shared.protocol.messages import Beat, RunState
from diloco_shared.protocol.pace import silence_s, transfer_s
from diloco_shared.spec.quorum import within_reach
from diloco_shared.spec.run import RunSpec
from diloco_syncer.events import Effect, InitMoved, SendBeat, Tell
from diloco_syncer.history.history import History
from diloco_syncer.members.roster import GONE_S, Roster
from diloco_syncer.rounds.rounds import Rounds
from diloco_syncer.status.watchdog import Watchdog

# An initializer is passed over for another once less than a chunk of its parameters has come within
# this many seconds: a message now and then is no transfer.
INITIALIZER_S = silence_s()
# And once all that has come of them has taken so many times as long as it takes on the slowest link
# worth using. What it has sent is not lost by that: whichever set is complete first is taken.
SLOWER = 2.0
# What counts of one initializer, in bytes per parameter: stored, and fetched from there. Of its
# newest life; and so much of all earlier ones together, that it sent since it was appointed.
COUNTED = 8
# Why a run is over, or rests.
SPENT, ASKED = "its budget is used up", "as the user asked"


class Announcer:
    """Beats once a heartbeat and at every change."""

    def __init__(self, spec: RunSpec, history: History, roster: Roster, rounds: Rounds) -> None:
        self.watchdog = Watchdog(history, roster, rounds)
        self.spec = spec
        self.history = history
        self.roster = roster
        self.rounds = rounds
        self.alive: tuple[str, ...] = ()
        # Who was alive in this term; until it was told who never was. Of learners that joined.
        self.met: set[str] | None = set()
        self.initializer = ""
        self.appointed_at = self.initializer_moved_at = 0.0
        self.here = self.here_before = 0  # bytes fetched: now, and when it was appointed
        self.came = self.moved = 0  # bytes, at most; and how many there were at the newest move
        self.life: int | None = None  # of the initializer, whose bytes these are; None: none yet
        self.came_before = 0  # bytes of its earlier lives
        # Whoever was an initializer in this term: what others send nobody asked for. Of learners
        # that joined, so there are no more than MEMBERS_MAX at once.
        self.appointed: set[str] = set()
        self.senders: tuple[str, ...] = ()  # of initial parameters, whoever asked for them
        self.evaluator = ""
        self.evaluated = False
        self.beat_at = 0.0
        self.looked_at = float("-inf")
        self.beat_state: tuple[object, ...] | None = None

    def appoint(self, now: float) -> list[Effect]:
        """Who is live, who initialises and who evaluates: those two stay as long as they live."""
        alive, told = self.roster.names(now), list[Effect]()
        if alive != self.alive:
            told = self._changes(alive, now)
            self.alive, self.beat_at = alive, now
        told += self._never_met(now)
        self._appoint(now)
        return told

    def restored(self) -> None:
        """The run goes on where it had ended: its next end has an evaluation of its own."""
        self.evaluated = False

    def initial_moved(self, event: InitMoved, parameters: int, now: float) -> None:
        """More of the initial parameters has come: whoever sends them is given time for as much.

        `parameters`: N; 0 while it is not known. More than all of them is no progress: of a life,
        since a new one sends all of them anew.
        """
        self.senders, self.here = event.senders, event.here
        if event.initializer != self.initializer:
            return
        most = COUNTED * parameters or math.inf
        if self.life not in (None, event.life):
            # The time that those had goes on: else a life after the other would hold up the rest.
            self.came_before = int(min(self.came_before + self.came, most))
            self.here_before, self.came, self.moved = event.here, 0, 0
        self.life = event.life
        came = event.stored + event.here - self.here_before
        self.came = max(self.came, int(min(came, most)))
        if self.came >= self.moved + CHUNK_BYTES:
            self.initializer_moved_at, self.moved = now, self.came

    def _slow(self, now: float) -> bool:
        """Whether it is another initializer's turn."""
        still = now - self.initializer_moved_at > INITIALIZER_S
        sent_s = transfer_s(self.came_before + self.came)
        return still or now - self.appointed_at > INITIALIZER_S + SLOWER * sent_s

    def initializing(self) -> tuple[str, int]:
        """Who is asked for the initial parameters, and in which life; ("", -1) for nobody."""
        return self.initializer, self.roster.newest(self.initializer) if self.initializer else -1

    def _changes(self, alive: tuple[str, ...], now: float) -> list[Effect]:
        told: list[Effect] = []
        for learner in sorted(set(self.alive) - set(alive)):
            member = self.roster.members.get(learner)
            silent = now - member.seen_at if member else 0.0
            self.roster.recoveries.silent(learner, now + self.roster.wall_offset)
            if member is not None and member.left:
                continue  # it has said so itself
            text = (
                f"nothing was heard of {learner} for {silent:.1f} s: "
                "the others are merged without it"
            )
            told.append(Tell("learner-lost", text, {"learner": learner}))
        for learner in sorted(set(alive) - set(self.alive)):
            told.append(Tell("learner-alive", f"{learner} is alive", {"learner": learner}))
        return told

    def _never_met(self, now: float) -> list[Effect]:
        """Once: who trained under an earlier leader, and was not alive for a whole lease of this.

        It died as the leaders changed, or an earlier one has told of it already. Its last words may
        have come just before this one led. `_changes` tells of none that was never alive.
        """
        if self.met is None:
            return []
        self.met.update(self.alive)
        silent = now - self.roster.since
        # Never later than such lives are settled: then nobody knows of them any more.
        if self.history.outcome or silent <= min(self.roster.lease_s, GONE_S):
            return []
        heard = {m.learner for m in self.roster.members.values() if not m.left}
        lost, self.met = ({*self.roster.unheard(), *heard} - self.met), None
        since = f"was not heard of since this leader began, {silent:.1f} s ago"
        return [
            Tell(
                "learner-lost",
                f"{learner} {since}: the others are merged without it",
                {"learner": learner},
            )
            for learner in sorted(lost)
        ]

    def _appoint(self, now: float) -> None:
        self.evaluated = self.evaluated or self._evaluation_made()
        able = [m.learner for m in self.roster.stepping(now)]
        if self.history.outcome:
            # Nobody stays for an evaluation that is nobody's: one of those that come back just
            # now, or one that a leader of after the end has yet to hear of, and that may be over
            # it.
            able += [*self.roster.coming(now), *self.roster.expected(now)]
        if not self.evaluated and self.evaluator not in able:
            self.evaluator = able[0] if able else ""
        early = len(self.alive) < self.spec.membership.learners_min
        h = self.history
        if h.initialised or h.paused or h.stopping or early or self.rounds.suspended:
            self.initializer = ""
            return
        if self.initializer in self.alive and not self._slow(now):
            return
        # In turn: any of them may be the only one that can. But first whoever sent them under an
        # earlier leader: it need not send them again.
        later = [x for x in self.alive if x > self.initializer] or list(self.alive)
        sent = [x for x in self.senders if x in self.alive and x not in self.appointed]
        self.initializer = (sent or later)[0]
        self.appointed_at = self.initializer_moved_at = now
        self.here_before, self.came, self.moved = self.here, 0, 0
        self.life, self.came_before = None, 0
        self.appointed.add(self.initializer)

    def _evaluation_made(self) -> bool:
        """Whether the evaluator left with the last versions: it evaluates before it finishes, and
        does not say that it has finished where it must leave sooner."""
        member = self.roster.members.get(self.evaluator)
        if not self.history.outcome or member is None or member.progress is None:
            return False
        p = member.progress
        h = self.history
        return p.state == "finished" and all(p.adopted[q] == h.versions[q] for q in h.owned)

    def state(self, now: float) -> tuple[RunState, str]:
        """The run's state and why; with it what is full and stops nothing."""
        (state, reason), room = self._state(now), self.rounds.room
        if state in ("running", "finishing") and (stuck := self.watchdog.stuck(now)):
            state, reason = "stuck", stuck
        beside = [room.snapshot_failed, room.slow]
        if state in ("paused", "full"):
            # A run goes back all the same, and its user waits to hear that it does.
            beside.append(self.rounds.suspended)
        if state in ("waiting", "bootstrapping"):
            # Whoever sends the initial parameters goes by the state.
            beside.append(room.reason)
        return state, "; ".join(why for why in (reason, *beside) if why)[:500]

    def look(self, now: float) -> list[Effect]:
        """Watch for a standstill, once a heartbeat."""
        if now < self.looked_at + self.spec.membership.heartbeat_s:
            return []
        self.looked_at = now
        if self._state(now)[0] not in ("running", "finishing") or self.rounds.room.slow:
            self.watchdog.idle(now)
        self.watchdog.look(now)
        return self.watchdog.tell(self.watchdog.stuck(now))

    def _state(self, now: float) -> tuple[RunState, str]:
        h = self.history
        if h.outcome:
            return ("finished", SPENT) if h.outcome == "finished" else ("stopped", ASKED)
        if h.paused:
            return "paused", ASKED
        if not h.initialised and self.rounds.suspended:
            return "waiting", self.rounds.suspended
        if not h.initialised:
            joined, least = len(self.alive), self.spec.membership.learners_min
            if joined < least:
                return "waiting", f"{joined} of {least} learners have joined"
            return "bootstrapping", f"waiting for the initial parameters of {self.initializer}"
        if self.rounds.room.reason:
            return "full", self.rounds.room.reason
        if self.rounds.suspended:
            return "starved", f"starved: {self.rounds.suspended}"
        if lack := self._lack(now):
            return lack
        if self.rounds.finishing:
            return "finishing", "last round of every fragment"
        return "running", self.rounds.last_quorum_reason or "waiting for the first round"

    def _lack(self, now: float) -> tuple[RunState, str] | None:
        """Fewer than K train: who is about to, or what could be done."""
        enough = self.history.enough
        stepping = [m.learner for m in self.roster.stepping(now)]
        answer = enough.answer(stepping)
        if answer.enough:
            return None
        starting = [m for m in self.roster.live(now) if m.starting]
        if enough.answer([*stepping, *(m.learner for m in starting)]).enough:
            named = ", ".join(m.learner for m in starting[:4])
            more = f" and {len(starting) - 4} more" if len(starting) > 4 else ""
            return "waiting", f"for the first step of {named}{more}: they recover or compile"
        if not self.roster.members and now - self.roster.since <= self.roster.lease_s:
            return "waiting", f"a new leader has not heard of its learners yet, {answer.needs}"
        way_out = f"{answer.short} more learner{'s are' if answer.short > 1 else ' is'} needed"
        if k := within_reach(stepping):
            way_out += f", or 'diloco quorum {self.spec.name} {k}'"
        return "starved", f"starved ({len(stepping)} train, {answer.needs}): {way_out}"

    def beat(self, now: float) -> list[Effect]:
        """The beat, where one is due: each heartbeat, and at once when what it says has changed."""
        state, reason = self.state(now)
        key = (state, self.history.seq, self.initializer, self.evaluator, self.evaluated)
        if now < self.beat_at and self.beat_state == key:
            return []
        self.beat_at, self.beat_state = now + self.spec.membership.heartbeat_s, key
        h = self.history
        if not h.outcome:
            self.roster.tidy(now)
        return [
            SendBeat(
                Beat(
                    run=self.spec.name,
                    epoch=h.epoch,
                    term=h.term,
                    state=state,
                    reason=reason[:500],
                    versions=tuple(h.versions),
                    stamp=h.stamp,
                    live=self.roster.holders(now),
                    initializer=self.initializer if state == "bootstrapping" else "",
                    evaluator=self.evaluator,
                    evaluated=self.evaluated,
                    incarnations=self.roster.incarnations(now),
                    checkpoint=h.checkpoint,
                    restored=h.restored,
                    shard=h.shard,
                )
            )
        ]
