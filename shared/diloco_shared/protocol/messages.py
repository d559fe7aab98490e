"""Every message that crosses the wire, as frozen, strictly validated values.

One class per row of the table in ARCHITECTURE.md. `wire.py` turns them into bytes and back.
Steps, rounds, versions and incarnations count from 0 unless said; -1 means none.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from diloco_shared.protocol.subjects import Id

# --------------------------------------------------------------------------------------------------
# What messages are made of: bounded numbers, places, counts, verdicts.

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
# A name, an id or a kind that a learner says, and that is kept or shown.
Word = Annotated[str, Field(max_length=128)]


def sendable(text: str) -> str:
    """The text, as long as it was, with ? for what no message and no JSON in UTF-8 holds: the bytes
    of a file's name that are no UTF-8, which Python gives as halves of characters."""
    return text.encode("utf-8", "replace").decode()


class Message(BaseModel):
    """Base: immutable, of strict types.

    Nobody makes one with fields that are unknown. Whoever reads one passes over them (`wire.py`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Stamp(Message):
    """How far the run is: what inner schedules are functions of."""

    round: Version  # newest round that is closed; -1: none
    steps: Count  # inner steps per learner by then: rounds closed, times steps between two
    fraction: Finite  # share of the run's budget that is used, 0 to 1
    fraction_per_step: Finite  # estimated growth of `fraction` per inner step


class Cursor(Message):
    """A place in the corpus: how far a learner has read the data shard that it reads now."""

    shard: Count  # number of the data shard
    sequences: Count  # that were read of the shard in this pass
    passes: Count = 0  # how often the shard had been read to its end before
    # Pairs (data shard, pass) that the learner read to their end before this one. They are still
    # its own, because not all of what it read there is known to be merged.
    finished: Annotated[tuple[tuple[Count, Count], ...], Field(max_length=16)] = ()


class LifeCount(Message):
    """How far a life of a learner is, for the ledger: all numbers are tokens of that life.

    `adopted`: pairs (fragment, tokens at its newest adoption). `left`: it will not train again.
    """

    learner: Id
    incarnation: Count
    tokens: Count  # that this life has trained on
    adopted: tuple[tuple[Index, Count], ...] = ()
    left: bool = False


class TensorSpec(Message):
    """One parameter tensor: its path, shape, and whether it is an embedding (merged by mean)."""

    name: Annotated[str, Field(min_length=1, max_length=300)]  # its path in the model
    shape: tuple[Count, ...]  # length of each dimension
    embedding: bool  # merging takes the weighted mean of it


class Blob(Message):
    """A payload in chunks, which are messages with indices 0..chunks-1."""

    subject: str  # on which the chunks were published
    bytes: Count  # of the whole payload
    chunk_bytes: Count  # of every chunk but the last
    chunks: Count  # how many there are
    digest: Digest  # of the whole payload


class Verdict(Message):
    """What became of one learner in one round, and why."""

    learner: Id
    incarnation: Version
    # Missed: it was asked, and nothing came of it. Ineligible: it was not asked.
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
    weight: Finite = 0.0  # how much it counted in the merge
    norm: Finite = 0.0  # Euclidean length of the pseudo-gradient
    # Tokens of this contribution that no earlier merge of this fragment had counted.
    tokens_new: Count = 0
    cursor: Cursor | None = None


class SocketBytes(Message):
    """What crossed a process's sockets since it began to work for a run, protocol included."""

    data_up: Count = 0  # fragments, sent
    data_down: Count = 0  # fragments, received
    control_up: Count = 0  # all else, sent
    control_down: Count = 0  # all else, received


class RecoveryTimes(Message):
    """How this process came to train, in seconds since it was started; None: not (yet).

    `granted_s`: the syncer admitted it; `donor_s`: somebody was asked to give inner state;
    `settled_s`: the inner state is in hand; `stepping_s`: anchors and compiled programs as well.
    `age_s`: now.
    """

    age_s: Seconds
    granted_s: Seconds | None = None
    donor_s: Seconds | None = None
    settled_s: Seconds | None = None
    stepping_s: Seconds | None = None
    donor: Word = ""  # who was asked last; empty: nobody
    source: Word = ""  # of the inner state: donor, checkpoint or fresh; empty: not in hand yet
    attempts: Count = 0  # joins of this life so far


