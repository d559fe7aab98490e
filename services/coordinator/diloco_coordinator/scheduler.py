"""Who works for which run: a pure function of members, runs and present assignments.

Runs are served in the order they were created. An assignment outlives the death of its member:
whoever comes back goes on where it was. Draining or forgetting a member ends it.
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
class Change:
    """An assignment to write (`run` "" for none), and why."""

    member: str
    run: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write, and what each run lacks, if anything."""

    changes: tuple[Change, ...]
    waiting: dict[str, str]


def schedule(
    members: Sequence[MemberView], runs: Sequence[RunView], assigned: Mapping[str, str]
) -> Plan:
    """`runs` in order of creation; the result is stable: applied, it yields no more changes.

    A run begins with a syncer and at least `learners_min` living learners; from then on it gets
    every free learner up to `learners_max`, the dead ones that may come back included.
    """
    wanted = {r.name: r for r in runs if not r.over}
    by_id = {m.id: m for m in members}
    reasons: dict[str, str] = {}
    now: dict[str, str] = {}
    for member, run in assigned.items():
        if not run:
            continue
        if run not in wanted:
            reasons[member] = f"run {run} is over or gone"
        elif member not in by_id:
            reasons[member] = f"{member} is not known any more"
        elif by_id[member].draining:
            reasons[member] = f"{member} is draining"
        else:
            now[member] = run
    waiting: dict[str, str] = {}
    for wish in wanted.values():
        _serve(wish, by_id, now, waiting, reasons)
    changes = tuple(
        Change(member, now.get(member, ""), reasons[member])
        for member in sorted(assigned.keys() | now.keys())
        if assigned.get(member, "") != now.get(member, "")
    )
    return Plan(changes, waiting)


def _serve(
    run: RunView,
    by_id: Mapping[str, MemberView],
    now: dict[str, str],
    waiting: dict[str, str],
    reasons: dict[str, str],
) -> None:
    def free(role: Literal["learner", "syncer"]) -> list[str]:
        return sorted(
            m.id
            for m in by_id.values()
            if m.role == role and m.alive and not m.draining and m.id not in now
        )

    mine = [by_id[m] for m, r in now.items() if r == run.name]
    syncer = next((m for m in mine if m.role == "syncer"), None)
    learners = [m for m in mine if m.role == "learner"]
    spare = free("learner")
    if syncer is None:
        syncers = free("syncer")
        if not syncers:
            waiting[run.name] = "queued: no free syncer"
            return
        have = len(learners) + len(spare)
        if have < run.learners_min:
            waiting[run.name] = f"queued: {have} of {run.learners_min} learners free"
            return
        now[syncers[0]] = run.name
        reasons[syncers[0]] = f"a free syncer for run {run.name}"
    elif not syncer.alive:
        # Its snapshots lie in its own folder: only it can go on with the run.
        waiting[run.name] = f"syncer {syncer.id} is gone: the run goes on once it is back"
    taken = spare[: max(run.learners_max - len(learners), 0)]
    for member in taken:
        now[member] = run.name
        reasons[member] = f"run {run.name} may have {run.learners_max} learners"
    living = sum(m.alive for m in learners) + len(taken)
    if run.name not in waiting and living < run.learners_min:
        waiting[run.name] = f"{living} of {run.learners_min} learners alive"
