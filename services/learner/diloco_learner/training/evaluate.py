"""Loss of given parameters on fixed held-out sequences."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from diloco_learner.models import ModelDef
from diloco_learner.training.programs import compiler_options

# Per call, whichever is less: bounds the memory of activations and logits, however long sequences
# are. A training step's batch is evaluated at once in any case: its step needed more than that.
SEQUENCES_MAX, TOKENS_MAX = 64, 4096


def held_out(tokens: NDArray[Any], context: int, sequences: int, seed: int) -> NDArray[np.int32]:
    """`sequences` seeded windows of context + 1 tokens, shape (S, L + 1), the same every time."""
    windows = (len(tokens) - 1) // context
    if windows < 1:
        raise ValueError(f"the held-out split has {len(tokens)} tokens, a sequence {context + 1}")
    chosen = np.random.default_rng(seed).permutation(windows)[:sequences]
    return np.stack([tokens[w * context : w * context + context + 1] for w in chosen]).astype(
        np.int32
    )


def at_once(context: int, trained: int) -> int:
    """Sequences per call, where steps take `trained` of `context` tokens each."""
    return max(trained, min(SEQUENCES_MAX, TOKENS_MAX // context), 1)


def make_evaluate(model: ModelDef, trained: int = 1) -> Callable[[Any, NDArray[np.int32]], float]:
    """A function of (params, sequences_SxL1) that returns mean nats per token.

    `trained`: sequences that a training step holds the activations of.
    """
    loss = jax.jit(model.loss, compiler_options=compiler_options())

    def evaluate(params: Any, sequences_SxL1: NDArray[np.int32]) -> float:
        total, batch = 0.0, at_once(sequences_SxL1.shape[1] - 1, trained)
        for start in range(0, len(sequences_SxL1), batch):
            part = sequences_SxL1[start : start + batch]
            total += float(loss(params, part)) * len(part)
        return total / len(sequences_SxL1)

    return evaluate