# --- learner -> syncer -------------------------------------------------------------------------

# `draining`: takes no more steps, but still answers pulls, until nothing of its work is unmerged.
# An evaluator that leaves without the last evaluation says it too, and not that it has `finished`.
LearnerState = Literal["joining", "recovering", "stepping", "paused", "draining", "finished"]


class Progress(Message):
    """After inner steps, and at least every heartbeat: where a learner stands."""

    learner: Id
    incarnation: Count
    epoch: Count
    state: LearnerState  # what it is doing
    step: Count  # inner steps that this incarnation has taken
    tokens: Count  # that this incarnation has trained on
    # Per fragment: inner steps since its newest adoption; 0 while all of them were skipped.
    c_steps: tuple[Count, ...]
    c_tokens: tuple[Count, ...]  # per fragment: tokens trained on since its newest adoption
    adopted: tuple[Version, ...]  # per fragment: version that was adopted last; -1: none
    adopted_at: tuple[Count, ...]  # per fragment: `step` at its newest adoption
    loss: float  # of the newest step, nats per token; NaN before the first
    step_s: Seconds  # moving average of one inner step
    wait_s: Seconds  # total the train loop spent on anything but its own computation
    cursor: Cursor | None = None
    checkpoint: Count = 0  # newest mark for which its part is written, or cannot be
    mark: Count = 0  # newest mark met
    restore: Count = 0  # serial of the newest restore in its epoch's history, 0: knows of none
    # Of `step`: their loss or gradient was not finite, so they changed nothing.
    steps_skipped: Count = 0
    sockets: SocketBytes = SocketBytes()  # bytes on its connections
    recovery: RecoveryTimes | None = None  # how this life came to train
    run_id: Word = ""  # a run deleted and submitted again is another one


class Join(Message):
    """A learner with a fresh incarnation asks to work for the run. Repeated until granted."""

    learner: Id
    incarnation: Count
    nonce: Word  # of this attempt: the grant echoes it
    config: dict[str, str]  # config.shared_keys, and `layout`: a digest of the fragments
    # Donors that did not deliver in earlier attempts of this incarnation.
    failed_donors: tuple[Id, ...] = ()
    parameters: Count = 0  # N of its model, for the streams' limits; 0: not told
    epoch: Count = 0  # newest of any syncer shard that it has heard of


class ContributionManifest(Message):
    """Last message of a contribution: names exactly the chunk set that counts."""

    run: Id
    learner: Id
    incarnation: Count
    epoch: Count
    term: Count
    round: Count  # of the pull that it answers
    fragment: Index
    base: Version
    step_from: Count
    step_to: Count
    tokens_from: Count
    tokens_to: Count
    cursor: Cursor | None  # where it stands in the corpus
    codec: Word
    values: Count
    config_hash: Digest
    checkpoint: Count = 0  # newest mark that this learner had met
    blob: Blob


class InitManifest(Message):
    """Initial parameters of one fragment, fp32, from the learner that the beat names."""

    run: Id
    learner: Id
    incarnation: Count
    config_hash: Digest
    layout: tuple[TensorSpec, ...]
    fragment: Index
    blob: Blob


class Restored(Message):
    """How the run was last restored to a checkpoint."""

    epoch: Count  # from this one on, the run's history is that of the checkpoint
    serial: Count  # of the user's wish
    source: str  # reference of the checkpoint


# --- syncer -> learners ------------------------------------------------------------------------

RunState = Literal[
    "waiting",  # for learners_min to join, or for those that joined to train
    "bootstrapping",  # for the initial parameters
    "running",
    "starved",  # fewer than K train, the lease cannot be renewed, or a restore is to be done
    "stuck",  # no progress, and no reason is known for it
    "full",  # a stream or a disk takes nothing more
    "paused",
    "finishing",  # last round of every fragment
    "finished",
    "stopped",
]


