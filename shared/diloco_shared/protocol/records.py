"""Records of the control room: members, runs, leases, events and faults.

Kept in key-value buckets and the event stream; nothing here is on the training path.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from diloco_shared.protocol.messages import (
    Blob,
    Count,
    Finite,
    MaybeDigest,
    Message,
    Reason,
    RunState,
    Seconds,
    Stamp,
    Version,
)
from diloco_shared.protocol.subjects import Id, member_key

Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # 0 or more, of the unit it names


class MemberRecord(Message):
    """A living process, under a key that expires unless refreshed."""

    id: Id  # its name, which no other living process has
    role: Literal["learner", "syncer", "coordinator", "supervisor"]  # what kind of process it is
    boot: str  # unique per process start; `boot_of` says with it which release the process is of
    host: str  # name of its machine
    pid: Count  # number of the process on that machine
    lock: str  # identifies the locked data folder: same lock, the old process is dead
    started_at: Seconds  # wall clock, in seconds since 1970
    address: str = ""  # host:port of its health endpoint
    run: str = ""  # that it works for; empty: none
    state: str = "idle"  # what it is doing
    draining: bool = False  # it takes up no more work
    reason: Reason = ""  # why a syncer cannot lead, or a learner does not work yet or at all
    full: Reason = ""  # what its own disk does not take, and what to do; it works all the same
    tape_seq: Count = 0  # newest tape record that a syncer has executed
    shard: Count = 0  # that a syncer works for
    memory_bytes: Count = 0  # anonymous resident memory; 0: not told

    @property
    def version(self) -> str:
        """The release that the process is of; "" for one of 0.2 or before, which says none."""
        said = _BOOT.match(self.boot)
        return said["version"].replace("_", ".") if said else ""

    def stands_at(self, key: str) -> bool:
        """Whether it may stand under this key of MEMBERS: in its own name, and in its role."""
        return key in (self.id, member_key(self.id, self.role, named=True))


# A process's release stands in its `boot`, which may be any text: release 0.2 refuses a record with
# a field that it does not know. Without dots, since it becomes part of a subject.
_BOOT = re.compile(r"v(?P<version>[0-9a-z_]{1,40})-")


def boot_of(version: str, unique: str) -> str:
    """What a process that was just started is known by; `unique`: nobody else has it."""
    return f"v{version.replace('.', '_')}-{unique}"


class LearnerSpeed(Message):
    """How fast a learner trains, and on what, every other second: for people alone.

    Lost is lost, and no decision rests on it. What nobody can know is None: no number is made up.
    """

    run: Id
    learner: Id
    incarnation: Count
    platform: Annotated[str, Field(max_length=40)]  # as jax names it: cpu, gpu, tpu
    device: Annotated[str, Field(max_length=200)]  # jax's device_kind
    devices: Count  # of this process
    # Of the newest steps that were timed. Pauses, evaluations and what faults cost are no part.
    steps: Count
    seconds: Seconds  # that these steps took
    tokens_per_s: Figure | None = None  # None: no step is timed yet
    data_wait_ratio: Figure | None = None  # share of `seconds` that went into the next batch
    data_wait_s: Seconds = 0.0  # of this life
    # Model FLOP utilisation: what the model's arithmetic takes of the devices' peak.
    mfu: Figure | None = None
    flops_per_token: Figure | None = None  # of the model, forward and backward
    flops_estimated: bool = False  # 6 N: of a model whose shape is not known
    peak_flops: Figure | None = None  # per second, dense bf16, all devices; None: not in the table
    memory_of: Literal["device", "process"]  # of all devices together, or what is resident
    memory_bytes: Count  # in use now
    memory_peak_bytes: Count  # the most that was in use
    memory_limit_bytes: Count | None = None  # that devices let a process have
    # Of an island of several hosts: by how much each takes up steps later than it is told to.
    hosts: dict[str, Seconds] = Field(default_factory=dict, max_length=1024)


class Assignment(Message):
    """Which run a member works for; outlives the coordinator."""

    member: Id  # whose it is
    run: str  # empty: none
    run_id: str = ""  # a run deleted and submitted again is another one
    shard: Count = 0  # of a syncer
    at: Seconds


class Deleted(Message):
    """A run that was deleted, under its id: what processes keep of it on their disks goes."""

    run: Id
    at: Seconds


class LeaderLease(Message):
    """Who leads a syncer shard; renewed by compare-and-set."""

    holder: str  # empty: given back
    boot: str
    lock: str  # the holder's locked data folder
    at: Seconds


class SnapshotWish(Message):
    """A standby that cannot execute the tape from where it stands wants a snapshot.

    First what describes the newest one, then its files, one by one, each under a nonce of its own.
    """

    standby: Id  # who asks
    nonce: Id
    after: Count  # the newest record it has executed: an older snapshot is of no use
    covers: Count = 0  # of the snapshot that the file is of
    digest: MaybeDigest = ""  # of the file; none: what describes the newest snapshot


class SnapshotReply(Message):
    """Whether the leader sends it."""

    accepted: bool
    reason: Reason


class SnapshotManifest(Message):
    """What describes a snapshot, or one of its files, on STATE; the tape record it covers."""

    run: Id
    leader: Id  # who sends it
    standby: Id
    nonce: Id
    covers: Count  # sequence of the newest tape record in it
    blob: Blob


class Incarnation(Message):
    """One life of a learner under its id, granted by compare-and-set on this record."""

    learner: Id
    incarnation: Count
    boot: str
    at: Seconds


class ShardLease(Message):
    """Who reads a data shard, and from where it began to; `Place` tells how far it is merged."""

    shard: Count  # number of the data shard
    holder: str  # empty: free
    incarnation: Version  # life of the holder
    sequences: Count  # already read when the lease began
    passes: Count  # times the shard was read to its end

    @property
    def began(self) -> tuple[int, int]:
        """(passes, sequences): ordered as a shard is read."""
        return self.passes, self.sequences


class LeaseWish(Message):
    """A learner asks the leader to write the lease of a data shard: taken, or given back.

    `revision`: of the lease as the learner read it; 0: there was none.
    """

    lease: ShardLease  # as it shall be
    revision: Count


class LeaseReply(Message):
    """The lease as it was written, with its revision; none: why not."""

    lease: ShardLease | None = None  # as it is
    revision: Count = 0  # that it has now
    reason: Reason = ""


class Place(Message):
    """How far a data shard is merged, in any fragment, as the run's tape says."""

    shard: Count  # number of the data shard
    sequences: Count  # merged in this pass
    passes: Count  # times that it was merged to its end before


