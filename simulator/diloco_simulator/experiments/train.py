"""Training with the product's own services and real numerics on a virtual clock and a modelled
network.

Deterministic: the same specification gives the same digest. Learners share the compiled programs
of one process; each reads its own data shards. Learners may be interrupted at random, differ in
speed, and come and go (setting.py); `IdleFleet` plays the same without computing anything.
"""

import asyncio
import gc
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_learner.data.batches_io import Batches
from diloco_learner.data.corpus import check_signs, check_vocabulary, load, separator_of
from diloco_learner.data.shards import ShardCut, cut_of
from diloco_learner.events import Evaluate, Leave
from diloco_learner.training.computing_io import Built, Check, go_on
from diloco_learner.training.data_parallel import LearnerStream
from diloco_learner.training.evaluate import HeldOut, Losses, always, held_out_of
from diloco_learner.training.mailbox_io import Mailbox
from diloco_learner.training.train import TrainLoop
from diloco_learner.training.trainer import Program, Published, Trainer, evaluate_anchors
from diloco_shared.bus.port import Stored
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Cursor, TapeInit, TapeRecord
from diloco_shared.protocol.wire import decode_tape
from diloco_shared.spec.run import RunSpec
from diloco_simulator.experiments.cluster import Cluster
from diloco_simulator.experiments.idle import IdleTrainer, idle, layout_of
from diloco_simulator.experiments.presence import Presence
from diloco_simulator.experiments.ready_only import ReadyOnly
from diloco_simulator.experiments.setting import Setting
from diloco_simulator.experiments.tally import Tally
from diloco_simulator.inside.learners import Trained
from diloco_simulator.virtual_loop import VirtualLoop, play
from diloco_simulator.worlds import constants
from diloco_simulator.worlds.computing import Paced
from diloco_simulator.worlds.world import MEMORY, quiet, uncollected
from diloco_syncer.history.history import History
from diloco_syncer.merging.store import FragmentStore

__all__ = ["Fleet", "IdleFleet", "Setting"]

# Between two looks at whether it is over, in virtual seconds; and at what nobody needs any more.
LOOK_S, COLLECT_S = 1.0, 100.0


class Unleased(Batches):
    """Of a learner whose data is its own from the beginning, so that who reads what depends on
    nothing that happens."""

    @property
    def wants(self) -> bool:
        return False

    @property
    def ready(self) -> bool:
        return True


class OwnShards(Unleased):
    """Some of the data shards."""

    def __init__(self, stream: LearnerStream, sequences: int) -> None:
        super().__init__(stream.cut, sequences)
        self.stream = stream

    @property
    def cursor(self) -> Cursor | None:
        return self.stream.reader.cursor

    def take(self) -> NDArray[Any]:
        """The tokens of the next step, (B, L + 1)."""
        batch: NDArray[Any] = self.stream.take(self.sequences)
        return batch


class NoData(Unleased):
    """Nobody looks at it."""

    def __init__(self, spec: RunSpec) -> None:
        context = spec.model.context_tokens
        nothing = ShardCut(np.zeros(context + 1, np.uint8), 1, context, spec.seed)
        super().__init__(nothing, spec.inner.batch_sequences * spec.inner.accumulation)
        self.batch = np.zeros((self.sequences, context + 1), np.int32)

    @property
    def cursor(self) -> Cursor | None:
        return None

    def take(self) -> NDArray[Any]:
        """Zeros of shape (B, L + 1), always the same array."""
        return self.batch


class CountedTrainer(Trainer):
    """The product's; `stepped` is called at every step."""

    def __init__(self, program: Program, stepped: Callable[[], None]) -> None:
        super().__init__(program)
        self.stepped = stepped
        self.evaluated: Callable[[float], None] | None = None  # the next loss is told, if at all
        self.looked_at: tuple[Published, Callable[[float], None]] | None = None

    def step(self, tokens_BxL1: NDArray[Any], rate: float, *, poisoned: bool = False) -> Any:
        loss = super().step(tokens_BxL1, rate, poisoned=poisoned)
        self.stepped()
        return loss

    def published(self, *, alone: bool = False) -> Published:
        found, told = super().published(alone=alone), self.evaluated
        if told is not None:
            self.evaluated, self.looked_at = None, (found, told)
        return found

    def evaluate(
        self, published: Published, held: HeldOut, wanted: Callable[[], bool] = always
    ) -> Losses:
        """Only for somebody who looks at it: that takes as long as many steps."""
        if self.looked_at is None or self.looked_at[0] is not published:
            return Losses(0.0)
        told, self.looked_at = self.looked_at[1], None
        told((losses := super().evaluate(published, held, wanted)).overall)
        return losses


