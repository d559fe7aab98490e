"""What learners of a world compute: the tiny quadratic, behind the product's own train loop."""

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from diloco_learner.data.batches_io import Batches
from diloco_learner.data.shards import ShardCut
from diloco_learner.events import Leave
from diloco_learner.recovery import moments
from diloco_learner.training.computing_io import Built, Check, go_on
from diloco_learner.training.evaluate import HeldOut, Losses, always
from diloco_learner.training.mailbox_io import Mailbox
from diloco_learner.training.train import Pause, Rest, Slowed, Stepping, TrainLoop
from diloco_learner.training.trainer import Published
from diloco_shared.numerics import codec
from diloco_shared.protocol.chunks import Headed
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_simulator.worlds.tiny import TinyTrainer, Values, tensors_of

T = TypeVar("T")

# Sequences of a data shard.
SEQUENCES = 512
# Of few of them, so that a run reads them again and again: two steps. And how often a run has few.
SEQUENCES_FEW, FEW, SCARCE = 16, (1, 2, 3), 0.25
# Of some of them, which a run reads one after another, and each several times: five steps. Every
# third one has a sequence more than the others.
SEQUENCES_SOME, SOME = 40, (12, 17, 24)
# Between two looks at the mailbox of a learner that may not step, in virtual seconds.
LOOK_S = 0.1
# Of every step's time in a world: without it, learners could stay in step for ever.
JITTER = 0.1
# An evaluation takes as long as so many steps. None, so that worlds that were kept for what they
# meet stay as they are; tests/sim/whole/test_hardships.py has some where it takes long.
BESIDE_STEPS = 0.0


@dataclass(frozen=True, slots=True)
class VirtualProgram:
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

    def is_ready(self) -> bool:
        """It always is."""
        return True


@dataclass(frozen=True, slots=True)
class Sent:
    """An encoded contribution."""

    payload: bytes

    def fetch(self) -> bytes:
        """Its bytes, which are there already."""
        return self.payload


class VirtualTrainer:
    """Answers like `diloco_learner.training.trainer.Trainer`."""

    def __init__(self, spec: RunSpec, tiny: TinyTrainer) -> None:
        self.program = VirtualProgram(spec, tiny.layout)
        self.tiny = tiny
        self.inner_state_bytes = len(tiny.inner_state())

    def warm_up(self, batch: int) -> None:
        """Nothing is compiled."""

    def fragment(self, p: int) -> Values:
        return self.tiny.theta[p].copy()

    def initial_fragment(self, p: int) -> Headed:
        return Headed(*codec.frame(self.fragment(p)))

    def step(self, tokens_BxL1: NDArray[Any], rate: float, *, poisoned: bool = False) -> Loss:
        """One step of the tiny quadratic, which needs no tokens; NaN where it is `poisoned`."""
        loss = self.tiny.step(rate)
        return Loss(math.nan if poisoned else loss)

    def hold(self, p: int, anchor_F: Values) -> Values:
        return anchor_F

    def adopt(self, p: int, anchor_F: Values, alpha: float) -> None:
        self.tiny.adopt(p, anchor_F, alpha)

    def contribution(self, p: int, round_: int) -> Sent:
        return Sent(self.tiny.contribution(p, round_))

    def decided(self, p: int, round_: int, *, merged: bool) -> None:
        self.tiny.decided(p, round_, merged=merged)

    def published(self, *, alone: bool = False) -> Published:
        return Published(self.tiny.anchors)

    def evaluate(
        self, published: Published, held: HeldOut, wanted: Callable[[], bool] = always
    ) -> Losses:
        return Losses(float(sum(np.abs(anchor_F).sum() for anchor_F in published)))

    def inner_state(self) -> memoryview:
        return memoryview(self.tiny.inner_state())

    def given_state(self) -> memoryview:
        return self.inner_state()

    def inner_state_pieces(self) -> list[bytes]:
        return [self.tiny.inner_state()]

    def check_inner_state(self, data: moments.State) -> None:
        """ValueError for what cannot be read."""
        if "moments" not in moments.views(data):
            raise ValueError("no moments")

    def load_inner_state(self, data: moments.State) -> None:
        self.tiny.moments = int(moments.views(data)["moments"][0])


def tiny(spec: RunSpec) -> RunSpec:
    """The same run of the tiny model, whose size its streams are made for."""
    layout = Layout.build(tensors_of(spec.algorithm.fragments), spec.algorithm.fragments)
    own = {"factory": "tiny:quadratic", "parameters": sum(layout.sizes)}
    return spec.model_copy(update={"model": spec.model.model_copy(update=own)})


def scarce(spec: RunSpec, seed: int) -> RunSpec:
    """Perhaps with fewer data shards than learners, each read within seconds."""
    dice = Random(f"data {seed}")
    if dice.random() >= SCARCE:
        return spec
    return in_shards(spec, dice.choice(FEW))


def in_shards(spec: RunSpec, shards: int) -> RunSpec:
    """The same run with so many data shards."""
    data = spec.data.model_copy(update={"virtual_shards": shards})
    return spec.model_copy(update={"data": data})


