"""Loss of given parameters on fixed held-out sequences: of all of them, and per corpus."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from diloco_learner.models import ModelDef, scattered
from diloco_learner.training.mesh import Placement
from diloco_learner.training.programs import Ahead, compiler_options
from diloco_shared.budget.memory import evaluated_at_once
from diloco_shared.corpora.mix import Mixed
from diloco_shared.corpora.sequences import Tokens, windows
from diloco_shared.spec.run import Data, RunSpec

# Above so many windows, drawing a few does not put all of them in order: that takes 32 MB.
ORDERED_MAX = 1 << 22


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What is evaluated on. Of a mixture each corpus has a name and `counts` sequences, one corpus
    after the other; of a single corpus nothing is told apart.

    `shares`: how many it would have, were enough of it held out. One that has fewer counts as often
    as that makes: it is trained on again and again too, so that it has its share.
    """

    sequences_SxL1: NDArray[np.int32]
    names: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.counts):
            raise ValueError(f"{len(self.names)} names for {len(self.counts)} corpora")
        if self.counts and sum(self.counts) != len(self.sequences_SxL1):
            raise ValueError(f"{self.counts} are not {len(self.sequences_SxL1)} sequences")

    @property
    def parts(self) -> list[NDArray[np.int32]]:
        """The sequences of each corpus, or of the only one."""
        return np.split(self.sequences_SxL1, np.cumsum(self.counts, dtype=int)[:-1])

    @property
    def times(self) -> list[float]:
        """How often each token of a corpus counts; exactly once where there are enough."""
        if not self.shares:
            return [1.0] * len(self.parts)
        pairs = zip(self.shares, self.counts, strict=True)
        return [share / many if 0 < many < share else 1.0 for share, many in pairs]

    @property
    def told(self) -> str:
        """Of a mixture: how many sequences of which corpus."""
        each = zip(self.names, self.counts, self.shares or self.counts, strict=True)
        return ", ".join(
            f"{many} of {name} (which count as {share})" if many < share else f"{many} of {name}"
            for name, many, share in each
        )


@dataclass(frozen=True, slots=True)
class Losses:
    """Mean nats per token to be predicted; `each` per corpus of a mixture that has such tokens.
    `overall` is of the mixture: see `HeldOut.times`."""

    overall: float
    each: dict[str, float] = field(default_factory=dict)


class Unwanted(Exception):
    """Nobody needs the result of this evaluation any more."""


def always() -> bool:
    """Of an evaluation that is wanted to its end."""
    return True


def held_out_of(spec: RunSpec, tokens: NDArray[Any] | Tokens | Mixed) -> HeldOut:
    """What a run evaluates on, of one split; raises what `held_out` raises."""
    context, sequences = spec.model.context_tokens, spec.held_out_sequences
    if not isinstance(tokens, Mixed) or len(tokens.parts) == 1:
        return HeldOut(held_out(tokens, context, sequences, spec.seed))
    each = held_out_each(tokens, context, sequences, spec.seed)
    names, counts = corpus_names(spec.data), tuple(map(len, each))
    return HeldOut(_joined(each), names, counts, tuple(_shares(tokens, sequences)))


def corpus_names(data: Data) -> tuple[str, ...]:
    """What the corpora of a mixture are called where losses are told: by the last part of their
    sources, by all of them where that is not enough, and by numbers where nothing else is."""
    sources = [part.source for part in data.sources]
    lasts = [PurePath(source).name or source for source in sources]
    names, seen = list[str](), Counter[str]()
    for last, source in zip(lasts, sources, strict=True):
        seen[source] += 1
        number = f" ({seen[source]})" if sources.count(source) > 1 else ""
        names.append((last if lasts.count(last) == sources.count(source) else source) + number)
    return tuple(names)


def held_out(
    tokens: NDArray[Any] | Tokens | Mixed, context: int, sequences: int, seed: int
) -> NDArray[np.int32]:
    """`sequences` seeded windows of context + 1 tokens, shape (S, L + 1), the same every time.

    Of a mixture each corpus gives its share; `held_out_each` keeps them apart. Raises ValueError
    where there is no such window, or where none has a token to be predicted.
    """
    if isinstance(tokens, Mixed):
        return _joined(held_out_each(tokens, context, sequences, seed))
    return _joined((_windows(tokens, context, sequences, seed),))


