"""What the API shows of runs, members, rounds, events and faults: plain dictionaries."""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import to_json

from diloco_coordinator.runs.membership import MemberNote
from diloco_coordinator.runs.reasons import Why, leaderless
from diloco_shared import VERSION
from diloco_shared.protocol.messages import TapeRound
from diloco_shared.protocol.records import (
    Event,
    LearnerSpeed,
    MemberRecord,
    RecoveryRecord,
    RunPhase,
    RunRecord,
    RunStatus,
    recovery_view,
)
from diloco_shared.protocol.run_states import OVER
from diloco_shared.spec.quorum import policy, within_reach

# Of members that cannot work, or whose disks are full: they mostly say the same.
HINDERED_SHOWN = 3
T = TypeVar("T")

# What becomes of a learner that is unfit is in its owner's hands.
MEND = "mend it there, it is noticed by itself; 'diloco check' on that machine says more"
# States in which a run waits for learners.
AWAITING = ("queued", "waiting")
# Release of a process that does not say it.
BEFORE = "0.2 or before"
# Why a run is not there for others; both are momentary unless a process died over it.
PHASES: dict[RunPhase, Why] = {
    "submitting": Why(
        "submitting", "it is being submitted; if that was cut off, submit it again or delete it"
    ),
    "deleting": Why("deleting", "it is being deleted; if that was cut off, delete it again"),
}


def jsonable(value: T) -> T:
    """Floats that JSON cannot say become null, everywhere inside `value`."""
    found: Any = value
    if isinstance(value, float):
        found = value if math.isfinite(value) else None
    elif isinstance(value, dict):
        found = {str(k): jsonable(v) for k, v in value.items()}
    elif isinstance(value, list | tuple):
        found = [jsonable(v) for v in value]
    result: T = found
    return result


def run_view(record: RunRecord, status: RunStatus | None, brief: dict[str, Any]) -> dict[str, Any]:
    """A run as `brief` (`brief_view`) has it, with its specification and status, which are long."""
    shown = None if status is None else status.model_dump(mode="json")
    return brief | {"spec": jsonable(record.spec), "status": jsonable(shown)}


def brief_view(
    record: RunRecord,
    status: RunStatus | None,
    waiting: Sequence[Why],
    members: list[str],
    syncers: list[dict[str, Any]] | None = None,
    beside: Sequence[Why] = (),
    cannot: str = "",
    wordless_s: float = 0.0,
) -> dict[str, Any]:
    """A run: what was asked for, where it stands, who works for it, who leads and stands by.

    `reason` is the syncer's while one leads the run (`standing`). With it comes which learners are
    `unfit` (`cannot`): first of all where the run waits for learners, since that is why; and what
    else is amiss (`beside`). What the scheduler misses is in `waiting`. `reason_codes` has a word
    for each of its sentences, in their order. `wordless_s`: seconds for which no leader has said
    anything.
    """
    state, why = standing(record, status, members, syncers or [], wordless_s)
    whys = [*waiting] if state == "queued" and waiting else [why]
    if state not in OVER:
        unable = Why("learners-unfit", cannot)
        whys = [unable, *whys] if state in AWAITING else [*whys, unable]
        whys += beside
    whys = [PHASES[record.phase]] if record.phase in PHASES else [why for why in whys if why.text]
    shown: dict[str, Any] = {
        "name": record.name,
        "desired": record.desired,
        "state": state,
        "reason": _sentence(whys),
        "reason_codes": [why.code for why in whys],
        "waiting": _sentence(waiting) if waiting and state not in OVER else None,
        "created_at": record.created_at,
        "quorum": record.quorum,
        "members": members,
        "syncers": syncers or [],
    }
    return jsonable(shown)


def _sentence(whys: Iterable[Why]) -> str:
    return "; ".join(why.text for why in whys)


def standing(
    record: RunRecord,
    status: RunStatus | None,
    members: list[str],
    syncers: list[dict[str, Any]],
    wordless_s: float,
) -> tuple[str, Why]:
    """(state, reason) of a run: its leader's word, unless nobody leads it any more."""
    if status is None:
        if record.phase == "deleting" or (record.desired == "stopped" and not members):
            return "stopped", Why("not-begun", "stopped before it began")
        return "queued", Why("unassigned", "members are being assigned")
    if status.state not in OVER and (why := leaderless(syncers, status.state, wordless_s)):
        return "leaderless", why
    return status.state, Why(status.state, status.reason)


def unfit(notes: Iterable[MemberNote]) -> str:
    """Which living learners of a run cannot work for it, why, and what to do; "" if all can."""
    by_reason: dict[str, list[str]] = {}
    for record in _living(notes):
        if record.role == "learner" and record.state == "unfit":
            by_reason.setdefault(record.reason, []).append(record.id)
    told = [f"{_named(ids)} cannot work: {reason}" for reason, ids in by_reason.items()]
    return f"{_first(told)} ({MEND})" if told else ""


def releases(notes: Iterable[MemberNote]) -> dict[str, list[str]]:
    """Which living processes are of which release, the coordinator among them."""
    found: dict[str, list[str]] = {VERSION: ["coordinator"]}
    for record in _living(notes):
        found.setdefault(record.version or BEFORE, []).append(record.id)
    return found


def full(notes: Iterable[MemberNote]) -> str:
    """Which living members of a run cannot keep what they need for a restart, and why; "" if all
    can. Mostly their disks are full, which the reason says."""
    return _first([f"{r.id}: {r.full}" for r in _living(notes) if r.full])


def _living(notes: Iterable[MemberNote]) -> list[MemberRecord]:
    return sorted((n.record for n in notes if n.alive), key=lambda r: r.id)


