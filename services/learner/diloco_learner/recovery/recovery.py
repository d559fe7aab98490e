"""From a new incarnation to its first inner step (paper section 4).

    JOINING ──granted──► BOOTSTRAPPING ──anchors of version 0──────────────────► BEGUN
       ▲ │ └─granted, a donor is named──► RECEIVING ──its state──► ANCHORING ──►──┘
       │ └───granted, nobody can give──────────────────────────────►─┘
       └──── the donor is silent or sends rubbish: a new attempt without it

Parameters always come from the anchors (publications at or above the granted versions): a donor's
own parameters hold unmerged work that would count twice. Only moments come from a donor, from an
own checkpoint, or start at zero. Only the syncer itself is awaited without limit.
"""

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum

from diloco_learner.events import (
    AnchorReady,
    BeatSeen,
    Begin,
    CheckpointLoaded,
    GrantSeen,
    InitMoved,
    Leave,
    LoadState,
    PublicationMoved,
    RecoveryEffect,
    RecoveryEvent,
    SendInit,
    SendJoin,
    StateBad,
    StateComing,
    StateMoved,
    StateSeen,
    Tell,
    TimePassed,
)
from diloco_learner.exchange.leaders import unborn
from diloco_shared.protocol.messages import (
    Beat,
    Grant,
    Join,
    Progress,
    RecoveryTimes,
    Restored,
    Stamp,
)
from diloco_shared.protocol.pace import silence_s, transfer_s
from diloco_shared.spec.run import RunSpec, shared_keys

# --------------------------------------------------------------------------------------------------
# The states of a recovery, and which may follow which.


class Stage(Enum):
    """Where a recovery stands."""

    JOINING = "joining"  # no grant yet
    BOOTSTRAPPING = "bootstrapping"  # granted, and nothing is published yet
    RECEIVING = "receiving"  # waiting for a donor's inner state
    ANCHORING = "anchoring"  # inner state is settled; waiting for anchors
    BEGUN = "begun"
    LEFT = "left"


# What may follow what; anything else is a fault in `recovery`.
MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.JOINING: frozenset({Stage.BOOTSTRAPPING, Stage.RECEIVING, Stage.ANCHORING, Stage.LEFT}),
    Stage.BOOTSTRAPPING: frozenset({Stage.BEGUN, Stage.LEFT}),
    Stage.RECEIVING: frozenset({Stage.JOINING, Stage.ANCHORING, Stage.LEFT}),
    Stage.ANCHORING: frozenset({Stage.BEGUN, Stage.LEFT}),
    Stage.BEGUN: frozenset(),
    Stage.LEFT: frozenset(),
}


# A join is sent again after this many seconds without its grant.
JOIN_S = 1.0
# Patience with a donor that lives, as beats say, and has shown no sign yet: it gives between two
# steps, and a step, an evaluation or a rest that its duty cycle demands may take so long. Beside it
# the time in which it takes its state from the device and hashes it, on a slow host.
STATE_S, STATE_BYTES_PER_S = 60.0, 50_000_000
# Once its state moves: as long as it does, and this many seconds of silence. Moments may be old, so
# no transfer is begun again for staleness; a donor that dies over it is not waited for.
STATE_SILENCE_S = 2 * silence_s()
# What has come may have taken so many times as long as on the slowest link worth using: a chunk now
# and then is no transfer.
SLOWER = 4.0
# Donors tried before doing without: five minutes of waiting are worse than moments that start anew.
DONORS_MAX = 5
# If the run has not begun this many seconds after the last of them was stored, this learner looks
# whether its initial parameters are all there; doubling, for the syncer may take long to read them.
INIT_S, INIT_S_MAX = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class OwnModel:
    """What others must know of this learner's model before they deal with it.

    `layout`: digest of how it is cut into fragments. `state_bytes`: size of an inner state.
    `parameters`: N, for the limits of the run's streams.
    """

    layout: str
    state_bytes: int = 0
    parameters: int = 0


