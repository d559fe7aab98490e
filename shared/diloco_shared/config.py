"""One run's specification: algorithm, model, data, inner optimizer and budget.

Frozen pydantic models with units in names. Every default carries its reason in the field's
description, which `diloco config --explain` prints.
"""

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from diloco_shared.ids import Id
from diloco_shared.optimizers import known

Codec = Literal["fp32", "bf16", "int8", "int4", "e3m0"]
# Syncer shards: each is a host with a leader, standbys and a tape; every learner hears them all.
SHARDS_MAX = 64
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


class Spec(BaseModel):
    """Base of all configuration: immutable, and an unknown key is a fault."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Algorithm(Spec):
    """Decoupled DiLoCo's own settings (paper sections 2 and 3)."""

    preset: Literal["long", "short"] = Field(
        "long", description="Fixes merge, outer rate and momentum, H and the inner rate factor."
    )
    fragments: int = Field(6, ge=1, le=512, description="P. Six suit small models; the paper: 24.")
    shards: int = Field(
        1,
        ge=1,
        le=SHARDS_MAX,
        description="S: shard s of the syncer owns the fragments p with p mod S = s, and has "
        "its own leader, standbys and tape. 1 unless one process cannot merge or hold all.",
    )
    sync_every_steps: int = Field(ge=1, description="H: each fragment is merged every H steps.")
    overlap_steps: int = Field(
        2, ge=0, description="tau: steps a merge may overlap with training. 2 is the paper's."
    )
    quorum: int = Field(1, ge=1, description="K: contributions a merge needs. 1 is the paper's.")
    grace_factor: float = Field(
        0.8, ge=0, le=1, description="gamma of Eq. 3, below 1 as a safety margin; unpublished."
    )
    grace_s_max: float = Field(
        60.0, ge=0, description="Limit on the grace window in seconds, whatever Eq. 3 gives."
    )
    merge: Literal["rda", "mean"] = Field(description="Merge of all but embeddings (section 3.5).")
    weighting: Weighting = Field(
        "quality",
        description="A contribution's weight in a merge: tokens times tokens per step (the "
        "paper's), 'tokens', or 'equal'.",
    )
    outer_optimizer: str = Field(
        "nesterov",
        description="'nesterov', or an optax optimizer by name.",
    )
    outer_rate: float = Field(gt=0, description="eta of the outer optimizer.")
    outer_momentum: float = Field(ge=0, lt=1, description="mu of the outer optimizer.")
    outer_settle_from: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the budget from which the outer rate goes to 1, the momentum to 0 "
        "and what RDA adds to the length of a mean as well, linearly until the end: the last "
        "merges are plain averages. 1: never.",
    )
    alpha: float = Field(
        0.0, ge=0, lt=1, description="Share of own parameters kept on adoption; 0 overwrites."
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
        16, ge=1, description="Versions between keyframes: bounds what a joiner must read."
    )
    keyframe_codec: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Wire format of keyframes: whole parameters, which fewer bits would spoil.",
    )
    staleness_max: int = Field(1, ge=0, le=1, description="Versions a base may be behind.")
    outlier_z_max: float = Field(
        6.0, gt=0, description="One-sided robust z-score above which a norm is an outlier."
    )
    outlier_samples_min: int = Field(20, ge=4, description="Norms seen before any is an outlier.")
    pull_timeout_s_min: float = Field(
        2.0, gt=0, description="Least time a learner has to answer: covers a scheduling hiccup."
    )
    pull_timeout_s_max: float = Field(
        300.0, gt=0, description="Limit on the doubling of the pull timeout after skipped rounds."
    )
    inner_rate_factor: float = Field(
        gt=0, description="Factor from the data-parallel inner rate to this run's."
    )

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

    def owned(self, shard: int) -> tuple[int, ...]:
        """Fragments of one shard, in the order of its rounds."""
        return tuple(range(shard, self.fragments, self.shards))