class Restore(Message):
    """A wish to restore a checkpoint."""

    serial: Count  # number of the wish: the same again is a repeat, a higher one another wish
    source: str  # reference of the checkpoint


# A run is `submitting` until its streams are there, and `deleting` from then on when its first key
# goes. What a process left half done is so recognised, and nobody works for such a run.
RunPhase = Literal["submitting", "there", "deleting"]


class RunRecord(Message):
    """A run as its user wants it."""

    name: Id  # of the run
    spec: dict[str, Any]  # the whole specification, as JSON
    desired: Literal["running", "paused", "stopped"]  # what the run shall be
    quorum: Count
    created_at: Seconds  # wall clock, in seconds since 1970
    checkpoint: Count = 0  # number of the newest checkpoint asked for
    restore: Restore | None = None  # newest wish to go back to a checkpoint
    # The newest record on any shard's tape when the user asked to begin again from what is
    # published; 0: never. A shard that has recorded more since found its state by itself.
    begin_again: Count = 0
    phase: RunPhase = "there"  # whether it is all there


class TokenCounts(Message):
    """Tokens by what became of them; together all that were processed (docs/how-to/recover.md)."""

    merged: Count = 0  # part of the published parameters
    refused: Count = 0  # in refused contributions, and in no merged one
    overwritten: Count = 0  # a newer publication came before they were merged
    lost: Count = 0  # their process is gone
    in_flight: Count = 0  # their fate is open


class RecoveryRecord(Message):
    """A learner that came back, or came new to a running run: when each phase was reached.

    Wall clock, seconds since 1970; 0: not (yet).
    `rounds`: closed from the start of the process up to the one that merged it first; -1: not
    merged yet, or the leader that saw it start is gone.
    """

    learner: Id
    incarnation: Count
    lost_at: Seconds = 0.0  # its former life was heard last; 0: it had none
    detected_at: Seconds = 0.0  # the former life's lease ran out, or this life spoke first
    restarted_at: Seconds = 0.0  # its process began
    joined_at: Seconds = 0.0  # the syncer admitted it
    donor_at: Seconds = 0.0  # somebody was asked to give inner state
    transferred_at: Seconds = 0.0  # the inner state is in hand
    stepping_at: Seconds = 0.0  # it takes steps
    contributed_at: Seconds = 0.0  # its work was merged
    donor: str = ""  # who was asked last; empty: nobody
    source: str = ""  # of its inner state: donor, checkpoint or fresh
    attempts: Count = 0  # joins of this life so far
    rounds: Version = -1


CheckpointState = Literal["", "making", "complete", "failed"]


class StreamUse(Message):
    """Bytes that a stream holds, and may hold (0: no limit)."""

    bytes: Count  # that it holds
    limit: Count  # that it may hold; 0: no limit