class Beat(Message):
    """The leader's heartbeat, about once a second and at every change."""

    run: Id
    epoch: Count
    term: Count
    state: RunState  # of the run
    reason: Reason
    versions: tuple[Version, ...]  # committed head per fragment
    stamp: Stamp
    # Learners that are heard of, or that a leader which has only just begun will hear of.
    live: tuple[Id, ...]
    initializer: str = ""  # while bootstrapping: who shall send the initial parameters
    evaluator: str = ""  # who evaluates the published parameters
    evaluated: bool = False  # at the end: the evaluator is done, nobody need stand by for it
    incarnations: dict[str, int] = Field(default_factory=dict)  # newest known per learner
    checkpoint: Count = 0  # newest mark: whoever meets it keeps its state before it adopts more
    restored: Restored | None = None
    shard: Count = 0  # of the syncer; versions of others' fragments are -1
    terms: tuple[Count, ...] = ()  # of every shard, where a learner has put their beats together
    run_id: str = ""


class Grant(Message):
    """Answer to a Join."""

    learner: Id
    incarnation: Count
    nonce: str
    accepted: bool
    reason: Reason
    epoch: Count
    term: Count
    versions: tuple[Version, ...]  # the stamp: adopt at least these before stepping
    donor: str  # who gives its inner moments; empty: nobody healthy can
    stamp: Stamp
    restored: Restored | None = None
    shard: Count = 0  # of the syncer; versions of others' fragments are -1
    run_id: str = ""


class Donate(Message):
    """Asks a learner for its inner state, for one that begins or comes back."""

    donor: Id  # who is asked
    donor_incarnation: Count
    newcomer: Id  # who shall get it
    newcomer_incarnation: Count
    nonce: str
    epoch: Count
    versions: tuple[Version, ...]  # per fragment: what the donor must have adopted first
    run_id: str = ""


class Pull(Message):
    """Asks learners for their contributions to a round; resent until answered or over."""

    epoch: Count
    term: Count
    round: Count  # the round that asks
    fragment: Index  # number of the fragment that is wanted
    participants: tuple[Id, ...]  # learners that are asked
    timeout_s: Seconds  # from receipt
    run_id: str = ""


class PublicationManifest(Message):
    """Last message of a publication: names exactly the chunk set that counts."""

    run: Id
    epoch: Count
    term: Count
    round: Version  # that made it; -1: none did
    fragment: Index
    version: Count  # of the fragment
    prev_version: Version  # version to which the payload is added; -1: a keyframe, which has all
    codec: str
    values: Count
    anchor_digest: Digest  # of the whole fragment, once this is applied
    config_hash: Digest
    checkpoint: Count = 0  # newest mark before it
    participants: tuple[Id, ...]  # learners whose work was merged in it
    # By learner. Whoever missed publications has given no more since its base: farther behind than
    # `staleness_max` it would have been refused.
    last_merged: dict[str, LastMerged]
    stamp: Stamp
    layout: tuple[TensorSpec, ...] = ()  # with version 0 only
    blob: Blob


# --- learner -> learner ------------------------------------------------------------------------


class StateManifest(Message):
    """A donor's inner state: optimizer moments and counts, never parameters."""

    run: Id
    donor: Id
    donor_incarnation: Count
    newcomer: Id
    newcomer_incarnation: Count
    nonce: str
    epoch: Count
    versions: tuple[Version, ...]  # what the donor had adopted
    donor_step: Count  # inner steps that the donor had taken
    config_hash: Digest
    blob: Blob


# --- tape --------------------------------------------------------------------------------------


class TapeInit(Message):
    """The run's first record: initial parameters are accepted."""

    kind: Literal["init"] = "init"
    run: Id
    config_hash: Digest
    layout: tuple[TensorSpec, ...]
    # Per fragment; empty for what another shard owns.
    anchor_digests: tuple[MaybeDigest, ...]
    subjects: tuple[str, ...]  # of the init blobs
    learner: Id
    incarnation: Count
    at: Seconds  # wall clock, seconds since 1970


class TapeTerm(Message):
    """A new leader, appended before it pulls: fences the old one."""

    kind: Literal["term"] = "term"
    epoch: Count
    term: Count
    leader: str
    at: Seconds


