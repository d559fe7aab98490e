"""A learner's computation that computes nothing: for when things happen, not what is learned.

Fleets of it take a fraction of the time; who is merged when is the same to the last round, unless
a norm outlier is refused.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from diloco_shared.config import RunSpec
from diloco_shared.numerics import codec
from diloco_shared.numerics.fragments import Layout
from diloco_shared.protocol.messages import Cursor, TensorSpec

Values = NDArray[np.float32]
# Values of each fragment.
SIZE = 8


def layout_of(fragments: int) -> Layout:
    """One small tensor per fragment."""
    names = [f"t{p:03d}" for p in range(fragments)]
    return Layout.build(
        [TensorSpec(name=n, shape=(SIZE,), embedding=False) for n in names], fragments
    )


class IdleTrainer:
    """Behind the simulator's interface of a trainer."""

    def __init__(self, spec: RunSpec, stepped: Callable[[], None]) -> None:
        self.layout = layout_of(spec.algorithm.fragments)
        self.codec = spec.algorithm.codec_up
        self.tokens = spec.tokens_per_step
        self.stepped = stepped
        self.steps = 0
        self.adopted_at = [0] * spec.algorithm.fragments

    def initial_fragments(self) -> list[Values]:
        return [np.zeros(size, np.float32) for size in self.layout.sizes]

    def step(self, rate: float) -> tuple[int, float]:
        self.steps += 1
        self.stepped()
        return self.tokens, math.nan

    @property
    def cursor(self) -> Cursor | None:
        return None

    def adopt(self, p: int, anchor_F: Values) -> None:
        self.adopted_at[p] = self.steps

    def contribution(self, p: int, round_: int) -> bytes:
        """As long as a random walk of so many steps: no norm is an outlier."""
        length = math.sqrt(self.steps - self.adopted_at[p])
        return codec.encode(self.codec, np.full(self.layout.sizes[p], length, np.float32))

    def decided(self, p: int, round_: int, *, merged: bool) -> None:
        """Nothing is withheld, so nothing is owed."""

    def inner_state(self) -> bytes:
        return b"idle"

    def load_inner_state(self, data: bytes) -> None:
        """There are no moments."""
