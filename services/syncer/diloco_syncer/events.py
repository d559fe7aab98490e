"""What goes into the syncer's machine and what comes out of it.

Events are facts, effects what the caller must do. It names payloads by `key`, the blob's subject.
"""

from dataclasses import dataclass, field
from typing import Any

from diloco_shared.protocol.messages import (
    Beat,
    ContributionManifest,
    Donate,
    Grant,
    Join,
    LastMerged,
    Progress,
    Pull,
    Stamp,
    TapeRecord,
    TensorSpec,
)
from diloco_shared.protocol.records import Restore
from diloco_syncer.leadership.rebirth import Reborn

# --- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Led:
    """This process may lead: the tape is read to its end. First event of a term."""

    leader: str
    at: float  # wall clock now, for records
    published: tuple[int, ...]  # newest version of each fragment on DN in this epoch, -1 none
    reborn: Reborn | None = None  # no syncer had the state: it is what is published
    keyframes: tuple[int, ...] = ()  # newest version of each that is there whole, -1 none
    # UP may have lost what was executed from it: the message server has begun a new life since.
    unsure: bool = False
    uncovered: bool = False  # no snapshot of its own covers what may be gone from UP


@dataclass(frozen=True, slots=True)
class JoinSeen:
    join: Join


@dataclass(frozen=True, slots=True)
class ProgressSeen:
    progress: Progress


@dataclass(frozen=True, slots=True)
class InitSeen:
    """Initial parameters of every fragment have arrived and check."""

    learner: str
    incarnation: int
    config_hash: str
    layout: tuple[TensorSpec, ...]
    subjects: tuple[str, ...]
    digests: tuple[str, ...]
    sizes: tuple[int, ...]  # values of each fragment; 0 of another shard's
    finite: bool


@dataclass(frozen=True, slots=True)
class InitMoved:
    """More of somebody's initial parameters is on the bus, or here.

    `senders`: whose is there. Bytes of that `life` of `initializer` alone are counted as `stored`,
    and as `here` those that were fetched, of whomever.
    """

    senders: tuple[str, ...] = ()
    initializer: str = ""
    stored: int = 0
    here: int = 0
    life: int = 0


@dataclass(frozen=True, slots=True)
class ContributionSeen:
    """A contribution's chunks check. `norm` of delta; `finite` false if any value is not.

    NaN for a norm: no round waited for it, so nobody fetched it.
    """

    manifest: ContributionManifest
    finite: bool
    norm: float


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that could not be accepted at the wire; counted by `kind`."""

    kind: str
    source: str
    reason: str
    answer: str = ""  # of a contribution: the subject of its chunks, which says what it answers


@dataclass(frozen=True, slots=True)
class Staged:
    """The merge of a round is computed, not yet in force."""

    epoch: int
    round: int
    anchor_digest: str
    master_digest: str
    payload_digest: str


@dataclass(frozen=True, slots=True)
class StageFailed:
    """The merge of a round cannot be computed, for this learner's contribution ("": nobody knows
    for whose). The gate should have refused that."""

    epoch: int
    round: int
    learner: str
    reason: str


@dataclass(frozen=True, slots=True)
class Appended:
    """The tape took the record of the outstanding Append at sequence `seq`."""

    seq: int
    at: float


@dataclass(frozen=True, slots=True)
class Published:
    """The manifest of (fragment, version) is on DN, in that epoch; `round` -1: of no round."""

    epoch: int
    round: int
    fragment: int
    version: int
    keyframe: bool

    @classmethod
    def of(cls, e: "Publish") -> "Published":
        """That `e` is done."""
        return cls(e.epoch, e.round, e.fragment, e.version, e.prev_version < 0)


@dataclass(frozen=True, slots=True)
class StreamSeen:
    """A stream of the run, by kind (UP, DN, TAPE, STATE), holds `used` bytes of `limit`."""

    kind: str
    used: int
    limit: int  # 0: none
    # It has yet to let go what a snapshot covers: for standbys as long as it has room, or because a
    # purge takes minutes.
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Full:
    """`place`, a stream or a disk, takes nothing more: `reason`. Empty: it has room again."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rewound:
    """The message server lost what it had acknowledged on UP or DN, by a kill or a power cut."""

    # Newest version of each fragment that DN has with all that it builds on, -1 none; None: only UP
    # lost something.
    published: tuple[int, ...] | None
    seen: tuple[int, ...] = ()  # newest version on DN, whether or not it can be built


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user wants of the run."""

    paused: bool
    stopping: bool
    quorum: int
    checkpoint: int = 0  # number of the newest checkpoint asked for
    restore: Restore | None = None


@dataclass(frozen=True, slots=True)
class Suspended:
    """The leader's lease could not be renewed in time: `reason`. Empty: it is renewed again."""

    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotDone:
    covers: int
    round: int
    path: str


@dataclass(frozen=True, slots=True)
class SnapshotBrokenOff:
    """The one that was being written is of no use any more: the run went back."""


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    reason: str


SnapshotOver = SnapshotDone | SnapshotBrokenOff | SnapshotFailed


@dataclass(frozen=True, slots=True)
class MergeWaits:
    """The merge of a fragment waits for `place`, which writes what it would replace; "": no more.

    All merges have waited so many `seconds` under this leader.
    """

    fragment: int
    place: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Kept:
    """This process's part of checkpoint `number` is durable."""

    number: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """Checkpoint `number` is complete with the parts of `learners`; or why it never will be."""

    number: int
    learners: tuple[str, ...] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True)
