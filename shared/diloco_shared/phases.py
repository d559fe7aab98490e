"""How long each phase of a learner's return took, from the times of a RecoveryRecord."""

from collections.abc import Mapping
from typing import Any

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
