"""A learner's dealings with the run while it trains: adopt, answer pulls, count, report, end.

    step ──► Stepped ──► adopt what is ready ──► answer pulls ──► give state, evaluate, checkpoint

Call `handle` only between inner steps: Stepped first, then all that arrived during the step, then
TimePassed, which acts on it at the same boundary. What arrives changes only what that will do: so
everything complete is adopted before a pull is answered, and no step is spent on waiting for the
next boundary. While the learner holds (paused, finishing, or without anchors of a new epoch) it
acts on each event at once. Pure: no clock, no arrays, nothing that waits (I8).
"""

import math
from collections import Counter

from diloco_learner.events import (
    Adopt,
    AnchorReady,
    BeatSeen,
    Begin,
    Checkpoint,
    Contribute,
    DonateSeen,
    Evaluated,
    ExchangeEffect,
    ExchangeEvent,
    Leave,
    PartSettled,
    PublicationMoved,
    PullSeen,
    SendProgress,
    StateGone,
    Stepped,
    Tell,
    TimePassed,
)
from diloco_learner.exchange.counters import Counters, Undecided
from diloco_learner.exchange.evaluating import Evaluating
from diloco_learner.exchange.leaders import is_final, outdated, slowest, unborn
from diloco_learner.exchange.pulls import AllPulls
from diloco_learner.recovery.donating import DonationRequests, Handing
from diloco_learner.recovery.draining import Draining
from diloco_shared.numerics.schedule import Position, position
from diloco_shared.protocol.messages import Beat, Cursor, LearnerState, Progress, Stamp
from diloco_shared.spec.run import RunSpec

# At most 50 reports a second: finer ones tell the syncer nothing that it could act on.
PROGRESS_S_MIN = 0.02
# A run is over and nothing more of its last publications comes for this many seconds: none will. As
# long as one comes it is waited for, however long that takes.
FINISH_S_MAX = 120.0
# Weight of the newest step in the moving average of step seconds: about ten steps.
STEP_S_SHARE = 0.1
# One step counts for at most so many times the average: a process that stood still for an hour
# does not take an hour for every step from then on.
STEP_TIMES_MAX = 10.0


