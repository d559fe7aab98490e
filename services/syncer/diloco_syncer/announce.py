"""What the leader tells everybody: the run's state and why, heads, and who has which duty."""

from diloco_shared.config import RunSpec
from diloco_shared.protocol.messages import Beat, RunState
from diloco_syncer.events import Effect, SendBeat, Tell
from diloco_syncer.history import History
from diloco_syncer.roster import Roster
from diloco_syncer.rounds import Rounds

# An initializer that has not delivered after this many seconds is passed over for another.
INITIALIZER_S = 60.0


class Announcer:
    """Beats once a heartbeat and at every change."""

    def __init__(self, spec: RunSpec, history: History, roster: Roster, rounds: Rounds) -> None:
        self.spec = spec
        self.history = history
        self.roster = roster
        self.rounds = rounds
        self.alive: tuple[str, ...] = ()
        self.initializer = ""
        self.initializer_since = 0.0
        self.evaluator = ""
        self.evaluated = False
        self.beat_at = 0.0
        self.beat_state: tuple[object, ...] | None = None

    def appoint(self, now: float) -> list[Effect]:
        """Who is live, who initialises and who evaluates: those two stay as long as they live."""
        alive, told = self.roster.names(now), list[Effect]()
        if alive != self.alive:
            told = self._changes(alive, now)
            self.alive, self.beat_at = alive, now
        self._appoint(now)
        return told

    def _changes(self, alive: tuple[str, ...], now: float) -> list[Effect]:
        told: list[Effect] = []
        for learner in sorted(set(self.alive) - set(alive)):
            member = self.roster.members.get(learner)
            silent = now - member.seen_at if member else 0.0
            self.roster.recoveries.silent(learner, now + self.roster.wall_offset)
            text = f"{learner} is silent for {silent:.1f} s: its weight is 0"
            told.append(Tell("learner-lost", text, {"learner": learner}))
        for learner in sorted(set(alive) - set(self.alive)):
            told.append(Tell("learner-alive", f"{learner} is alive", {"learner": learner}))
        return told

    def _appoint(self, now: float) -> None:
        self.evaluated = self.evaluated or self._evaluation_made()
        stepping = self.roster.stepping(now)
        if not self.evaluated and all(m.learner != self.evaluator for m in stepping):
            self.evaluator = stepping[0].learner if stepping else ""
        early = len(self.alive) < self.spec.membership.learners_min
        if self.history.initialised or early or self.rounds.suspended:
            self.initializer = ""
            return
        slow = now - self.initializer_since > INITIALIZER_S
        if self.initializer in self.alive and not slow:
            return
        # In turn: any of them may be the only one that can.
        later = [x for x in self.alive if x > self.initializer] or list(self.alive)
        self.initializer, self.initializer_since = later[0], now

    def _evaluation_made(self) -> bool:
        """Whether the evaluator left with the last versions: it evaluates before it leaves."""
        member = self.roster.members.get(self.evaluator)
        if not self.history.outcome or member is None or member.progress is None:
            return False
        p = member.progress
        h = self.history
        return p.state == "finished" and all(p.adopted[q] == h.versions[q] for q in h.owned)

    def state(self, now: float) -> tuple[RunState, str]:
        """The run's state and why."""
        h, needed = self.history, self.history.quorum
        if h.outcome:
            return ("finished" if h.outcome == "finished" else "stopped"), f"run {h.outcome}"
        if not h.initialised and self.rounds.suspended:
            return "waiting", self.rounds.suspended
        if not h.initialised:
            joined, least = len(self.alive), self.spec.membership.learners_min
            if joined < least:
                return "waiting", f"{joined} of {least} learners have joined"
            return "bootstrapping", f"waiting for the initial parameters of {self.initializer}"
        if h.paused:
            return "paused", "as the user asked"
        if self.rounds.suspended:
            return "starved", f"starved: {self.rounds.suspended}"
        stepping = len(self.roster.stepping(now))
        if stepping < needed:
            return "starved", f"starved ({stepping} of {needed})"
        if self.rounds.finishing:
            return "finishing", "last round of every fragment"
        return "running", self.rounds.last_quorum_reason or "waiting for the first round"

    def beat(self, now: float) -> list[Effect]:
        state, reason = self.state(now)
        key = (state, self.history.seq, self.initializer, self.evaluator, self.evaluated)
        if now < self.beat_at and self.beat_state == key:
            return []
        self.beat_at, self.beat_state = now + self.spec.membership.heartbeat_s, key
        h = self.history
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
                    live=self.alive,
                    initializer=self.initializer if state == "bootstrapping" else "",
                    evaluator=self.evaluator,
                    evaluated=self.evaluated,
                    incarnations=dict(self.roster.incarnations),
                    checkpoint=h.checkpoint,
                    restored=h.restored,
                    shard=h.shard,
                )
            )
        ]
