"""A learner's computation that computes nothing: for when things happen, not what is learned.

Fleets of it take a fraction of the time; who is merged when is the same to the last round, unless
a norm outlier is refused.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from diloco_learner.recovery import moments
from diloco_learner.training.evaluate import HeldOut, Losses, always
from diloco_learner.training.trainer import Published
from diloco_shared.numerics import codec
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_simulator.worlds.computing import Loss, Sent, VirtualProgram, VirtualTrainer

Values = NDArray[np.float32]
# Values of each fragment.
SIZE = 8
# Of a learner without moments.
NOTHING = save({"moments": np.zeros(1, np.int64)})


def layout_of(fragments: int) -> Layout:
    """One small tensor per fragment."""
    names = [f"t{p:03d}" for p in range(fragments)]
    return Layout.build(
        [TensorSpec(name=n, shape=(SIZE,), embedding=False) for n in names], fragments
    )


def idle(spec: RunSpec) -> RunSpec:
    """The same run of that model: of a preset the syncer knows the tensors."""
    size = sum(layout_of(spec.algorithm.fragments).sizes)
    own = {"factory": "idle:nothing", "parameters": size}
    return spec.model_copy(update={"model": spec.model.model_copy(update=own)})


class IdleTrainer(VirtualTrainer):
    """Without the tiny quadratic; `stepped` is called at every step."""

    def __init__(self, spec: RunSpec, stepped: Callable[[], None]) -> None:
        self.program = VirtualProgram(spec, layout_of(spec.algorithm.fragments))
        self.inner_state_bytes = len(NOTHING)
        self.stepped = stepped
        self.steps = 0
        self.adopted_at = [0] * spec.algorithm.fragments
        self.adopted: dict[int, Values] = {}

    def fragment(self, p: int) -> Values:
        """As it was adopted: steps change nothing."""
        zeros_F = np.zeros(self.program.layout.sizes[p], np.float32)
        return self.adopted.get(p, zeros_F)

    def step(self, tokens_BxL1: NDArray[Any], rate: float, *, poisoned: bool = False) -> Loss:
        """Count the step; the loss is 0. Nobody looks at the tokens, of shape (B, L + 1)."""
        self.steps += 1
        self.stepped()
        return Loss(0.0)

    def adopt(self, p: int, anchor_F: Values, alpha: float) -> None:
        self.adopted_at[p], self.adopted[p] = self.steps, anchor_F

    def contribution(self, p: int, round_: int) -> Sent:
        """As long as a random walk of so many steps: no norm is an outlier."""
        length = math.sqrt(self.steps - self.adopted_at[p])
        values_F = np.full(self.program.layout.sizes[p], length, np.float32)
        return Sent(codec.encode(self.program.spec.algorithm.codec_up, values_F))

    def decided(self, p: int, round_: int, *, merged: bool) -> None:
        """Nothing is withheld, so nothing is owed."""

    def published(self, *, alone: bool = False) -> Published:
        return Published(self.adopted.values())

    def evaluate(
        self, published: Published, held: HeldOut, wanted: Callable[[], bool] = always
    ) -> Losses:
        return Losses(0.0)

    def inner_state(self) -> memoryview:
        return memoryview(NOTHING)

    def inner_state_pieces(self) -> list[bytes]:
        return [NOTHING]

    def check_inner_state(self, data: moments.State) -> None:
        """It says nothing."""

    def load_inner_state(self, data: moments.State) -> None:
        """There are no moments."""
