"""Whether anybody leads a run, and what to do where nobody does. Pure.

A run's syncers are given as its view shows them (`views.syncer_views`).
"""

from collections.abc import Sequence
from typing import Any

from diloco_coordinator.standings import UNLED_S

# What a run without a leader does and does not do.
MEANWHILE = "learners step on, nothing is merged"


def leaderless(syncers: Sequence[dict[str, Any]], state: str, wordless_s: float) -> str:
    """Why nobody leads some shard of a run, and what to do; "" while somebody does, or may soon.

    `state`: the last word of its leader, `wordless_s` seconds ago. A hub out of disk explains the
    silence by itself.
    """
    if why := cannot_go_on(syncers):
        return why
    for shard in sorted({s["shard"] for s in syncers}):
        mine = [s for s in syncers if s["shard"] == shard]
        if all(s["state"] == "gone" for s in mine):
            return _gone([s["id"] for s in mine])
    return _silent([s["id"] for s in syncers]) if wordless_s > UNLED_S and state != "full" else ""


def _gone(ids: list[str]) -> str:
    gone, are = ", ".join(ids), "are" if len(ids) > 1 else "is"
    one = "one of them" if len(ids) > 1 else "it"
    return f"{gone} {are} gone and nobody else leads: {MEANWHILE} until you start {one} again"


def _silent(ids: list[str]) -> str:
    if not ids:
        return f"no syncer is assigned to it: {MEANWHILE} until you start one"
    text = f"no syncer has led it for more than {UNLED_S:.0f} s: {MEANWHILE}"
    return f"{text}. Look at the logs of {', '.join(ids)}, and at the message server's disk"


def cannot_go_on(syncers: Sequence[dict[str, Any]]) -> str:
    """Why a shard has nobody who could lead it, of those that live; "" if none has nobody."""
    for shard in sorted({s["shard"] for s in syncers}):
        living = [s for s in syncers if s["shard"] == shard and s["state"] != "gone"]
        if living and all(s["state"] == "ineligible" for s in living):
            return f"cannot go on, no syncer has its state: {living[0]['reason']}"
    return ""
