"""Training with the real machines and real numerics on a virtual clock and a modelled network.

Deterministic: the same specification gives the same digest. Learners share the compiled programs
of one process; each reads its own data shards. Learners may be interrupted at random, differ in
speed, and come and go (setting.py); `IdleFleet` plays the same without computing anything.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
)
from diloco_shared.config import RunSpec
from diloco_shared.protocol.messages import Cursor, TapeRecord
from diloco_simulator.hub import Hub
from diloco_simulator.idle import IdleTrainer, layout_of
from diloco_simulator.learner_life import LearnerLife
from diloco_simulator.learner_node import LearnerNode
from diloco_simulator.options import Options
from diloco_simulator.presence import Presence
from diloco_simulator.ready_only import ReadyOnly
from diloco_simulator.setting import Setting
from diloco_simulator.syncer_node import SyncerNode
from diloco_simulator.tally import Tally
from diloco_simulator.tiny import Computation
from diloco_simulator.watch import Watch
from diloco_simulator.world import World

__all__ = ["Fleet", "IdleFleet", "Setting"]

Values = NDArray[np.float32]


@dataclass(slots=True)
class RealTrainer:
    """The product's trainer behind the simulator's interface."""

    trainer: Trainer
    stream: LearnerStream
    sequences: int
    alpha: float
    stepped: Callable[[], None]
    layout: Any = field(init=False)

    def __post_init__(self) -> None:
        self.layout = self.trainer.program.layout

    def initial_fragments(self) -> list[Values]:
        return self.trainer.initial_fragments()

    def step(self, rate: float) -> tuple[int, float]:
        tokens_BxL1 = self.stream.take(self.sequences)
        self.trainer.step(tokens_BxL1, rate)
        self.stepped()
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
        return bytes(self.trainer.inner_state())

    def load_inner_state(self, data: bytes) -> None:
        self.trainer.load_inner_state(data)


class IdleFleet:
    """A run of learners in one process that compute nothing: time, rounds and tokens."""

    def __init__(self, spec: RunSpec, setting: Setting) -> None:
        self.spec = spec
        self.setting = setting
        count = setting.learners_in_all
        self.world = World(
            spec.seed,
            Options.calm(learners=count, delay_s=setting.one_way_s, jitter=setting.jitter),
        )
        self.world.heal()
        self.hub = Hub(self.world, spec)
        self.watch = Watch(self.world, spec, numbers=False)  # a long run's contributions are many
        self.hub.on_record = self._recorded
        self.tally = Tally(self._sizes())
        self.names = [f"learner-{m:03d}" for m in range(count)]
        self.syncer = SyncerNode(self.hub, self.watch, self.names)
        self.learners = [self._learner(m, name) for m, name in enumerate(self.names)]
        self.presence = Presence(self.world, self.learners, setting, spec.seed)

    def _sizes(self) -> Sequence[int]:
        """Values of each fragment."""
        return layout_of(self.spec.algorithm.fragments).sizes

    def _make(self, m: int) -> Computation:
        """The computation of a new process of learner `m`."""
        return IdleTrainer(self.spec, partial(self.tally.stepped, self.names[m]))

    def _learner(self, m: int, name: str) -> LearnerNode:
        return LearnerNode(
            self.hub, name, partial(self._make, m), self.watch, step_s=self.setting.step_of(m)
        )

    def _recorded(self, shard: int, seq: int, record: TapeRecord) -> None:
        self.watch.record(shard, seq, record)
        self.tally.record(record, self.world.now)

    def _over(self) -> bool:
        return bool(self.watch.ended) and all(node.life is None for node in self.learners)

    def run(self) -> dict[str, Any]:
        """To the end of the run; RuntimeError if it does not come."""
        self.syncer.start()
        if self.setting.only_ready:
            assert self.syncer.life is not None
            ReadyOnly.put_into(self.syncer.life.machine)
        self.presence.begin()
        self.world.run(20 * self._usual_s() + 1000, self._over)
        if not self._over() or self.watch.violations:
            raise RuntimeError(f"the run did not end well: {self.watch.violations[:3]}")
        return self._result()

    def _usual_s(self) -> float:
        """What a run of the slowest of its own learners, alone, would take."""
        b, slowest_s = self.spec.budget, max(n.step_s for n in self.learners)
        steps = b.steps or math.ceil((b.tokens or 0) / self.spec.tokens_per_step)
        return max(steps * slowest_s, b.seconds or 0.0)

    def _result(self) -> dict[str, Any]:
        life = self.syncer.life
        assert life is not None
        history, end_s = life.machine.history, self.world.now
        goodput, stepping = self.tally.shares(
            self.names,
            step_s=self.setting.step_of,
            allocated_s=lambda m: self.presence.allocated_s(m, end_s),
            tokens_per_step=self.spec.tokens_per_step,
        )
        found: dict[str, Any] = {
            "tokens": history.ledger.processed,
            "tokens_useful": history.tokens_useful,
            "rounds": history.committed,
            "rounds_skipped": history.skipped,
            "virtual_s": round(end_s, 1),
            "goodput": goodput,
            "stepping": stepping,
            "merged_per_round": self.tally.merged_per_round,
            "interruptions": self.presence.struck,
            "recoveries_from_donors": self.world.counts["from donor"],
        }
        if self.setting.over_time:
            found["useful_over_time"] = [[round(s, 2), round(n)] for s, n in self.tally.timeline]
        return found


class Fleet(IdleFleet):
    """A run of real learners in one process."""

    def __init__(
        self, spec: RunSpec, setting: Setting, *, told: Callable[[int, float], None] | None = None
    ) -> None:
        self.program = Program.build(spec)
        corpus = load(spec.data)
        self.cut = Cut(corpus.train, spec.data.virtual_shards, spec.model.context_tokens, spec.seed)
        self.splits = {"validation": corpus.validation, "test": corpus.test}
        self.told = told
        self.curve: list[tuple[int, float, float]] = []  # steps of the run, virtual seconds, loss
        super().__init__(spec, setting)

    def _sizes(self) -> Sequence[int]:
        return self.program.layout.sizes

    def _make(self, m: int) -> Computation:
        inner, name = self.spec.inner, self.names[m]
        stream = LearnerStream(self.cut, m, self.setting.learners_in_all)
        if name in self.tally.cursors:  # as the product's leases do: merged data is not read again
            stream.resume(self.tally.cursors[name])
        return RealTrainer(
            Trainer(self.program),
            stream,
            inner.batch_sequences * inner.accumulation,
            self.spec.algorithm.alpha,
            partial(self.tally.stepped, name),
        )

    def _learner(self, m: int, name: str) -> LearnerNode:
        node = super()._learner(m, name)
        node.on_evaluate = self._evaluate
        return node

    def _held(self, split: str) -> NDArray[np.int32]:
        e = self.spec.evaluation
        return held_out(
            self.splits[split], self.spec.model.context_tokens, e.sequences, self.spec.seed
        )

    def _evaluate(self, life: LearnerLife, effect: Evaluate) -> None:
        if effect.final or (self.told is None and not self.setting.over_time):
            return
        assert isinstance(life.trainer, RealTrainer)
        loss = life.trainer.trainer.evaluate(self._held("validation"))
        self.curve.append((effect.stamp.steps, round(self.world.now, 1), loss))
        if self.told is not None:
            self.told(effect.stamp.steps, loss)

    def _result(self) -> dict[str, Any]:
        life = self.syncer.life
        assert life is not None and life.store is not None
        anchors = [life.store.anchor(p) for p in range(self.spec.algorithm.fragments)]
        digests = "".join(life.store.anchor_digest(p) for p in range(len(anchors)))
        found = super()._result() | {
            "val_loss": evaluate_anchors(self.program, anchors, self._held("validation")),
            "test_loss": evaluate_anchors(self.program, anchors, self._held("test")),
            "digest": hashlib.blake2b(digests.encode(), digest_size=16).hexdigest(),
            "inner_rate": self.spec.inner_rate,
        }
        return found | ({"losses_over_time": self.curve} if self.setting.over_time else {})