class RunStatus(Message):
    """A run as its syncer sees it; a few times a second at most. See `fencing.keeps`."""

    run: Id
    run_id: str = ""  # tells it from a deleted run of that name; empty: of an earlier version
    state: RunState  # of the run
    reason: Reason
    epoch: Count
    term: Count
    shard: Count = 0  # of the syncer that tells it
    leader: str
    quorum: Count
    versions: tuple[Version, ...]
    stamp: Stamp
    rounds_committed: Count  # since the run began
    rounds_skipped: Count  # since the run began
    contributions_merged: Count  # since the run began
    refused: dict[str, int]  # reason class -> count
    alive: tuple[Id, ...]  # learners that are heard of
    participating: tuple[Id, ...]  # learners that were merged within the last rounds
    parameters: Count  # of the model
    tokens_per_step: Count  # that a learner trains on in one step
    tokens_processed: Count  # that learners have trained on
    tokens_useful: Count  # merged, as in `tokens`
    tokens: TokenCounts = TokenCounts()  # mean over fragments weighted by size
    tokens_by_fragment: tuple[TokenCounts, ...] = ()  # the same, exactly
    tokens_reread: Count = 0  # samples that are read again because their reader is gone
    bytes_up: Count  # of contributions
    bytes_down: Count  # of publications, times their readers
    learners: dict[str, dict[str, Any]]  # per learner: what the dashboard shows
    recoveries: tuple[RecoveryRecord, ...] = ()  # the newest, oldest first
    checkpoint: Count = 0  # number of the newest
    checkpoint_state: CheckpointState = ""  # of the newest checkpoint
    checkpoint_reason: Reason = ""  # why it failed
    restores: Count = 0  # serial of the newest wish to restore that is fulfilled or given up
    streams: dict[str, StreamUse] = Field(default_factory=dict)  # by kind: UP, DN, TAPE, STATE
    settled: bool = False  # the run is over and its learners have left: nobody is needed any more
    forced: bool = False  # by the coordinator, since no syncer could end it
    since_round_s: Seconds = 0.0  # since a round was closed, or this leader began
    at: Seconds


class Event(Message):
    """Something worth telling: joins, leaves, faults, evaluations. Shown, never acted on."""

    run: str  # that it is about; empty: none
    kind: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,40}$")]  # what happened, in one word
    source: str  # who tells it
    text: Reason  # what happened, for people
    data: dict[str, Any] = Field(default_factory=dict)  # what happened, for programs
    at: Seconds


FaultKind = Literal["kill", "hang", "slow", "nan"]


class Fault(Message):
    """A typed fault on one process: now, after seconds, or at a step."""

    id: Id  # of this fault
    kind: FaultKind  # what shall happen to the process
    target: Id  # the member that it hits
    run: str = ""
    at_step: Version = -1  # at this step of a learner; -1: at a time
    after_s: Seconds = 0.0  # from receipt
    duration_s: Seconds = 0.0  # of a hang or a slowness
    factor: Finite = 1.0  # how many times slower


class FaultReply(Message):
    """A process's answer to a Fault: armed, or why not."""

    id: Id  # of the fault
    accepted: bool
    reason: Reason


# --------------------------------------------------------------------------------------------------
# How long each phase of a learner's return took, from the times of a RecoveryRecord.

# What was reached, and what it is counted from: the first of these that is known.
_PHASES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("detected", "detected_at", ("lost_at",)),
    ("restarted", "restarted_at", ("lost_at",)),
    ("joined", "joined_at", ("restarted_at",)),
    ("donor_chosen", "donor_at", ("joined_at",)),
    ("transferred", "transferred_at", ("donor_at", "joined_at")),
    ("stepping", "stepping_at", ("transferred_at",)),
    ("first_contribution", "contributed_at", ("stepping_at",)),
    ("total", "contributed_at", ("lost_at", "restarted_at")),
)


def phases(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Seconds per phase; None for what has not happened, or is not known.

    `detected` and `restarted` count from the last word of the former life and may overlap: a
    process may be back before anybody misses it. Every other one counts from the phase before.
    """
    found: dict[str, float | None] = {}
    for name, reached, origins in _PHASES:
        end = record.get(reached) or 0.0
        start = next((record[o] for o in origins if record.get(o)), 0.0)
        found[name] = round(max(end - start, 0.0), 3) if end and start else None
    return found


def recovery_view(record: Mapping[str, Any]) -> dict[str, Any]:
    """A recovery for people: who, from where, how many rounds, which phase took how long."""
    rounds = record.get("rounds", -1)
    return {
        **record,
        "rounds": None if rounds < 0 else rounds,
        "complete": bool(record.get("contributed_at")),
        "phases_s": phases(record),
    }