def _named(ids: list[str]) -> str:
    """Some of them; of one mistake in a run's file all learners say the same."""
    more = len(ids) - HINDERED_SHOWN
    return ", ".join(ids[:HINDERED_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _first(told: list[str]) -> str:
    more = f"; and {len(told) - HINDERED_SHOWN} more" if len(told) > HINDERED_SHOWN else ""
    return "; ".join(told[:HINDERED_SHOWN]) + more


def quorum_consequence(run: str, quorum: int, status: dict[str, Any] | None) -> str:
    """What a new quorum means for a run as it stands; "" if nothing is in its way."""
    if status is None:
        return ""
    alive, answer = status["alive"], policy(quorum).answer(status["alive"])
    if answer.enough:
        return ""
    text = f"{len(alive)} of {quorum} learners are there: no round opens until {answer.short} more"
    k = within_reach(alive)
    return f"{text} join, or 'diloco quorum {run} {k}'" if k else f"{text} join"


def over_view(view: dict[str, Any]) -> bool:
    """Whether a run's view is its last."""
    return view["state"] in OVER


def syncer_views(notes: Iterable[MemberNote]) -> list[dict[str, Any]]:
    """The syncers of one run: what each does for it, and how many tape records it is behind."""
    syncers = sorted(
        (n for n in notes if n.record.role == "syncer"),
        key=lambda note: (note.record.shard, note.record.id),
    )
    heads: dict[int, int] = {}
    for n in syncers:
        if n.alive and n.record.state == "leading":
            heads[n.record.shard] = max(heads.get(n.record.shard, 0), n.record.tape_seq)
    return [
        {
            "id": n.record.id,
            "version": n.record.version or BEFORE,
            "shard": n.record.shard,
            "state": n.record.state if n.alive else "gone",
            "reason": n.record.reason if n.alive else "",
            # Told every second or so, each by its own process: a fresh leader may be behind.
            "lag_records": None
            if (head := heads.get(n.record.shard)) is None
            else max(head - n.record.tape_seq, 0),
        }
        for n in syncers
    ]


def member_view(
    note: MemberNote,
    run: str,
    status: RunStatus | None,
    lag_records: int | None = None,
    speed: LearnerSpeed | None = None,
    stays: str = "",
) -> dict[str, Any]:
    """A member: the process, its assignment, and what its run's syncer sees of it.

    `lag_records`: of a syncer, how many tape records it is behind the one that leads; `speed`: what
    a learner says of it; `stays`: why a syncer that drains still works for the run.
    """
    record = note.record
    shown = record.model_dump(mode="json", exclude={"lock", "boot"})
    shown["version"] = record.version or BEFORE
    shown["assigned"] = run
    shown["alive"] = note.alive
    shown["gone_since"] = note.gone_since
    shown["draining"] = note.draining
    shown["stays"] = stays if note.draining and note.alive else ""
    shown["lag_records"] = lag_records
    shown["learner"] = status.learners.get(record.id) if status is not None else None
    shown["speed"] = None if speed is None else _speed_view(speed)
    return jsonable(shown)


def speed_views(speeds: Iterable[LearnerSpeed | None]) -> dict[str, dict[str, Any]]:
    """How fast learners train, by learner; of those that said it lately."""
    return {speed.learner: _speed_view(speed) for speed in speeds if speed is not None}


def _speed_view(speed: LearnerSpeed) -> dict[str, Any]:
    return speed.model_dump(mode="json", exclude={"run", "learner", "incarnation"})


def round_json(seq: int, shard: int, record: TapeRound) -> bytes:
    """A closed round with every verdict and reason, as JSON: hundreds of them are a lot to make."""
    shown = {"seq": seq, **record.model_dump(), "shard": shard}
    return to_json(shown, inf_nan_mode="null")


def recovery_views(
    events: Iterable[tuple[int, Event]], status: RunStatus | None
) -> list[dict[str, Any]]:
    """Every recovery that events tell of, then those under way; times of each phase."""
    told = list[dict[str, Any]]()
    for _, e in events:
        # A learner may tell what it likes in its own name.
        with suppress(ValidationError):
            if e.kind == "returned" and "contributed_at" in e.data:
                told.append(RecoveryRecord.model_validate(e.data, extra="ignore").model_dump())
    known = {(d["learner"], d["incarnation"]) for d in told}
    under_way = [
        record.model_dump()
        for record in (status.recoveries if status is not None else ())
        if (record.learner, record.incarnation) not in known
    ]
    return jsonable([recovery_view(r) for r in [*told, *under_way]])


def event_view(seq: int, event: Event) -> dict[str, Any]:
    """An event and its place, which is the cursor to go on from."""
    try:
        shown = event.model_dump(mode="json")
    except ValueError:
        # `Events` keeps none such. Should it ever, one event costs nobody the others.
        shown = event.model_dump(mode="json", exclude={"data"}) | {"data": {}}
    return jsonable({"seq": seq, **shown})


_FAULT_FIELDS = ("kind", "target", "run", "at_step", "after_s", "duration_s", "factor")


def fault_views(events: Iterable[tuple[int, Event]]) -> list[dict[str, Any]]:
    """Every fault that events tell of: what, on whom, and when planned, applied and healed."""
    faults: dict[str, dict[str, Any]] = {}
    for _, e in events:
        phase = e.kind.removeprefix("fault-")
        if phase not in ("planned", "applied", "healed") or "id" not in e.data:
            continue
        fault = faults.setdefault(str(e.data["id"]), {"id": str(e.data["id"]), "when": ""})
        fault |= {k: e.data.get(k) for k in _FAULT_FIELDS}
        fault["when"] = e.data.get("when", fault["when"])
        fault[f"{phase}_at"] = e.at
    return jsonable(list(faults.values()))
