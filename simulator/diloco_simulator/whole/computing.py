"""What learners of a world compute: the tiny quadratic, behind the product's own train loop."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_learner import moments
from diloco_learner.data.shards import Cut
from diloco_learner.edges.batches import Batches
from diloco_learner.edges.computing import Built
from diloco_learner.edges.mailbox import Mailbox
from diloco_learner.events import Leave
from diloco_learner.train import Rest, Slowed, Stepping, TrainLoop
from diloco_shared.config import RunSpec
from diloco_shared.numerics.fragments import Layout
from diloco_simulator.tiny import TinyTrainer, Values

# Sequences of a data shard. Of fewer the library takes longer to draw the order of each.
SEQUENCES = 512
# Between two looks at the mailbox of a learner that may not step, in virtual seconds.
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Program:
    """What is asked of a trainer's program."""

    spec: RunSpec
    layout: Layout


@dataclass(frozen=True, slots=True)
class Loss:
    """Of a step: at once, since nothing is computed on a device."""

    value: float

    def __float__(self) -> float:
        return self.value

    def block_until_ready(self) -> None:
        """It is."""


@dataclass(frozen=True, slots=True)
class Sent:
    """An encoded contribution."""

    payload: bytes

    def fetch(self) -> bytes:
        return self.payload


class Trainer:
    """Answers like `diloco_learner.trainer.Trainer`."""

    def __init__(self, spec: RunSpec, tiny: TinyTrainer) -> None:
        self.program = Program(spec, tiny.layout)
        self.tiny = tiny
        self.inner_state_bytes = len(tiny.inner_state())

    def warm_up(self, batch: int) -> None:
        """Nothing is compiled."""

    def fragment(self, p: int) -> Values:
        return self.tiny.theta[p].copy()

    def step(self, tokens_BxL1: NDArray[Any], rate: float, *, poisoned: bool = False) -> Loss:
        loss = self.tiny.step(rate)[1]
        return Loss(math.nan if poisoned else loss)

    def adopt(self, p: int, anchor_F: Values, alpha: float) -> None:
        self.tiny.adopt(p, anchor_F)

    def contribution(self, p: int, round_: int) -> Sent:
        return Sent(self.tiny.contribution(p, round_))

    def decided(self, p: int, round_: int, *, merged: bool) -> None:
        self.tiny.decided(p, round_, merged=merged)

    def evaluate(self, sequences_SxL1: NDArray[np.int32]) -> float:
        return float(sum(np.abs(anchor_F).sum() for anchor_F in self.tiny.anchors))

    def inner_state(self) -> memoryview:
        return memoryview(self.tiny.inner_state())

    def inner_state_pieces(self) -> list[bytes]:
        return [self.tiny.inner_state()]

    def check_inner_state(self, data: moments.State) -> None:
        """ValueError for what cannot be read."""
        if "moments" not in moments.views(data):
            raise ValueError("no moments")

    def load_inner_state(self, data: moments.State) -> None:
        self.tiny.moments = int(moments.views(data)["moments"][0])


class TinyComputing:
    """Of one learner; its steps take virtual time. See `diloco_learner.edges.computing`."""

    def __init__(
        self,
        learner: int,
        rng: Random,
        step_s: float,
        report: Callable[[str, str], None],
        trains: Callable[[TrainLoop], None] = lambda loop: None,
    ) -> None:
        """`trains` is shown every loop before its first turn."""
        self.learner = learner
        self.rng = rng
        self.step_s = step_s
        self.report = report
        self.trains = trains
        self.turned: list[asyncio.Event] = []  # whoever waits for the next turn

    async def handed(self, seconds: float) -> None:
        """Only a turn of the loop hands something out."""
        event = asyncio.Event()
        self.turned.append(event)
        await event.wait()

    def _turn(self) -> None:
        turned, self.turned = self.turned, []
        for event in turned:
            event.set()

    def build(self, spec: RunSpec) -> Built:
        a = spec.algorithm
        tiny = TinyTrainer(
            a.fragments, self.learner, spec.seed, spec.tokens_per_step, a.codec_up, self.report
        )
        context = spec.model.context_tokens
        corpus = np.zeros(spec.data.virtual_shards * SEQUENCES * context + 1, np.uint8)
        cut = Cut(corpus, spec.data.virtual_shards, context, spec.seed)
        batches = Batches(cut, spec.inner.batch_sequences * spec.inner.accumulation)
        return Built(Trainer(spec, tiny), batches, np.zeros((1, context + 1), np.int32))

    async def train(self, loop: TrainLoop, mailbox: Mailbox) -> Leave:
        """As the train thread does, in virtual time."""
        self.trains(loop)
        for pause in loop.turns():
            self._turn()
            match pause:
                case Rest():
                    await _rest(mailbox, pause.seconds)
                case Slowed():
                    await asyncio.sleep(pause.seconds)
                case Stepping():
                    await asyncio.sleep(self.step_s * self.rng.uniform(0.9, 1.1))
        self._turn()
        assert loop.left is not None
        return loop.left


async def _rest(mailbox: Mailbox, seconds: float) -> None:
    """Until something arrives, or a little later."""
    for _ in range(math.ceil(seconds / LOOK_S)):
        if mailbox.waiting:
            return
        await asyncio.sleep(LOOK_S)