def sequences_in(shards: int) -> int:
    """Sequences of a corpus that is cut into so many data shards."""
    if shards in FEW:
        return shards * SEQUENCES_FEW
    return shards * SEQUENCES_SOME + shards // 3 if shards in SOME else shards * SEQUENCES


def size_of(shards: int, shard: int) -> int:
    """Sequences of one of so many data shards."""
    each, more = divmod(sequences_in(shards), shards)
    return each + (shard < more)


# More than a shard has sequences.
_SPAN = 1 << 20


class InOrder(ShardCut):
    """Each sequence says which one it is, by its first tokens: data shard, pass, and place in it.

    Drawing an order would only take time."""

    def places(self, shard: int, passes: int, first: int, last: int) -> NDArray[np.int64]:
        return (passes * self.shards + shard) * _SPAN + np.arange(first, last)

    def at(self, places_S: NDArray[np.int64]) -> NDArray[np.int32]:
        found = np.zeros((len(places_S), self.context + 1), np.int32)
        readings_S, found[:, 2] = np.divmod(places_S, _SPAN)
        found[:, 1], found[:, 0] = np.divmod(readings_S, self.shards)
        return found


class Paced:
    """Of one learner; its steps take virtual time. See `diloco_learner.training.computing_io`."""

    def __init__(
        self,
        rng: Random,
        step_s: float,
        jitter: float,
        trains: Callable[[TrainLoop, float], None],
        beside_steps: float = 0.0,
    ) -> None:
        """`jitter`: of a step's time, uniform within this share of it, either way; `trains` is
        shown every loop before its first turn, and how long its steps take; what is computed
        beside them takes the time of `beside_steps`."""
        self.rng = rng
        self.step_s = step_s
        self.jitter = jitter
        self.trains = trains
        self.beside_s = beside_steps * step_s
        self.turned: list[asyncio.Event] = []  # whoever waits for the next turn

    async def handed(self, seconds: float) -> None:
        """Only a turn of the loop hands something out."""
        event = asyncio.Event()
        self.turned.append(event)
        await event.wait()

    def island(self) -> None:
        """No device computes: there is no speed to tell of."""

    def _turn(self) -> None:
        turned, self.turned = self.turned, []
        for event in turned:
            event.set()

    async def train(self, loop: TrainLoop, mailbox: Mailbox) -> Leave:
        """As the train thread does, in virtual time."""
        await self.shown(loop)
        turns = loop.turns()
        while (pause := await self.turn(turns)) is not None:
            self._turn()
            match pause:
                case Rest():
                    await _rest(mailbox, pause.seconds)
                case Slowed():
                    await asyncio.sleep(pause.seconds)
                case Stepping():
                    share = self.rng.uniform(1 - self.jitter, 1 + self.jitter)
                    await asyncio.sleep(self.step_s * share)
        self._turn()
        assert loop.left is not None
        return loop.left

    async def shown(self, loop: TrainLoop) -> None:
        """To who looks at it, before its first turn."""
        self.trains(loop, self.step_s)

    async def turn(self, turns: Iterator[Pause]) -> Pause | None:
        """The next one; None: it was the last."""
        return next(turns, None)

    async def beside(self, work: Callable[[], T]) -> T:
        """In virtual time, and all of it at its end."""
        await asyncio.sleep(self.beside_s)
        return work()

    async def freed(self) -> None:
        """Next to nothing is held: a look for circles would only take time."""

    @property
    def lost(self) -> str:
        return ""

    async def over(self, within_s: float | None = None) -> None:
        """Nothing is held."""


class TinyComputing(Paced):
    """The tiny quadratic."""

    def __init__(
        self,
        learner: int,
        rng: Random,
        step_s: float,
        report: Callable[[str, str], None],
        trains: Callable[[TrainLoop, float], None] = lambda loop, step_s: None,
    ) -> None:
        super().__init__(rng, step_s, JITTER, trains, BESIDE_STEPS)
        self.learner = learner
        self.report = report

    def build(self, spec: RunSpec, check: Check = go_on, *, begun: bool = False) -> Built:
        """A tiny trainer of the run's fragments, with a corpus in as many data shards."""
        a = spec.algorithm
        tiny = TinyTrainer(a.fragments, self.learner, spec.seed, a.codec_up, self.report)
        context = spec.model.context_tokens
        shards = spec.data.virtual_shards
        corpus = np.zeros(sequences_in(shards) * context + 1, np.uint8)
        cut = InOrder(corpus, shards, context, spec.seed)
        batches = Batches(cut, spec.inner.batch_sequences * spec.inner.accumulation)
        held_out = HeldOut(np.zeros((1, context + 1), np.int32))
        return Built(VirtualTrainer(spec, tiny), batches, held_out)


async def _rest(mailbox: Mailbox, seconds: float) -> None:
    """Until something arrives, or a little later."""
    for _ in range(math.ceil(seconds / LOOK_S)):
        if mailbox.waiting:
            return
        await asyncio.sleep(LOOK_S)
