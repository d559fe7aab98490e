"""One run's specification: algorithm, model, data, inner optimizer and budget.

Frozen pydantic models with units in names. Every default carries its reason in the field's
description, which `diloco config --explain` prints.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from diloco_shared.protocol.subjects import Id
from diloco_shared.spec.algorithm import (
    BATCH_MAX,
    DAY_S,
    LEARNERS_MAX,
    RATE_MAX,
    SECONDS_MAX,
    STEPS_MAX,
    Algorithm,
    Spec,
)
from diloco_shared.spec.optimizers import known


def _odd(copies: int) -> int:
    if copies % 2 == 0:
        raise ValueError(
            f"{copies} copies outlive no more nodes than {copies - 1} do, since more than half of "
            "them must be there: give 1, 3 or 5"
        )
    return copies


# Copies of a stream on as many nodes of a hub; the message server has five at most.
Replicas = Annotated[int, Field(ge=1, le=5), AfterValidator(_odd)]

# Tokens of a sequence: more than any model reads.
CONTEXT_MAX = 1 << 24
# Before the reference of a run-wide checkpoint, and the name of a run, in `model.weights`.
OF_CHECKPOINT, OF_RUN = "checkpoint:", "run:"


class Model(Spec):
    """A decoder-only transformer by preset or by shape, or your own by `module:factory`."""

    preset: str = Field(
        "nano",
        description="Named shape, from 'nano' (0.1M parameters) to '30b-a3b' (30.5B, of which a "
        "token takes 3.4B): docs/how-to/models.md lists all, 'diloco model describe PRESET' "
        "shows one.",
    )
    factory: str | None = Field(
        None, description="module:factory of your own model; replaces preset."
    )
    overrides: dict[str, int | float | str | bool] = Field(
        default_factory=dict, description="Fields of the preset's shape to change."
    )
    parameters: int | None = Field(
        None,
        ge=1,
        le=10**13,
        description="Parameters of a factory's model, for the run's budget; none: learners tell "
        "it when "
        "they join. A preset's is known.",
    )
    weights: str = Field(
        "",
        description="What to begin from; empty: fresh parameters from the seed. A folder of a "
        "Hugging Face checkpoint, on every learner's machine; or 'checkpoint:FOLDER/NUMBER', or "
        "'checkpoint:' and the address of a run-wide checkpoint that every learner reaches; or "
        "'run:NAME' or 'run:NAME@VERSION', of which 'diloco submit' makes a folder.",
    )
    weights_digest: str = Field(
        "",
        pattern=r"^([0-9a-f]{32})?$",
        description="Of the weights, which must be the same everywhere; filled in by "
        "'diloco submit', and printed by 'diloco model describe FOLDER'. Of a run-wide checkpoint "
        "it is its manifest's, and the coordinator fills it in.",
    )
    weights_context: int = Field(
        0,
        ge=0,
        le=CONTEXT_MAX,
        description="Tokens per sequence for which the weights were made, where that is more than "
        "context_tokens; exports say it. Filled in as weights_digest is; 0: not known.",
    )
    context_tokens: int = Field(64, ge=2, le=CONTEXT_MAX, description="Tokens per sequence.")

    @property
    def checkpoint(self) -> str:
        """The run-wide checkpoint to begin from: FOLDER/NUMBER, or its address; "" for none."""
        named = self.weights
        return named.removeprefix(OF_CHECKPOINT) if named.startswith(OF_CHECKPOINT) else ""


def longer_context(context: int, model: Mapping[str, Any]) -> dict[str, int]:
    """What a table [model] gains from weights that were made for so many tokens per sequence: it is
    left out where the run's own are as long, so that other builds can read it."""
    usual = Model.model_fields["context_tokens"].default
    own = model.get("context_tokens", usual)
    # 0 says nothing: so does a table that has every setting written out.
    if model.get("weights_context") or not isinstance(own, int) or context <= own:
        return {}
    return {"weights_context": min(context, CONTEXT_MAX)}


# What tells one corpus from another: of its tokens and its tokenizer.
CorpusDigest = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
# Corpora of a mixture: each is opened, and drawn from, by every learner.
MIXTURE_MAX = 64


# Held-out tokens of one evaluation: as many lie in the memory of every learner, four bytes each.
EVALUATION_TOKENS_MAX = 1 << 28


