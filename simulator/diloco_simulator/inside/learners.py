"""Learners from within: what their exchanges decide and hold, shown to the checkers."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from diloco_learner.app import Learner
from diloco_learner.events import (
    Adopt,
    AnchorReady,
    BeatSeen,
    Checkpoint,
    Contribute,
    Evaluate,
    GiveState,
    KeepPart,
    Leave,
    Merged,
    SendProgress,
    Stepped,
    Tell,
    Unmerged,
)
from diloco_learner.exchange import uplink_io
from diloco_learner.exchange.anchors import AnchorBook
from diloco_learner.exchange.arrivals import heavy
from diloco_learner.recovery import moments
from diloco_learner.recovery import recoverer_io as recoverer
from diloco_learner.recovery.checkpoint_io import LocalCheckpoints
from diloco_learner.training.mailbox_io import Mailbox
from diloco_learner.training.train import Pause, Rest, TrainLoop
from diloco_learner.work_io import RUN_OVER, Work
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Restored, Stamp
from diloco_simulator.checkers.data import SEEN_S
from diloco_simulator.checkers.limits import LearnerHolds
from diloco_simulator.checkers.watch import End, RunWatch
from diloco_simulator.virtual_loop import Hosted, current

# Lives go on from the seconds since 2026 where a hub was put back: no other reaches this.
LATE_LIFE = 10**6
# Why a publication is refused that is bad in itself: chunks that were damaged on their way are
# fetched again before anybody takes them for one.
BAD = frozenset({"malformed", "digest"})


@dataclass(slots=True)
class SeenLife:
    """One process of a learner in its training. See `checkers.Life`."""

    process: Hosted
    loop: TrainLoop
    rounds: int
    step_s: float
    began_at: float
    left_at: float = inf
    drained: bool = False

    @property
    def silent_since(self) -> float:
        return min(self.process.silent_since, self.left_at)

    @property
    def able_at(self) -> float:
        """Since when it has gone on."""
        return max(self.began_at, self.process.thawed_at)

    @property
    def leaves(self) -> bool:
        """It was told to, or has done so."""
        self.drained = self.drained or bool(self.loop.draining or self.loop.stopping)
        return self.drained or self.loop.exchange.left

    @property
    def gives(self) -> bool:
        return self.silent_since == inf and not self.leaves and self.whole

    @property
    def alone(self) -> bool:
        """Whether it is no island of several hosts."""
        return getattr(getattr(self.process.app, "computing", None), "leading", None) is None

    @property
    def whole(self) -> bool:
        """Of an island of several hosts: whether none keeps it from its work."""
        leading = getattr(getattr(self.process.app, "computing", None), "leading", None)
        return leading is None or bool(leading.island.able)


class Trained:
    """One process's training, from its first turn to its last, shown to the watch of its run."""

    def __init__(self, watch: RunWatch, learner: str, loop: TrainLoop, step_s: float) -> None:
        process = current()
        assert process is not None and isinstance(process.app, Learner)
        work = process.app.work
        assert work is not None
        self.work: Work = work
        self.watch = watch
        self.learner = learner
        self.loop = loop
        self.exchange = exchange = loop.exchange
        self.book: AnchorBook = work.book
        self.mailbox: Mailbox = work.mailbox
        self.found_bad = False
        self.steps = 0  # of this life, at its end
        self.last_moments: bytes | None = None  # then, where one host holds them
        # Of the publications that were delivered and not adopted yet.
        self.stamps: dict[tuple[int, int, int], Stamp] = {}
        self.skipped: list[bool] = []  # of every step of this life, whether it does nothing
        # Of the newest adopted anchors.
        self.based_P = [exchange.epoch] * len(exchange.counters.adopted_P)
        self.copy: tuple[int, bytes] | None = None  # the newest of its moments: after which step
        self.life = f"{learner}/{exchange.incarnation}"
        options, algorithm = watch.scene.options, watch.spec.algorithm
        rounds = ceil(algorithm.sync_every_steps * max(step_s / options.step_s, 1.0))
        rounds += algorithm.rounds_in_flight_max
        self.state = SeenLife(process, loop, rounds, step_s, watch.scene.now)
        self._begins()
        self._look(exchange.handle, loop.turns)

    def _begins(self) -> None:
        """It has adopted every fragment, and has its moments."""
        watch, exchange, trainer = self.watch, self.exchange, self.loop.trainer
        if watch.taken_back.get(self.learner):
            del watch.taken_back[self.learner]  # this life was never to leave
        watch.parts.began(self.life, exchange.joined)
        for p, version in enumerate(exchange.counters.adopted_P):
            key = exchange.epoch, p, version
            watch.anchors.adopted(self.life, *key, digest_array(np.asarray(trainer.fragment(p))))
            watch.claims.adopted(self.life, *key)
        watch.pace.begins(self.life)
        watch.rates.begins(self.life, exchange.epoch, exchange.stamp)
        for of in watch.of:
            of.members.trains(self.learner, exchange.incarnation, self.state)

    def _look(self, handle: Any, turns: Any) -> None:
        def handled(event: Any, now: float) -> list[Any]:
            self._meets(event)
            before = self.exchange.epoch
            effects: list[Any] = handle(event, now)
            self._placed(event, before)
            for effect in effects:
                self._decides(effect)
            return effects

        def turned() -> Iterator[Pause]:
            for pause in turns():
                self._pauses(pause)
                yield pause
            self._ends()

        exchange: Any = self.exchange
        loop: Any = self.loop
        step, adopt = loop.trainer.step, loop.trainer.adopt

        def stepped(tokens_BxL1: NDArray[Any], rate: float, *, poisoned: bool = False) -> Any:
            self._reads(tokens_BxL1)
            self.watch.rates.steps(self.life, rate)
            self.skipped.append(poisoned)
            if poisoned:
                self.watch.reached("learners:", "a step skipped")
            return step(tokens_BxL1, rate, poisoned=poisoned)

        def adopted(p: int, anchor_F: Any, alpha: float) -> None:
            self._keeps(p, alpha)
            adopt(p, anchor_F, alpha)

        exchange.handle, loop.turns, loop.trainer.step = handled, turned, stepped
        loop.trainer.adopt = adopted

    def _keeps(self, p: int, alpha: float) -> None:
        """A share of its own parameters: none of those that are void since an epoch began."""
        epoch = self.exchange.epoch
        if self.based_P[p] < epoch:
            self.watch.reached("learners:", "adopts anew")
            if alpha:
                text = f"{self.life} carries {alpha} of fragment {p} into epoch {epoch}"
                self.watch.broken("I9", text)
        self.based_P[p] = epoch

    def _reads(self, tokens_BxL1: NDArray[Any]) -> None:
        """Every sequence says which one it is."""
        now, state = self.watch.scene.now, self.state
        read = [(shard, passes, n) for shard, passes, n in tokens_BxL1[:, :3].tolist()]
        able = not state.leaves and now - state.able_at > SEEN_S
        self.watch.data.reads(self.life, read, now, able=able)

    # --- between two steps ---------------------------------------------------------------------

    def _meets(self, event: Any) -> None:
        match event:
            case Stepped():
                self.watch.claims.stepped(self.life, event.tokens)
                self.watch.rates.stepped(self.life)
            case BeatSeen():
                self.watch.pace.told(self.life, event.beat)
            case AnchorReady():
                self.watch.pace.published(self.life, event.epoch)

    def _placed(self, event: Any, before: int) -> None:
        """How far the run is, by what was delivered; `before`: the epoch that it knew by then."""
        match event:
            case BeatSeen():
                epoch, stamp = event.beat.epoch, event.beat.stamp
            case AnchorReady():
                epoch, stamp = event.epoch, event.stamp
                self.stamps[epoch, event.fragment, event.version] = stamp
            case _:
                return
        if self.exchange.epoch > before:
            self.watch.rates.enters(self.life, epoch, stamp)
        else:
            self.watch.rates.told(self.life, epoch, stamp)

    def _decides(self, effect: Any) -> None:
        watch = self.watch
        match effect:
            case Adopt() as e:
                key = (e.epoch, e.fragment, e.version)
                watch.anchors.adopted(self.life, *key, digest_array(self.loop.anchors[key]))
                watch.claims.adopted(self.life, *key)
                watch.rates.adopted(self.life, e.epoch, self.stamps.pop(key))
            case KeepPart() as e:
                place = self.learner, e.number, e.epoch, e.versions
                watch.parts.kept(self.life, *place, self._copied(e.step))
            case Contribute() as e:
                whose = watch.spec.name, self.learner
                subject = subjects.contribution(*whose, e.epoch, e.fragment, e.round, e.term)
                self._answers(e)
                watch.claims.contributed(self.life, e)
                watch.data.contributed(self.life, e)
                watch.parts.contributed(self.life, subject)
            case Merged() | Unmerged():
                watch.reached("learners:", type(effect).__name__)
                watch.claims.decided(self.learner, self.exchange.incarnation, effect)
            case Evaluate():
                watch.reached("learners: Evaluate")
            case Tell():
                if effect.kind == "epoch-entered":
                    watch.claims.voided(self.life)
            case GiveState() | Checkpoint():
                self._copied(effect.step)
            case SendProgress() | Leave():
                pass
            case _:
                watch.broken("I8", f"{self.life} is to wait for {type(effect).__name__}")

    def _answers(self, e: Contribute) -> None:
        """With a step that did something, as far as is known: of the newest it is not yet."""
        known = self.skipped[e.step_from : e.step_to - 1]
        if known and all(known):
            text = f"{self.life} answers round {e.round} with steps that were all skipped"
            self.watch.broken("I9", text)

    def _copied(self, step: int) -> bytes:
        """Moments as they were copied after this step: a part may share a copy made before."""
        if self.copy is None or self.copy[0] != step:
            self.copy = step, bytes(self.loop.trainer.inner_state())
        return self.copy[1]

    def _pauses(self, pause: Pause) -> None:
        """A step is under way; or none may be taken, and something must have told it so."""
        self.watch.report.looked("I8")
        if isinstance(pause, Rest):
            why = self.watch.pace.rests(self.life, self.state.leaves)
            if why in ("paused", "epoch"):
                self.watch.reached("learners rest:", why)
        self.watch.limits.holds(self.life, self._holds())
        if not self.found_bad and self.book.refused.keys() & BAD:
            self.found_bad = True
            why = self.book.last_refusal
            self.watch.broken("I4", f"{self.life} finds a publication bad: {why}")

    def _ends(self) -> None:
        assert self.loop.left is not None
        watch, exchange = self.watch, self.exchange
        self.state.left_at = watch.scene.now
        self.steps = exchange.counters.step
        if self.state.alone:
            self.last_moments = bytes(self.loop.trainer.inner_state())
        self.state.drained = self.state.drained or bool(self.loop.draining or self.loop.stopping)
        left, of = self.loop.left, exchange.evaluating
        over = left.outcome == "withdrawn" and left.reason == RUN_OVER
        watch.ends[self.learner] = End(
            left.outcome,
            tuple(exchange.counters.adopted_P),
            watch.scene.now,
            dismissed=over and self.learner not in watch.taken_back,
            evaluates=of.last is not None and not of.over,
        )

    def _holds(self) -> LearnerHolds:
        exchange, book = self.exchange, self.book
        pulls, sent = exchange.pulls, exchange.undecided.sent
        return LearnerHolds(
            to_answer=len(pulls.pending),
            answered=len(pulls.answered),
            undecided=max(map(len, sent.values()), default=0),
            newcomers=len(exchange.donations.requests),
            to_adopt=len(exchange.ready),
            waiting=max(len(shelf.waiting) for shelf in book.shelves),
            early=len(book.early),
            kept=max(len(shelf.anchors) for shelf in book.shelves),
            values=len(self.loop.anchors) + sum(map(heavy, self.mailbox.waiting)),
            files=self._files(),
        )

    def _files(self) -> int:
        """In the folder of its checkpoints, which is gone where the run is deleted."""
        kept = self.work.checkpoints
        if not isinstance(kept, LocalCheckpoints):
            return 0  # an island of several hosts keeps them elsewhere
        return len(os.listdir(kept.folder)) if kept.folder.is_dir() else 0


