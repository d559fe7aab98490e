"""Who works for which run: a pure function of members, runs and present assignments.

Runs are served in the order they were created. An assignment outlives the death of its member:
whoever comes back goes on where it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MemberView:
    """A process that is or was a member."""

    id: str
    role: str
    alive: bool
    draining: bool = False


@dataclass(frozen=True, slots=True)
class RunView:
    """A run that wants members. `over` once its syncer says so."""

    name: str
    learners_min: int
    learners_max: int
    over: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Assignments to write (member -> run, "" for none), and why a run waits."""

    changes: dict[str, str]
    waiting: dict[str, str]


def schedule(
    members: Sequence[MemberView], runs: Sequence[RunView], assigned: Mapping[str, str]
) -> Plan:
    """`runs` in order of creation; the result is stable: applied, it yields no more changes."""
    wanted = {r.name: r for r in runs if not r.over}
    by_id = {m.id: m for m in members}
    now = {
        member: run
        for member, run in assigned.items()
        if run in wanted and not (member in by_id and by_id[member].draining)
    }
    waiting: dict[str, str] = {}
    for run in wanted.values():
        _serve(run, members, now, waiting)
    changes = {
        member: now.get(member, "")
        for member in sorted(assigned.keys() | now.keys())
        if assigned.get(member, "") != now.get(member, "")
    }
    return Plan(changes, waiting)


def _serve(
    run: RunView, members: Sequence[MemberView], now: dict[str, str], waiting: dict[str, str]
) -> None:
    def free(role: Literal["learner", "syncer"]) -> list[str]:
        return sorted(
            m.id
            for m in members
            if m.role == role and m.alive and not m.draining and m.id not in now
        )

    roles = {m.id: m.role for m in members}
    has_syncer = any(r == run.name and roles.get(m) == "syncer" for m, r in now.items())
    learners = [m for m, r in now.items() if r == run.name and roles.get(m) != "syncer"]
    syncers, spare = free("syncer"), free("learner")
    if not has_syncer and not syncers:
        waiting[run.name] = "queued: no free syncer"
        return
    if len(learners) + len(spare) < run.learners_min:
        have = len(learners) + len(spare)
        waiting[run.name] = f"queued: {have} of {run.learners_min} learners free"
        return
    if not has_syncer:
        now[syncers[0]] = run.name
    for member in spare[: max(run.learners_max - len(learners), 0)]:
        now[member] = run.name
