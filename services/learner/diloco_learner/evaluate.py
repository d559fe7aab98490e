"""Loss of given parameters on fixed held-out sequences."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from diloco_learner.model import ModelDef

# Sequences per call: bounds the memory of the logits.
BATCH = 64


def held_out(tokens: NDArray[Any], context: int, sequences: int, seed: int) -> NDArray[np.int32]:
    """`sequences` seeded windows of context + 1 tokens, shape (S, L + 1), the same every time."""
    windows = (len(tokens) - 1) // context
    if windows < 1:
        raise ValueError(f"the held-out split has {len(tokens)} tokens, a sequence {context + 1}")
    chosen = np.random.default_rng(seed).permutation(windows)[:sequences]
    return np.stack([tokens[w * context : w * context + context + 1] for w in chosen]).astype(
        np.int32
    )


def make_evaluate(model: ModelDef) -> Callable[[Any, NDArray[np.int32]], float]:
    """A function of (params, sequences_SxL1) that returns mean nats per token."""
    loss = jax.jit(model.loss)

    def evaluate(params: Any, sequences_SxL1: NDArray[np.int32]) -> float:
        total = 0.0
        for start in range(0, len(sequences_SxL1), BATCH):
            part = sequences_SxL1[start : start + BATCH]
            total += float(loss(params, part)) * len(part)
        return total / len(sequences_SxL1)

    return evaluate