class Exchange:
    """One incarnation from Begin to Leave. Mutated only through `handle`."""

    def __init__(
        self,
        spec: RunSpec,
        learner: str,
        incarnation: int,
        begin: Begin,
        now: float,
    ) -> None:
        """Starts with every fragment adopted at the versions of recovery's `begin`.

        Tell it recovery's newest beat first: a run that is paused must not be stepped until the
        next one.
        """
        fragments = spec.algorithm.fragments
        if len(begin.versions) != fragments:
            raise ValueError(f"{len(begin.versions)} versions for {fragments} fragments")
        self.spec = spec
        self.learner = learner
        self.incarnation = incarnation
        self.epoch = begin.epoch
        self.joined = begin.joined
        # The newest one that its moments are surely of. Anchors may tell of a newer one before the
        # beat that says whether a restore began it, and then moments are of before.
        self.moments_epoch = self.joined
        self.restore = begin.restore  # the newest one in the history of `epoch`; 0: none known
        self.donations = DonationRequests(learner, incarnation)
        self.handing = Handing(self.donations, spec.keeping.checkpoint_every_steps)
        self.marks = self.handing.marks
        self.counters = Counters(list(begin.versions))
        self.ready: dict[int, AnchorReady] = {}  # newest unadopted per fragment, of this epoch
        self.pulls = AllPulls(learner, begin.epoch, spec.algorithm)
        self.draining = Draining(spec.membership.lease_s)
        self.undecided = Undecided(learner, incarnation)
        self.beat: Beat | None = None
        self.ignored: Counter[str] = Counter()  # why input changed nothing (I11) -> count
        self.left, self.finish_by = False, math.inf
        self.place: Position
        self._place(begin.stamp)
        self.placed = True  # by every shard's word in this epoch
        self.evaluating = Evaluating(learner, spec.evaluation.every_steps)
        self.cursor: Cursor | None = None
        self.loss, self.step_s, self.wait_s = math.nan, 0.0, 0.0
        self.reported_at, self.reported_state = now - spec.membership.heartbeat_s, ""
        self.unreported = True

    # --- the door ------------------------------------------------------------------------------

    def handle(self, event: ExchangeEvent, now: float) -> list[ExchangeEffect]:
        """Apply one event; return what the caller must do, in this order."""
        if self.left:
            return []
        effects = self._take(event, now)
        acts = isinstance(event, Stepped | TimePassed)
        if not self.left and (acts or not self.may_step):
            effects += self._boundary(now, stepped=isinstance(event, Stepped))
        own, cap = self.counters.step - self.stamp_step, self.spec.algorithm.steps_per_round
        self.place = position(self.stamp, own, cap, self.place)
        if not self.left:
            effects += self.report(now)
        return effects

    @property
    def deadline(self) -> float:
        """When TimePassed is due at the latest: the next report, or the end of patience."""
        ends = self.finish_by, self.draining.deadline, self.evaluating.deadline
        return min(self._report_due, *ends)

    def drain(self, reason: str, now: float) -> None:
        """Leave as soon as nothing of this learner's work is unmerged; TimePassed must follow."""
        if not self.draining.reason:
            self.draining.begin(reason, now, self.spec.algorithm.sync_every_steps * self.step_s)

    def withdraw(self, reason: str) -> list[ExchangeEffect]:
        """Leave now, whatever the run does: with the moments kept, and with a last word."""
        told = self.evaluating.broken_off(reason)
        return [*told, *self._left(Leave("withdrawn", reason))]

    @property
    def may_step(self) -> bool:
        """Whether the trainer shall take another inner step."""
        return not self.left and not self._finishing and self._state == "stepping"

    def position(self) -> Position:
        """Place on the run's inner schedules: (steps of the run, fraction of the budget)."""
        return self.place

    def _take(self, event: ExchangeEvent, now: float) -> list[ExchangeEffect]:
        match event:
            case Stepped():
                self._stepped(event)
            case AnchorReady():
                return self._anchor(event)
            case BeatSeen():
                return self._beat(event.beat, now)
            case PullSeen():
                self._count(self.pulls.ask(event.pull, now))
            case DonateSeen():
                self._count(self.donations.ask(event.donate, now))
            case PartSettled():
                self.marks.settled = max(self.marks.settled, event.number)
                self.unreported = True
            case StateGone():
                self.handing.gone()
            case Evaluated():
                self.evaluating.made(event.effect)
            case PublicationMoved():
                self._stay(now)
            case TimePassed():
                pass
        return []

    def _count(self, why: str) -> None:
        if why:
            self.ignored[why] += 1

    # --- what arrives --------------------------------------------------------------------------

    def _stepped(self, e: Stepped) -> None:
        self.counters.stepped(e.tokens, skipped=e.skipped)
        # The first step compiles, or was only handed to the device: its time says nothing about
        # the next ones.
        if self.counters.step <= 2:
            self.step_s = e.step_s
        else:
            step_s = min(e.step_s, STEP_TIMES_MAX * self.step_s)
            self.step_s += STEP_S_SHARE * (step_s - self.step_s)
        self.loss, self.wait_s, self.cursor = e.loss, e.wait_s, e.cursor
        self.unreported = True

    def _anchor(self, anchor: AnchorReady) -> list[ExchangeEffect]:
        p = anchor.fragment
        if anchor.epoch < self.epoch:
            self._count("anchor of an older epoch")
            return []
        self.marks.meet(anchor.checkpoint)
        effects: list[ExchangeEffect] = []
        if anchor.epoch > self.epoch:
            effects += self._enter(anchor.epoch, anchor.stamp)
        # A shard closes its rounds in order, of whatever fragments. Who answered one of these would
        # send a whole fragment for nothing, and look slower to the syncer than it is.
        self.pulls.close(p, anchor.stamp.round)
        effects += self.undecided.decide(anchor)
        newest = self.ready[p].version if p in self.ready else self.counters.adopted_P[p]
        if anchor.version > newest:
            self.ready[p] = anchor
        else:
            self._count("anchor known before")
        return effects

    def _beat(self, beat: Beat, now: float) -> list[ExchangeEffect]:
        newest = beat.incarnations.get(self.learner, -1)
        if newest > self.incarnation:
            self.left = True
            return [Leave("superseded", f"incarnation {newest} of {self.learner} has joined")]
        terms, fragments = beat.terms or (beat.term,), self.spec.algorithm.fragments
        deposed = self.pulls.deposed(beat.epoch, terms)
        if why := outdated(beat, self.beat, fragments=fragments, deposed=deposed):
            self._count(why)
            return []
        if beat.restored is not None and beat.restored.epoch > self.joined:
            # Moments and data must go back too: as a new incarnation, which begins with them.
            self.left = True
            return [Leave("restored", f"the run goes back to {beat.restored.source}"[:500])]
        self.marks.meet(beat.checkpoint)
        effects: list[ExchangeEffect] = []
        if beat.epoch > self.epoch:
            effects += self._enter(beat.epoch, beat.stamp)
        if self._unborn(beat):
            # Only who begins sends initial parameters: as a new incarnation.
            self.left = True
            return [*effects, Leave("restored", "the hub was put back from before the run began")]
        self.pulls.lead(beat.epoch, terms)
        if all(terms):  # every shard has spoken in this epoch
            self.restore = beat.restored.serial if beat.restored else 0
            self.moments_epoch = beat.epoch
            if not self.placed:
                self._place(beat.stamp)
                self.placed = True
        was_finishing = self._finishing
        self.beat = beat
        self._progressed(beat.stamp)
        if not self._finishing:
            self.finish_by = math.inf
        elif not was_finishing:
            self._stay(now)
        return effects

    def _unborn(self, beat: Beat) -> bool:
        """Whether a syncer shard has not begun, in an epoch of which nothing of it was adopted, and
        this learner is asked for parameters to begin with."""

        def known(p: int) -> bool:
            return p in self.ready or self.counters.adopted_P[p] >= 0

        asked = beat.state == "bootstrapping" and beat.initializer == self.learner
        return asked and unborn(beat, self.spec.algorithm, known)

    def _enter(self, epoch: int, stamp: Stamp) -> list[ExchangeEffect]:
        """History began again: what was adopted is void, and the schedule goes back with it.

        A hub that was put back may have lost the newest restore: its beats will tell.
        """
        reason = f"epoch {epoch} replaces {self.epoch}: waiting for its anchors"
        self.epoch, self.restore = epoch, 0
        self.counters.void()
        self.ready.clear()
        self.pulls.lead(epoch, (-1,) * self.spec.algorithm.shards)
        # Of one shard among several: the run may be behind it, until all have spoken.
        self.placed = self.spec.algorithm.shards == 1
        self._place(stamp if self.placed else slowest((stamp, self.stamp)))
        self.evaluating.begin_again()
        self.unreported = True
        return [Tell("epoch-entered", reason, {"learner": self.learner, "epoch": epoch})]

    def _place(self, stamp: Stamp) -> None:
        """The run is there, be it behind what was thought."""
        # The schedule: the newest stamp, and the own step when it came.
        self.stamp, self.stamp_step = stamp, self.counters.step
        self.place = position(stamp, 0, self.spec.algorithm.steps_per_round)
        self.anchor_stamp = stamp  # of the newest adopted anchor

    def _progressed(self, stamp: Stamp) -> None:
        # A hub that lost records has a round closed once more, when more of the budget is used. Of
        # several shards each says something else of so many steps.
        known, single = self.stamp, self.spec.algorithm.shards == 1
        again = single and stamp.steps == known.steps and stamp.fraction > known.fraction
        if stamp.steps > known.steps or again:
            self.stamp, self.stamp_step = stamp, self.counters.step

    # --- what a step boundary brings -----------------------------------------------------------

    def _boundary(self, now: float, *, stepped: bool) -> list[ExchangeEffect]:
        c = self.counters
        effects = [*self.handing.part(self.epoch, c), *self._adopt(now)]
        effects += self._contribute(now)
        if self.moments_epoch == self.epoch:
            effects += self.handing.give(self.epoch, c, now)
        if self._finishing:
            return effects + self._finish(now)
        if why := self.draining.over(self.beat, c, now):
            return effects + self._left(Leave("drained", why[:500]))
        if self.beat is not None and c.complete and self.placed:
            versions = tuple(c.adopted_P)
            effects += self.evaluating.due(self.beat.evaluator, self.anchor_stamp, versions)
        return effects + self.handing.keep(self.epoch, self.moments_epoch, c, stepped=stepped)

    def _adopt(self, now: float) -> list[ExchangeEffect]:
        if not self.ready:
            return []
        effects: list[ExchangeEffect] = []
        for p, anchor in sorted(self.ready.items()):
            assert anchor.epoch == self.epoch
            anew = self.counters.adopted_P[p] < 0
            self.counters.adopt(p, anchor.version)
            # Of one shard among several: the run may be behind it.
            single = self.spec.algorithm.shards == 1
            stamp = anchor.stamp if single else slowest((anchor.stamp, self.stamp))
            self._progressed(stamp)
            self.anchor_stamp = max(self.anchor_stamp, stamp, key=lambda s: s.steps)
            effects.append(Adopt(anchor.epoch, p, anchor.version, anew))
        self.ready.clear()
        self.unreported = True
        self._stay(now)
        return effects

    def _contribute(self, now: float) -> list[ExchangeEffect]:
        """Answer what is owed, each round once, and never without a step that counts (weight 0).

        Who skips all its steps has nothing to bring, and would only shorten the merge: as far as
        is known by then, which the newest step is not (`c_sound`). Beside one that counts, skipped
        ones weigh like it: a manifest of this wire version cannot tell them.
        """
        if not self.pulls.pending:
            return []
        effects: list[ExchangeEffect] = []
        c = self.counters
        for owed in self.pulls.owed(now):
            pull, p = owed.pull, owed.pull.fragment
            if c.c_sound(p) < 1:
                continue  # adopted just now: the next boundary may still be in time
            self.pulls.answer(pull)
            self.undecided.contributed(p, pull.round, pull.epoch, self.cursor)
            effects.append(
                Contribute(
                    epoch=pull.epoch,
                    term=pull.term,
                    round=pull.round,
                    fragment=p,
                    base=c.adopted_P[p],
                    step_from=c.step_at_P[p],
                    step_to=c.step,
                    tokens_from=c.tokens_at_P[p],
                    tokens_to=c.tokens,
                    cursor=self.cursor,
                    deadline=owed.deadline,
                    checkpoint=max(self.marks.met, 0),
                )
            )
        return effects

    # --- the end -------------------------------------------------------------------------------

    @property
    def _finishing(self) -> bool:
        return self.beat is not None and is_final(self.beat)

    def _stay(self, now: float) -> None:
        """Something of the run's end has come: the rest is waited for from now on."""
        if self._finishing:
            self.finish_by = now + FINISH_S_MAX

    def _finish(self, now: float) -> list[ExchangeEffect]:
        """Leave once everything published is adopted, and evaluated if that is this learner's
        duty, or once nothing more can be expected."""
        beat, c = self.beat, self.counters
        assert beat is not None
        complete = beat.epoch == self.epoch and c.covers(beat.versions)
        # Another evaluates: stand by until it has, should it die over it.
        stands_by = beat.evaluator not in ("", self.learner) and not beat.evaluated
        if (not complete or stands_by) and now < self.finish_by:
            return []
        effects: list[ExchangeEffect] = []
        adopted = tuple(c.adopted_P)
        if not complete:
            text = f"leaves with versions {adopted}; the run ended at {beat.versions}"
            effects.append(Tell("left-behind", text[:500], {"learner": self.learner}))
        elif beat.evaluator == self.learner and c.complete and not beat.evaluated:
            # Who says that it has finished is done with it: so it is told first.
            effects += self.evaluating.at_the_end(self.anchor_stamp, adopted, now)
            if not self.evaluating.over:
                return effects
        why = f"the run is {beat.state}: {beat.reason}"
        return effects + self._left(Leave(beat.state, why[:500]))

    @property
    def _owes_evaluation(self) -> bool:
        """Whether the last evaluation is this learner's, is not told, and may be due already.

        Of several syncer shards one may be over while another rests, and then the run rests.
        """
        beat = self.beat
        if beat is None or beat.evaluator != self.learner or beat.evaluated:
            return False
        if self.evaluating.over or min(beat.versions) < 0:  # it is told, or there is nothing
            return False
        single = self.spec.algorithm.shards == 1
        ends = is_final(beat) or beat.state == "finishing"
        return ends if single else beat.state != "running"

    def _left(self, leave: Leave) -> list[ExchangeEffect]:
        self.left = True
        c = self.counters
        checkpoint = Checkpoint(self.moments_epoch, c.step, tuple(c.adopted_P), final=True)
        return [checkpoint, SendProgress(self.progress()), leave]

    # --- reports -------------------------------------------------------------------------------

    @property
    def _state(self) -> LearnerState:
        # Stepping until it has really finished: an evaluator that waits must not be replaced.
        if self.left:
            # Of the evaluator, "finished" says that the last evaluation is told. Who leaves
            # without it says something else, so that another is named.
            return "draining" if self._owes_evaluation else "finished"
        if not self.counters.complete:
            return "recovering"
        if self.beat is not None and self.beat.state == "paused":
            return "paused"
        return "draining" if self.draining.reason else "stepping"

    @property
    def _report_due(self) -> float:
        heartbeat_s = self.spec.membership.heartbeat_s
        return self.reported_at + (PROGRESS_S_MIN if self.unreported else heartbeat_s)

    def report(self, now: float) -> list[ExchangeEffect]:
        """Where this learner stands, if it is time to say so. For whoever is between two steps for
        long, too: nothing else comes of it."""
        state = self._state
        if now < self._report_due and state == self.reported_state:
            return []
        self.reported_at, self.reported_state, self.unreported = now, state, False
        return [SendProgress(self.progress())]

    def progress(self) -> Progress:
        """Where this learner stands now."""
        c = self.counters
        fragments = range(self.spec.algorithm.fragments)
        # Unchecked: these are our own numbers, up to 50 times a second; the receiver checks.
        return Progress.model_construct(
            learner=self.learner,
            incarnation=self.incarnation,
            epoch=self.epoch,
            state=self._state,
            step=c.step,
            tokens=c.tokens,
            steps_skipped=c.skipped,
            # Of who has nothing to bring the syncer asks nothing, and waits for nothing.
            c_steps=tuple(c.c_steps(p) if c.c_sound(p) else 0 for p in fragments),
            c_tokens=tuple(c.c_tokens(p) for p in fragments),
            adopted=tuple(c.adopted_P),
            adopted_at=tuple(c.step_at_P),
            loss=self.loss,
            step_s=self.step_s,
            wait_s=self.wait_s,
            cursor=self.cursor,
            checkpoint=self.marks.settled,
            mark=max(self.marks.met, 0),
            restore=self.restore,
        )
