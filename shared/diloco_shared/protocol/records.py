"""Records of the control room: members, runs, leases, events and faults.

Kept in key-value buckets and the event stream; nothing here is on the training path.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from diloco_shared.ids import Id
from diloco_shared.protocol.messages import (
    Count,
    Finite,
    Message,
    Reason,
    RunState,
    Seconds,
    Stamp,
    Version,
)


class MemberRecord(Message):
    """A living process, under a key that expires unless refreshed."""

    id: Id
    role: Literal["learner", "syncer", "coordinator", "supervisor"]
    boot: str  # unique per process start
    host: str
    pid: Count
    lock: str  # identifies the locked data folder: same lock, the old process is dead
    started_at: Seconds
    address: str = ""  # host:port of its health endpoint
    run: str = ""
    state: str = "idle"
    draining: bool = False


class Assignment(Message):
    """Which run a member works for; outlives the coordinator."""

    member: Id
    run: str  # empty: none
    at: Seconds


class Incarnation(Message):
    """One life of a learner under its id, granted by compare-and-set on this record."""

    learner: Id
    incarnation: Count
    boot: str
    at: Seconds


class ShardLease(Message):
    """Who reads a data shard, and from where."""

    shard: Count
    holder: str  # empty: free
    incarnation: Version
    sequences: Count  # newest cursor known to be merged
    passes: Count  # times the shard was read to its end


class RunRecord(Message):
    """A run as its user wants it."""

    name: Id
    spec: dict[str, Any]
    desired: Literal["running", "paused", "stopped"]
    quorum: Count
    created_at: Seconds


class RunStatus(Message):
    """A run as its syncer sees it; a few times a second at most."""

    run: Id
    state: RunState
    reason: Reason
    epoch: Count
    term: Count
    leader: str
    quorum: Count
    versions: tuple[Version, ...]
    stamp: Stamp
    rounds_committed: Count
    rounds_skipped: Count
    contributions_merged: Count
    refused: dict[str, int]  # reason class -> count
    alive: tuple[Id, ...]
    participating: tuple[Id, ...]
    parameters: Count
    tokens_per_step: Count
    tokens_processed: Count
    tokens_useful: Count
    bytes_up: Count
    bytes_down: Count
    learners: dict[str, dict[str, Any]]  # per learner: what the dashboard shows
    at: Seconds


class Event(Message):
    """Something worth telling: joins, leaves, faults, evaluations. Shown, never acted on."""

    run: str
    kind: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,40}$")]
    source: str
    text: Reason
    data: dict[str, Any] = Field(default_factory=dict)
    at: Seconds


FaultKind = Literal["kill", "hang", "slow", "nan"]


class Fault(Message):
    """A typed fault on one process: now, after seconds, or at a step."""

    id: Id
    kind: FaultKind
    target: Id
    run: str = ""
    at_step: Version = -1
    after_s: Seconds = 0.0
    duration_s: Seconds = 0.0
    factor: Finite = 1.0


class FaultReply(Message):
    """A process's answer to a Fault: armed, or why not."""

    id: Id
    accepted: bool
    reason: Reason
