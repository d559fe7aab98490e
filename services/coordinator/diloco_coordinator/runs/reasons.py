"""Why a run stands where it does: sentences for people, and a word for programs with each. Pure."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from diloco_shared.protocol.messages import RunState

# Nobody leads a run of which nobody has said anything for this long: a leader that dies is replaced
# within its lease of 3 s, and the next one speaks as soon as it leads.
UNLED_S = 12.0

# What the coordinator knows by itself. What a run's leader says has the run's state as its word.
ReasonCode = Literal[
    "submitting",  # the run is being submitted
    "deleting",  # the run is being deleted
    "not-begun",  # it was stopped before it began
    "unassigned",  # its members are being assigned
    "syncers-missing",  # no syncer works for it, or fewer than it has shards
    "syncers-gone",  # every syncer of a shard is gone
    "syncers-unfit",  # no syncer that lives can lead a shard
    "leader-silent",  # its syncers live, and none has led a shard for long
    "learners-missing",  # fewer learners than it asks for
    "learners-unfit",  # learners that cannot work for it
    "members-full",  # members whose disks take nothing more
    "hub-away",  # the coordinator is cut off, or the hub keeps nothing
]


class Why(NamedTuple):
    """One sentence of a reason; without a text it says nothing."""

    code: ReasonCode | RunState
    text: str


# --------------------------------------------------------------------------------------------------
# Whether anybody leads a run, and what to do where nobody does.
#
# A run's syncers are given as its view shows them (`api/views.py`).

# What a run without a leader does and does not do.
MEANWHILE = "learners step on, nothing is merged"


def leaderless(syncers: Sequence[dict[str, Any]], state: str, wordless_s: float) -> Why | None:
    """Why nobody leads some shard of a run, and what to do; None while somebody does, or may soon.

    `state`: the last word of its leader, `wordless_s` seconds ago. A hub out of disk explains the
    silence by itself.
    """
    if why := cannot_go_on(syncers):
        return Why("syncers-unfit", why)
    for shard in sorted({s["shard"] for s in syncers}):
        mine = [s for s in syncers if s["shard"] == shard]
        if all(s["state"] == "gone" for s in mine):
            return Why("syncers-gone", _gone([s["id"] for s in mine]))
    silent = wordless_s > UNLED_S and state != "full"
    return _silent([s["id"] for s in syncers]) if silent else None


def _gone(ids: list[str]) -> str:
    gone, are = ", ".join(ids), "are" if len(ids) > 1 else "is"
    one = "one of them" if len(ids) > 1 else "it"
    return f"{gone} {are} gone and nobody else leads: {MEANWHILE} until you start {one} again"


def _silent(ids: list[str]) -> Why:
    if not ids:
        text = f"no syncer is assigned to it: {MEANWHILE} until you start one"
        return Why("syncers-missing", text)
    text = f"no syncer has led it for more than {UNLED_S:.0f} s: {MEANWHILE}"
    look = f"Look at the logs of {', '.join(ids)}, and at the message server's disk"
    return Why("leader-silent", f"{text}. {look}")


def cannot_go_on(syncers: Sequence[dict[str, Any]]) -> str:
    """Why a shard has nobody who could lead it, of those that live; "" if none has nobody."""
    for shard in sorted({s["shard"] for s in syncers}):
        living = [s for s in syncers if s["shard"] == shard and s["state"] != "gone"]
        if living and all(s["state"] == "ineligible" for s in living):
            return f"cannot go on, no syncer has its state: {living[0]['reason']}"
    return ""
