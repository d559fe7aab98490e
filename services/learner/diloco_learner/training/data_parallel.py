"""The reference: data-parallel training of the same model on the same tokens.

One optimizer step per M local batches (the mean gradient over M * B sequences), as many steps as
each learner of a Decoupled run takes, at data-parallel's own inner rate.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from diloco_learner.data.corpus import check_signs, check_vocabulary, load, separator_of
from diloco_learner.data.shards import Cut, ShardReader, cut_of
from diloco_learner.training.evaluate import held_out_of
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.numerics.schedule import inner_rate
from diloco_shared.protocol.messages import Cursor
from diloco_shared.spec.run import RunSpec


class LearnerStream:
    """Endless batches of one of M learners: shards m, m + M, m + 2 M, … in turn."""

    def __init__(self, cut: Cut, learner: int, learners: int) -> None:
        self.cut = cut
        self.shards = [s for s in range(cut.shards) if s % learners == learner]
        if not self.shards:
            raise ValueError(f"{cut.shards} data shards are too few for {learners} learners")
        self.turn = 0
        self.reader = ShardReader(cut, self.shards[0])

    def resume(self, cursor: Cursor) -> None:
        """Go on where that place of one of its shards is: what was read after it is read again."""
        self.turn = cursor.passes * len(self.shards) + self.shards.index(cursor.shard)
        self.reader = ShardReader(
            self.cut, cursor.shard, sequences=cursor.sequences, passes=cursor.passes
        )

    def take(self, sequences: int) -> Any:
        """The next batch, shape (sequences, L + 1)."""
        parts = [self.reader.take(sequences)]
        while sum(len(p) for p in parts) < sequences:
            self.turn += 1
            passes, place = divmod(self.turn, len(self.shards))
            self.reader = ShardReader(self.cut, self.shards[place], passes=passes)
            parts.append(self.reader.take(sequences - sum(len(p) for p in parts)))
        return np.concatenate(parts)


def train_data_parallel(
    spec: RunSpec,
    learners: int,
    *,
    rate: float | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Train and return `val_loss`, `test_loss`, `steps`, `tokens`, `inner_rate`.

    `rate` is the peak inner rate (default: the spec's data-parallel rate). The budget must be in
    steps. `progress(step, loss)` is called every hundred steps.
    """
    if spec.budget.steps is None:
        raise ValueError("data-parallel training needs budget.steps")
    corpus, peak = load(spec.data), rate or spec.inner.learning_rate
    check_vocabulary(spec, corpus)
    cut = cut_of(corpus.train, spec.data.virtual_shards, spec.model.context_tokens, spec.seed)
    streams = [LearnerStream(cut, m, learners) for m in range(learners)]
    program = Program.build(spec, separator=separator_of(spec.data, corpus))
    check_signs(spec, program.model, corpus)
    trainer = Trainer(program)
    steps, batch = spec.budget.steps, spec.inner.batch_sequences * spec.inner.accumulation
    loss = None
    for step in range(steps):
        tokens = np.concatenate([stream.take(batch) for stream in streams])
        loss = trainer.step(tokens, inner_rate(spec.inner, peak, step, step / steps))
        if progress is not None and step % 100 == 0:
            progress(step, float(loss))
    validation, test = (held_out_of(spec, split) for split in (corpus.validation, corpus.test))
    return {
        "val_loss": program.evaluate.losses(trainer.params, validation).overall,
        "test_loss": program.evaluate.losses(trainer.params, test).overall,
        "steps": steps,
        "tokens": steps * learners * spec.tokens_per_step,
        "inner_rate": peak,
    }
