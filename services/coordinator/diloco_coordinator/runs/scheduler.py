"""Who works for which run: a pure function of members, runs and present assignments.

Runs are served in the order they were created: first each gets a syncer and its learners, then
standbys are given out. An assignment outlives the death of its member: whoever comes back goes on
where it was, if there is room. But the dead count against nothing. Draining or forgetting a member
ends it; but a syncer that drains stays until another one has the state of its shard. A run that
only another release can read keeps whom it has, and gets nobody.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from diloco_coordinator.runs.reasons import Why

# A learner that is gone keeps its place among `learners_max` for this many seconds, and a syncer
# its shard: a process that is started again, or a container that is made anew, is back by then and
# goes on where it was.
GRACE_S = 30.0
# A syncer that comes back to a run whose end was forced is left with it for this many seconds: it
# reads the tape, ends the run properly, and is free.
RETURN_S = 30.0


@dataclass(frozen=True, slots=True)
class MemberView:
    """A process that is or was a member."""

    id: str
    role: str
    alive: bool
    draining: bool = False
    unfit: str = ""  # why a syncer could not lead its run
    shard: int = 0  # that a syncer is assigned to
    since_s: float = 0.0  # for how long it has been alive, or gone
    fit: bool = False  # a syncer that has its shard's state: it leads, or could at once


@dataclass(frozen=True, slots=True)
class RunView:
    """A run that wants members. `over` once its syncer says so."""

    name: str
    learners_min: int
    learners_max: int
    over: bool
    syncers: int = 1  # living ones wanted per shard: a leader, and standbys
    leaders: tuple[str, ...] = ()  # the syncers that led its shards last
    shards: int = 1
    forced: bool = False  # over by the coordinator's word: its tape has no end yet
    unread: bool = False  # nobody here can tell what it wants


@dataclass(frozen=True, slots=True)
class AssignmentChange:
    """An assignment to write (`run` "" for none), and why."""

    member: str
    run: str
    reason: str
    shard: int = 0  # of a syncer


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write, what each run lacks, if anything, and why a syncer that drains stays."""

    changes: tuple[AssignmentChange, ...]
    waiting: dict[str, tuple[Why, ...]]
    staying: dict[str, str]  # by member


def schedule(
    members: Sequence[MemberView], runs: Sequence[RunView], assigned: Mapping[str, str]
) -> Plan:
    """`runs` in order of creation; the result is stable: applied, it yields no more changes.

    A run begins with a syncer for each of its shards and at least `learners_min` living learners;
    from then on it gets every free learner up to `learners_max` living ones, and free syncers until
    `syncers` of every shard live. One that was led before, and that nobody works for any more (its
    end is not in the backup that the hub was put back from), needs no `learners_min`. A run that
    waits for a syncer gets the standby of another one; so does a shard whose syncers are gone for
    longer than `GRACE_S`, or drain.
    """
    return _Scheduling(members, runs, assigned).plan()


def needed(
    members: Sequence[MemberView], runs: Sequence[RunView], assigned: Mapping[str, str]
) -> set[str]:
    """The dead whose place must be kept: syncers of a shard that nobody else can lead now."""
    wanted = {r.name for r in runs if not r.over}
    mine = [(m, r) for m in members if m.role == "syncer" and (r := assigned.get(m.id)) in wanted]
    led = {(r, m.shard) for m, r in mine if m.alive and not m.unfit}
    return {m.id for m, r in mine if not m.alive and (r, m.shard) not in led}


