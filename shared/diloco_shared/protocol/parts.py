"""What messages are made of: bounded numbers, places, counts, verdicts.

Re-exported by `messages.py`, from which everybody imports them.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from diloco_shared.ids import Id

COUNT_MAX = 2**53  # whole numbers up to here are exact as JSON too
Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Index = Annotated[int, Field(ge=0, le=2**31)]
Version = Annotated[int, Field(ge=-1, le=2**53)]
# Of a learner's contributions to a fragment: incarnation, the newest round that merged one, and the
# newest before that, or -1.
LastMerged = tuple[Count, Version, Version]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # 16 bytes, in hex
MaybeDigest = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
Reason = Annotated[str, Field(max_length=500)]


class Message(BaseModel):
    """Base: immutable; wrong types and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Stamp(Message):
    """How far the run is: what inner schedules are functions of.

    `steps` is the run's progress in inner steps per learner (round * H / P), `fraction` of the
    budget that is used, `fraction_per_step` its estimated growth per inner step.
    """

    round: Version
    steps: Count
    fraction: Finite
    fraction_per_step: Finite


class Cursor(Message):
    """A place in the corpus: `sequences` already consumed of data shard `shard`.

    `passes` counts how often the shard had been read to its end before. `finished` are shards
    that this learner read to their end before this one, with the pass: they are still its own,
    because not all of what it read there is known to be merged.
    """

    shard: Count
    sequences: Count
    passes: Count = 0
    finished: Annotated[tuple[tuple[Count, Count], ...], Field(max_length=16)] = ()


class LifeCount(Message):
    """How far a life of a learner is, for the ledger: all numbers are tokens of that life.

    `adopted`: pairs (fragment, tokens at its newest adoption). `left`: it will not train again.
    """

    learner: Id
    incarnation: Count
    tokens: Count
    adopted: tuple[tuple[Index, Count], ...] = ()
    left: bool = False


class TensorSpec(Message):
    """One parameter tensor: its path, shape, and whether it is an embedding (merged by mean)."""

    name: Annotated[str, Field(min_length=1, max_length=300)]
    shape: tuple[Count, ...]
    embedding: bool


class Blob(Message):
    """A chunked payload: the chunks are messages on `subject`, indices 0..chunks-1."""

    subject: str
    bytes: Count
    chunk_bytes: Count
    chunks: Count
    digest: Digest


class Verdict(Message):
    """What became of one learner in one round, and why."""

    learner: Id
    incarnation: Version
    outcome: Literal["merged", "refused", "missed", "ineligible"]
    reason: Reason
    # Of the contribution; none when missed or ineligible.
    subject: str = ""
    digest: str = ""
    base: Version = -1
    step_from: Count = 0
    step_to: Count = 0
    tokens_from: Count = 0
    tokens_to: Count = 0
    weight: Finite = 0.0
    norm: Finite = 0.0
    # Tokens of this contribution that no earlier merge of this fragment had counted.
    tokens_new: Count = 0
    cursor: Cursor | None = None


class SocketBytes(Message):
    """What crossed a process's sockets since it began to work for a run, protocol included."""

    data_up: Count = 0
    data_down: Count = 0
    control_up: Count = 0
    control_down: Count = 0


class RecoveryTimes(Message):
    """How this process came to train, in seconds since it was started; None: not (yet).

    `granted_s`: the syncer admitted it; `donor_s`: somebody was asked to give inner state;
    `settled_s`: the inner state is in hand, from `source` (donor, checkpoint or fresh);
    `stepping_s`: anchors and compiled programs as well. `age_s`: now.
    """

    age_s: Seconds
    granted_s: Seconds | None = None
    donor_s: Seconds | None = None
    settled_s: Seconds | None = None
    stepping_s: Seconds | None = None
    donor: str = ""
    source: str = ""
    attempts: Count = 0