class Part(Spec):
    """One corpus of a mixture."""

    source: str = Field(description="As data.source.")
    weight: float = Field(
        gt=0, le=1e9, description="Its share of the sequences, over the sum of all weights."
    )
    digest: CorpusDigest = Field("", description="As data.digest.")


class Data(Spec):
    """The corpus and how it is cut into virtual shards."""

    source: str = Field(
        "stdlib",
        description="'stdlib' (source code of the running Python), a folder or file of text, or a "
        "folder that 'diloco data prepare' wrote. A relative path is looked for in the data root "
        "of each learner.",
    )
    tokenizer: str = Field(
        "bytes",
        description="'bytes' needs no download; or the path of a tokenizer.json, of a "
        "SentencePiece .model, or of a folder with one. A prepared corpus has its own.",
    )
    digest: CorpusDigest = Field(
        "",
        description="What the corpus of every learner must be ('diloco data show' tells it). Then "
        "learners need not have it at the same path. Empty: it is not compared.",
    )
    mixture: Annotated[tuple[Part, ...], Field(max_length=MIXTURE_MAX)] = Field(
        (),
        description="Several corpora in fixed shares, each {source, weight, digest}; replaces "
        "source and digest.",
    )
    documents: Literal["packed", "apart"] = Field(
        "packed",
        description="Several documents lie in one sequence. 'packed': a token attends to all "
        "tokens before it. 'apart': only to those of its own document; for built-in models.",
    )
    virtual_shards: int = Field(
        64,
        ge=1,
        le=65536,
        description="Leases are per shard; many keep joins fair. A new run has 8192 at most.",
    )
    validation_fraction: float = Field(
        0.05,
        gt=0,
        lt=0.5,
        description="Share of documents held out for validation; as much for test. A prepared "
        "corpus has its own.",
    )

    @model_validator(mode="after")
    def _one_digest(self) -> Self:
        if self.mixture and self.digest:
            raise ValueError("digest is for source; in a mixture each corpus has its own")
        return self

    @property
    def sources(self) -> tuple[Part, ...]:
        """What is read: the parts of the mixture, or the source alone."""
        return self.mixture or (Part(source=self.source, weight=1.0, digest=self.digest),)


class Inner(Spec):
    """The inner optimizer of every learner."""

    optimizer: str = Field(
        "adamw", description="'adamw', 'muon', or another optax optimizer by name."
    )
    learning_rate: float = Field(
        1.6e-2,
        gt=0,
        le=RATE_MAX,
        description="Peak rate of *data-parallel* training of this model.",
    )
    b1: float = Field(0.9, ge=0, lt=1, description="First-moment decay.")
    b2: float = Field(
        0.99,
        ge=0,
        lt=1,
        description="Second-moment decay. A learner's own batches are small, so that it remembers "
        "more of them than the 0.95 of large ones.",
    )
    weight_decay: float = Field(0.1, ge=0, le=RATE_MAX, description="Decoupled decay of matrices.")
    clip_norm: float = Field(1.0, gt=0, le=1e30, description="Global gradient norm limit.")
    warmup_steps: int = Field(
        100, ge=0, le=STEPS_MAX, description="Linear warm-up, in steps of the run."
    )
    final_fraction: float = Field(
        0.05, ge=0, le=1, description="Rate at the end over the peak (cosine)."
    )
    batch_sequences: int = Field(
        8, ge=1, le=BATCH_MAX, description="Sequences per learner and inner step."
    )
    accumulation: int = Field(
        1, ge=1, le=BATCH_MAX, description="Gradient accumulation within a step."
    )

    @field_validator("optimizer")
    @classmethod
    def _optimizer(cls, name: str) -> str:
        return known(name, "muon")