class _Scheduling:
    """One call's work: `now` becomes who works for what."""

    def __init__(
        self,
        members: Sequence[MemberView],
        runs: Sequence[RunView],
        assigned: Mapping[str, str],
    ) -> None:
        self.wanted = {r.name: r for r in runs if not r.over and not r.unread}
        self.unread = {r.name: r for r in runs if not r.over and r.unread}
        self.forced = {r.name for r in runs if r.over and r.forced}
        self.by_id = {m.id: m for m in members}
        self.assigned = assigned
        self.now: dict[str, str] = {}
        self.shards: dict[str, int] = {}  # of the syncers among them
        self.reasons: dict[str, str] = {}
        self.waiting: dict[str, tuple[Why, ...]] = {}

    def plan(self) -> Plan:
        self._keep()
        self._let_go()
        for run in self.wanted.values():
            self._serve(run)
        for run in self.wanted.values():
            self._stand_by(run)
        changes = tuple(
            AssignmentChange(
                member, self.now.get(member, ""), self.reasons[member], self.shards.get(member, 0)
            )
            for member in sorted(self.assigned.keys() | self.now.keys())
            if self._changed(member)
        )
        return Plan(changes, self.waiting, self._staying())

    def _changed(self, member: str) -> bool:
        before, now = self.assigned.get(member, ""), self.now.get(member, "")
        moved = member in self.shards and self.shards[member] != self.by_id[member].shard
        return before != now or moved

    def _keep(self) -> None:
        """Assignments that still hold."""
        for member, run in self.assigned.items():
            if not run:
                continue
            if run in self.forced and self._may_end(member):
                self.now[member], self.shards[member] = run, self.by_id[member].shard
            elif run not in self.wanted and run not in self.unread:
                self.reasons[member] = f"run {run} is over or gone"
            elif member not in self.by_id:
                self.reasons[member] = f"{member} is not known any more"
            elif self.by_id[member].draining and self.by_id[member].role != "syncer":
                self.reasons[member] = f"{member} is draining"
            else:
                self.now[member] = run
                self.shards[member] = self.by_id[member].shard

    def _draining(self) -> list[MemberView]:
        """Syncers that still work for a run; first those that it misses least."""
        leaders = {m for run in self.wanted.values() for m in run.leaders}
        found = [m for member in self.now if (m := self.by_id[member]).draining]
        return sorted(found, key=lambda m: (m.alive and m.fit, m.id in leaders, m.id))

    def _let_go(self) -> None:
        """Of the syncers that drain, each that another one of its shard can do without.

        One that has left sends nobody its snapshots. If nobody else had the state, the run would
        begin again from what is published.
        """
        for m in self._draining():
            mine = self._at(self.now[m.id], self.shards[m.id])
            able = [o.id for o in mine if o is not m and o.alive and o.fit]
            if able:
                del self.now[m.id], self.shards[m.id]
                self.reasons[m.id] = f"{m.id} is draining, and {able[0]} can do without it"

    def _staying(self) -> dict[str, str]:
        """Why the syncers that drain and live still work for their runs."""
        runs, said = self.wanted | self.unread, {}
        for m in (m for m in self._draining() if m.alive):
            run, shard = runs[self.now[m.id]], self.shards[m.id]
            heirs = [o.id for o in self._of_shard(run, shard) if o.alive and not o.draining]
            said[m.id] = (
                f"{self._named('hands over', run, shard)} to {', '.join(sorted(heirs))}"
                if heirs
                else f"{self._named('nobody can take over', run, shard)}: start another syncer"
            )
        return said

    def _may_end(self, member: str) -> bool:
        """Whether it may still end a run properly whose end was forced; the dead nobody needs."""
        m = self.by_id.get(member)
        if m is None or m.role != "syncer" or m.draining or m.unfit:
            return False
        return not m.alive or m.since_s < RETURN_S

    def _free(self, role: Literal["learner", "syncer"]) -> list[str]:
        return sorted(
            m.id
            for m in self.by_id.values()
            if m.role == role and m.alive and not m.draining and m.id not in self.now
        )

    def _of(self, run: RunView, role: Literal["learner", "syncer"]) -> list[MemberView]:
        mine = (self.by_id[m] for m, r in self.now.items() if r == run.name)
        return [m for m in mine if m.role == role]

    def _give(self, member: str, run: RunView, reason: str, shard: int = 0) -> None:
        self.now[member], self.reasons[member] = run.name, reason
        self.shards[member] = shard

    def _of_shard(self, run: RunView, shard: int) -> list[MemberView]:
        return self._at(run.name, shard)

    def _at(self, run: str, shard: int) -> list[MemberView]:
        """Syncers of a shard, by the name of its run."""
        mine = (self.by_id[m] for m, r in self.now.items() if r == run)
        return [m for m in mine if m.role == "syncer" and self.shards[m.id] == shard]

    def _serve(self, run: RunView) -> None:
        learners, spare = self._learners(run), self._free("learner")
        led = [s for s in range(run.shards) if self._of_shard(run, s)]
        unled = [s for s in range(run.shards) if s not in led]
        if unled:
            have = len(learners) + len(spare)
            candidates = self._free("syncer")
            candidates += self._standbys() if len(candidates) < len(unled) else []
            if not led and len(candidates) < len(unled):
                least = f"{len(candidates)} of {run.shards} syncers free"
                text = f"queued: {least if candidates else 'no free syncer'}"
                self.waiting[run.name] = (Why("syncers-missing", text),)
                return
            # One that was led before goes on with fewer: it says itself what it lacks.
            if not led and not any(run.leaders) and have < run.learners_min:
                text = f"queued: {have} of {run.learners_min} learners free"
                self.waiting[run.name] = (Why("learners-missing", text),)
                return
            for shard, candidate in zip(unled, candidates, strict=False):
                self._give(candidate, run, self._named("a free syncer for", run, shard), shard)
        for shard in led:
            self._replace(run, shard)
            self._look_at(run, self._of_shard(run, shard))
        taken = spare[: max(run.learners_max - len(learners), 0)]
        for member in taken:
            self._give(member, run, f"run {run.name} may have {run.learners_max} learners")
        living = sum(m.alive for m in learners) + len(taken)
        if run.name not in self.waiting and living < run.learners_min:
            text = f"{living} of {run.learners_min} learners alive"
            self.waiting[run.name] = (Why("learners-missing", text),)

    def _replace(self, run: RunView, shard: int) -> None:
        """A free syncer, or the standby of another shard, or run, for one whose syncers are gone
        for long, or drain.

        It finds what the run has of the shard, or begins again.
        """
        mine = self._of_shard(run, shard)
        leave = all(m.draining or (not m.alive and m.since_s >= GRACE_S) for m in mine)
        if leave and (spare := self._free("syncer") or self._standbys()):
            drain = any(m.alive for m in mine)
            what = self._named("takes over" if drain else "leads", run, shard)
            reason = f"{what}, whose syncers {'drain' if drain else 'are gone'}"
            self._give(spare[0], run, reason, shard)

    def _learners(self, run: RunView) -> list[MemberView]:
        """Those that count: the living, and those that are gone for a moment.

        Whoever comes back to find its place taken is free again: the last to come go first.
        """
        mine = [m for m in self._of(run, "learner") if m.alive or m.since_s < GRACE_S]
        living = sorted((m for m in mine if m.alive), key=lambda m: (-m.since_s, m.id))
        for m in living[run.learners_max :]:
            del self.now[m.id]
            self.reasons[m.id] = f"run {run.name} has {run.learners_max} learners without it"
            mine.remove(m)
        return mine

    def _look_at(self, run: RunView, syncers: list[MemberView]) -> None:
        """Say so when none of a run's syncers can lead it."""
        able = [m for m in syncers if m.alive and not m.unfit]
        if able:
            return
        gone = ", ".join(sorted(m.id for m in syncers if not m.alive))
        unfit = "; ".join(f"{m.id} cannot lead: {m.unfit}" for m in syncers if m.alive)
        # Snapshots lie in each syncer's own folder: who has one can go on with the run.
        if gone:
            text = f"syncer {gone} is gone: the run goes on once it is back"
            self.waiting[run.name] = (Why("syncers-gone", text),)
        if unfit:
            before = self.waiting.get(run.name, ())
            self.waiting[run.name] = (*before, Why("syncers-unfit", unfit))

    def _standbys(self) -> list[str]:
        """Syncers that a run could do without."""
        shards = ((run, s) for run in self.wanted.values() for s in range(run.shards))
        return sorted(m for run, shard in shards for m in self._spare(run, shard))

    def _spare(self, run: RunView, shard: int) -> list[str]:
        """All but one that lives and stays: one that has the state, and best the leader."""
        living = [m for m in self._of_shard(run, shard) if m.alive and not m.draining]
        living.sort(key=lambda m: (not m.fit, m.id not in run.leaders, m.id))
        return [m.id for m in living[1:]]

    def _stand_by(self, run: RunView) -> None:
        """Free syncers for a run that has begun."""
        if not self._of(run, "syncer"):
            return
        # Evenly: no shard gets a second standby before every shard has its first.
        for wanted in range(1, run.syncers + 1):
            for shard in range(run.shards):
                mine = self._of_shard(run, shard)
                living = sum(m.alive and not m.draining for m in mine)
                for member in self._free("syncer")[: max(wanted - living, 0)]:
                    self._give(member, run, self._named("stands by for", run, shard), shard)

    @staticmethod
    def _named(what: str, run: RunView, shard: int) -> str:
        of_shard = f", shard {shard}" if run.shards > 1 else ""
        return f"{what} run {run.name}{of_shard}"