class Model(Spec):
    """A decoder-only transformer by preset or by shape, or your own by `module:factory`."""

    preset: str = Field("nano", description="Named shape; 'nano' has 0.1M parameters.")
    factory: str | None = Field(
        None, description="module:factory of your own model; replaces preset."
    )
    overrides: dict[str, int | float | str | bool] = Field(
        default_factory=dict, description="Fields of the preset's shape to change."
    )
    context_tokens: int = Field(64, ge=2, description="Tokens per sequence.")


class Data(Spec):
    """The corpus and how it is cut into virtual shards."""

    source: str = Field(
        "stdlib",
        description="'stdlib' (source code of the running Python), or a folder or file of text.",
    )
    tokenizer: str = Field("bytes", description="'bytes' needs no download.")
    virtual_shards: int = Field(
        64, ge=1, le=65536, description="Leases are per shard; many keep joins fair."
    )
    validation_fraction: float = Field(
        0.05, gt=0, lt=0.5, description="Share of files held out for validation; as much for test."
    )


class Inner(Spec):
    """The inner optimizer of every learner."""

    optimizer: str = Field(
        "adamw", description="'adamw', 'muon', or another optax optimizer by name."
    )
    learning_rate: float = Field(
        1.6e-2, gt=0, description="Peak rate of *data-parallel* training of this model."
    )
    b1: float = Field(0.9, ge=0, lt=1, description="First-moment decay.")
    b2: float = Field(
        0.99,
        ge=0,
        lt=1,
        description="Second-moment decay. A learner's own batches are small, so that it remembers "
        "more of them than the 0.95 of large ones.",
    )
    weight_decay: float = Field(0.1, ge=0, description="Decoupled decay of matrices.")
    clip_norm: float = Field(1.0, gt=0, description="Global gradient norm limit.")
    warmup_steps: int = Field(100, ge=0, description="Linear warm-up, in steps of the run.")
    final_fraction: float = Field(
        0.05, ge=0, le=1, description="Rate at the end over the peak (cosine)."
    )
    batch_sequences: int = Field(8, ge=1, description="Sequences per learner and inner step.")
    accumulation: int = Field(1, ge=1, description="Gradient accumulation within a step.")

    @field_validator("optimizer")
    @classmethod
    def _optimizer(cls, name: str) -> str:
        return known(name, "muon")