class MarkFound:
    """The first shard's tape had no newer mark than `newest` when we looked; `open`: of one that is
    being made, 0 for none."""

    newest: int
    open: int = 0


@dataclass(frozen=True, slots=True)
class NumberFound:
    """The newest checkpoint of which anything lies at its place; 0: none, or nobody can look."""

    newest: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The state of a checkpoint is at hand (`History.meta`, and a store with it); or why not."""

    restore: Restore
    run: str = ""  # that it is of
    history: dict[str, Any] = field(default_factory=dict)
    digest: str = ""  # of the manifest
    fault: str = ""


@dataclass(frozen=True, slots=True)
class BusBack:
    """The bus was away; silence until now says nothing about learners."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The deadline was reached."""


Event = (
    Led
    | JoinSeen
    | ProgressSeen
    | InitSeen
    | InitMoved
    | ContributionSeen
    | Malformed
    | Staged
    | StageFailed
    | Appended
    | Published
    | StreamSeen
    | Full
    | Rewound
    | Wanted
    | Suspended
    | SnapshotDone
    | SnapshotBrokenOff
    | SnapshotFailed
    | MergeWaits
    | Kept
    | Sealed
    | MarkFound
    | NumberFound
    | Loaded
    | BusBack
    | TimePassed
)

# --- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendPull:
    pull: Pull


@dataclass(frozen=True, slots=True)
class SendGrant:
    grant: Grant


@dataclass(frozen=True, slots=True)
class SendDonate:
    donate: Donate


@dataclass(frozen=True, slots=True)
class SendBeat:
    beat: Beat


@dataclass(frozen=True, slots=True)
class Append:
    """Append to the tape, expecting nobody else's record in between; answer with Appended.

    At most one is outstanding.
    """

    record: TapeRecord


@dataclass(frozen=True, slots=True)
class Chosen:
    """A contribution that is merged."""

    learner: str
    key: str
    weight: float
    base: int
    codec: str
    values: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Merge, outer step and publication encode of one round; answer with Staged or StageFailed."""

    epoch: int
    round: int
    fragment: int
    contributions: tuple[Chosen, ...]  # sorted by learner
    keyframe: bool
    fraction: float  # of the budget that is used: where the outer schedule stands


@dataclass(frozen=True, slots=True)
class Install:
    """The staged round is committed: put it in force."""

    round: int
    fragment: int


@dataclass(frozen=True, slots=True)
class InstallInit:
    """The initial parameters are committed."""

    layout: tuple[TensorSpec, ...]
    subjects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish the installed (fragment, version); answer with Published.

    `round` is -1 for what no round made: the current anchor is sent exactly.
    """

    round: int
    fragment: int
    epoch: int
    term: int
    version: int
    prev_version: int  # -1: keyframe
    participants: tuple[str, ...]
    last_merged: dict[str, LastMerged]
    stamp: Stamp
    checkpoint: int  # newest mark before it


@dataclass(frozen=True, slots=True)
class Unstage:
    epoch: int
    round: int  # whose merge, if it is there, is void: history began again meanwhile


@dataclass(frozen=True, slots=True)
class Drop:
    """A payload that nothing will need while this process lives."""

    key: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Write store and history durably as of the tape sequence `covers`."""

    covers: int
    round: int


@dataclass(frozen=True, slots=True)
class Capture:
    """Keep store and history as of sequence `covers` for a checkpoint; then Kept, or Sealed."""

    number: int
    covers: int
    reason: str
    at: float  # wall clock


@dataclass(frozen=True, slots=True)
class FindMark:
    """Look for the newest mark on the first shard's tape; then MarkFound."""


@dataclass(frozen=True, slots=True)
class FindNumber:
    """Look for the newest number of which anything lies where checkpoints are; then NumberFound."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Write the manifest over the parts that are there; then Sealed.

    `invited` may have given one in that incarnation, and no others; `late` did not in time. What is
    in `needed` stays, however old: history began with it, or shall.
    """

    number: int
    invited: dict[str, int]
    late: dict[str, str]
    needed: tuple[str, ...] = ()  # references


@dataclass(frozen=True, slots=True)
class Load:
    """Read a checkpoint's state; then Loaded."""

    restore: Restore


@dataclass(frozen=True, slots=True)
class Unload:
    """What was loaded for the wish of this serial, if anything was, will not be installed."""

    serial: int


@dataclass(frozen=True, slots=True)
class InstallLoaded:
    """The restore is committed: the state that was loaded for it is in force."""

    serial: int


@dataclass(frozen=True, slots=True)
class PurgeUp:
    """A durable snapshot covers all rounds up to this one: remove what UP has of them."""

    last_round: int


@dataclass(frozen=True, slots=True)
class PurgeDown:
    """A keyframe replaces everything older of this fragment on DN."""

    epoch: int
    fragment: int
    below_version: int


@dataclass(frozen=True, slots=True)
class PurgeUnsealed:
    """What leaders of earlier terms sent to DN of publications and died before they sealed them."""

    term: int  # the one of now


@dataclass(frozen=True, slots=True)
class Tell:
    """Something for the event log."""

    kind: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over: nothing more will be opened."""

    outcome: str


Effect = (
    SendPull
    | SendGrant
    | SendDonate
    | SendBeat
    | Append
    | Stage
    | Install
    | InstallInit
    | Publish
    | Unstage
    | Drop
    | Snapshot
    | Capture
    | FindMark
    | FindNumber
    | Seal
    | Load
    | Unload
    | InstallLoaded
    | PurgeUp
    | PurgeDown
    | PurgeUnsealed
    | Tell
    | Ended
)