class Recovery:
    """One incarnation until Begin or Leave. Mutated only through `handle`.

    Start it with `TimePassed`. Exactly one LoadState precedes Begin; where that is of a checkpoint,
    CheckpointLoaded must follow.
    """

    def __init__(
        self,
        spec: RunSpec,
        learner: str,
        incarnation: int,
        model: OwnModel,
        *,
        has_checkpoint: bool,
        nonce_seed: str,
        initial: bool = True,
    ) -> None:
        """`nonce_seed`: unique per process start, one subject token; attempts are numbered.
        `initial`: whether it has the parameters that the run began with.
        """
        self.spec = spec
        self.learner = learner
        self.incarnation = incarnation
        self.has_checkpoint = has_checkpoint
        self.nonce_seed = nonce_seed
        self.parameters = model.parameters
        self.initial = initial
        self.making_s = model.state_bytes / STATE_BYTES_PER_S
        # More than all of it is no progress. 0: nobody knows how large it is.
        self.state_bytes = model.state_bytes or 8 * model.parameters
        self.config = shared_keys(spec) | {"layout": model.layout}
        self.state = Stage.JOINING
        self.attempt = 0
        self.failed_donors: tuple[str, ...] = ()
        self.donor = ""
        self.donor_life = -1  # its incarnation as first told since it was named; -1: not told yet
        self.source = ""  # of the inner state, once settled
        self.loading = False  # from a checkpoint: there may be none that can be used
        self.epoch = -1  # newest seen
        self.term = -1
        self.joined = -1  # epoch of the newest grant
        self.restored: Restored | None = None
        self.wanted_P: tuple[int, ...] = ()  # least versions to begin with
        self.anchors: dict[int, AnchorReady] = {}  # newest per fragment, of the newest epoch
        self.early: StateSeen | None = None  # came before the grant that names its donor
        self.stamp: Stamp | None = None
        self.beat: Beat | None = None
        self.init_moved_at: float | None = None  # or asked for
        self.init_s = INIT_S
        self.wake_at: float | None = 0.0
        self.now = 0.0
        self.reached: dict[Stage, float] = {}  # when, the newest time
        self.granted_at: float | None = None  # first
        self.arriving = ""  # nonce under which a donor's state is complete on the bus
        self.moved = ""  # nonce under which something of a state has moved
        self.came = 0  # bytes of it, at most
        # Since when the donor is waited for, not counting what others held up, and until when this
        # is known.
        self.since = self.since_at = 0.0
        self.ignored: Counter[str] = Counter()  # why input changed nothing (I11) -> count
        self.join = self._new_join()

    # --- the door ------------------------------------------------------------------------------

    def handle(self, event: RecoveryEvent, now: float) -> list[RecoveryEffect]:
        """Apply one event; return what the caller must do, in this order."""
        if self.state in (Stage.BEGUN, Stage.LEFT):
            return []
        self.now = now
        effects = self._take(event, now)
        if self.wake_at is not None and now >= self.wake_at:
            effects += self._wake(now)
        return effects + self._begin()

    @property
    def deadline(self) -> float | None:
        """When TimePassed is due at the latest; None while only the syncer is awaited."""
        return self.wake_at

    def restore(self, epoch: int) -> int:
        """Serial of the newest restore in the history of `epoch`, as far as is known; 0 if none.

        One of before that epoch counts where it was told of in the epoch, for all syncer shards: a
        hub that was put back may have lost it.
        """
        told = [self.restored] if epoch <= self.joined else []
        if (beat := self.beat) is not None:
            of_all = beat.epoch == epoch and all(beat.terms or (beat.term,))
            told += [beat.restored] if of_all or _began(beat.restored, epoch) else []
        return max((r.serial for r in told if r and r.epoch <= epoch), default=0)

    @property
    def nonce(self) -> str:
        """Of the present attempt."""
        return self.join.nonce

    @property
    def awaited(self) -> tuple[str, str] | None:
        """Donor and nonce of the inner state that is waited for; None: of none."""
        return (self.donor, self.nonce) if self.state is Stage.RECEIVING else None

    def _take(self, event: RecoveryEvent, now: float) -> list[RecoveryEffect]:
        match event:
            case GrantSeen():
                return self._granted(event.grant, now)
            case BeatSeen():
                return self._beat(event.beat, now)
            case AnchorReady():
                return self._anchor(event, now)
            case StateSeen():
                return self._state_seen(event)
            case StateMoved() | StateComing():
                self._moving(event, now)
            case CheckpointLoaded():
                self.loading = False
                self.source = "fresh" if event.none else self.source
            case InitMoved():
                self.init_moved_at, self.init_s = now, INIT_S
            case StateBad():
                if self._from_donor(event.donor, event.nonce):
                    return self._donor_failed(event.reason, now)
                self.ignored["state nobody waits for"] += 1
            case PublicationMoved() | TimePassed():
                pass
        return []

    def _wake(self, now: float) -> list[RecoveryEffect]:
        """The deadline is reached."""
        if self.state is Stage.JOINING:
            self.wake_at = now + JOIN_S
            return [SendJoin(self.join)]
        if self.state is Stage.RECEIVING:
            return self._donor_failed("nothing (more) of it came in time", now)
        self.wake_at = None
        return []

    def _move(self, state: Stage) -> None:
        if state not in MOVES[self.state]:
            raise RuntimeError(f"a recovery is {self.state.name} and cannot be {state.name}")
        self.state = state
        self.reached[state] = self.now

    # --- joining -------------------------------------------------------------------------------

    def _new_join(self) -> Join:
        self.attempt += 1
        return Join(
            learner=self.learner,
            incarnation=self.incarnation,
            nonce=f"{self.nonce_seed}-{self.attempt}",
            config=self.config,
            failed_donors=self.failed_donors,
            parameters=self.parameters,
            epoch=max(self.epoch, 0),
        )

    def _rejoin(self, now: float) -> list[RecoveryEffect]:
        """Ask again under a new nonce; what the old one brings is void."""
        if self.state is not Stage.JOINING:
            self._move(Stage.JOINING)
        self.donor, self.early, self.wanted_P = "", None, ()
        self.join = self._new_join()
        self.wake_at = now + JOIN_S
        return [SendJoin(self.join)]

    def _granted(self, grant: Grant, now: float) -> list[RecoveryEffect]:
        to = (grant.learner, grant.incarnation, grant.nonce)
        if self.state is not Stage.JOINING or to != (self.learner, self.incarnation, self.nonce):
            self.ignored["grant of another attempt"] += 1
            return []
        if not grant.accepted:
            return self._leave("refused", grant.reason)
        if len(grant.versions) != self.spec.algorithm.fragments:
            self.ignored["grant of another layout"] += 1
            return []
        if grant.epoch < self.epoch:
            # The syncer repeats its answer per nonce: only a new one brings a new answer.
            self.ignored["grant of an older epoch"] += 1
            return self._rejoin(now)
        if grant.epoch > self.epoch:
            self._enter(grant.epoch)
        if self.granted_at is None:
            self.granted_at = now
        self.joined, self.restored = grant.epoch, grant.restored
        self.term = max(self.term, grant.term)
        self.wanted_P = grant.versions
        self._progressed(grant.stamp)
        if max(grant.versions) < 0 and not self.anchors:
            self._move(Stage.BOOTSTRAPPING)
            self.wake_at = None
            return [*self._settle("fresh"), *self._initialise(now)]
        able = grant.donor not in ("", self.learner, *self.failed_donors)
        if not able or len(self.failed_donors) >= DONORS_MAX:
            return self._without_donor()
        self._move(Stage.RECEIVING)
        self.donor, self.donor_life = grant.donor, -1
        self.since = self.since_at = now
        self.wake_at = now + self._patience_s
        early, self.early = self.early, None
        return self._state_seen(early) if early else []

    # --- inner state ---------------------------------------------------------------------------

    def _from_donor(self, donor: str, nonce: str) -> bool:
        return self.state is Stage.RECEIVING and donor == self.donor and nonce == self.nonce

    def _state_seen(self, seen: StateSeen) -> list[RecoveryEffect]:
        if self._from_donor(seen.donor, seen.nonce):
            self._move(Stage.ANCHORING)
            self.wake_at = None
            return self._settle("donor", seen.donor)
        if self.state is Stage.JOINING and seen.nonce == self.nonce:
            self.early = seen  # faster than the grant, which will say whom to believe
        else:
            self.ignored["state nobody waits for"] += 1
        return []

    @property
    def _patience_s(self) -> float:
        """With a donor that has shown no sign."""
        return STATE_S + self.making_s

    def _moving(self, event: StateMoved | StateComing, now: float) -> None:
        """More of it has come; once all is on the bus, the donor has done its part.

        What is announced again is no more, nor is what was here before.
        """
        if event.nonce != self.nonce or not self._more(event):
            return
        if self.state is not Stage.RECEIVING:
            return
        if isinstance(event, StateMoved) and event.waiting:
            self.since += now - self.since_at
        self.since_at = now
        allowed_s = self._patience_s + STATE_SILENCE_S + SLOWER * transfer_s(self.came)
        self.wake_at = min(now + STATE_SILENCE_S, self.since + allowed_s)

    def _more(self, event: StateMoved | StateComing) -> bool:
        """Whether this is a sign of life of its donor, or tells that the donor can give none."""
        first, self.moved = self.moved != event.nonce, event.nonce
        if first:
            self.came = 0
        if isinstance(event, StateComing):
            again, self.arriving = self.arriving == event.nonce, event.nonce
            return not again
        came = min(event.bytes, self.state_bytes) if self.state_bytes else event.bytes
        more, self.came = came > self.came, max(self.came, came)
        return more or first or event.waiting

    def _donor_failed(self, reason: str, now: float) -> list[RecoveryEffect]:
        self.failed_donors = (*self.failed_donors, self.donor)
        text = f"{self.donor} gave no inner state: {reason}"
        told = Tell("donor-failed", text[:500], {"learner": self.learner, "donor": self.donor})
        return [told, *self._rejoin(now)]

    def _without_donor(self) -> list[RecoveryEffect]:
        self._move(Stage.ANCHORING)
        self.wake_at = None
        return self._settle("checkpoint" if self.has_checkpoint or self.restored else "fresh")

    def _settle(self, source: str, donor: str = "") -> list[RecoveryEffect]:
        assert not self.source, "the inner state is settled once"
        self.source, self.loading = source, source == "checkpoint"
        return [LoadState(source, donor, self.nonce if donor else "", self.restored)]

    # --- what the syncer tells everybody -------------------------------------------------------

    def _beat(self, beat: Beat, now: float) -> list[RecoveryEffect]:
        newest = beat.incarnations.get(self.learner, -1)
        if newest > self.incarnation:
            return self._leave("superseded", f"incarnation {newest} of {self.learner} has joined")
        if len(beat.versions) != self.spec.algorithm.fragments:
            self.ignored["beat of another layout"] += 1
            return []
        if (beat.epoch, beat.term) < (self.epoch, self.term):
            self.ignored["beat of a deposed leader"] += 1
            return []
        if beat.state in ("finished", "stopped"):
            return self._leave(beat.state, f"the run is {beat.state}: {beat.reason}"[:500])
        if self.source and beat.restored is not None and beat.restored.epoch > self.joined:
            return self._leave("restored", f"the run goes back to {beat.restored.source}"[:500])
        effects: list[RecoveryEffect] = []
        if beat.epoch > self.epoch:
            effects += self._raised(beat.epoch, beat.versions, now)
        if beat.term > self.term and self.wanted_P:
            # A new leader's tape may end below what an old one granted: do not wait for more
            # than there is, or a lone learner and the syncer would wait for each other.
            self.wanted_P = tuple(map(min, self.wanted_P, beat.versions))
        self.term, self.beat = beat.term, beat
        if all(beat.terms):  # else one of the shards speaks of an older epoch
            self._progressed(beat.stamp)
        waits = self.state is Stage.RECEIVING and self.arriving != self.nonce
        # A beat that knows this learner was made after the grant, when the donor was alive.
        if waits and self.learner in beat.live and (why := self._gone(beat)):
            effects += self._donor_failed(why, now)
        return effects + self._initialise(now)

    def _gone(self, beat: Beat) -> str:
        """Why the donor that was named will give nothing (more); or ""."""
        if self.donor not in beat.live:
            return "it is silent for its lease"
        life = beat.incarnations.get(self.donor, -1)
        if self.donor_life < 0:
            self.donor_life = life
        # Only the life that was asked gives.
        return "it has begun again" if life > self.donor_life else ""

    def _initialise(self, now: float) -> list[RecoveryEffect]:
        """Send the initial parameters, if asked, and only while a syncer shard has none at all.

        Of several shards one may have lost them while the others go on: who joins then waits for
        anchors that nobody publishes unless it sends them.
        """
        beat = self.beat
        asked = (
            self.state in (Stage.BOOTSTRAPPING, Stage.ANCHORING)
            and beat is not None
            and beat.state == "bootstrapping"
            and beat.initializer == self.learner
            and unborn(
                beat, self.spec.algorithm, lambda p: self.wanted_P[p] >= 0 or p in self.anchors
            )
        )
        if not asked:
            return []
        if not self.initial:
            text = (
                "the run wants the parameters that it began with, and this life has not read them"
            )
            return self._leave("unread", text)
        if self.init_moved_at is not None:
            if now < self.init_moved_at + self.init_s:
                return []
            self.init_s = min(2 * self.init_s, INIT_S_MAX)
        self.init_moved_at = now
        return [SendInit()]

    def _raised(self, epoch: int, versions_P: tuple[int, ...], now: float) -> list[RecoveryEffect]:
        """History began again: versions and requests of before are void, moments are not."""
        self._enter(epoch)
        if self.state is Stage.RECEIVING:
            return self._rejoin(now)  # the donor was asked in the old epoch
        self.wanted_P = versions_P
        return []

    def _enter(self, epoch: int) -> None:
        self.epoch, self.term = epoch, -1
        self.anchors.clear()
        self.stamp = None

    def _progressed(self, stamp: Stamp) -> None:
        if self.stamp is None or stamp.steps > self.stamp.steps:
            self.stamp = stamp

    # --- anchors -------------------------------------------------------------------------------

    def _anchor(self, anchor: AnchorReady, now: float) -> list[RecoveryEffect]:
        if anchor.epoch < self.epoch:
            self.ignored["anchor of an older epoch"] += 1
            return []
        effects: list[RecoveryEffect] = []
        if anchor.epoch > self.epoch:
            # Which versions it has reached, a beat will tell; the keyframes of its beginning do.
            effects += self._raised(anchor.epoch, (0,) * self.spec.algorithm.fragments, now)
        known = self.anchors.get(anchor.fragment)
        if known is None or anchor.version > known.version:
            self.anchors[anchor.fragment] = anchor
        return effects

    def _begin(self) -> list[RecoveryEffect]:
        """Begin once moments are settled and every fragment is at least at its granted version."""
        fragments = self.spec.algorithm.fragments
        if self.loading or self.state not in (Stage.BOOTSTRAPPING, Stage.ANCHORING):
            return []
        if len(self.anchors) < fragments:
            return []
        versions = tuple(self.anchors[p].version for p in range(fragments))
        if any(have < want for have, want in zip(versions, self.wanted_P, strict=True)):
            return []
        if self.spec.algorithm.shards == 1:  # else each is of its shard, not of the run
            for p in range(fragments):
                self._progressed(self.anchors[p].stamp)
        if self.stamp is None:
            return []  # anchors of a new epoch were quicker than its first beat
        assert self.source and min(versions) >= 0
        first = self.state is Stage.BOOTSTRAPPING
        self._move(Stage.BEGUN)
        self.wake_at = None
        how = {
            "donor": f"with the optimizer state of {self.donor}",
            "checkpoint": "with the optimizer state of a checkpoint",
            "fresh": "with a new optimizer state",
        }[self.source]
        data = {
            "learner": self.learner,
            "incarnation": self.incarnation,
            "source": self.source,
            "donor": self.donor,
            "versions": list(versions),
            "attempts": self.attempt,
        }
        verb = "begins to train" if first else "trains again"
        text = f"{self.learner} {verb} (life {self.incarnation}), {how}"
        return [
            Tell("began" if first else "recovered", text[:500], data),
            Begin(self.joined, self.epoch, versions, self.stamp, self.restore(self.epoch)),
        ]

    def _leave(self, outcome: str, reason: str) -> list[RecoveryEffect]:
        self._move(Stage.LEFT)
        self.wake_at = None
        return [Leave(outcome, reason)]


