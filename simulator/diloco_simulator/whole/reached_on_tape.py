"""Which rare states records on a tape show."""

from typing import TYPE_CHECKING

from diloco_shared.protocol.messages import (
    TapeCheckpoint,
    TapeEpoch,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeSetting,
)

if TYPE_CHECKING:
    from diloco_simulator.whole.watch import Watch
    from diloco_simulator.whole.watch_shard import OfShard


def of_record(watch: "Watch", of: "OfShard", record: TapeRecord) -> None:
    """What a record on a shard's tape shows; before it is watched."""
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
            if of.restores:
                watch.reached("restored twice")
        case TapeCheckpoint():
            watch.reached(f"checkpoint {record.outcome}")
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
