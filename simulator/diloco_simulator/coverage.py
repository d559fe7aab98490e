"""Rare states: which of them a world reached. What no seed reaches, no seed has tested.

Counters of the world, by name; `STATES` lists those that many seeds together must have reached.
"""

from typing import TYPE_CHECKING, Any

from diloco_learner.anchors import AnchorBook
from diloco_learner.events import Adopt as LearnerAdopts
from diloco_learner.events import Leave
from diloco_learner.events import Tell as LearnerTells
from diloco_shared.protocol.messages import (
    TapeCheckpoint,
    TapeEnd,
    TapeEpoch,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeSetting,
)
from diloco_syncer.events import (
    Effect,
    InstallLoaded,
    Publish,
    SendBeat,
    SendGrant,
    SendPull,
    Tell,
)
from diloco_syncer.round import Phase

if TYPE_CHECKING:
    from diloco_simulator.learner_life import LearnerLife
    from diloco_simulator.syncer_life import SyncerLife
    from diloco_simulator.watch import Watch
    from diloco_simulator.watch_shard import OfShard

# Kinds of refusal, on the tape and at the door.
REFUSED = (
    "config",
    "epoch",
    "incarnation",
    "late",
    "malformed",
    "non-finite",
    "outlier",
    "second",
    "skipped",
    "stale",
    "term",
    "tokens",
    "uninvited",
    "wire",
)
LEADER_DIES_BEFORE = (
    "Append",
    "Capture",
    "Drop",
    "Ended",
    "Install",
    "InstallInit",
    "InstallLoaded",
    "Load",
    "Publish",
    "PurgeDown",
    "PurgeUp",
    "Seal",
    "SendBeat",
    "SendDonate",
    "SendGrant",
    "SendPull",
    "Snapshot",
    "Stage",
    "Tell",
    "a Write of the lease",
)
STANDBY_DIES_BEFORE = (
    "a Look of the lease",
    "a Write of the lease",
    "a record",
    "a snapshot",
)
LEARNER_DIES_BEFORE = (
    "Adopt",
    "Begin",
    "Checkpoint",
    "Contribute",
    "Evaluate",
    "GiveState",
    "KeepPart",
    "Leave",
    "LoadState",
    "Merged",
    "SendInit",
    "SendJoin",
    "SendProgress",
    "Tell",
    "Unmerged",
)
STATES = (
    "disk lost",
    "syncer renamed",
    "begun again from what is published",
    "begun again without what was never published",
    "goes on from a checkpoint's part",
    # Faults of the world.
    "lost",
    "duplicated",
    "put again",
    "put twice",
    "overtaken",
    "corrupted",
    "partitions",
    "slow links",
    "disk full",
    "standby's disk full",
    "torn",
    "torn snapshot passed over",
    "power cuts",
    "blackouts",
    "wall clock off by days",
    "a syncer's clock stood still",
    "a learner's clock stood still",
    "hub away",
    "steps longer than a lease",
    "transfers that take bytes over bandwidth",
    "a syncer's disk full for a while",
    *(f"{order} took effect" for order in ("pause", "quorum", "stop", "checkpoint", "restore")),
    # Capacities and losses.
    "hub's disk full",
    "tails lost",
    "published again after it was lost",
    "state lost at the hub and on disks",
    "UP full",
    "DN full",
    "TAPE full",
    "learner hangs for minutes",
    "stood still until its run had been over for long",
    "learners lost for good",
    "syncers lost for good",
    "lacks learners",
    "lacks a syncer",
    *(f"recreated: {kind}" for kind in ("rename", "empty", "all at once", "one by one")),
    "new names at work",
    # Leaders and standbys.
    "failovers",
    "deposed",
    "lapses",
    "two leaders at once",
    "three syncers",
    "takeover during publication",
    "restart during publication",
    "leader dies with a record under way",
    "leader dies with a snapshot half written",
    "leader dies with a round being pulled",
    "leader dies with a merge staged",
    "leader dies before any init",
    "append fenced by the tape",
    "append of unknown outcome that was on the tape",
    "append of unknown outcome that was not on the tape",
    "purges waited",
    "snapshots fetched",
    *(f"leader dies before {effect}" for effect in LEADER_DIES_BEFORE),
    *(f"standby dies before {effect}" for effect in STANDBY_DIES_BEFORE),
    # Syncer shards, checkpoints and restores.
    "two shards",
    "shards in two epochs",
    "epoch of a shard that is over",
    "checkpoint begun",
    "checkpoint complete",
    "checkpoint failed",
    "checkpoint not written",
    "part not written",
    "restored",
    "restored twice",
    "restored with a round in flight",
    "restored while a checkpoint is made",
    "restore executed by a standby",
    "restore failed",
    "moments of a checkpoint",
    "moments of somebody else's part",
    # Rounds.
    "skipped round",
    "two rounds skipped in a row",
    "skipped for want of members",
    "skipped for want of answers",
    "starvation",
    "paused",
    "paused with a round in flight",
    "quorum changed with a round in flight",
    "stopped by the user",
    "rounds in flight: 2",
    "rounds in flight: 3",
    "missed",
    "ineligible",
    "merged with a base one behind",
    "merged by one learner alone",
    "merged by four learners",
    *(f"refused: {kind}" for kind in REFUSED),
    "epoch raised",
    "two epochs raised",
    "keyframe on demand",
    "snapshot failed",
    "join refused: the run is over",
    "join refused: superseded",
    "join refused: another configuration",
    "ended while a learner was away",
    "budget in tokens",
    "budget in seconds",
    # Learners.
    "learner hangs",
    "doubles",
    "superseded process leaves",
    "from donor",
    "from checkpoint",
    "from fresh",
    "recovery whose donor failed",
    "recovery whose donor died",
    "two recoveries at once",
    "initializer dies",
    "evaluator dies",
    "grant sent again",
    "delta waits for its base",
    "delta of an epoch to come",
    "adopts a version past the next",
    "adopts an epoch's first version",
    "learner left behind at the end",
    "learner rests while paused",
    "learner rests for a new epoch's anchors",
    *(f"learner dies before {effect}" for effect in LEARNER_DIES_BEFORE),
)


