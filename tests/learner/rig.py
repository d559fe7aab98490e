"""A training loop with a real, tiny trainer: no network, and time passes where a test lets it."""

from collections.abc import Callable
from typing import Any

from diloco_learner.data.batches_io import Batches
from diloco_learner.data.corpus import load
from diloco_learner.data.shards import ShardCut
from diloco_learner.events import (
    AnchorReady,
    BeatSeen,
    Begin,
    Leave,
    PullSeen,
)
from diloco_learner.exchange.exchange import Exchange
from diloco_learner.training import computing_io as computing
from diloco_learner.training.computing_io import WaitClock
from diloco_learner.training.evaluate import HeldOut, held_out
from diloco_learner.training.mailbox_io import Mailbox
from diloco_learner.training.train import Anchored, Clocks, Injected, ToSend, TrainLoop
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.protocol.messages import Beat, Donate, Pull, Stamp

START = Stamp(round=-1, steps=0, fraction=0.0, fraction_per_step=0.001)


class Box(Mailbox):
    """A mailbox whose two sides are in one thread: `at[n]` arrives at the n-th look into it."""

    def __init__(self, clock: "Clock") -> None:
        super().__init__()
        self.clock = clock
        self.looks = 0
        self.at: dict[int, list[Any]] = {}
        self.blocks_s = 0.0
        self.rests = 0

    def drain(self) -> list[Any]:
        self.clock.now += self.blocks_s
        for item in self.at.get(self.looks, []):
            assert self.put(item)
        self.looks += 1
        return super().drain()

    def rest(self, seconds: float) -> None:
        self.clock.now += seconds
        self.rests += 1


class Clock:
    """Time passes only where a test lets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def beat(state: Any = "running", versions: tuple[int, ...] = (0, 0, 0), **more: Any) -> BeatSeen:
    return BeatSeen(
        Beat(
            run="r",
            epoch=0,
            term=1,
            state=state,
            reason="as scripted",
            versions=versions,
            stamp=START,
            live=("a",),
            **more,
        )
    )


def pull(round_: int, fragment: int) -> PullSeen:
    return PullSeen(
        Pull(
            epoch=0, term=1, round=round_, fragment=fragment, participants=("a",), timeout_s=1000.0
        )
    )


def donation(newcomer: str) -> Donate:
    return Donate(
        donor="a",
        donor_incarnation=0,
        newcomer=newcomer,
        newcomer_incarnation=0,
        nonce=f"n-{newcomer}",
        epoch=0,
        versions=(0, 0, 0),
    )


def anchor(fragment: int, version: int, values_F: Any) -> Anchored:
    return Anchored(AnchorReady(0, fragment, version, version, START, {}), values_F)


Rig = Callable[[], tuple[TrainLoop, Box, Clock]]


def rigs(program: Program) -> Rig:
    """Makes loops that share the compiled program."""
    spec = program.spec
    corpus = load(spec.data)

    def make() -> tuple[TrainLoop, Box, Clock]:
        clock = Clock()
        box = Box(clock)
        batches = Batches(ShardCut(corpus.train, 8, 8, spec.seed), 2)
        batches.grant(0, 0, 0)
        trainer = Trainer(program)
        for p, values_F in enumerate(trainer.initial_fragments()):
            trainer.adopt(p, values_F, 0.0)
        loop = TrainLoop(
            trainer,
            Exchange(program.spec, "a", 0, Begin(0, 0, (0, 0, 0), START), clock()),
            batches,
            HeldOut(held_out(corpus.validation, 8, 4, 0)),
            box,
            Clocks(clock, WaitClock(clock)),
            Injected(),
        )
        return loop, box, clock

    return make


def run(loop: TrainLoop) -> Leave:
    """To its end, as the train thread does."""
    box, clock = loop.post, loop.now
    assert isinstance(box, Box) and isinstance(clock, Clock)
    return computing.run(loop, box, clock.sleep)


def outgoing(box: Box, kind: type) -> list[ToSend]:
    return [o for o in box.collect() if isinstance(o.effect, kind)]
