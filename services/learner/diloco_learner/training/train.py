"""The training loop, to be read beside Algorithm 1 of the paper (section 2).

Never waits for the network: what has arrived is taken in at a step boundary, what goes out is left
in the mailbox. The exchange decides, the trainer computes, the loop carries out. Everything that
could wait is clocked.

    for pause in loop.turns():    # of the thread, or the task, that trains
        ...                       # spend it
    loop.left                     # why it ended
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diloco_learner.events import (
    Adopt,
    AnchorReady,
    Checkpoint,
    Contribute,
    Evaluate,
    ExchangeEffect,
    GiveState,
    KeepPart,
    Leave,
    Merged,
    SendProgress,
    StateGone,
    Stepped,
    Tell,
    TimePassed,
    Unmerged,
)
from diloco_learner.exchange.exchange import Exchange
from diloco_learner.recovery.moments import Handed
from diloco_learner.training.evaluate import HeldOut, Losses
from diloco_learner.training.inner import Skips
from diloco_learner.training.speed import Speed
from diloco_learner.training.trainer import Trainer
from diloco_shared.numerics.schedule import inner_rate
from diloco_shared.protocol.messages import Cursor

Values = NDArray[np.float32]
# An evaluation to be carried out, in any thread. It asks now and then whether it is still wanted,
# and raises Unwanted if not.
Work = Callable[[Callable[[], bool]], Losses]

# Asleep between two looks at the mailbox while no step may be taken, in seconds.
REST_S = 0.2


@dataclass(frozen=True, slots=True)
class Anchored:
    """An anchor on its way into the loop, with its values, or their handle (`Trainer.hold`)."""

    ready: AnchorReady
    values_F: Values


@dataclass(frozen=True, slots=True)
class ToSend:
    """An effect for the asyncio side, with what belongs to it.

    `handle`: device arrays of a contribution; `Handed` of an inner state; for a final checkpoint
    the bytes of one, piece by piece, or what hosts have begun; the `Work` of an evaluation.
    """

    effect: ExchangeEffect
    handle: Any = None


@dataclass(frozen=True, slots=True)
class Rest:
    """No step may be taken: until something arrives, at most `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stepping:
    """A step is under way on the device: nothing to do, where devices compute by themselves."""


@dataclass(frozen=True, slots=True)
class Slowed:
    """Nothing is computed for so long after a step: by a fault, or to leave time to others."""

    seconds: float


Pause = Rest | Stepping | Slowed


class Post(Protocol):
    """What the loop needs of a mailbox."""

    def drain(self) -> list[Any]: ...
    def post(self, item: Any) -> bool: ...
    def progress(self, progress: Any) -> None: ...


class BatchSource(Protocol):
    """What the loop needs of the data."""

    @property
    def cursor(self) -> Cursor | None: ...
    def take(self) -> NDArray[Any]:
        """The tokens of the next step, of shape (sequences, L + 1)."""


class Keeper(Protocol):
    """Checkpoints of which every host of an island writes its part: see `hosts.keeping_io`."""

    def begin(self, epoch: int, step: int, *, final: bool = False) -> Any: ...
    def let_go(self, kept: Any) -> None: ...


class Clock(Protocol):
    """A context manager that adds up seconds."""

    seconds: float

    def __enter__(self) -> None: ...
    def __exit__(self, *exc: Any) -> None: ...


@dataclass(slots=True)
class Injected:
    """What changes the loop's behaviour from outside: faults, and a machine's other users."""

    slow_factor: float = 1.0
    duty_cycle: float = 1.0  # the share of its time in which this learner may compute
    poison: bool = False  # the next step's loss and gradients are not numbers
    seconds: float = 0.0  # slept in all: neither computation nor waiting

    @property
    def stretch(self) -> float:
        """How many times as long as its computation a step takes."""
        return self.slow_factor / self.duty_cycle


@dataclass(frozen=True, slots=True)
class Clocks:
    """What the loop reads time from. `waiting` adds up what it waits for the rest of its process,
    which is hardly anything."""

    now: Callable[[], float]  # seconds, monotonic
    waiting: Clock


@dataclass(frozen=True, slots=True)
class OwnKeeping:
    """How this learner's checkpoints are kept.

    `shared`: what begins checkpoints, where hosts write them; None: they are handed out.
    `disk_hangs`: whether an own checkpoint that was handed out is not written yet, although nobody
    waits for it any more.
    """

    shared: Keeper | None = None
    disk_hangs: Callable[[], bool] = lambda: False


class TrainLoop:
    """One learner's training, from recovered to the end of the run."""

    def __init__(
        self,
        trainer: Trainer,
        exchange: Exchange,
        batches: BatchSource,
        held_out: HeldOut,
        post: Post,
        clocks: Clocks,
        injected: Injected,
        keeping: OwnKeeping | None = None,
    ) -> None:
        """`keeping`: by default checkpoints are handed out, and no disk hangs."""
        keeping = keeping or OwnKeeping()
        self.shared, self.disk_hangs = keeping.shared, keeping.disk_hangs
        self.trainer = trainer
        self.exchange = exchange
        self.batches = batches
        self.held_out = held_out
        self.post = post
        self.now = clocks.now
        self.waiting = clocks.waiting
        self.injected = injected
        self.anchors: dict[tuple[int, int, int], Values] = {}  # ready, not yet adopted
        self.loss_handle: Any = None
        a = trainer.program.spec.algorithm
        self.skips = Skips(a.sync_every_steps, a.fragments)
        self.handed: Handed | None = None  # the inner state that is on its way out
        self.begun = False  # a checkpoint of which every host writes its part, before this step
        self.paused_s = 0.0  # in which no step was allowed
        self.speed = Speed()
        self.left: Leave | None = None
        # Why to leave, set by any thread: at the next step boundary, or once all work is merged.
        self.stopping = self.draining = ""
        self.spec = trainer.program.spec

    def turns(self) -> Iterator[Pause]:
        """Train until the exchange says to leave, or `stopping` is set: `left` says why.

        Whoever iterates spends the pauses, and goes on. Raises Diverged.
        """
        while self.left is None:
            self._take_in()
            if self.left is not None:
                break
            if self.draining:
                self.exchange.drain(self.draining, self.now())
            if self.stopping:
                self._withdraw()
            elif self.exchange.may_step:
                yield from self._step()
            else:
                yield from self._hold()

    def _hold(self) -> Iterator[Pause]:
        """Not stepping: paused, finishing, or without a complete set of anchors."""
        since = self.now()
        self.speed.interrupted()
        yield Rest(REST_S)
        self.paused_s += self.now() - since
        self._handle(TimePassed())

    def _withdraw(self) -> None:
        """Leave a run that goes on: keep the moments, and say so that nobody counts on us."""
        for effect in self.exchange.withdraw(self.stopping):
            self._perform(effect)

    def _take_in(self) -> None:
        with self.waiting:
            arrived = self.post.drain()
        self._look_at_copy()
        for item in arrived:
            if isinstance(item, Anchored):
                r = item.ready
                self.anchors[(r.epoch, r.fragment, r.version)] = item.values_F
                self._handle(r)
            else:
                self._handle(item)
        if arrived:
            self._handle(TimePassed())

    def _look_at_copy(self) -> None:
        """Whether the copy of the inner state that was on its way is gone."""
        # What hosts keep was copied before the step, so that nothing of it is on its way here.
        if self.handed.gone if self.handed is not None else self.begun:
            self.handed, self.begun = None, False
            self._handle(StateGone())

    def _step(self) -> Iterator[Pause]:
        """theta <- AdamW(theta, grad); counters; effects of the boundary that follows."""
        began = self.now()
        tokens_BxL1 = self.batches.take()
        data_wait_s = self.now() - began
        rate = inner_rate(self.spec.inner, self.spec.inner_rate, *self.exchange.position())
        poisoned, self.injected.poison = self.injected.poison, False
        handle: Any = self.trainer.step(tokens_BxL1, rate, poisoned=poisoned)
        yield Stepping()
        loss, skipped = self._previous_loss(handle)
        # Nothing was waited for before the first step: a device that has only taken it up tells
        # nothing of its speed.
        known = self.exchange.counters.step > 0 or handle.is_ready()
        if self.injected.stretch > 1:
            yield from self._slow_down(handle, began)
        ended = self.now()
        tokens = tokens_BxL1.shape[0] * (tokens_BxL1.shape[1] - 1)
        self.speed.stepped(ended - self.injected.seconds, tokens, data_wait_s)
        self._look_at_copy()  # one that went during the step is nothing to be shared
        self._handle(
            Stepped(
                tokens=tokens,
                loss=loss,
                step_s=ended - began if known else 0.0,
                wait_s=self.waiting.seconds,
                cursor=self.batches.cursor,
                skipped=skipped,
            )
        )

    def _previous_loss(self, handle: Any) -> tuple[float, bool]:
        """(loss of the step before, NaN if there is none; whether that step was skipped).

        Reading it back while the new step runs keeps the device busy; it also keeps the host from
        running ahead by more than one step. Raises Diverged.
        """
        previous, self.loss_handle = self.loss_handle, handle
        if previous is None:
            return math.nan, False
        loss = float(previous)
        skipped = self.skips.stepped(loss)
        step = self.exchange.counters.step
        if text := self.skips.tell(step, self.now()):
            self._send(ToSend(Tell("step-skipped", text, {"skipped": self.skips.total})))
        return loss, skipped

    def _slow_down(self, handle: Any, began: float) -> Iterator[Pause]:
        """Every step takes a multiple of its time."""
        handle.block_until_ready()
        rest_s = (self.now() - began) * (self.injected.stretch - 1)
        yield Slowed(rest_s)
        self.injected.seconds += rest_s

    # --- effects -------------------------------------------------------------------------------

    def _handle(self, event: Any) -> None:
        for effect in self.exchange.handle(event, self.now()):
            self._perform(effect)

    def _perform(self, effect: ExchangeEffect) -> None:
        match effect:
            case Adopt():
                self._adopt(effect)
            case Contribute():
                handle = self.trainer.contribution(effect.fragment, effect.round)
                self._send(ToSend(effect, handle))
            case Checkpoint() if self.shared is not None:
                kept = self.shared.begin(effect.epoch, effect.step, final=effect.final)
                self.begun = True
                if not self._send(ToSend(effect, kept)):
                    self.shared.let_go(kept)
            case Checkpoint() if effect.final:
                # No step follows: it is written from where it lies, whatever else is on its way.
                self._send(ToSend(effect, self.trainer.inner_state_pieces()))
            case Checkpoint() if self.disk_hangs():
                # It would be refused there, and a copy takes memory and time.
                self.begun = True
            case GiveState() | Checkpoint() | KeepPart():
                self._hand_out(effect)
            case Evaluate():
                if not self.spec.evaluation.beside_training:
                    self.speed.interrupted()
                self._send(ToSend(effect, self._evaluation(effect)))
            case SendProgress():
                with self.waiting:
                    self.post.progress(effect.progress)
            case Leave():
                self.left = effect
                self._send(ToSend(effect))
            case Merged():
                self.trainer.decided(effect.fragment, effect.round, merged=True)
                self._send(ToSend(effect))
            case Unmerged():
                self.trainer.decided(effect.fragment, effect.round, merged=False)
            case Tell():
                self._send(ToSend(effect))

    def _evaluation(self, effect: Evaluate) -> Work:
        """What is published now, to be evaluated while steps go on; or evaluated already, where
        there is no room for it beside a step. After a final one no step follows."""
        beside = self.spec.evaluation.beside_training
        published = self.trainer.published(alone=effect.final or not beside)
        work = partial(self.trainer.evaluate, published, self.held_out)
        return work if beside or effect.final else carried_out(work, self._goes_on)

    def _goes_on(self) -> bool:
        """Whether an evaluation between two steps does, asked before each of its batches.

        Each batch counts as a boundary to whoever watches over this thread: an evaluation of many
        takes as long as it takes, and only one batch that never ends is taken for a hang.
        """
        for effect in self.exchange.report(self.now()):
            self._perform(effect)
        return not self.stopping

    def _adopt(self, effect: Adopt) -> None:
        key = (effect.epoch, effect.fragment, effect.version)
        # Nothing is kept of what is void, nor of what no step could be taken on: parameters may be
        # finite, and yet too large for a loss that is.
        whole = effect.anew or self.skips.in_a_row > 0
        alpha = 0.0 if whole else self.spec.algorithm.alpha
        self.trainer.adopt(effect.fragment, self.anchors[key], alpha)
        self.skips.adopted.add(effect.fragment)
        for other in list(self.anchors):
            if other[1] == effect.fragment and other <= key:
                del self.anchors[other]

    def _hand_out(self, effect: ExchangeEffect) -> None:
        """The inner state: the copy that is on its way, or else one of now.

        The next step overwrites the original.
        """
        if self.handed is None or not self.handed.share():
            giving = isinstance(effect, GiveState)
            made = self.trainer.given_state() if giving else self.trainer.inner_state()
            self.handed = Handed(made)
        if not self._send(ToSend(effect, self.handed)):
            self.handed.let_go()

    def _send(self, item: ToSend) -> bool:
        with self.waiting:
            return self.post.post(item)


def carried_out(work: Work, goes_on: Callable[[], bool]) -> Work:
    """The same, with its result, or what it raised, already there: training must not end of it."""
    try:
        losses = work(goes_on)
    except Exception as error:
        failure = error.with_traceback(None)  # which would hold what it was made with

        def fails(wanted: Callable[[], bool]) -> Losses:
            raise failure

        return fails
    return lambda wanted: losses
