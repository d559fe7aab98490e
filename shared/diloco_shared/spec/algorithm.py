"""Decoupled DiLoCo's own settings, and what all settings have in common: limits and the base."""

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from diloco_shared.spec.codecs import NAMES
from diloco_shared.spec.merge_rules import named
from diloco_shared.spec.optimizers import known

if TYPE_CHECKING:  # a type checker takes no names from a table
    Codec = str
else:
    Codec = Literal[NAMES]
# Syncer shards: each is a host with a leader, standbys and a tape; every learner hears them all.
SHARDS_MAX = 64
# Limits that no run in earnest comes near; beyond them, sums and clocks overflow somewhere.
STEPS_MAX = 10**12  # steps, rounds or versions: a step a millisecond for thirty years
SECONDS_MAX = 10**9  # thirty years
DAY_S = 86_400  # of waiting for somebody who is silent
RATE_MAX = 1e3  # of learning, decay or change: the parameters leave every number behind
BATCH_MAX = 1 << 20  # sequences, or parts, of one step
# A tape record names every learner, with 640 bytes, in a message of 1 MiB.
LEARNERS_MAX = 1024
# Learners that a run takes, dead ones included until they are forgotten: what the largest messages
# hold (a record's verdicts, a beat, the status) stays well below NATS' default limit of 1 MB. More
# of them are refused at submission, for records of before may name as many as LEARNERS_MAX.
MEMBERS_MAX = 512
# What a contribution weighs: tokens^2 / steps, tokens, or as much as any other.
Weighting = Literal["quality", "tokens", "equal"]

# What trades against each other is fixed together. `long`: with RDA and outer momentum the best
# inner rate is about half of data-parallel's. `short`: few rounds, where momentum over-drives.
PRESETS: dict[str, dict[str, Any]] = {
    "long": {
        "merge": "rda",
        "outer_rate": 0.7,
        "outer_momentum": 0.8,
        "outer_settle_from": 0.7,
        "sync_every_steps": 24,
        "inner_rate_factor": 0.5,
    },
    "short": {
        "merge": "mean",
        "outer_rate": 1.0,
        "outer_momentum": 0.0,
        "sync_every_steps": 6,
        "inner_rate_factor": 1.0,
    },
}