class Budget(Spec):
    """When the run ends: exactly one of the three."""

    steps: int | None = Field(
        None,
        ge=1,
        le=STEPS_MAX,
        description="Inner steps of the run: sync_every_steps / fragments for each "
        "merge. A learner that outruns the merges takes more of its own.",
    )
    tokens: int | None = Field(
        None, ge=1, le=2**53, description="Tokens processed by all learners."
    )
    seconds: float | None = Field(
        None,
        gt=0,
        le=SECONDS_MAX,
        description="Seconds since the first round, pauses too, but not while no syncer leads. The "
        "run ends with the rounds that come after them. While none can come, since no learner is "
        "there or a stream is full, it waits; 'diloco stop' ends it.",
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [k for k in ("steps", "tokens", "seconds") if getattr(self, k) is not None]
        if len(given) != 1:
            named = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of steps, tokens, seconds (given: {named})")
        return self


class Membership(Spec):
    """Who may work for the run, and how soon silence counts."""

    learners_min: int = Field(
        1,
        ge=1,
        le=LEARNERS_MAX,
        description="Joined learners needed before the first step; the run's budget is made for "
        "as many, and grows when more join.",
    )
    learners_max: int = Field(64, ge=1, le=LEARNERS_MAX, description="Learners assigned at most.")
    lease_s: float = Field(
        5.0,
        gt=0,
        le=DAY_S,
        description="Silence after which a learner is not live; covers a long compile.",
    )
    heartbeat_s: float = Field(
        1.0,
        gt=0,
        le=DAY_S,
        description="Progress is sent at least this often: a fifth of the lease.",
    )
    syncers: int = Field(
        2, ge=1, le=16, description="Syncers assigned at most: a leader, and standbys."
    )
    leader_lease_s: float = Field(
        3.0,
        ge=0.5,
        le=DAY_S,
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

    every_steps: int = Field(
        96, ge=1, le=STEPS_MAX, description="Steps of the run between two evaluations."
    )
    sequences: int = Field(
        256, ge=1, le=BATCH_MAX, description="Held-out sequences per evaluation."
    )
    tokens: int | None = Field(
        None,
        ge=1,
        le=EVALUATION_TOKENS_MAX,
        description="Held-out tokens per evaluation, instead of sequences: as many whole sequences "
        "as that makes, one at least.",
    )
    beside_training: bool = Field(
        True,
        description="Steps go on during an evaluation, for which a second set of parameters lies "
        "on the device. If false, its learner takes no step until the evaluation is over.",
    )

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.tokens is not None and "sequences" in self.model_fields_set:
            raise ValueError(
                f"tokens ({self.tokens}) and sequences ({self.sequences}) both say how much is "
                "evaluated: leave one of them out"
            )
        return self

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `sequences` where tokens take its place: what is written can be read again."""
        found: dict[str, Any] = handler(self)
        if self.tokens is not None:
            found.pop("sequences", None)
        return found


class Keeping(Spec):
    """What is kept, and for how long."""

    checkpoint_every_steps: int = Field(
        480, ge=1, le=STEPS_MAX, description="Learner checkpoint interval."
    )
    checkpoints: int = Field(2, ge=1, le=1000, description="Checkpoints kept per learner.")
    snapshot_every_rounds: int = Field(
        24,
        ge=1,
        le=10**6,
        description="Syncer snapshot interval: bounds replay and kept contributions.",
    )
    contributions: Literal["until_snapshot", "all"] = Field(
        "until_snapshot", description="'all' allows a full replay of the run."
    )
    run_checkpoint_every_steps: int | None = Field(
        None,
        ge=1,
        le=STEPS_MAX,
        description="Run-wide checkpoint interval in steps; none: when asked for.",
    )
    run_checkpoints: int = Field(3, ge=1, le=1000, description="Run-wide checkpoints kept.")
    run_checkpoint_root: str = Field(
        "",
        description="Where run-wide checkpoints go: a folder that every process of the run "
        "reaches, or file://, gs://, s3://. Empty: where each process was told to keep them.",
    )
    stream_bytes_max: int | None = Field(
        None,
        ge=1 << 20,
        le=2**53,
        description="Upper bound in bytes for each of the run's streams; none: what the run needs.",
    )
    replicas: Replicas = Field(
        1,
        description="Copies of the run's streams, each on another node of the hub: 1, 3 or 5. With "
        "3 the run goes on without any one node; every byte is written three times.",
    )
    export_every_rounds: int | None = Field(
        None,
        ge=1,
        le=10**9,
        description="The coordinator exports the published weights whenever so many rounds were "
        "committed since the last time, and once more at the end; none: when asked for.",
    )
    exports: int = Field(
        3,
        ge=1,
        le=1000,
        description="Exports made by themselves that are kept; each holds the whole model.",
    )
    begin_again: Literal["automatic", "ask"] = Field(
        "automatic",
        description="When no syncer has the run's state and none can be got: begin a new epoch "
        "from the published parameters, without outer momentum, or wait for 'diloco begin-again'.",
    )
    begin_again_after_s: float = Field(
        60.0,
        gt=0,
        le=DAY_S,
        description="Before it begins again by itself: a syncer that still has the state may "
        "come back. At least four leader leases, whatever is given.",
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
    def held_out_sequences(self) -> int:
        """Sequences of one evaluation."""
        e = self.evaluation
        return e.sequences if e.tokens is None else max(e.tokens // self.model.context_tokens, 1)

    @property
    def inner_rate(self) -> float:
        """Peak inner learning rate of the learners of this run."""
        return self.inner.learning_rate * self.algorithm.inner_rate_factor

    @property
    def data_order(self) -> tuple[Any, ...]:
        """What decides which sequence lies at which place of a data shard.

        A corpus with a digest may lie anywhere; one without is told by its path and its tokenizer.
        """
        data = self.data
        by_path = (data.tokenizer, data.validation_fraction)
        corpora = [(p.digest or (p.source, *by_path), p.weight) for p in data.sources]
        return (self.seed, self.model.context_tokens, data.virtual_shards, corpora)

    @property
    def tokens_per_step(self) -> int:
        """Tokens one learner processes in one inner step as declared here."""
        return self.inner.batch_sequences * self.inner.accumulation * self.model.context_tokens


# Settings that release 0.2 does not know, and refuses. Their defaults stay for good: a run that
# does not name one means what it meant.
_SINCE_0_2 = {
    "model": ("weights", "weights_digest", "weights_context"),
    "data": ("digest", "mixture", "documents"),
    "evaluation": ("tokens", "beside_training"),
    "keeping": ("replicas", "export_every_rounds", "exports"),
}


def written(spec: RunSpec) -> dict[str, Any]:
    """What is kept of a specification: read by this release, and by 0.2 where it can do the run.

    A setting that 0.2 does not know is left out while it has its default.
    """
    view = spec.model_dump(mode="json")
    for table, names in _SINCE_0_2.items():
        said: Spec = getattr(spec, table)
        for name in names:
            if getattr(said, name) == type(said).model_fields[name].default:
                del view[table][name]
    return view


# Content must agree, not where it lies. What a run of version 0.2.0 could not say is left out where
# it is not said, so that its hash is what it was.
_NOT_SHARED = {"parameters", "weights", "weights_context"}


def shared_keys(spec: RunSpec) -> dict[str, str]:
    """Flat `path -> JSON value` of what all members of a run must agree on.

    The run's id is among them: what comes of a deleted run of the same name is refused. A learner's
    own batch size is left out: the weights account for it. So is what only the syncer uses to
    decide when to stop. Where a digest says what a corpus is, it does not matter where it lies.
    """
    view = spec.model_dump(
        mode="json",
        include={"name", "id", "seed", "algorithm", "model", "data"},
        exclude={"algorithm": {"quorum"}, "model": _NOT_SHARED},
    )
    if not view["model"]["weights_digest"]:
        del view["model"]["weights_digest"]
    return dict(_flatten("", view | {"data": _agreed(spec.data, view["data"])}))


def _agreed(data: Data, view: dict[str, Any]) -> dict[str, Any]:
    """Of `[data]` what members must agree on.

    What a run of an earlier release did not have is named only where it is used, so that such a run
    keeps its hash.
    """
    view = {name: value for name, value in view.items() if value or name in ("source", "tokenizer")}
    if data.documents == "packed":
        del view["documents"]
    if data.mixture:
        del view["source"]
        view["mixture"] = [
            {name: value for name, value in part.items() if name != "source" or not part["digest"]}
            for part in view["mixture"]
        ]
    elif data.digest:
        del view["source"]
    if all(part.digest for part in data.sources):
        del view["tokenizer"]
    return view


def _flatten(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [kv for k in sorted(value) for kv in _flatten(f"{prefix}.{k}".strip("."), value[k])]
    return [(prefix, json.dumps(value, sort_keys=True))]


def config_hash(spec: RunSpec) -> str:
    """SHA-256 (first 32 hex digits) over `shared_keys`."""
    text = json.dumps(shared_keys(spec), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
