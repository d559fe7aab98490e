"""What goes into the learner's machines and what comes out of them.

Two machines. `recovery.Recovery` brings a process from its incarnation to "may step":
parameters from the anchors, moments from a donor. `exchange.Exchange` runs at step boundaries:
adopt, answer pulls, count. Arrays never pass through either: they are named.
"""

from dataclasses import dataclass, field
from typing import Any

from diloco_shared.protocol.messages import (
    Beat,
    Cursor,
    Donate,
    Grant,
    Join,
    LastMerged,
    Progress,
    Pull,
    Restored,
    Stamp,
)

# --- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnchorReady:
    """Anchor (epoch, fragment, version) is held, bit-checked, by the edge's AnchorBook."""

    epoch: int
    fragment: int
    version: int
    round: int  # -1: made by no round
    stamp: Stamp
    last_merged: dict[str, LastMerged]
    checkpoint: int = 0  # newest mark before it


@dataclass(frozen=True, slots=True)
class BeatSeen:
    beat: Beat


@dataclass(frozen=True, slots=True)
class GrantSeen:
    grant: Grant


@dataclass(frozen=True, slots=True)
class PullSeen:
    pull: Pull


@dataclass(frozen=True, slots=True)
class DonateSeen:
    donate: Donate


@dataclass(frozen=True, slots=True)
class StateSeen:
    """A donor's inner state with this nonce has arrived and checks."""

    donor: str
    nonce: str


@dataclass(frozen=True, slots=True)
class StateComing:
    """A donor's inner state is complete on the bus, and being fetched."""

    donor: str
    nonce: str


@dataclass(frozen=True, slots=True)
class StateMoved:
    """A donor has begun to send its inner state, or more of it has come: so many `bytes` are here.

    `waiting`: no more of it could come, since other payloads are before it.
    """

    donor: str
    nonce: str
    bytes: int = 0
    waiting: bool = False


@dataclass(frozen=True, slots=True)
class InitMoved:
    """More of the initial parameters that this learner sends is stored."""


@dataclass(frozen=True, slots=True)
class PublicationMoved:
    """More of a publication has come, told while the run ends."""


@dataclass(frozen=True, slots=True)
class StateBad:
    """A donor's inner state could not be used."""

    donor: str
    nonce: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointLoaded:
    """Moments of a checkpoint are in use, or there was `none` that could be used."""

    none: bool = False


@dataclass(frozen=True, slots=True)
class Stepped:
    """One inner step is done. `loss` is of a step already read back (may lag by one)."""

    tokens: int
    loss: float
    step_s: float  # 0: not known, as nothing waited for the device
    wait_s: float  # total so far
    cursor: Cursor | None
    skipped: bool = False  # the step of `loss` was: it changed nothing


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The deadline was reached, or all that arrived during the last step has been handed over."""


@dataclass(frozen=True, slots=True)
class PartSettled:
    """This learner's part of checkpoint `number` is durable, or could not be written."""

    number: int


@dataclass(frozen=True, slots=True)
class StateGone:
    """The inner state handed out last has arrived or was given up: its memory is free."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation is over: its result is told, or why there is none."""

    effect: "Evaluate"


ExchangeEvent = (
    AnchorReady
    | BeatSeen
    | PullSeen
    | DonateSeen
    | Stepped
    | PartSettled
    | StateGone
    | Evaluated
    | PublicationMoved
    | TimePassed
)
RecoveryEvent = (
    AnchorReady
    | BeatSeen
    | GrantSeen
    | StateMoved
    | StateComing
    | StateSeen
    | StateBad
    | CheckpointLoaded
    | InitMoved
    | PublicationMoved
    | TimePassed
)

# --- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendJoin:
    join: Join


@dataclass(frozen=True, slots=True)
class SendInit:
    """See to it that this learner's fresh parameters are on the bus: the syncer asked for them.

    What is under way goes on; what is there already is not sent again.
    """


@dataclass(frozen=True, slots=True)
class LoadState:
    """Put the inner state into the trainer. `source`: donor, checkpoint or fresh."""

    source: str
    donor: str
    nonce: str
    restored: Restored | None = None  # the run-wide checkpoint that this history began with


@dataclass(frozen=True, slots=True)
class Begin:
    """Recovered: adopt these anchors, start the exchange and step."""

    joined: int  # epoch of the grant
    epoch: int
    versions: tuple[int, ...]
    stamp: Stamp
    restore: int = 0  # serial of the newest restore before the grant


@dataclass(frozen=True, slots=True)
class Adopt:
    """Overwrite (or mix) fragment with the anchor, which becomes its base.

    `anew`: the first one of an epoch. What was adopted before is void, and so is what was trained
    on it: nothing of it is mixed in.
    """

    epoch: int
    fragment: int
    version: int
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Contribute:
    """Encode anchor - theta of this fragment as it is now, and upload it."""

    epoch: int
    term: int
    round: int
    fragment: int
    base: int
    step_from: int
    step_to: int
    tokens_from: int
    tokens_to: int
    cursor: Cursor | None
    deadline: float  # same clock as `now`: abandon the upload then
    checkpoint: int = 0  # newest mark met


@dataclass(frozen=True, slots=True)
class SendProgress:
    progress: Progress


@dataclass(frozen=True, slots=True)
class GiveState:
    """Send inner moments and counts, as they are now, to the newcomer."""

    donate: Donate
    versions: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Validation loss of the adopted anchors, as they are now; then Evaluated."""

    stamp: Stamp
    versions: tuple[int, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Save moments, counts and adopted versions, asynchronously."""

    epoch: int  # that the moments are of
    step: int
    versions: tuple[int, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class KeepPart:
    """Keep moments and counts, as they are now, for a run-wide checkpoint; then PartSettled."""

    number: int
    epoch: int
    step: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """A contribution of this learner with this cursor is part of the published parameters."""

    fragment: int
    round: int
    cursor: Cursor | None


@dataclass(frozen=True, slots=True)
class Unmerged:
    """A contribution of this learner that no publication will ever contain."""

    fragment: int
    round: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Stop working for the run: it is over, or a newer process has taken this id."""

    outcome: str  # finished, stopped, superseded, refused, restored, drained, withdrawn
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Something for the event log."""

    kind: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


ExchangeEffect = (
    Adopt
    | Contribute
    | SendProgress
    | GiveState
    | Evaluate
    | Checkpoint
    | KeepPart
    | Merged
    | Unmerged
    | Leave
    | Tell
)
RecoveryEffect = SendJoin | SendInit | LoadState | Begin | Leave | Tell