class Computed(Paced):
    """What one process of a fleet's learner computes with."""

    def __init__(self, fleet: "IdleFleet", m: int) -> None:
        name, setting = fleet.names[m], fleet.setting
        dice = Random(f"{fleet.spec.seed}/{name}/steps/{fleet.processes}")
        fleet.processes += 1
        super().__init__(dice, setting.step_of(m), setting.jitter, partial(fleet.trains, m))
        self.fleet = fleet
        self.m = m

    def build(self, spec: RunSpec, check: Check = go_on, *, begun: bool = False) -> Built:
        return self.fleet.built(self.m)

    async def train(self, loop: TrainLoop, mailbox: Mailbox) -> Leave:
        left = await super().train(loop, mailbox)
        self.fleet.presence.leaves(self.m)
        return left


class IdleFleet:
    """A run of learners in one process that compute nothing: time, rounds and tokens."""

    def __init__(self, spec: RunSpec, setting: Setting) -> None:
        count = setting.learners_in_all
        most = max(spec.membership.learners_max, count)
        membership = spec.membership.model_copy(update={"learners_max": most})
        self.spec = self._computed(spec.model_copy(update={"membership": membership}))
        self.setting = setting
        self.tally = Tally(self._sizes())
        self.names = [f"learner-{m:03d}" for m in range(count)]
        self.records: list[TapeRecord] = []
        self.history: History  # of the run's leader, and its numbers, as of the newest record
        self.store: FragmentStore
        self.processes = 0  # of learners, so far
        self.began_s = 0.0
        self.cluster: Cluster
        self.presence: Presence

    def _computed(self, spec: RunSpec) -> RunSpec:
        """Of the model that learners have here."""
        return idle(spec)

    def _sizes(self) -> Sequence[int]:
        """Values of each fragment."""
        return layout_of(self.spec.algorithm.fragments).sizes

    # --- what a learner's process asks for -----------------------------------------------------

    def built(self, m: int) -> Built:
        """A new process of learner `m` computes with it."""
        stepped = partial(self.tally.stepped, self.names[m])
        held_out = HeldOut(np.zeros((1, 2), np.int32))
        return Built(IdleTrainer(self.spec, stepped), NoData(self.spec), held_out)

    def trains(self, m: int, loop: TrainLoop, step_s: float) -> None:
        """A process of learner `m` has recovered."""
        self.presence.trains(m)
        Trained(self.cluster.observer.watch, self.names[m], loop, step_s)

    # --- what is seen --------------------------------------------------------------------------

    def _stored(self, stream: str, message: Stored) -> None:
        if message.subject == subjects.tape(self.spec.name, 0):
            self._recorded(decode_tape(message.payload))

    def _recorded(self, record: TapeRecord) -> None:
        """The tape takes it."""
        leader = self.cluster.leader
        assert leader is not None
        if self.setting.only_ready and isinstance(record, TapeInit):
            ReadyOnly.put_into(leader.machine)
        self.history = leader.machine.history
        if leader.numbers.store is not None:  # it is there once parameters are
            self.store = leader.numbers.store
        self.records.append(record)
        self.tally.record(record, self.now)

    @property
    def now(self) -> float:
        """Virtual seconds since the run was submitted."""
        return self.cluster.loop.now - self.began_s

    # --- from beginning to end -----------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """To the end of the run; RuntimeError if it does not come."""
        memory = MEMORY if MEMORY.is_dir() else None
        folder = TemporaryDirectory(prefix="diloco-fleet-", dir=memory)
        with folder as disk, quiet(), constants.put({}), uncollected():
            return play(self._play(Path(disk)), Random(self.spec.seed), thread_s=0.0)

    async def _play(self, folder: Path) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        computed = {name: partial(Computed, self, m) for m, name in enumerate(self.names)}
        self.cluster = cluster = Cluster(
            self.spec, loop, folder, computed, self.setting.one_way_s, self._stored
        )
        self.presence = Presence(cluster, self.setting, self.spec.seed)
        await cluster.begin(self.names[: self.setting.learners])
        self.began_s = loop.now
        self.presence.begin()
        await self._until_over(20 * self._usual_s() + 1000)
        found = self._result()
        cluster.end()
        return found

    async def _until_over(self, within_s: float) -> None:
        """RuntimeError if that takes longer, or if anything is not as it must be."""
        watch, collect_s = self.cluster.observer.watch, COLLECT_S
        while not (watch.ended and not self.presence.training):
            if self.now > within_s or watch.violations or self.cluster.ended:
                said = [*watch.violations[:3], *self.cluster.ended[:3], f"{self.now:.0f} s"]
                raise RuntimeError(f"the run did not end well: {said}")
            await asyncio.sleep(LOOK_S)
            if self.now > collect_s:
                gc.collect()  # at a moment that depends on nothing else
                collect_s += COLLECT_S

    def _usual_s(self) -> float:
        """What a run of the slowest of its own learners, alone, would take."""
        b, slowest_s = self.spec.budget, max(map(self.setting.step_of, range(len(self.names))))
        steps = b.steps or -(-(b.tokens or 0) // self.spec.tokens_per_step)
        return max(steps * slowest_s, b.seconds or 0.0)

    def _result(self) -> dict[str, Any]:
        history, end_s = self.history, self.presence.over_s
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
            "recoveries_from_donors": self.cluster.scene.counts["from donor"],
        }
        if self.setting.over_time:
            found["useful_over_time"] = [[round(s, 2), round(n)] for s, n in self.tally.timeline]
        return found