class Budget(Spec):
    """When the run ends: exactly one of the three."""

    steps: int | None = Field(None, ge=1, description="Inner steps per learner of the run.")
    tokens: int | None = Field(None, ge=1, description="Tokens processed by all learners.")
    seconds: float | None = Field(None, gt=0, description="Seconds since the first round.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [k for k in ("steps", "tokens", "seconds") if getattr(self, k) is not None]
        if len(given) != 1:
            named = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of steps, tokens, seconds (given: {named})")
        return self


class Membership(Spec):
    """Who may work for the run, and how soon silence counts."""

    learners_min: int = Field(1, ge=1, description="Joined learners needed before the first step.")
    learners_max: int = Field(64, ge=1, description="Learners assigned at most.")
    lease_s: float = Field(
        5.0, gt=0, description="Silence after which a learner is not live; covers a long compile."
    )
    heartbeat_s: float = Field(
        1.0, gt=0, description="Progress is sent at least this often: a fifth of the lease."
    )
    syncers: int = Field(
        2, ge=1, le=16, description="Syncers assigned at most: a leader, and standbys."
    )
    leader_lease_s: float = Field(
        3.0,
        ge=0.5,
        description="A leader silent for so long is replaced; two of three renewals may be lost.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.learners_min > self.learners_max:
            raise ValueError("learners_min must not exceed learners_max")
        if self.heartbeat_s * 2 > self.lease_s:
            raise ValueError("heartbeat_s must be at most half of lease_s")
        return self


class Evaluation(Spec):
    """Validation loss of the published parameters."""

    every_steps: int = Field(96, ge=1, description="Steps of the run between two evaluations.")
    sequences: int = Field(256, ge=1, description="Held-out sequences per evaluation.")


class Keeping(Spec):
    """What is kept, and for how long."""

    checkpoint_every_steps: int = Field(480, ge=1, description="Learner checkpoint interval.")
    checkpoints: int = Field(2, ge=1, description="Checkpoints kept per learner.")
    snapshot_every_rounds: int = Field(
        24, ge=1, description="Syncer snapshot interval: bounds replay and kept contributions."
    )
    contributions: Literal["until_snapshot", "all"] = Field(
        "until_snapshot", description="'all' allows a full replay of the run."
    )
    run_checkpoint_every_steps: int | None = Field(
        None, ge=1, description="Run-wide checkpoint interval in steps; none: when asked for."
    )
    run_checkpoints: int = Field(3, ge=1, description="Run-wide checkpoints kept.")
    run_checkpoint_root: str = Field(
        "",
        description="Where run-wide checkpoints go: a folder that every process of the run "
        "reaches, or file://, gs://, s3://. Empty: where each process was told to keep them.",
    )
    stream_bytes_max: int = Field(
        2 << 30, ge=1 << 20, description="Limit of each of the run's streams in bytes."
    )


class RunSpec(Spec):
    """One run, whole. `checking.load` reads it from a file's text."""

    name: Id = Field(description="The run's name, in subjects, keys and file names.")
    id: str = Field(
        "",
        pattern=r"^[0-9a-f]{0,16}$",
        description="Given at submission: tells a run from an earlier one of its name.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seeds parameters, data order and samples.")
    algorithm: Algorithm = Field(default_factory=lambda: Algorithm.model_validate({}))
    model: Model = Field(default_factory=Model)
    data: Data = Field(default_factory=Data)
    inner: Inner = Field(default_factory=Inner)
    membership: Membership = Field(default_factory=Membership)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    keeping: Keeping = Field(default_factory=Keeping)
    budget: Budget

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.algorithm.quorum > self.membership.learners_max:
            raise ValueError(
                f"algorithm.quorum ({self.algorithm.quorum}) exceeds membership.learners_max "
                f"({self.membership.learners_max}): no round could ever commit"
            )
        return self

    @property
    def folder(self) -> str:
        """Name of this run's folders: no other run's, and no earlier one's of this name."""
        return f"{self.name}.{self.id}" if self.id else self.name

    @property
    def inner_rate(self) -> float:
        """Peak inner learning rate of the learners of this run."""
        return self.inner.learning_rate * self.algorithm.inner_rate_factor

    @property
    def tokens_per_step(self) -> int:
        """Tokens one learner processes in one inner step as declared here."""
        return self.inner.batch_sequences * self.inner.accumulation * self.model.context_tokens


def shared_keys(spec: RunSpec) -> dict[str, str]:
    """Flat `path -> JSON value` of what all members of a run must agree on.

    The run's id is among them: what comes of a deleted run of the same name is refused. A learner's
    own batch size is left out: the weights account for it. So is what only the syncer uses to
    decide when to stop.
    """
    view = spec.model_dump(
        mode="json",
        include={"name", "id", "seed", "algorithm", "model", "data"},
        exclude={"algorithm": {"quorum"}},
    )
    return dict(_flatten("", view))


def _flatten(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [kv for k in sorted(value) for kv in _flatten(f"{prefix}.{k}".strip("."), value[k])]
    return [(prefix, json.dumps(value, sort_keys=True))]


def config_hash(spec: RunSpec) -> str:
    """SHA-256 (first 32 hex digits) over `shared_keys`."""
    text = json.dumps(shared_keys(spec), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def differing_keys(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Sorted descriptions `path: ours X, theirs Y` of every difference."""
    return [
        f"{key}: here {ours.get(key, 'absent')}, there {theirs.get(key, 'absent')}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]
