"""Events that can be shown: who may tell which, and what each must have.

Pages, reports and commands take an event's data as they are. What is asked of them here keeps one
event from costing everybody the others. Pure.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from diloco_shared.protocol.records import RecoveryRecord

# What only the hub's processes tell. A learner with credentials of its own tells nothing of these:
# that a run is paused, say, or has gone back to a checkpoint.
_OF_SYNCERS = """
checkpoint deposed end epoch flood init join join-refused lead-failed learner-alive learner-lost
learner-seen no-room rebirth refused restore-failed restored returned rewound setting
slow-disk snapshot-failed snapshot-fetched standby-unfit stuck term
"""
_OF_THE_COORDINATOR = """
assigned begin-again end-forced export-failed exported fault-planned left-over member-drained
member-forgotten member-undrained released run-created run-paused run-running run-stopped
stray-readers
"""
OF_THE_HUB = frozenset((_OF_SYNCERS + _OF_THE_COORDINATOR).split())

# What tells when each learner stepped, was down, and the like. Without some of these, whoever reads
# the others takes a learner for stepping that was not: they are kept, or let go, together.
_OF_LANES = """
began fault-applied fault-healed join learner-alive learner-lost leave recovered setting
"""
OF_LANES = frozenset(_OF_LANES.split())


def not_ones_own(kind: str, data: Mapping[str, Any], teller: str) -> str:
    """Why a learner may not tell this; "" if it may: what it did itself, and what befell it."""
    if kind in OF_THE_HUB:
        return "which no learner tells"
    about = data.get("target" if kind.startswith("fault-") else "learner", teller)
    return "" if about == teller else "about somebody else"


def misses(kind: str, data: Mapping[str, Any]) -> str:
    """What an event lacks that is shown of its kind; "" for nothing."""
    match kind:
        case "evaluation":
            figures = [data.get("steps"), data.get("val_loss")]
            each = data.get("each", {})
            figures += each.values() if isinstance(each, Mapping) else [None]
            return "" if all(map(_finite, figures)) else "without its figures"
        case "fault-planned" | "fault-applied" | "fault-healed":
            words = [data.get("id"), data.get("kind"), data.get("target")]
            return "" if all(isinstance(w, str) for w in words) else "without its fault"
        case "setting":
            known = isinstance(data.get("name"), str) and _finite(data.get("value"))
            return "" if known else "without its value"
        case "restored" | "restore-failed":
            # A syncer of an older release tells neither.
            told = (data.get("serial", 0), data.get("shard", 0))
            return "" if all(isinstance(n, int) for n in told) else "without its wish"
        case "returned":
            try:
                RecoveryRecord.model_validate(data, extra="ignore")
            except ValidationError:
                return "without its times"
    return ""


def readable(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of events as the API shows them, those that have what is shown of their kind.

    A coordinator of an older release lets others through.
    """
    return [event for event in events if not misses(event["kind"], event["data"])]


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
