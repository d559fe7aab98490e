"""Loss of given parameters on fixed held-out sequences."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from diloco_learner.models import ModelDef
from diloco_learner.training.programs import compiler_options
from diloco_shared.corpora.mix import Mixed
from diloco_shared.corpora.sequences import Tokens, windows

# Per call, whichever is less: bounds the memory of activations and logits, however long sequences
# are. A training step's batch is evaluated at once in any case: its step needed more than that.
SEQUENCES_MAX, TOKENS_MAX = 64, 4096


# Above so many windows, drawing a few does not put all of them in order: that takes 32 MB.
ORDERED_MAX = 1 << 22


def held_out(
    tokens: NDArray[Any] | Tokens | Mixed, context: int, sequences: int, seed: int
) -> NDArray[np.int32]:
    """`sequences` seeded windows of context + 1 tokens, shape (S, L + 1), the same every time.

    Of a mixture each corpus gives its share; `held_out_each` keeps them apart. Raises ValueError
    where there is no such window, or where none has a token to be predicted.
    """
    if isinstance(tokens, Mixed):
        each = held_out_each(tokens, context, sequences, seed)
        found_SxL1 = np.concatenate([found for found in each if len(found)])
    else:
        found_SxL1 = _windows(tokens, context, sequences, seed)
    if not targets(found_SxL1):
        raise ValueError(
            f"none of the {len(found_SxL1)} held-out sequences has a token to be predicted: set "
            "evaluation.sequences higher, or prepare the corpus with more validation"
        )
    return found_SxL1


def targets(sequences_SxL1: NDArray[np.int32]) -> int:
    """How many tokens of these sequences are to be predicted: the first of each never is."""
    return int(np.count_nonzero(sequences_SxL1[:, 1:] >= 0))


def _windows(
    tokens: NDArray[Any] | Tokens, context: int, sequences: int, seed: int
) -> NDArray[np.int32]:
    there = (len(tokens) - 1) // context
    if there < 1:
        raise ValueError(f"the held-out split has {len(tokens)} tokens, a sequence {context + 1}")
    chosen_S = _chosen(there, min(sequences, there), seed)
    return windows(tokens, chosen_S * context, context + 1)


def held_out_each(
    mixed: Mixed, context: int, sequences: int, seed: int
) -> tuple[NDArray[np.int32], ...]:
    """Of each corpus of a mixture its share of `sequences` windows, shape (S_k, L + 1)."""
    found = []
    counts = mixed.interleave.counts(sequences)
    for part, name, count in zip(mixed.parts, mixed.names, counts, strict=True):
        try:
            found.append(_windows(part, context, count, seed))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return tuple(found)


def _chosen(windows: int, count: int, seed: int) -> NDArray[np.int64]:
    """Different numbers below `windows`; a smaller count gives the first of a larger one's."""
    rng = np.random.default_rng(seed)
    if windows <= ORDERED_MAX:
        return rng.permutation(windows)[:count]
    drawn: dict[int, None] = {}
    while len(drawn) < count:
        drawn.setdefault(int(rng.integers(windows)))
    return np.fromiter(drawn, np.int64)


def at_once(context: int, trained: int) -> int:
    """Sequences per call, where steps take `trained` of `context` tokens each."""
    return max(trained, min(SEQUENCES_MAX, TOKENS_MAX // context), 1)


def make_evaluate(model: ModelDef, trained: int = 1) -> Callable[[Any, NDArray[np.int32]], float]:
    """A function of (params, sequences_SxL1) that returns mean nats per token to be predicted, of
    all of them together; 0 if there is none.

    `trained`: sequences that a training step holds the activations of.
    """
    loss = jax.jit(model.loss, compiler_options=compiler_options())

    def evaluate(params: Any, sequences_SxL1: NDArray[np.int32]) -> float:
        total, count, batch = 0.0, 0, at_once(sequences_SxL1.shape[1] - 1, trained)
        for start in range(0, len(sequences_SxL1), batch):
            part = sequences_SxL1[start : start + batch]
            if its := targets(part):  # its loss is the mean over so many
                total += float(loss(params, part)) * its
                count += its
        return total / max(count, 1)

    return evaluate