def of_record(watch: "Watch", of: "OfShard", record: TapeRecord) -> None:
    """What a record on a shard's tape shows."""
    match record:
        case TapeRound():
            _of_round(watch, of, record)
        case TapeRebirth():
            watch.reached("begun again from what is published")
            if any(record.versions[p] < of.merges.versions[p] for p in of.merges.owned):
                watch.reached("begun again without what was never published")
        case TapeEpoch():
            watch.reached("epoch raised")
            if of.ended:
                watch.reached("epoch of a shard that is over")
            if record.epoch > 1:
                watch.reached("two epochs raised")
        case TapeSetting(name="paused", value=1):
            watch.reached("paused")
        case TapeSetting(name="stopping"):
            watch.reached("stopped by the user")
        case TapeRestore():
            watch.reached("restored")
            if of.leaders and of.leaders[-1].machine.rounds.open:
                watch.reached("restored with a round in flight")
            if of.leaders and of.leaders[-1].machine.history.checkpoint_open:
                watch.reached("restored while a checkpoint is made")
        case TapeCheckpoint():
            watch.reached(f"checkpoint {record.outcome}")
        case TapeEnd() if watch.away:
            watch.reached("ended while a learner was away")
        case _:
            pass


def _of_round(watch: "Watch", of: "OfShard", r: TapeRound) -> None:
    if r.outcome == "skipped":
        watch.reached("skipped round")
        members = "eligible" in r.reason
        watch.reached("skipped for want of", "members" if members else "answers")
        if of.skipped_before:
            watch.reached("two rounds skipped in a row")
    of.skipped_before = r.outcome == "skipped"
    merged = [v for v in r.verdicts if v.outcome == "merged"]
    if len(merged) == 1:
        watch.reached("merged by one learner alone")
    if len(merged) == 4:
        watch.reached("merged by four learners")
    for v in r.verdicts:
        if v.outcome == "merged" and v.base < r.version - 1:
            watch.reached("merged with a base one behind")
        elif v.outcome == "refused":
            watch.reached("refused:", v.reason.split(":")[0])
        elif v.outcome != "merged":
            watch.reached(v.outcome)