# --------------------------------------------------------------------------------------------------
# What a learner says of itself before it trains; while it trains, the exchange reports.


def _began(restored: Restored | None, epoch: int) -> bool:
    """Whether that restore began the epoch."""
    return restored is not None and restored.epoch == epoch


def before_training(
    learner: str, incarnation: int, epoch: int, versions_P: tuple[int, ...], restore: int = 0
) -> Progress:
    """Alive, nothing done yet: `joining`, or `recovering` once every anchor is there."""
    zeros = (0,) * len(versions_P)
    return Progress(
        learner=learner,
        incarnation=incarnation,
        epoch=epoch,
        state="recovering" if min(versions_P) >= 0 else "joining",
        step=0,
        tokens=0,
        c_steps=zeros,
        c_tokens=zeros,
        adopted=tuple(-1 for _ in zeros),
        adopted_at=zeros,
        loss=math.nan,
        step_s=0.0,
        wait_s=0.0,
        restore=restore,
    )


def recovery_times(
    recovery: Recovery, started_at: float, stepping_at: float | None, now: float
) -> RecoveryTimes:
    """How this process came to train; all times are on one clock, whatever its origin."""

    def since(at: float | None) -> float | None:
        return None if at is None else max(at - started_at, 0.0)

    settled = recovery.reached.get(Stage.ANCHORING, recovery.reached.get(Stage.BOOTSTRAPPING))
    return RecoveryTimes(
        age_s=max(now - started_at, 0.0),
        granted_s=since(recovery.granted_at),
        donor_s=since(recovery.reached.get(Stage.RECEIVING)),
        settled_s=since(settled),
        stepping_s=since(stepping_at),
        donor=recovery.donor,
        source=recovery.source,
        attempts=recovery.attempt,
    )
