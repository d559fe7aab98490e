"""States of a run: which mean its end, which speaks for all shards, which may replace which."""

from diloco_shared.protocol.messages import RunState
from diloco_shared.protocol.records import RunStatus

OVER: tuple[RunState, ...] = ("finished", "stopped")
# While shards differ, the run is said to be what comes first here. One that has no parameters yet
# is why another waits for steps.
SHOWN_FIRST: tuple[RunState, ...] = (
    "bootstrapping",
    "waiting",
    "paused",
    "full",
    "starved",
    "stuck",
    "finishing",
)

# Says of a learner in a status that its leader alone need know of it: it left under an earlier one.
GONE_BEFORE = "gone_before"
# What a shard needs of run-wide checkpoints stands among its learners, under a name that none can
# have: a status of this wire version has no field of its own for it.
NEEDS = "(checkpoints)"


def seen(status: RunStatus) -> RunStatus:
    """The same without learners that left under an earlier leader, and what is none (`NEEDS`)."""
    there = {m: shown for m, shown in status.learners.items() if not shown.get(GONE_BEFORE)}
    same = len(there) == len(status.learners)
    return status if same else status.model_copy(update={"learners": there})


def needs_in(status: RunStatus) -> tuple[str, ...] | None:
    """References of the checkpoints that a shard may read again or shall go back to; None where it
    does not say: it is of release 0.2, or there was never a wish to go back."""
    told = status.learners.get(NEEDS, {}).get(NEEDS)
    if not isinstance(told, list | tuple):
        return None
    return tuple(text for text in told if isinstance(text, str))


# --------------------------------------------------------------------------------------------------
# Which status of a run may replace which: what others decide upon is no last writer's to say.
#
# A status is written by compare-and-set against the revision that was read, and only if this says
# so.


def over(status: RunStatus) -> bool:
    """Whether nothing more is opened."""
    return status.state in OVER


def keeps(there: RunStatus, new: RunStatus) -> str:
    """Why `there` must stay although `new`, of the same run, would replace it; "" if it may go.

    Within an epoch the end is final, and so is what is settled: only a restore, which raises the
    epoch, takes either back. What the coordinator forced gives way to a leader
    that has settled it.
    """
    if new.epoch > there.epoch:
        return ""
    if there.forced and new.settled and not new.forced:
        return ""
    if new.epoch < there.epoch:
        return f"it is of epoch {there.epoch}, this one of {new.epoch}"
    if there.settled and not (over(new) and new.settled and new.term > there.term):
        return "the run is settled"
    if over(there) and not over(new):
        return f"the run is {there.state}"
    if new.term < there.term:
        return f"it is of term {there.term}, this one of {new.term}"
    return ""