def keyframe_turns(keyframe_every: int) -> int:
    """Turns in a row that share the fragments' keyframes; of the others none has any."""
    return max(keyframe_every // 4, 1)


class Spec(BaseModel):
    """Base of all configuration: immutable, and an unknown key is a fault."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Algorithm(Spec):
    """Decoupled DiLoCo's own settings (paper sections 2 and 3)."""

    preset: Literal["long", "short"] = Field(
        "long",
        description="Fixes merge, outer_rate, outer_momentum, outer_settle_from, "
        "sync_every_steps and inner_rate_factor.",
    )
    fragments: int = Field(
        6,
        ge=1,
        le=512,
        description="Parts that the parameters are cut into (P in the paper, "
        "which takes 24). Six suit small models.",
    )
    shards: int = Field(
        1,
        ge=1,
        le=SHARDS_MAX,
        description="Syncer shards (S): shard s owns the fragments p with p mod S = s, and has its "
        "own leader, standbys and tape. 1 unless one process cannot merge or hold all.",
    )
    sync_every_steps: int = Field(
        ge=1,
        le=STEPS_MAX,
        description="Inner steps between two merges of a fragment (H in the paper).",
    )
    overlap_steps: int = Field(
        2,
        ge=0,
        le=STEPS_MAX,
        description="Steps that a merge may overlap with training (tau in the paper, which takes "
        "2).",
    )
    quorum: int = Field(
        1,
        ge=1,
        le=LEARNERS_MAX,
        description="Contributions that a merge needs (K in the paper, which takes 1).",
    )
    grace_factor: float = Field(
        0.8,
        ge=0,
        le=1,
        description="Share of its slack, the time to spare until its result is needed, that a "
        "round waits for late learners (gamma of the paper's Eq. 3, which gives no value). Below 1 "
        "it leaves a margin.",
    )
    grace_s_max: float = Field(
        60.0,
        ge=0,
        le=DAY_S,
        description="Limit in seconds on that wait, the grace window, whatever Eq. 3 gives.",
    )
    merge: str = Field(
        description="How contributions become one. The paper's (section 3.5): 'rda', with the mean "
        "for embeddings, and 'mean'. Where learners may lie: 'clipped' (rda with no length above "
        "the median), 'trimmed' (each coordinate's mean without the outermost fifths) or 'median'; "
        "these count no weight beyond twice the median. Or another rule of spec/merge_rules.py."
    )
    weighting: Weighting = Field(
        "quality",
        description="A contribution's weight in a merge: tokens times tokens per step (the "
        "paper's), 'tokens', or 'equal'.",
    )
    outer_optimizer: str = Field(
        "nesterov",
        description="'nesterov', or an optax optimizer by name.",
    )
    outer_rate: float = Field(
        gt=0, le=RATE_MAX, description="Learning rate of the outer optimizer (eta in the paper)."
    )
    outer_momentum: float = Field(
        ge=0, lt=1, description="Momentum of the outer optimizer (mu in the paper)."
    )
    outer_settle_from: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the budget from which the outer rate goes to 1, the momentum to 0 "
        "and what RDA adds to the length of a mean as well, linearly until the end: the last "
        "merges are plain averages. 1: never.",
    )
    alpha: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of its own parameters that a learner keeps when it takes "
        "merged ones (alpha in the paper); 0 overwrites them.",
    )
    codec_up: Codec = Field(
        "bf16",
        description="Wire format of contributions. Below 16 bits see error_feedback.",
    )
    error_feedback: bool = Field(
        True,
        description="Give with the next contribution what a codec below 16 bits withheld from "
        "the last merged one; costs a learner 4 bytes of device memory per parameter.",
    )
    codec_down: Codec = Field(
        "bf16", description="Wire format of publication deltas; the next one makes up its error."
    )
    keyframe_every: int = Field(
        16,
        ge=1,
        le=10_000,
        description="Versions between keyframes: bounds what a joiner must read.",
    )
    keyframe_codec: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Wire format of keyframes: whole parameters, which fewer bits would spoil.",
    )
    staleness_max: int = Field(
        1,
        ge=0,
        le=1,
        description="Versions that the parameters a contribution began from may be behind.",
    )
    outlier_z_max: float = Field(
        6.0,
        gt=0,
        le=1e6,
        description="A contribution is an outlier above this robust z-score of its norm "
        "(one-sided).",
    )
    outlier_samples_min: int = Field(
        20, ge=4, le=10_000, description="Norms that must have been seen before any is an outlier."
    )
    pull_timeout_s_min: float = Field(
        2.0,
        gt=0,
        le=DAY_S,
        description="Least time a learner has to answer: covers a scheduling hiccup.",
    )
    pull_timeout_s_max: float = Field(
        300.0,
        gt=0,
        le=DAY_S,
        description="Limit on the doubling of the pull timeout after skipped rounds.",
    )
    inner_rate_factor: float = Field(
        gt=0,
        le=RATE_MAX,
        description="What the learning rate of data-parallel training is multiplied by for "
        "learners.",
    )

    @field_validator("merge")
    @classmethod
    def _merge(cls, name: str) -> str:
        named(name)
        return name

    @field_validator("outer_optimizer")
    @classmethod
    def _optimizer(cls, name: str) -> str:
        return known(name, "nesterov")

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, data: Any) -> Any:
        if isinstance(data, dict):
            preset = PRESETS.get(str(data.get("preset", "long")), {})
            if data.get("outer_optimizer", "nesterov") != "nesterov":
                preset = preset | {"outer_settle_from": 1.0}  # only that one settles
            return {**preset, **data}
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sync_every_steps % self.fragments:
            raise ValueError(
                f"sync_every_steps ({self.sync_every_steps}) must be a multiple of fragments "
                f"({self.fragments}), so that every fragment comes round every H steps"
            )
        if self.outer_settle_from < 1 and self.outer_optimizer != "nesterov":
            raise ValueError(
                f"outer_settle_from ({self.outer_settle_from:g}) is for the outer optimizer "
                f"'nesterov'; with '{self.outer_optimizer}' leave it out"
            )
        if self.fragments % self.shards:
            raise ValueError(
                f"fragments ({self.fragments}) must be a multiple of shards ({self.shards}), so "
                "that every shard owns as many"
            )
        if self.pull_timeout_s_max < self.pull_timeout_s_min:
            raise ValueError("pull_timeout_s_max must not be below pull_timeout_s_min")
        return self

    @property
    def steps_per_round(self) -> int:
        """Inner steps between the openings of two rounds of a shard: H / F, F = P / S."""
        return self.sync_every_steps * self.shards // self.fragments

    @property
    def rounds_in_flight_max(self) -> int:
        """D = max(1, ceil(tau * F / H)) of each shard, which owns F = P / S fragments."""
        owned = self.fragments // self.shards
        return max(1, -(-self.overlap_steps * owned // self.sync_every_steps))

    def deltas_since(self, fragment: int, version: int) -> int:
        """How many versions a fragment's version is behind its keyframe; 0: it is one.

        Fragments have theirs in a quarter of the turns: if all had it in one, that turn would carry
        the whole model in fp32, and take several times as long as the others. In the other turns
        there are versions that can be had of every fragment, which an export may name.
        """
        if version <= 0:
            return 0  # the first one is whole
        turns = keyframe_turns(self.keyframe_every)
        return min((version + fragment % turns) % self.keyframe_every, version)

    def owned(self, shard: int) -> tuple[int, ...]:
        """Fragments of one shard, in the order of its rounds."""
        return tuple(range(shard, self.fragments, self.shards))