# A hub that was put back from a backup goes on with numbers that are larger by so much, or by more:
# fewer epochs, terms, and lives of one learner, can have begun since. All others follow each other.
AHEAD = 1000


class TapeEpoch(Message):
    """History restarts: learners discard anchors of older epochs."""

    kind: Literal["epoch"] = "epoch"
    epoch: Count
    term: Count
    reason: Reason
    at: Seconds


class TapeRebirth(Message):
    """A new leader and a new epoch: no syncer had the state, so it is what DN had of it.

    Master and anchor of a fragment are that publication; outer momentum is zero. Fences as a
    TapeTerm does. `versions` may be one below the tape's, of what was never published.
    """

    kind: Literal["rebirth"] = "rebirth"
    epoch: Count
    term: Count
    leader: str
    versions: tuple[Version, ...]  # -1 for another shard's
    anchor_digests: tuple[MaybeDigest, ...]
    reason: Reason
    at: Seconds


class TapeRound(Message):
    """One closed round, committed or skipped."""

    kind: Literal["round"] = "round"
    epoch: Count
    term: Count
    round: Count
    fragment: Index
    outcome: Literal["committed", "skipped"]  # whether it was merged
    reason: Reason
    quorum_reason: Reason  # why these learners were enough
    quorum: Count  # K in force
    version: Version  # of the fragment after this round
    verdicts: tuple[Verdict, ...]  # one of each learner
    keyframe: bool  # whether the publication has all values, not only a difference
    outer_fraction: Finite = 0.0  # of the budget: where the outer schedule stood
    anchor_digest: str  # after this round; empty when skipped
    master_digest: str  # of the syncer's own fp32 values
    payload_digest: str  # of the bytes that are published
    stamp: Stamp
    quorum_s: Seconds  # from its beginning until enough learners were ready
    grace_s: Seconds  # from there until contributions were asked for
    sync_s: Seconds  # from there until it was closed
    at: Seconds
    # Of every life that is further than the tape knew, or adopted more.
    counts: tuple[LifeCount, ...] = ()


class TapeCheckpoint(Message):
    """A run-wide checkpoint: its mark (begun), and what became of it."""

    kind: Literal["checkpoint"] = "checkpoint"
    term: Count
    number: Count  # of the checkpoint in this run
    outcome: Literal["begun", "complete", "failed"]  # what became of it
    reason: Reason
    at: Seconds


class TapeRestore(Message):
    """History restarts as of a checkpoint: state is that of it, epoch and term are not."""

    kind: Literal["restore"] = "restore"
    epoch: Count
    term: Count
    serial: Count  # of the user's wish
    source: str  # reference of the checkpoint
    digest: Digest  # of its manifest
    run: Id  # that it is of
    versions: tuple[Version, ...]
    anchor_digests: tuple[MaybeDigest, ...]
    at: Seconds


class TapeSnapshot(Message):
    """A durable snapshot of the syncer's state is on a disk."""

    kind: Literal["snapshot"] = "snapshot"
    term: Count
    covers: Count  # sequence of the newest tape record in it, and so of all before
    round: Version  # newest round that it covers; -1: none
    path: str  # where it lies on the writer's disk
    at: Seconds


class TapeSetting(Message):
    """A change on the live run: pause, resume, a new quorum, stop."""

    kind: Literal["setting"] = "setting"
    term: Count
    name: Literal["paused", "quorum", "stopping"]  # what was changed
    value: int  # what it is now; 1: yes
    reason: Reason
    at: Seconds


class TapeEnd(Message):
    """The run is over; nothing follows."""

    kind: Literal["end"] = "end"
    term: Count
    outcome: Literal["finished", "stopped"]  # how the run ended
    reason: Reason
    versions: tuple[Version, ...]
    at: Seconds
    counts: tuple[LifeCount, ...] = ()  # as in TapeRound


TapeRecord = Annotated[
    TapeInit
    | TapeTerm
    | TapeEpoch
    | TapeRebirth
    | TapeRound
    | TapeCheckpoint
    | TapeRestore
    | TapeSnapshot
    | TapeSetting
    | TapeEnd,
    Field(discriminator="kind"),
]
