"""What the API shows of runs, members and rounds: plain dictionaries."""

import math
from collections.abc import Iterable
from typing import Any

from diloco_shared.protocol.messages import (
    Event,
    MemberRecord,
    RunRecord,
    RunStatus,
    TapeRecord,
    TapeRound,
)


def jsonable(value: Any) -> Any:
    """Floats that JSON cannot say become null, everywhere inside `value`."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return value


def run_view(
    record: RunRecord, status: RunStatus | None, waiting: str | None, members: list[str]
) -> dict[str, Any]:
    """A run: what was asked for, where it stands, who works for it."""
    state = "queued" if status is None else status.state
    reason = waiting or ("members are being assigned" if status is None else status.reason)
    if status is None and record.desired == "stopped":
        state, reason = "stopped", "stopped before it began"
    shown: dict[str, Any] = {
        "name": record.name,
        "desired": record.desired,
        "state": state,
        "reason": reason,
        "created_at": record.created_at,
        "quorum": record.quorum,
        "members": members,
        "spec": record.spec,
        "status": None if status is None else status.model_dump(mode="json"),
    }
    result: dict[str, Any] = jsonable(shown)
    return result


def member_view(
    record: MemberRecord, run: str, gone_since: float | None, status: RunStatus | None
) -> dict[str, Any]:
    """A member: the process, its assignment, and what its run's syncer sees of it."""
    shown = record.model_dump(mode="json", exclude={"lock", "boot"})
    shown["assigned"] = run
    shown["alive"] = gone_since is None
    shown["gone_since"] = gone_since
    shown["learner"] = status.learners.get(record.id) if status is not None else None
    result: dict[str, Any] = jsonable(shown)
    return result


def round_views(records: Iterable[tuple[int, TapeRecord]]) -> list[dict[str, Any]]:
    """Closed rounds with every verdict and reason."""
    return [
        {"seq": seq, **jsonable(record.model_dump(mode="json"))}
        for seq, record in records
        if isinstance(record, TapeRound)
    ]


def event_view(seq: int, event: Event) -> dict[str, Any]:
    result: dict[str, Any] = jsonable({"seq": seq, **event.model_dump(mode="json")})
    return result