class Fleet(IdleFleet):
    """A run of real learners in one process."""

    def __init__(
        self, spec: RunSpec, setting: Setting, *, told: Callable[[int, float], None] | None = None
    ) -> None:
        corpus = load(spec.data)
        check_vocabulary(spec, corpus)
        self.program = Program.build(spec, separator=separator_of(spec.data, corpus))
        check_signs(spec, self.program.model, corpus)
        self.cut = cut_of(
            corpus.train, spec.data.virtual_shards, spec.model.context_tokens, spec.seed
        )
        self.splits = {"validation": corpus.validation, "test": corpus.test}
        self.told = told
        self.curve: list[tuple[int, float, float]] = []  # steps of the run, virtual seconds, loss
        super().__init__(spec, setting)

    def _computed(self, spec: RunSpec) -> RunSpec:
        return spec

    def _sizes(self) -> Sequence[int]:
        return self.program.layout.sizes

    def built(self, m: int) -> Built:
        """What learner m computes with; its data go on where what is merged of its shards ends."""
        inner, name = self.spec.inner, self.names[m]
        stream = LearnerStream(self.cut, m, self.setting.learners_in_all)
        if name in self.tally.cursors:  # as the product's leases do: merged data is not read again
            stream.resume(self.tally.cursors[name])
        return Built(
            CountedTrainer(self.program, partial(self.tally.stepped, name)),
            OwnShards(stream, inner.batch_sequences * inner.accumulation),
            self._held("validation"),
        )

    def _held(self, split: str) -> HeldOut:
        return held_out_of(self.spec, self.splits[split])

    def trains(self, m: int, loop: TrainLoop, step_s: float) -> None:
        """Watch a loop that begins: losses of published parameters become points of the curve."""
        super().trains(m, loop, step_s)
        handle = loop.exchange.handle

        def watched(event: Any, now: float) -> list[Any]:
            effects = handle(event, now)
            for effect in effects:
                if isinstance(effect, Evaluate) and self._looks_at(effect):
                    assert isinstance(loop.trainer, CountedTrainer)
                    loop.trainer.evaluated = partial(self._evaluated, effect.stamp.steps)
            return effects

        loop.exchange.handle = watched  # type: ignore[method-assign]

    def _looks_at(self, effect: Evaluate) -> bool:
        return not effect.final and (self.told is not None or self.setting.over_time)

    def _evaluated(self, steps: int, loss: float) -> None:
        self.curve.append((steps, round(self.now, 1), loss))
        if self.told is not None:
            self.told(steps, loss)

    def _result(self) -> dict[str, Any]:
        anchors = [self.store.anchor(p) for p in range(self.spec.algorithm.fragments)]
        digests = "".join(self.store.anchor_digest(p) for p in range(len(anchors)))
        found = super()._result() | {
            "val_loss": evaluate_anchors(self.program, anchors, self._held("validation")),
            "test_loss": evaluate_anchors(self.program, anchors, self._held("test")),
            "digest": hashlib.blake2b(digests.encode(), digest_size=16).hexdigest(),
            "inner_rate": self.spec.inner_rate,
        }
        return found | ({"losses_over_time": self.curve} if self.setting.over_time else {})
