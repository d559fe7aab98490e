"""Training with the real machines and real numerics on a virtual clock and a modelled network.

Deterministic: the same specification gives the same digest. Learners share the compiled programs
of one process; each reads its own data shards.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_learner.data.corpus import load
from diloco_learner.data.shards import Cut
from diloco_learner.data_parallel import LearnerStream
from diloco_learner.evaluate import held_out
from diloco_learner.events import Evaluate
from diloco_learner.trainer import (
    Program,
    Trainer,
    evaluate_anchors,
    state_bytes,
)
from diloco_shared.config import RunSpec
from diloco_shared.protocol.messages import Cursor
from diloco_simulator.hub import Hub
from diloco_simulator.learner_life import LearnerLife
from diloco_simulator.learner_node import LearnerNode
from diloco_simulator.options import Options
from diloco_simulator.syncer_node import SyncerNode
from diloco_simulator.watch import Watch
from diloco_simulator.world import World

Values = NDArray[np.float32]


@dataclass(slots=True)
class RealTrainer:
    """The product's trainer behind the simulator's interface."""

    trainer: Trainer
    stream: LearnerStream
    sequences: int
    alpha: float
    layout: Any = field(init=False)

    def __post_init__(self) -> None:
        self.layout = self.trainer.program.layout

    def initial_fragments(self) -> list[Values]:
        return self.trainer.initial_fragments()

    def step(self, rate: float) -> tuple[int, float]:
        tokens_BxL1 = self.stream.take(self.sequences)
        self.trainer.step(tokens_BxL1, rate)
        # The loss is left on the device: reading it back would serialise the learners.
        return tokens_BxL1.shape[0] * (tokens_BxL1.shape[1] - 1), float("nan")

    @property
    def cursor(self) -> Cursor | None:
        return self.stream.reader.cursor

    def adopt(self, p: int, anchor_F: Values) -> None:
        self.trainer.adopt(p, anchor_F, self.alpha)

    def contribution(self, p: int, round_: int) -> bytes:
        return self.trainer.contribution(p, round_).fetch()

    def decided(self, p: int, round_: int, *, merged: bool) -> None:
        self.trainer.decided(p, round_, merged=merged)

    def inner_state(self) -> bytes:
        return state_bytes(self.trainer.inner_state())

    def load_inner_state(self, data: bytes) -> None:
        self.trainer.load_inner_state(data)


@dataclass(frozen=True, slots=True)
class Setting:
    """How the islands and their links are: times in virtual seconds."""

    learners: int
    step_s: float = 1.0
    speeds: tuple[float, ...] = (1.0,)  # relative, repeated over learners
    one_way_s: float = 0.1


class Fleet:
    """A run of real learners in one process."""

    def __init__(
        self, spec: RunSpec, setting: Setting, *, told: Callable[[int, float], None] | None = None
    ) -> None:
        self.spec = spec
        self.setting = setting
        self.told = told
        self.world = World(
            spec.seed,
            Options.calm(learners=setting.learners, delay_s=setting.one_way_s, jitter=0.0),
        )
        self.world.heal()
        self.hub = Hub(self.world, spec)
        self.watch = Watch(self.world, spec, numbers=False)  # a long run's contributions are many
        self.hub.on_record = self.watch.record
        self.program = Program.build(spec)
        corpus = load(spec.data)
        self.cut = Cut(corpus.train, spec.data.virtual_shards, spec.model.context_tokens, spec.seed)
        self.splits = {"validation": corpus.validation, "test": corpus.test}
        names = [f"learner-{m:03d}" for m in range(setting.learners)]
        self.syncer = SyncerNode(self.hub, self.watch, names)
        self.learners = [self._learner(m, name) for m, name in enumerate(names)]
        self.curve: list[tuple[int, float]] = []

    def _learner(self, m: int, name: str) -> LearnerNode:
        inner = self.spec.inner

        def make() -> RealTrainer:
            return RealTrainer(
                Trainer(self.program),
                LearnerStream(self.cut, m, self.setting.learners),
                inner.batch_sequences * inner.accumulation,
                self.spec.algorithm.alpha,
            )

        speeds = self.setting.speeds
        node = LearnerNode(
            self.hub,
            name,
            make,
            self.watch,
            step_s=self.setting.step_s / speeds[m % len(speeds)],
        )
        node.on_evaluate = self._evaluate
        return node

    def _held(self, split: str) -> NDArray[np.int32]:
        e = self.spec.evaluation
        return held_out(
            self.splits[split], self.spec.model.context_tokens, e.sequences, self.spec.seed
        )

    def _evaluate(self, life: LearnerLife, effect: Evaluate) -> None:
        if self.told is None or effect.final:
            return
        assert isinstance(life.trainer, RealTrainer)
        loss = life.trainer.trainer.evaluate(self._held("validation"))
        self.curve.append((effect.stamp.steps, loss))
        self.told(effect.stamp.steps, loss)

    def run(self) -> dict[str, Any]:
        """To the end of the run; RuntimeError if it does not come."""
        self.syncer.start()
        for node in self.learners:
            node.start()
        steps = self.spec.budget.steps or 10**6
        slowest = max(n.step_s for n in self.learners)
        self.world.run(
            20 * slowest * steps + 1000,
            lambda: bool(self.watch.ended) and all(n.left for n in self.learners),
        )
        if not self.watch.ended or self.watch.violations:
            raise RuntimeError(f"the run did not end well: {self.watch.violations[:3]}")
        return self._result()

    def _result(self) -> dict[str, Any]:
        life = self.syncer.life
        assert life is not None and life.store is not None
        anchors = [life.store.anchor(p) for p in range(self.spec.algorithm.fragments)]
        history = life.machine.history
        digests = "".join(life.store.anchor_digest(p) for p in range(len(anchors)))
        return {
            "val_loss": evaluate_anchors(self.program, anchors, self._held("validation")),
            "test_loss": evaluate_anchors(self.program, anchors, self._held("test")),
            "digest": hashlib.blake2b(digests.encode(), digest_size=16).hexdigest(),
            "tokens": history.ledger.processed,
            "tokens_useful": history.tokens_useful,
            "rounds": history.committed,
            "rounds_skipped": history.skipped,
            "inner_rate": self.spec.inner_rate,
            "virtual_s": round(self.world.now, 1),
        }
