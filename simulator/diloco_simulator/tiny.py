"""A learner's computation small enough for thousands of worlds: a noisy quadratic.

Every learner pulls towards its own target, so that only a merge finds the common one.
"""

import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from diloco_learner.encoding import feeds_back
from diloco_learner.feedback import Feedback
from diloco_shared.numerics import codec
from diloco_shared.numerics.fragments import Layout
from diloco_shared.protocol.messages import Cursor, TensorSpec

Values = NDArray[np.float32]

TENSORS = (
    TensorSpec(name="a", shape=(6, 2), embedding=False),
    TensorSpec(name="b", shape=(7,), embedding=False),
    TensorSpec(name="c", shape=(5,), embedding=True),
    TensorSpec(name="d", shape=(3, 2), embedding=False),
)
# Of that many the first: a tensor more than that only where there are more fragments.
TENSORS_MIN = 3


def tensors_of(fragments: int) -> tuple[TensorSpec, ...]:
    """Of a model that is cut into so many fragments."""
    return TENSORS[: max(fragments, TENSORS_MIN)]


class Computation(Protocol):
    """What a simulated learner needs of a trainer."""

    layout: Any

    def initial_fragments(self) -> list[Values]: ...
    def step(self, rate: float) -> tuple[int, float]: ...
    @property
    def cursor(self) -> Cursor | None: ...
    def adopt(self, p: int, anchor_F: Values) -> None: ...
    def contribution(self, p: int, round_: int) -> bytes: ...
    def decided(self, p: int, round_: int, *, merged: bool) -> None: ...
    def inner_state(self) -> bytes: ...
    def load_inner_state(self, data: bytes) -> None: ...


class TinyTrainer:
    """Parameters are one fp32 vector per fragment."""

    def __init__(
        self,
        fragments: int,
        learner: int,
        seed: int,
        tokens: int,
        codec_up: str,
        report: Callable[[str, str], None] = lambda invariant, text: None,
    ) -> None:
        self.report = report
        self.layout = Layout.build(tensors_of(fragments), fragments)
        self.codec = codec_up
        self.feedback = [Feedback(np.zeros(n, np.float32)) for n in self.layout.sizes]
        # What merged contributions should have given and did not, by a second way to count; and
        # what those that are undecided would add, by round.
        self.owed = [np.zeros(n) for n in self.layout.sizes]
        self.undecided: list[dict[int, Values]] = [{} for _ in self.layout.sizes]
        rng = np.random.default_rng([seed, 7])
        self.theta = [rng.normal(size=n).astype(np.float32) for n in self.layout.sizes]
        own = np.random.default_rng([seed, learner])
        self.target = [own.normal(size=n).astype(np.float32) for n in self.layout.sizes]
        self.anchors = [x.copy() for x in self.theta]
        self.moments = 0  # stands for inner moments: steps they have seen
        self.tokens = tokens
        self.consumed = 0
        self.noise = random.Random(f"{seed}/{learner}")

    def initial_fragments(self) -> list[Values]:
        return [x.copy() for x in self.theta]

    def step(self, rate: float) -> tuple[int, float]:
        """(tokens, loss)."""
        for x, target in zip(self.theta, self.target, strict=True):
            x += np.float32(0.1) * (target - x) + np.float32(self.noise.gauss(0, 0.01))
        self.moments += 1
        self.consumed += 1
        return self.tokens, float(sum(abs(x).sum() for x in self.theta))

    @property
    def cursor(self) -> Cursor:
        return Cursor(shard=0, sequences=self.consumed)

    def adopt(self, p: int, anchor_F: Values) -> None:
        self.anchors[p] = anchor_F
        self.theta[p] = anchor_F.copy()

    def contribution(self, p: int, round_: int) -> bytes:
        feedback = self.feedback[p]
        meant_F = values_F = self.anchors[p] - self.theta[p]
        if feeds_back(self.codec):
            values_F = values_F + feedback.residual
        payload = codec.encode(self.codec, values_F)
        given_F = codec.decode(self.codec, payload, values_F.size)
        feedback.sent(round_, values_F - given_F)
        self.undecided[p][round_] = meant_F - given_F
        return payload

    def decided(self, p: int, round_: int, *, merged: bool) -> None:
        feedback, difference_F = self.feedback[p], self.undecided[p].pop(round_, None)
        if merged and difference_F is not None and round_ in feedback.pending:
            self.owed[p] += difference_F
        feedback.decided(round_, merged)
        off = float(np.abs(feedback.residual - self.owed[p]).max())
        if feeds_back(self.codec) and off > 1e-3:
            self.report(
                "I9", f"a residual of fragment {p} is off by {off:.2g} after round {round_}"
            )

    def inner_state(self) -> bytes:
        return save({"moments": np.array([self.moments])})

    def load_inner_state(self, data: bytes) -> None:
        self.moments = int(load(data)["moments"][0])
