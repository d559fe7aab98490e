"""What fills up, goes away for a while, or never comes back; and what a run is without it."""

from functools import partial
from typing import TYPE_CHECKING

from diloco_shared.protocol.messages import PublicationManifest
from diloco_simulator.checkers_alive import WORKING
from diloco_simulator.syncer_inbox import NAME
from diloco_simulator.syncer_node import SyncerNode
from diloco_syncer.replay import payloads_needed

if TYPE_CHECKING:
    from diloco_simulator.scenario import Scenario

# With less than a run needs for good, it is looked at for so long.
DEGRADED_S = 100.0
# After one of these the state of a shard may be nowhere.
DISASTERS = ("tails lost", "disk lost", "syncer renamed")


class Losses:
    """Of one world."""

    def __init__(self, scenario: "Scenario") -> None:
        self.scenario = scenario
        self.world, self.watch, self.hub = scenario.world, scenario.watch, scenario.hub

    def plan(self) -> None:
        """What fills, goes away, or never comes back."""
        rng, o = self.world.rng, self.world.options
        for _ in range(o.losses):
            self.scenario.at(self.scenario.fleet.lose_somebody)
        for _ in range(o.replaced):
            self.scenario.at(self.scenario.fleet.replace_somebody)
        for _ in range(o.long_hangs):
            self.scenario.at(self._learner_hangs_long)
        if o.stop_late:
            self.world.at(rng.uniform(20.0, o.safety_s), self.scenario.user.stop)
        for _ in range(o.squeezes):
            self._for_a_while("squeezed", "hub's disk full")
        for _ in range(o.outages):
            self._for_a_while("away", "hub away")
        for _ in range(o.disk_spells):
            self.scenario.at(self._disk_full)
        for _ in range(o.tails):
            self.scenario.at(self._lose_tails)

    def _learner_hangs_long(self) -> None:
        """Its lease runs out many times over, and nobody takes its place."""
        node = self.world.rng.choice(self.scenario.learners)
        if node.life is not None:
            self.watch.reached("learner hangs for minutes")
            node.hang(self.world.rng.uniform(100.0, 300.0))

    def _for_a_while(self, trouble: str, reached: str) -> None:
        """The hub's disk is full, or the hub is away, for everybody."""
        rng = self.world.rng
        begin, seconds = rng.uniform(3.0, self.world.options.safety_s), rng.uniform(3.0, 30.0)
        self.watch.reached(reached)

        def begins() -> None:
            setattr(self.world, trouble, self.world.faulty)
            self._miss_the_hub()

        self.world.at(begin, begins)
        self.world.at(begin + seconds, lambda: setattr(self.world, trouble, False))

    def _miss_the_hub(self) -> None:
        """Leaders see that the bus does not answer: until it does, silence is nobody's fault."""
        if not self.world.away:
            return
        for node in self.scenario.syncers:
            if node.life is not None and node.life.machine.leading:
                node.life.enter(node.life.away)
        self.world.after(1.0, self._miss_the_hub)

    def _disk_full(self) -> None:
        """A syncer's disk takes no snapshot for a while."""
        self.watch.reached("a syncer's disk full for a while")
        node, seconds = (
            self.world.rng.choice(self.scenario.syncers),
            self.world.rng.uniform(5.0, 40.0),
        )
        node.disk_full_until = self.world.now + seconds

    def _lose_tails(self) -> None:
        """A power cut at the hub takes what was acknowledged and not on disk: of every stream but
        the tape, which is synced."""
        rng = self.world.rng
        lost = [log.lose(rng.randint(0, 3)) for log in (self.hub.up, self.hub.dn, self.hub.state)]
        for shard in self.watch.of:
            shard.limits.rewound(self.hub.up.seq)
        if any(lost):
            self.watch.reached("tails lost")

    def disks(self) -> None:
        """The syncers of a shard die and start on empty disks: at once, or one after another."""
        rng = self.world.rng
        shard, renamed = rng.choice(self.hub.shards), rng.random() < 0.5
        apart_s = rng.choice([0.0, 0.0, 2.0, 20.0])
        for n, syncer in enumerate(node for node in self.scenario.syncers if node.shard is shard):
            self.world.after(n * apart_s, partial(self._disk_lost, syncer, renamed))

    def _disk_lost(self, syncer: SyncerNode, renamed: bool) -> None:
        if not self.world.faulty:
            return
        self.watch.reached("syncer renamed" if renamed else "disk lost")
        syncer.on_an_empty_disk(self.world.rng.uniform(0.5, 6.0), renamed=renamed)
        processes = tuple(node.process for node in self.scenario.syncers)
        self.hub.processes[NAME] = processes

    def lacking(self) -> str:
        """What a healed world lacks for good, after some time without it; "" for nothing.

        A container that is being made anew, or parameters on their way, are no loss.
        """
        lacks = self.scenario.fleet.lacks()
        if not lacks or self.watch.ended:
            return ""
        self.world.run(self.world.now + DEGRADED_S)
        return "" if self.watch.ended else self.scenario.fleet.lacks()

    def gone(self) -> bool:
        """Whether disasters took from hub and disks what is nowhere else: the state of a shard.

        Nothing there makes a version of some fragment, and what the tape names next is not on UP.
        """
        found = [n for n in range(len(self.hub.shards)) if self._gone(n)]
        for shard in found:
            self.watch.reached("state lost at the hub and on disks")
            for node in self.scenario.syncers:
                following = node.life.following if node.life is not None else None
                of_shard = node.shard.number == shard and following is not None
                if of_shard and following is not None and following.shows == "fit":
                    self.watch.broken("liveness", f"{node.process} is fit without a state")
        return bool(found)

    def _gone(self, shard: int) -> bool:
        syncers = [n for n in self.scenario.syncers if n.shard.number == shard]
        led = any(n.life is not None and n.life.machine.leading for n in syncers)
        if led or not any(self.world.counts[what] for what in DISASTERS):
            return False
        built = _built([i.message for i in self.hub.dn.items])
        owned = self.scenario.spec.algorithm.owned(shard)
        tape = self.hub.shards[shard].tape
        rest = tape[max((n.disk.covers() for n in syncers), default=0) :]
        named = {subject for record in rest for subject in payloads_needed(record)}
        return not built.issuperset(owned) and not named <= self.hub.up.by_subject.keys()

    def judge(self, lacks: str) -> None:
        """With less than a run needs, its state has a name, and the user's word still counts."""
        w, world = self.watch, self.world
        self.watch.reached("lacks a syncer" if lacks.startswith("a syncer") else "lacks learners")
        working = [
            life.machine.announcer.state(life.now)[0]
            for node in self.scenario.syncers
            if (life := node.life) is not None and life.machine.leading
        ]
        w.report.looked("liveness")
        # Without a syncer of one shard, the leaders of the others rightly go on with their rounds.
        # Initial parameters that were on their way may have come: then it has what it needs.
        lead = not lacks.startswith("a syncer") and bool(self.scenario.fleet.lacks())
        if lead and working and all(state in WORKING for state in working) and not w.ended:
            w.broken("liveness", f"lacks {lacks}, and says {working}")
        short = len(working) < self.scenario.spec.algorithm.shards and not w.ended
        # Or somebody came after all, and finds no state to lead with.
        if short and not self.scenario.fleet.waiting and not self.gone():
            w.broken("liveness", f"lacks {lacks}, and the coordinator waits for nobody")
        self.scenario.user.stop()
        world.run(world.now + DEGRADED_S)


def _built(manifests: list[PublicationManifest]) -> set[int]:
    """Fragments of which some version is there with all that it builds on."""
    whole = set[tuple[int, int, int]]()
    for m in sorted(manifests, key=lambda m: (m.epoch, m.version, m.prev_version)):
        if m.prev_version < 0 or (m.fragment, m.epoch, m.prev_version) in whole:
            whole.add((m.fragment, m.epoch, m.version))
    return {p for p, _, _ in whole}
