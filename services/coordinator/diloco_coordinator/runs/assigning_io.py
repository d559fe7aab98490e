"""Writes the assignments that members and runs call for, again and again."""

from collections.abc import Collection

import structlog
from pydantic import ValidationError

from diloco_coordinator.runs.membership import MemberNote
from diloco_coordinator.runs.registry_io import Registry
from diloco_coordinator.runs.scheduler import MemberView, RunView, needed, schedule
from diloco_shared import ambient
from diloco_shared.bus.port import Conflict
from diloco_shared.bus.repeating import again_and_again
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord
from diloco_shared.spec.run import RunSpec

log = structlog.get_logger()

# Between two looks at whether assignments fit, in seconds.
SCHEDULE_S = 0.3
# What the record of a syncer shows that has its shard's state.
FIT = ("leading", "standby")


async def keep_assigned(registry: Registry) -> None:
    """For ever."""
    specs = Specs()
    await again_and_again(lambda: assign(registry, specs), "assignments", SCHEDULE_S)


class Specs:
    """Of runs, as they were read last: several looks a second find them as they were."""

    def __init__(self) -> None:
        self.read: dict[str, tuple[RunRecord, RunSpec | None]] = {}  # by name

    def of(self, record: RunRecord) -> RunSpec | None:
        """None for what was written by another release, which is logged once."""
        known = self.read.get(record.name)
        if known is not None and known[0] is record:
            return known[1]
        spec = None
        try:
            spec = RunSpec.model_validate(record.spec)
        except ValidationError as error:
            log.error("unreadable specification", run=record.name, error=str(error))
        self.read[record.name] = record, spec
        return spec

    def keep(self, names: Collection[str]) -> None:
        """Those of other runs are let go."""
        for name in [*self.read]:
            if name not in names:
                del self.read[name]


async def assign(registry: Registry, specs: Specs | None = None) -> None:
    """One look, and what follows from it."""
    await registry.miss()
    registry.roll.not_ahead(ambient.wall())
    members = [_member(registry, m, note) for m, note in registry.roll.notes.items()]
    unread = _unread(registry)
    # One to a run that was deleted ends, also if another has taken its name since.
    assigned = {
        m: a.run if not a.run or a.run in unread or registry.holds(a) else f"{a.run}.{a.run_id}"
        for m, a in registry.assignments.items()
    }
    runs = _runs(registry, specs or Specs()) + [_beyond(registry, run) for run in unread]
    await _forget(registry, needed(members, runs, assigned))
    plan = schedule(members, runs, assigned)
    registry.plan = plan
    for change in plan.changes:
        before = assigned.get(change.member, "")
        try:
            await registry.assign(change.member, change.run, change.shard)
        except Conflict as error:
            log.info("another was first", member=change.member, why=str(error))
            continue
        text = f"{change.member} works for {change.run or 'no run'}: {change.reason}"
        kind = "assigned" if change.run else "released"
        known = before if before in registry.runs else ""  # a deleted run has no events
        await registry.tell(change.run or known, kind, text, {"member": change.member})


async def _forget(registry: Registry, kept: set[str]) -> None:
    """The dead leave the list by themselves, with their assignments."""
    now = ambient.wall()
    # Who was drained is kept for a month.
    gone_s = {m: registry.roll.notes[m].since_s(now) for m in registry.roll.expired(now, kept)}
    for member, seconds in gone_s.items():
        run = registry.assigned.get(member, "")
        await registry.forget(member)
        text = f"{member} was gone for {_lasted(seconds)} and is forgotten"
        await registry.tell(run, "member-forgotten", text, {"member": member})


def _lasted(seconds: float) -> str:
    """At least the quarter of an hour after which members are forgotten."""
    days, minutes = seconds / 86_400, seconds / 60
    return f"{days:.0f} days" if days >= 2 else f"{minutes:.0f} minutes"


def _member(registry: Registry, member: str, note: MemberNote) -> MemberView:
    assignment, record = registry.assignments.get(member), note.record
    # What it shows may still be of what it was assigned to before.
    there = assignment and (record.run, record.shard) == (assignment.run, assignment.shard)
    return MemberView(
        member,
        record.role,
        alive=note.alive,
        draining=note.draining,
        unfit=record.reason if record.state == "ineligible" else "",
        shard=assignment.shard if assignment else 0,
        since_s=note.since_s(ambient.wall()),
        fit=bool(there and record.run and record.state in FIT),
    )


def _runs(registry: Registry, specs: Specs) -> list[RunView]:
    found = []
    specs.keep(registry.runs)
    for record in sorted(registry.runs.values(), key=lambda r: (r.created_at, r.name)):
        spec = specs.of(record)
        if spec is None:
            found.append(_beyond(registry, record.name))
            continue
        found.append(
            RunView(
                record.name,
                spec.membership.learners_min,
                spec.membership.learners_max,
                registry.over(record.name),
                spec.membership.syncers,
                registry.standings.leaders(record.name),
                spec.algorithm.shards,
                registry.forced(record.name),
            )
        )
    return found


def _unread(registry: Registry) -> list[str]:
    """Runs that are on the bus and not in the mirror: not even their records can be read here."""
    there = (key for bucket, key in registry.revisions if bucket == subjects.RUNS)
    return sorted(run for run in there if run not in registry.runs)


def _beyond(registry: Registry, run: str) -> RunView:
    """A run of another release: whether it is over can be told, and not what it wants."""
    status = registry.statuses.get(run)
    settled = status is not None and status.settled
    over = registry.over(run) if run in registry.runs else settled
    return RunView(run, 0, 0, over, forced=registry.forced(run), unread=True)