def of_syncer_effect(watch: "Watch", life: "SyncerLife", effect: Effect) -> None:
    """What an effect of a leader shows; called before it is performed."""
    match effect:
        case SendBeat():
            if effect.beat.state == "starved":
                watch.reached("starvation")
            elif effect.beat.state == "paused" and life.machine.rounds.open:
                watch.reached("paused with a round in flight")
        case SendPull():
            watch.reached("rounds in flight:", str(len(life.machine.rounds.open)))
        case Publish():
            if effect.round < 0 and effect.version > 0:
                watch.reached("keyframe on demand")
        case SendGrant():
            if not effect.grant.accepted:
                for part, why in _JOIN_REFUSED:
                    if part in effect.grant.reason:
                        watch.reached("join refused:", why)
            elif (nonce := (life.shard.number, effect.grant.nonce)) in watch.granted_nonces:
                watch.reached("grant sent again")
            else:
                watch.granted_nonces.add(nonce)
        case Tell(kind="refused"):
            watch.reached("refused:", effect.data["kind"])
        case Tell(kind="snapshot-failed"):
            watch.reached("snapshot failed")
        case Tell(kind="restore-failed"):
            watch.reached("restore failed")
        case InstallLoaded() if life.machine.history.restores > 1:
            watch.reached("restored twice")
        case Tell(kind="setting") if life.machine.rounds.open and "quorum" in effect.text:
            watch.reached("quorum changed with a round in flight")
        case _:
            pass


_JOIN_REFUSED = (
    ("the run is over", "the run is over"),
    ("is superseded by", "superseded"),
    ("configuration differs", "another configuration"),
)


def of_syncer_death(watch: "Watch", life: "SyncerLife") -> None:
    """In what a syncer dies."""
    if life.writing is not None:
        watch.reached("leader dies with a snapshot half written")
    if not life.machine.leading:
        return
    if life.machine.appending is not None:
        watch.reached("leader dies with a record under way")
    if life.staged:
        watch.reached("leader dies with a merge staged")
    if any(r.phase is Phase.PULLING for r in life.machine.rounds.open):
        watch.reached("leader dies with a round being pulled")
    if not life.machine.history.initialised:
        watch.reached("leader dies before any init")


def of_learner_effect(watch: "Watch", life: "LearnerLife", effect: Any) -> None:
    """What an effect of a learner shows; called before it is performed."""
    match effect:
        case LearnerTells(kind="donor-failed"):
            watch.reached("recovery whose donor failed")
            if str(effect.data["donor"]) in watch.away:
                watch.reached("recovery whose donor died")
        case LearnerTells(kind="left-behind"):
            watch.reached("learner left behind at the end")
        case LearnerAdopts():
            before = watch.anchors.by_life.get((life.life, effect.epoch, effect.fragment))
            if before is None:
                watch.reached("adopts an epoch's first version")
            elif effect.version > before + 1:
                watch.reached("adopts a version past the next")
        case Leave(outcome="superseded"):
            watch.reached("superseded process leaves")
        case _:
            pass


def of_book(watch: "Watch", book: AnchorBook) -> None:
    """What a learner holds back of the publications."""
    if book.early:
        watch.reached("delta of an epoch to come")
    if any(shelf.waiting for shelf in book.shelves):
        watch.reached("delta waits for its base")