@contextmanager
def going_back(watch_of: Callable[[str], RunWatch | None]) -> Iterator[None]:
    """Until the end of the block whoever takes moments of a checkpoint is looked at (I6)."""
    module: Any = recoverer  # by whatever names it has
    read = module.read_part
    asked = Counter[str]()  # how often each learner looked for the part of a run-wide checkpoint

    def looked_at(
        root: str, source: str, learner: str, check: Any, further: Sequence[str] = ()
    ) -> Any:
        asked[learner] += 1
        found, faults = read(root, source, learner, check, further)
        process = current()
        work = None if process is None else process.app.work
        if found is not None and work is not None and (watch := watch_of(work.spec.name)):
            there, ref = RunCheckpoints.at(source, root, further)
            own = learner in there.manifest(ref)[0].learners and not faults
            watch.reached("moments of", "its own part" if own else "somebody else's part")
            state = moments.views(moments.pack(found))["moments"]
            taken = save({"moments": np.array([int(state[0])])})
            watch.parts.went_back(
                f"{learner}/{work.context.incarnation}", learner, source, own, taken
            )
        return found, faults

    module.read_part = looked_at
    try:
        with _of_the_history_that_was_left(watch_of, asked):
            yield
    finally:
        module.read_part = read


@contextmanager
def _of_the_history_that_was_left(
    watch_of: Callable[[str], RunWatch | None], asked: Mapping[str, int]
) -> Iterator[None]:
    """Until the end of the block nobody goes on unnoticed with own moments of before a restore."""
    numbers: Any = uplink_io
    number, decide = numbers.sequence_of, recoverer.Recoverer._go_back
    epochs: dict[int, int] = {}  # in which a learner's own checkpoint was made, by its number

    def numbered(epoch: int, incarnation: int, step: int) -> int:
        made: int = number(epoch, incarnation, step)
        epochs[made] = epoch
        return made

    async def decided(self: recoverer.Recoverer, restored: Restored | None) -> bool:
        learner, newest, before = self.recovery.learner, self.checkpoints.newest, dict(asked)
        went = await decide(self, restored)
        process = current()
        work = None if process is None else process.app.work
        if restored is None or work is None or (watch := watch_of(work.spec.name)) is None:
            return went
        if newest in epochs and epochs[newest] < restored.epoch:
            late = work.context.incarnation >= LATE_LIFE
            watch.reached("own moments", f"of before a restore{', in a late life' * late}")
            if before.get(learner) == asked.get(learner):
                life = f"{learner}/{work.context.incarnation}"
                watch.parts.report("I6", f"{life} goes on with moments of before {restored.source}")
        return went

    numbers.sequence_of = numbered
    recoverer.Recoverer._go_back = decided  # type: ignore[method-assign]
    try:
        yield
    finally:
        numbers.sequence_of, recoverer.Recoverer._go_back = number, decide  # type: ignore[method-assign]
