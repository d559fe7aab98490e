"""Used against budget: of a run's streams, and of the memory of everybody who works for it."""

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from diloco_shared.budget import Job, Size, assumed, learners_of, rounds_at, streams
from diloco_shared.budget.memory import device, processes
from diloco_shared.protocol.records import MemberRecord, RunRecord, RunStatus
from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import WrongModel


def used(
    record: RunRecord, status: RunStatus | None, members: Iterable[MemberRecord]
) -> dict[str, Any] | None:
    """Bytes by stream and by member; None for a specification that nobody could budget.

    A stream's `limit` is what the server has, `needed` what the run needs at its worst moment with
    the learners that are there; so less than that is a wall ahead.
    """
    found = _figures(json.dumps(record.spec, sort_keys=True), _seen(record, status))
    if found is None:
        return None
    needed, memory = found
    seen = {} if status is None else status.streams
    return {
        "streams": {
            kind: {
                "used": seen[kind].bytes if kind in seen else None,
                "limit": seen[kind].limit if kind in seen else None,
                "needed": size,
            }
            for kind, size in needed.items()
        },
        "memory": {
            m.id: {"used": m.memory_bytes or None, "budget": memory[m.role]}
            for m in members
            if m.role in memory
        },
    }


def _seen(record: RunRecord, status: RunStatus | None) -> Size:
    """As large as the run's own status says."""
    if status is None:
        return Size()
    stamp, budget = status.stamp, record.spec.get("budget")
    seconds = budget.get("seconds") if isinstance(budget, dict) else None
    rounds = rounds_at(seconds, stamp.round + 1, stamp.fraction)
    return Size(status.parameters, len(status.alive), rounds)


@lru_cache(maxsize=256)  # of runs as they are looked at twice a second
def _figures(spec: str, seen: Size) -> tuple[dict[str, int], dict[str, int]] | None:
    try:
        run = RunSpec.model_validate(json.loads(spec))
        size = seen.at_least(Size(learners=learners_of(run)))
        job = assumed(run, **size._asdict())
    except (WrongModel, ValidationError):  # another release may have submitted it
        return None
    return {kind: need.bytes for kind, need in streams(job).items()}, _memory(job)


def _memory(job: Job) -> dict[str, int]:
    """By role. A learner's is that of one without an accelerator: host and device in one."""
    needs = {name: need.bytes for name, need in processes(job).items()}
    return {
        "learner": needs["learner"] + device(job, on_cpu=True).bytes,
        "syncer": needs["syncer"],
        "coordinator": needs["coordinator"],
    }
