"""What the figures of a run are functions of: its specification, N, the fragments' sizes and M."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from diloco_shared.budget.overhead import layout_bytes
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.optimizers import inner_state_bytes
from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import Shape, cut, shape_of, tensors

# A model of one's own until a learner tells its size: streams of a few hundred MB.
ASSUMED_PARAMETERS = 1_000_000
# And of how many tensors, where they are not known.
ASSUMED_TENSORS = 1_000
# Every tensor above twice the mean fragment is cut, so that none is larger than that
# (spec/fragmentation.py).
LARGEST_OVER_MEAN = 2
# Between two rounds of a shard, in seconds, where a run ends by the clock, until its own pace is
# known (`rounds_at`): messages and commits of a round take about as much.
ROUND_S = 0.25
# Of its time, what shows a run's pace: its first rounds, one of each fragment, end together.
PACE_S, PACE_FRACTION = 30.0, 0.05


@dataclass(frozen=True, slots=True)
class Job:
    """A run of `learners` learners; `sizes` are values per fragment."""

    spec: RunSpec
    learners: int  # M
    sizes: tuple[int, ...]
    layout: int  # bytes of a layout in a message
    state: int  # bytes of a learner's moments and counts
    shape: Shape | None = None  # of a preset
    assumed: bool = False  # nobody knows N yet
    rounds_seen: int = 0  # of a shard by its own pace, as `rounds_at` says; 0: not known yet

    @property
    def parameters(self) -> int:
        """N."""
        return sum(self.sizes)

    @property
    def largest(self) -> int:
        """Values of the largest fragment; of an unknown layout, what it is at most."""
        if self.shape is not None:
            return max(self.sizes)
        return min(self.parameters, LARGEST_OVER_MEAN * max(self.sizes))

    @property
    def rounds(self) -> int:
        """Rounds of each shard in the whole run, the last one of every fragment included."""
        budget, algorithm = self.spec.budget, self.spec.algorithm
        owned = algorithm.fragments // algorithm.shards
        if budget.seconds is not None:
            return max(int(budget.seconds / ROUND_S), self.rounds_seen) + owned
        steps = budget.steps or -(-(budget.tokens or 0) // self.spec.tokens_per_step)
        return -(-steps // algorithm.steps_per_round) + owned


class Size(NamedTuple):
    """A run as large as it is known to be: what `assumed` takes beside its specification."""

    parameters: int = 0  # N, as far as learners told it
    learners: int = 0  # M
    rounds: int = 0  # of `rounds_at`

    def at_least(self, other: "Size") -> "Size":
        """The larger of each."""
        return Size(*(max(pair) for pair in zip(self, other, strict=True)))


def learners_of(spec: RunSpec) -> int:
    """M to begin with: as many as the run waits for. `learners_max` is a limit, not a fact.

    Limits grow when more join: the leader counts again then.
    """
    return max(spec.membership.learners_min, spec.algorithm.quorum)


def rounds_at(seconds: float | None, rounds: int, fraction: float) -> int:
    """Rounds that a shard will have made in all, if `rounds` took `fraction` of its `seconds`.

    0 where `seconds` is None: any other run's are known from the beginning; and as long as its pace
    is not known. What is assumed until then is doubled until it is enough, so it seldom changes.
    """
    if seconds is None or rounds <= 0 or fraction < min(PACE_FRACTION, PACE_S / seconds):
        return 0
    first = seconds / ROUND_S
    doublings: int = math.ceil(math.log2(max(rounds / fraction / first, 1.0)))
    return math.ceil(math.ldexp(first, doublings))


def known(
    spec: RunSpec,
    *,
    learners: int | None = None,
    parameters: int | None = None,
    rounds: int = 0,
) -> Job | None:
    """The run, if its size is known. Raises WrongModel.

    `learners`, `parameters`, `rounds`: as `Size` has them, so far as they are known.
    """
    m = learners_of(spec) if learners is None else max(learners, 1)
    algorithm, optimizer = spec.algorithm, spec.inner.optimizer
    if spec.model.factory is None:
        shape = shape_of(spec.model)
        sizes, layout, state = _measured(shape, algorithm.fragments, optimizer)
        return Job(spec, m, sizes, layout, state, shape, rounds_seen=rounds)
    n = max(parameters or 0, spec.model.parameters or 0)
    return _unseen(spec, m, n, rounds) if n else None


@lru_cache(maxsize=256)  # of a thousand layers it takes a tenth of a second, and all ask for it
def _measured(shape: Shape, fragments: int, optimizer: str) -> tuple[tuple[int, ...], int, int]:
    """Values per fragment, bytes of the layout in a message, bytes of the inner state."""
    every = tensors(shape)
    sizes = cut(shape, fragments).sizes
    return sizes, layout_bytes(every), inner_state_bytes(optimizer, every)


def assumed(
    spec: RunSpec,
    *,
    learners: int | None = None,
    parameters: int | None = None,
    rounds: int = 0,
) -> Job:
    """`known`, or the same run of a modest model until learners say how large theirs is."""
    found = known(spec, learners=learners, parameters=parameters, rounds=rounds)
    if found is not None:
        return found
    m = learners_of(spec) if learners is None else max(learners, 1)
    return _unseen(spec, m, ASSUMED_PARAMETERS, rounds, assumed=True)


def _unseen(
    spec: RunSpec, learners: int, parameters: int, rounds: int, *, assumed: bool = False
) -> Job:
    """N values in fragments of whose sizes only the sum is known."""
    count = spec.algorithm.fragments
    sizes = tuple(parameters * (p + 1) // count - parameters * p // count for p in range(count))
    whole = TensorSpec(name="unknown", shape=(parameters,), embedding=False)
    state = inner_state_bytes(spec.inner.optimizer, (whole,))
    named = TensorSpec(name="x" * 60, shape=(1,), embedding=False)
    layout = layout_bytes((named,)) * ASSUMED_TENSORS
    return Job(spec, learners, sizes, layout, state, None, assumed, rounds)
