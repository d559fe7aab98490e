"""Who there is, by name, and what the coordinator's scheduler makes of it.

Members come and go for good: a machine that is lost, a container that comes back under another name
or with an empty disk. Who works for the run is the scheduler's decision, as in the product: from
living members and from what they were assigned to before.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from diloco_coordinator.scheduler import Change, MemberView, RunView, schedule
from diloco_simulator.learner_node import FREED, LearnerNode
from diloco_simulator.syncer_disk import FileDisk
from diloco_simulator.syncer_inbox import NAME
from diloco_simulator.syncer_node import SyncerNode

if TYPE_CHECKING:
    from diloco_simulator.scenario import Scenario

Node = LearnerNode | SyncerNode
Role = Literal["learner", "syncer"]
# Between two looks of the scheduler; and how long a key of a member outlives its process.
LOOK_S, TTL_S = 1.0, 5.0
# A container is back so soon, in virtual seconds.
BACK_S = (0.5, 6.0)
RUN = "sim"
# How a learner that never comes back left.
LOST = "lost"
# Seconds after the end in which its leader tells it to everybody who listens.
TOLD_S = 20.0


@dataclass(slots=True)
class Member:
    """One name. `begin` makes it work for a shard of the run; a learner works for all."""

    name: str
    role: Role
    begin: Callable[[int], Node]
    node: Node | None = None  # once it was given work
    shard: int = 0
    gone: bool = False  # for good
    seen_at: float = 0.0


class Fleet:
    """Of one world."""

    def __init__(self, scenario: "Scenario") -> None:
        self.scenario = scenario
        self.world, self.options = scenario.world, scenario.options
        self.members: dict[str, Member] = {}
        self.assigned: dict[str, str] = {}
        self.waiting = ""  # why the run lacks somebody, as the coordinator says
        self.named = 0  # names given so far to those that came back

    def begin(self) -> None:
        """Whoever is there from the beginning has work already."""
        nodes: list[Node] = [*self.scenario.syncers, *self.scenario.learners]
        for node in nodes:
            self._has(node)
        self._look()

    def _has(self, node: Node) -> None:
        if isinstance(node, SyncerNode):
            member = Member(node.process, "syncer", lambda shard: node, node, node.shard.number)
        else:
            member = Member(node.name, "learner", lambda shard: node, node)
        member.seen_at = self.world.now
        self.members[member.name], self.assigned[member.name] = member, RUN

    def _there(self, role: Role) -> list[Member]:
        return [m for m in self.members.values() if m.role == role and not m.gone]

    # --- the scheduler -------------------------------------------------------------------------

    def _look(self) -> None:
        """Write the assignments that members call for."""
        now = self.world.now
        for m in self.members.values():
            if not m.gone and (m.node is None or m.node.life is not None):
                m.seen_at = now
        membership, algorithm = self.scenario.spec.membership, self.scenario.spec.algorithm
        views = [self._view(m, now) for m in self.members.values()]
        run = RunView(
            RUN,
            membership.learners_min,
            membership.learners_max,
            over=bool(self.scenario.watch.ended),
            syncers=self.options.syncers,
            leaders=tuple(self._leaders()),
            shards=algorithm.shards,
        )
        plan = schedule(views, [run], self.assigned)
        self.waiting = plan.waiting.get(RUN, "")
        for change in plan.changes:
            self._apply(change)
        if not run.over:
            self.world.after(LOOK_S, self._look)

    @staticmethod
    def _view(member: Member, now: float) -> MemberView:
        """As the coordinator knows a member: its key has run out, or not."""
        gone_s = now - member.seen_at - TTL_S
        alive = gone_s <= 0
        return MemberView(
            member.name,
            member.role,
            alive=alive,
            shard=member.shard,
            since_s=now if alive else gone_s,
        )

    def _leaders(self) -> Iterator[str]:
        for node in self.scenario.syncers:
            if node.life is not None and node.life.machine.leading:
                yield node.process

    def _apply(self, change: Change) -> None:
        member = self.members[change.member]
        self.assigned[member.name] = change.run
        if not change.run and isinstance(member.node, LearnerNode):
            # The end of a run is told to everybody by its leader; to whom it cannot be told, the
            # missing assignment says so later.
            self.world.after(TOLD_S, partial(self._free, member.node))
        if not change.run or member.gone:
            return
        member.shard = change.shard
        if member.node is None:
            self.world.counts["new names at work"] += 1
            member.node = member.begin(change.shard)
            member.node.start()

    def _free(self, node: LearnerNode) -> None:
        node.freed = True
        told = {m.shard for m in self._there("syncer") if m.node is not None}
        mute = len(told) < self.scenario.spec.algorithm.shards
        for life in node.lives:
            if life.alive and (mute or self.world.now < life.frozen_until):
                self.scenario.watch.reached("stood still until its run had been over for long")
                life.enter(partial(node.leaves, life, FREED))

    def _has_a_syncer(self, shard: int) -> bool:
        return any(m.shard == shard for m in self._there("syncer"))

    # --- who comes and goes --------------------------------------------------------------------

    def lose_somebody(self) -> None:
        """A machine is lost for good: mostly a learner's."""
        role: Role = "learner" if self.world.rng.random() < 0.6 else "syncer"
        there = self._there(role)
        if there:
            self.world.counts[f"{role}s lost for good"] += 1
            self.lose(self.world.rng.choice(there))

    def lose(self, member: Member) -> None:
        """Its processes and its disk never come back."""
        member.gone, node = True, member.node
        if node is not None:
            node.lose(LOST)

    def replace_somebody(self) -> None:
        """A container is recreated: under a new name, or under its own with an empty disk; or all
        of them are, at once or one by one."""
        rng = self.world.rng
        there = [m for m in self.members.values() if not m.gone and m.node is not None]
        kind = rng.choice(("rename", "rename", "empty", "all at once", "one by one"))
        self.world.counts[f"recreated: {kind}"] += 1
        if kind in ("rename", "empty"):
            self._recreate(rng.choice(there), kind == "rename")
            return
        for n, member in enumerate(there):
            wait_s = 8.0 * n if kind == "one by one" else 0.0
            self.world.after(wait_s, partial(self._recreate, member, True))

    def _recreate(self, member: Member, renamed: bool) -> None:
        rng = self.world.rng
        if member.gone or member.node is None:
            return
        back_s = rng.uniform(*BACK_S)
        if not renamed:
            member.node.wipe(back_s)
            return
        self.lose(member)
        self.world.after(back_s, partial(self._come, member.role, member.node))

    def _come(self, role: Role, before: Node) -> None:
        """A member with a new name waits for work; it computes as the one before it did."""
        self.named += 1
        if isinstance(before, LearnerNode):
            name = f"l-new{self.named}"
            make: Callable[[int], Node] = partial(self._new_learner, name, before)
        else:
            name = f"syncer-new{self.named}"
            make = partial(self._new_syncer, name)
        self.members[name] = Member(name, role, make, seen_at=self.world.now)

    def _new_learner(self, name: str, before: LearnerNode, shard: int) -> LearnerNode:
        """A container in the place of another, under its own name and with an empty disk."""
        self.scenario.names.append(name)
        m = next(m for m, node in enumerate(self.scenario.learners) if node is before)
        node = self.scenario.learner(m % self.options.learners, name)
        self.scenario.learners.append(node)
        return node

    def _new_syncer(self, name: str, shard: int) -> SyncerNode:
        """Likewise, for whatever shard it is given."""
        scenario = self.scenario
        disk = FileDisk(self.scenario.folder / name)
        node = SyncerNode(scenario.hub, scenario.watch, scenario.names, name, disk, shard)
        node.wanted = self.scenario.user.wanted
        self.scenario.syncers.append(node)
        of_shard = [n for n in self.scenario.syncers if n.shard is node.shard and not n.lost]
        for one in of_shard:
            one.others = [other for other in of_shard if other is not one]
        self.scenario.hub.processes[NAME] = tuple(n.process for n in self.scenario.syncers)
        return node

    # --- what there is in the end --------------------------------------------------------------

    def lacks(self) -> str:
        """What a healed run would need to end; "" if it has it."""
        needed = self.scenario.user.wanted.quorum
        learners = len(self._there("learner"))
        if learners < needed:
            return f"{learners} of {needed} learners"
        if not all(w.merges.initialised for w in self.scenario.watch.of):
            least = self.scenario.spec.membership.learners_min
            if learners < least:
                return f"{learners} of {least} learners to begin"
        for shard in range(self.scenario.spec.algorithm.shards):
            if not self._has_a_syncer(shard):
                return f"a syncer of shard {shard}"
        return ""