def _joined(each: tuple[NDArray[np.int32], ...]) -> NDArray[np.int32]:
    found_SxL1 = np.concatenate([found for found in each if len(found)])
    if not targets(found_SxL1):
        raise ValueError(
            f"none of the {len(found_SxL1)} held-out sequences has a token to be predicted: set "
            "evaluation.sequences or evaluation.tokens higher, or prepare the corpus with more "
            "validation"
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
    """Of each corpus of a mixture its share of `sequences` windows, shape (S_k, L + 1).

    One at least, or nobody would see how a corpus of small share is learned: the largest shares
    give way, and where there are more corpora than `sequences`, each has one.
    """
    found = []
    shares = _shares(mixed, sequences)
    for part, name, count in zip(mixed.parts, mixed.names, shares, strict=True):
        try:
            found.append(_windows(part, context, count, seed))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return tuple(found)


def _shares(mixed: Mixed, sequences: int) -> list[int]:
    """How many of so many sequences are to be of which corpus."""
    return _one_at_least(mixed.interleave.counts(sequences))


def _one_at_least(counts: Sequence[int]) -> list[int]:
    """These counts with 1 in the place of 0; as many in all, if there are enough."""
    found = [max(count, 1) for count in counts]
    for _ in range(sum(found) - sum(counts)):
        largest = found.index(max(found))
        found[largest] -= found[largest] > 1
    return found


def _chosen(windows: int, count: int, seed: int) -> NDArray[np.int64]:
    """Different numbers below `windows`; a smaller count gives the first of a larger one's."""
    rng = np.random.default_rng(seed)
    if windows <= ORDERED_MAX:
        return rng.permutation(windows)[:count]
    drawn: dict[int, None] = {}
    while len(drawn) < count:
        drawn.setdefault(int(rng.integers(windows)))
    return np.fromiter(drawn, np.int64)


class HeldOutLoss:
    """The loss of given parameters, at a batch after a batch.

    Between two batches the device is free for others: for the steps of whoever trains on it
    meanwhile. Different threads may call it.
    """

    def __init__(
        self, model: ModelDef, trained: int = 1, placement: Placement | None = None
    ) -> None:
        """`trained`: sequences that a training step holds the activations of. `placement`: how the
        parameters lie that it is given."""
        self.loss: Any = jax.jit(model.loss, compiler_options=compiler_options())
        if placement is not None:
            scope, turn = placement.scope, placement.turn
            self.loss = Ahead(model.loss, lambda _, tokens: tokens.shape, scope=scope, turn=turn)
        self.trained = trained
        self.placement = placement
        self.parts = 1 if placement is None else placement.batch_parts
        self.masked = model.masked_tokens

    def __call__(self, params: Any, sequences_SxL1: NDArray[np.int32]) -> float:
        """Mean nats per token to be predicted, of all of them together; 0 if there is none."""
        return self.losses(params, HeldOut(sequences_SxL1)).overall

    def losses(
        self,
        params: Any,
        held: HeldOut,
        wanted: Callable[[], bool] = always,
        batch: Callable[[Any, NDArray[np.int32]], Any] | None = None,
    ) -> Losses:
        """Each sequence is evaluated once; `wanted` is asked before every batch.

        `batch`: in place of the method of that name. Raises Unwanted once the result is not wanted,
        and whatever the model raises.
        """
        loss = batch or self.batch
        sums = [self._sum(params, part_SxL1, wanted, loss) for part_SxL1 in held.parts]
        named = zip(held.names, sums, strict=True) if held.names else ()
        nats = sum(total * n for (total, _), n in zip(sums, held.times, strict=True))
        tokens = sum(count * n for (_, count), n in zip(sums, held.times, strict=True))
        return Losses(
            nats / max(tokens, 1),
            {name: total / count for name, (total, count) in named if count},
        )

    def _sum(
        self,
        params: Any,
        sequences_SxL1: NDArray[np.int32],
        wanted: Callable[[], bool],
        loss: Callable[[Any, NDArray[np.int32]], Any],
    ) -> tuple[float, int]:
        """(nats of all tokens to be predicted, how many these are)."""
        total, count = 0.0, 0
        for part, its in self._batches(sequences_SxL1):
            if not wanted():
                raise Unwanted
            if its:  # its loss is the mean over so many
                total += float(loss(params, part)) * its
                count += its
        return total, count

    def _batches(self, sequences_SxL1: NDArray[np.int32]) -> Iterator[tuple[Any, int]]:
        """Batches that the devices divide evenly, each with how many tokens are to be predicted of
        the sequences that it is made of: of a batch that they do not, each would compute all."""
        at_once = evaluated_at_once(sequences_SxL1.shape[1] - 1, self.trained)
        at_once = max(at_once - at_once % self.parts, self.parts)
        for start in range(0, len(sequences_SxL1), at_once):
            part = sequences_SxL1[start : start + at_once]
            even = len(part) - len(part) % self.parts
            if even < len(part) and self.masked:
                # A sequence without a token to be predicted is no part of the mean.
                read = np.where(part[:1] < 0, part[:1], ~part[:1])
                filling = read.repeat(even + self.parts - len(part), axis=0)
                yield np.concatenate([part, filling]), targets(part)
                continue
            if even:
                yield part[:even], targets(part[:even])
            for row in part[even:, None]:  # the mean of several alike is that of one
                yield row.repeat(self.parts, axis=0), targets(row)

    def shapes(self, held: HeldOut) -> list[tuple[int, int]]:
        """(sequences, their tokens) of the batches in which they are evaluated, each once."""
        batches = (batch for part_SxL1 in held.parts for batch in self._batches(part_SxL1))
        return sorted({(len(part), part.shape[1]) for part, its in batches if its})

    def compile(self, params: Any, sequences: int, tokens: int) -> None:
        """The program for batches of that shape; nothing is computed, and no other process is
        needed. Of several devices. Raises whatever the model raises."""
        assert self.placement is not None
        lies = self.placement.batch(sequences)
        self.loss.compile(
            params, jax.ShapeDtypeStruct((sequences, tokens), np.int32, sharding=lies)
        )

    def batch(self, params: Any, part_SxL1: Any) -> jax.Array:
        """The mean loss of so many sequences."""
        tokens: Any = part_SxL1
        if self.placement is not None:
            lies = self.placement.batch(len(part_SxL1))
            tokens = scattered(part_SxL1, part_SxL1.dtype, lies)
        loss: jax.Array = self.loss(params, tokens)
        return loss
