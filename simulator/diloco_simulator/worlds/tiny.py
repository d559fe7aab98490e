"""A learner's computation small enough for thousands of worlds: a noisy quadratic.

Every learner pulls towards its own target, so that only a merge finds the common one.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from diloco_learner.exchange.encoding import Feedback, feeds_back
from diloco_shared.numerics import codec
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.codecs import bytes_of
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_simulator.worlds.options import Options

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


@dataclass(frozen=True, slots=True)
class Part:
    """Of every fragment, what one of the `hosts` of an island holds; they are counted from 0."""

    index: int = 0
    hosts: int = 1

    def of(self, size: int) -> slice:
        """Of so many values: all hosts' parts, one after another, are the whole."""
        return slice(size * self.index // self.hosts, size * (self.index + 1) // self.hosts)


WHOLE = Part()


class TinyTrainer:
    """Parameters are one fp32 vector per fragment."""

    def __init__(
        self,
        fragments: int,
        learner: int,
        seed: int,
        codec_up: str,
        report: Callable[[str, str], None] = lambda invariant, text: None,
        part: Part = WHOLE,
    ) -> None:
        """`part`: of an island's host, which computes with its part of every fragment alone."""
        self.report = report
        self.layout = Layout.build(tensors_of(fragments), fragments)
        self.spans = [part.of(n) for n in self.layout.sizes]
        self.codec = codec_up
        own_sizes = [s.stop - s.start for s in self.spans]
        self.feedback = [Feedback(np.zeros(n, np.float32)) for n in own_sizes]
        # What merged contributions should have given and did not, by a second way to count; and
        # what those that are undecided would add, by round.
        self.owed = [np.zeros(n) for n in own_sizes]
        self.undecided: list[dict[int, Values]] = [{} for _ in self.layout.sizes]
        self.theta = self._normal(np.random.default_rng([seed, 7]))
        self.target = self._normal(np.random.default_rng([seed, learner]))
        self.anchors = [x.copy() for x in self.theta]
        self.moments = 0  # stands for inner moments: steps they have seen
        self.consumed = 0
        self.noise = random.Random(f"{seed}/{learner}")

    def _normal(self, rng: np.random.Generator) -> list[Values]:
        """Drawn for the whole, however it is shared."""
        drawn = [rng.normal(size=n).astype(np.float32) for n in self.layout.sizes]
        return [x[s].copy() for x, s in zip(drawn, self.spans, strict=True)]

    def step(self, rate: float) -> float:
        """The loss."""
        for x, target in zip(self.theta, self.target, strict=True):
            x += np.float32(0.1) * (target - x) + np.float32(self.noise.gauss(0, 0.01))
        self.moments += 1
        self.consumed += 1
        return float(sum(abs(x).sum() for x in self.theta))

    def adopt(self, p: int, anchor_F: Values, alpha: float) -> None:
        """Overwrite, or keep that share of its own."""
        self.anchors[p] = anchor_F
        share = np.float32(alpha)
        self.theta[p] = share * self.theta[p] + (1 - share) * anchor_F if alpha else anchor_F.copy()

    def contribution(self, p: int, round_: int) -> bytes:
        """Of the whole fragment; its error is owed once the contribution is merged."""
        return self.sent(p, round_, self.gives(p))

    def gives(self, p: int) -> Values:
        """Of the next contribution of a fragment, what is to be encoded."""
        values_F: Values = self.anchors[p] - self.theta[p]
        return values_F + self.feedback[p].residual if feeds_back(self.codec) else values_F

    def sent(self, p: int, round_: int, whole_F: Values) -> bytes:
        """Encoded for that round: `gives` of all parts together."""
        meant_F, values_F = self.anchors[p] - self.theta[p], self.gives(p)
        payload = codec.encode(self.codec, whole_F)
        given_F = codec.decode(self.codec, payload, whole_F.size)[self.spans[p]]
        self.feedback[p].sent(round_, values_F - given_F)
        self.undecided[p][round_] = meant_F - given_F
        return payload

    def decided(self, p: int, round_: int, *, merged: bool) -> None:
        """Whether that round merged the contribution. Reports I9 for a residual of other values."""
        feedback, difference_F = self.feedback[p], self.undecided[p].pop(round_, None)
        if merged and difference_F is not None and round_ in feedback.pending:
            self.owed[p] += difference_F
        feedback.decided(round_, merged)
        off = float(np.abs(feedback.residual - self.owed[p]).max(initial=0.0))
        if feeds_back(self.codec) and off > 1e-3:
            self.report(
                "I9", f"a residual of fragment {p} is off by {off:.2g} after round {round_}"
            )

    def inner_state(self) -> bytes:
        """The number of steps, as safetensors."""
        return save({"moments": np.array([self.moments])})

    def load_inner_state(self, data: bytes) -> None:
        """Take over the number of steps that a donor has taken."""
        self.moments = int(load(data)["moments"][0])


# --------------------------------------------------------------------------------------------------
# The run of a world, as its user submits it.


def spec_of(options: Options, seed: int) -> RunSpec:
    """Small: some dozen steps of a second, leases of seconds."""
    return RunSpec.model_validate(
        {
            "name": "sim",
            "seed": seed,
            "algorithm": {
                "fragments": options.fragments,
                # Divisible by the number of fragments, and several steps of a slow learner.
                "sync_every_steps": 8 if options.fragments == 4 else 6,
                "shards": options.shards,
                "overlap_steps": options.overlap_steps,
                "quorum": options.quorum,
                "keyframe_every": options.keyframe_every,
                "codec_up": options.codec_up,
                "merge": options.merge,
                "weighting": options.weighting,
                "alpha": options.alpha,
                "codec_down": options.codec_down,
                "pull_timeout_s_min": 3.0,
                # Few enough that there are outliers in runs as short as these.
                "outlier_samples_min": 8,
            },
            "membership": {
                "learners_min": options.learners,
                "learners_max": options.learners + options.learners_spare,
                "lease_s": 5.0,
                "heartbeat_s": 1.0,
            },
            "keeping": {
                "snapshot_every_rounds": options.snapshot_every_rounds,
                "begin_again_after_s": 13.0,  # longer than most processes are away
                "checkpoint_every_steps": 10,
                "run_checkpoint_every_steps": options.checkpoint_every_steps,
            },
            "budget": _budget(options),
        }
    )


def payloads_least(spec: RunSpec, learners: int) -> int:
    """Bytes of encoded values that its syncers must be able to hold at once: a shard's initial
    parameters, and an answer of everybody in one round."""
    a = spec.algorithm
    sizes = Layout.build(tensors_of(a.fragments), a.fragments).sizes
    initial = max(
        sum(bytes_of("fp32", sizes[p]) for p in a.owned(shard)) for shard in range(a.shards)
    )
    return max(initial, learners * bytes_of(a.codec_up, max(sizes)))


def _budget(options: Options) -> dict[str, float]:
    """About as many steps, whatever it is counted in: 512 tokens a step, a step a second."""
    amounts = {
        "steps": options.steps,
        "tokens": options.steps * 512 * options.learners,
        "seconds": options.steps * options.step_s,
    }
    return {options.budget: amounts[options.budget]}
