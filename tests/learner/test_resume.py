"""A learner that comes back from its own checkpoint is the one that never went, bit for bit.

What it needs are the moments that it kept, the cursor that was merged, and the publications that it
adopted, each at its step. Both halves cross the end of a data shard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from diloco_learner.data.batches_io import Batches
from diloco_learner.data.shards import ShardCut
from diloco_learner.models import to_named
from diloco_learner.recovery.checkpoint_io import LocalCheckpoints
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.protocol.messages import Cursor
from diloco_shared.spec.run import RunSpec

FRAGMENTS, STEPS, BACK = 3, 14, 6
# As many layers as are looped over, and an optimizer state of more than one kind.
SHAPE = {"width": 8, "layers": 6, "heads": 2, "kv_heads": 2, "head_width": 4, "hidden": 8}
TOKENS = np.random.default_rng(5).integers(0, 256, 400).astype(np.uint8)
# (step, fragment): a publication that arrives is adopted before the step.
ADOPTED = {(2, 0), (4, 1), *((BACK, p) for p in range(FRAGMENTS)), (8, 2), (9, 0), (12, 1)}


def spec(optimizer: str) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "r",
            "seed": 3,
            "algorithm": {"fragments": FRAGMENTS, "sync_every_steps": 6},
            "model": {"context_tokens": 8, "overrides": SHAPE},
            "inner": {"batch_sequences": 2, "warmup_steps": 0, "optimizer": optimizer},
            "budget": {"steps": STEPS},
        }
    )


@dataclass
class Learner:
    """A trainer with its data, stepped as the train loop steps it."""

    program: Program
    anchors: Mapping[tuple[int, int], NDArray[np.float32]]
    cursor: Cursor | None = None
    read: list[NDArray[Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trainer = Trainer(self.program)
        self.batches = Batches(ShardCut(TOKENS, 4, 8, seed=3), 2)
        place = self.cursor or Cursor(shard=0, sequences=0, passes=0)
        for shard in range(place.shard, 4):
            begun = place.sequences if shard == place.shard else 0
            self.batches.grant(shard, begun, place.passes)

    def steps(self, which: Sequence[int]) -> None:
        for step in which:
            for p in range(FRAGMENTS):
                if (step, p) in self.anchors:
                    self.trainer.adopt(p, self.anchors[step, p], 0.0)
            tokens_BxL1 = self.batches.take()
            self.read.append(tokens_BxL1)
            self.losses.append(float(self.trainer.step(tokens_BxL1, 1e-2 / (1 + step))))


def bits(tree: Any) -> dict[str, bytes]:
    return {name: np.asarray(leaf).tobytes() for name, leaf in to_named(tree).items()}


@pytest.mark.whole
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_is_the_uninterrupted_one(tmp_path: Path, optimizer: str) -> None:
    program, rng = Program.build(spec(optimizer)), np.random.default_rng(1)
    anchors = {
        (step, p): rng.normal(0, 0.1, program.layout.sizes[p]).astype(np.float32)
        for step, p in sorted(ADOPTED)
    }
    whole = Learner(program, anchors)
    whole.steps(range(BACK))
    kept = LocalCheckpoints(tmp_path, keep=2)
    kept.save(BACK, whole.trainer.inner_state_pieces())
    cursor = whole.batches.cursor
    whole.steps(range(BACK, STEPS))

    back = Learner(program, anchors, cursor)
    state, faults = kept.load(back.trainer.check_inner_state)
    assert state is not None and not faults
    back.trainer.load_inner_state(state)
    back.steps(range(BACK, STEPS))

    assert len({whole.read[n].tobytes() for n in range(STEPS)}) == STEPS
    np.testing.assert_array_equal(np.stack(back.read), np.stack(whole.read[BACK:]))
    assert back.losses == whole.losses[BACK:]
    assert bits(back.trainer.params) == bits(whole.trainer.params)
    assert bits(back.trainer.opt_state) == bits(whole.trainer.opt_state)
    assert back.batches.cursor is not None and whole.batches.cursor is not None
    assert back.batches.cursor.shard == whole.batches.cursor.shard > 0
