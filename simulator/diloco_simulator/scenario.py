"""One seeded world from start to verdict: safety while anything may go wrong, then liveness."""

import math
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from diloco_shared.config import RunSpec
from diloco_shared.edges.checkpoints import Checkpoints
from diloco_shared.protocol.checkpoints import parse_reference
from diloco_shared.protocol.messages import TapeInit, TapeRebirth, TapeTerm
from diloco_simulator.capacity import needed
from diloco_simulator.fleet import LOST, Fleet
from diloco_simulator.hub import Hub
from diloco_simulator.learner_node import FREED, LearnerNode
from diloco_simulator.losses import DEGRADED_S, Losses
from diloco_simulator.mischief import Mischief
from diloco_simulator.options import Options
from diloco_simulator.syncer_disk import FileDisk
from diloco_simulator.syncer_inbox import NAME
from diloco_simulator.syncer_node import SyncerNode
from diloco_simulator.tiny import TinyTrainer
from diloco_simulator.user import User
from diloco_simulator.watch import Watch
from diloco_simulator.world import World
from diloco_syncer.edges.parts import written_part

# Once healed, a run of a few dozen steps of a second must be over well within this time.
LIVENESS_S = 1200.0
# Whoever stood still at the end goes on within this time, and must see that it is over.
AFTER_S = 30.0
# Where disks of simulated machines are, if there is such a folder: syncing real ones takes long.
MEMORY = Path("/dev/shm")


@dataclass(slots=True)
class Verdict:
    """What became of one seed."""

    seed: int
    violations: list[str]
    counts: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    virtual_s: float = 0.0
    effects: Counter[str] = field(default_factory=Counter)  # performed, by role
    looks: Counter[str] = field(default_factory=Counter)  # checks made, by invariant


def spec_of(options: Options, seed: int) -> RunSpec:
    """The run of a tiny world."""
    return RunSpec.model_validate(
        {
            "name": "sim",
            "seed": seed,
            "algorithm": {
                "fragments": options.fragments,
                # Divisible by the number of fragments, and several steps of a slow learner.
                "sync_every_steps": 8 if options.fragments == 4 else 6,
                "shards": options.shards,
                "overlap_steps": options.overlap_steps,
                "quorum": options.quorum,
                "keyframe_every": options.keyframe_every,
                "codec_up": options.codec_up,
                "weighting": options.weighting,
                "codec_down": options.codec_down,
                "pull_timeout_s_min": 3.0,
                # Few enough that there are outliers in runs as short as these.
                "outlier_samples_min": 8,
            },
            "membership": {
                "learners_min": options.learners,
                "learners_max": options.learners + options.learners_spare,
                "lease_s": 5.0,
                "heartbeat_s": 1.0,
            },
            "keeping": {
                "snapshot_every_rounds": options.snapshot_every_rounds,
                "begin_again_after_s": 13.0,  # longer than most processes are away
                "checkpoint_every_steps": 10,
                "run_checkpoint_every_steps": options.checkpoint_every_steps,
            },
            "budget": _budget(options),
        }
    )


def _budget(options: Options) -> dict[str, float]:
    """About as many steps, whatever it is counted in: 512 tokens a step, a step a second."""
    amounts = {
        "steps": options.steps,
        "tokens": options.steps * 512 * options.learners,
        "seconds": options.steps * options.step_s,
    }
    return {options.budget: amounts[options.budget]}


class Scenario:
    """A world with its processes. `folder`: for what they keep on disk; nobody else uses it."""

    def __init__(self, seed: int, options: Options, folder: Path) -> None:
        self.seed = seed
        self.folder = folder
        self.options = options
        self.world = World(seed, options)
        self.spec = spec_of(options, seed)
        self.hub = Hub(self.world, self.spec)
        self.hub.vault = str(folder / "vault")
        self.watch = Watch(self.world, self.spec)
        self.mischief = Mischief(self.hub, self.watch)
        self.hub.on_record = self.watch.record
        self.hub.up.on_store = self.watch.stored
        # Everybody who ever was a learner: leaders speak to all of them.
        self.names = names = [f"l{m}" for m in range(options.learners)]
        self.syncers = self._syncers(names)
        self.user = User(self.hub, self.syncers, options.quorum, self.watch.report)
        self.learners = [self.learner(m, name) for m, name in enumerate(names)]
        if options.room < math.inf:
            trainer = self.learners[0].make()
            sizes_P, state_bytes = trainer.layout.sizes, len(trainer.inner_state())
            room = needed(self.spec, sizes_P, options.learners, state_bytes)
            self.hub.limit(room.times(options.room))
        self.fleet = Fleet(self)
        self.losses = Losses(self)

    def _syncers(self, learners: list[str]) -> list[SyncerNode]:
        """Of each shard, one that leads from the start, or several that compete for its lease."""
        found: list[SyncerNode] = []
        for shard in range(self.options.shards):
            count, prefix = self.options.syncers, NAME
            if self.options.shards > 1:
                prefix = f"{NAME}-{'abcd'[shard]}"
            names = [prefix] if count == 1 else [f"{prefix}-{n}" for n in range(count)]
            nodes = [
                SyncerNode(
                    self.hub, self.watch, learners, name, FileDisk(self.folder / name), shard
                )
                for name in names
            ]
            for node in nodes:
                node.others = [other for other in nodes if other is not node]
            found += nodes
        self.hub.processes[NAME] = tuple(node.process for node in found)
        return found

    @property
    def leader(self) -> SyncerNode | None:
        """The machine whose newest process leads; of several shards, the first one's."""
        leading = (n for n in self.syncers if n.life is not None and n.life.machine.leading)
        return min(leading, key=lambda n: n.shard.number, default=None)

    def learner(self, m: int, name: str) -> LearnerNode:
        """One that computes as the m-th."""

        def make() -> TinyTrainer:
            o = self.options
            tokens = self.spec.tokens_per_step
            return TinyTrainer(o.fragments, m, self.seed, tokens, o.codec_up, self.watch.broken)

        speeds = self.options.speeds
        step_s = self.options.step_s / speeds[m % len(speeds)]
        node = LearnerNode(self.hub, name, make, self.watch, step_s=step_s)
        node.tamper = self.mischief.tamper
        return node

    def run(self) -> Verdict:
        """Safety phase, heal, liveness phase."""
        world = self.world
        for syncer in self.syncers:
            syncer.start()
        for node in self.learners:
            world.after(world.rng.uniform(0.0, 2.0), node.start)
        self._plan()
        self.fleet.begin()
        world.run(self.options.safety_s)
        world.heal()
        self.watch.healed()
        self.user.calm()
        lacks = self.losses.lacking()
        healed_at = world.now
        if lacks:
            self.losses.judge(lacks)
        else:
            world.run(healed_at + DEGRADED_S * self.options.step_s, self._over)
            if self._over() or not self.losses.gone():
                world.run(healed_at + LIVENESS_S * self.options.step_s, self._over)
                world.run(world.now + AFTER_S)
                self._check_liveness(healed_at)
        self._check_end()
        return Verdict(
            self.seed,
            list(self.watch.violations),
            dict(world.counts),
            self.watch.rounds,
            world.now,
            world.effects,
            self.watch.report.looks,
        )

    # --- what goes wrong -----------------------------------------------------------------------

    def _plan(self) -> None:
        """Draw the faults that have a time; those of single effects and messages come by chance."""
        rng, o = self.world.rng, self.options
        for name, there in (
            ("three syncers", o.syncers == 3),
            ("two shards", o.shards == 2),
            ("wall clock off by days", o.wall_skew_s > 86400),
            ("budget in tokens", o.budget == "tokens"),
            ("budget in seconds", o.budget == "seconds"),
            ("steps longer than a lease", o.step_s > self.spec.membership.lease_s),
            ("transfers that take bytes over bandwidth", o.link_bytes_per_s < math.inf),
        ):
            if there:
                self.watch.reached(name)
        for _ in range(o.syncer_hangs):
            self.at(self._syncer_hangs)
        for _ in range(o.learner_hangs):
            self.at(self._learner_hangs)
        names = [n.name for n in self.learners]
        for _ in range(o.partitions):
            self._partition(rng.choice([n.process for n in self.syncers] + names))
        for _ in range(o.slow_links):
            self._slow_link(rng.choice([n.process for n in self.syncers] + names))
        self.losses.plan()
        for _ in range(o.wishes):
            self.at(self.user.wish)
        if o.stop:
            self.at(self.user.stop)
        for _ in range(o.checkpoints):
            self.at(self.user.checkpoint)
        for _ in range(o.restores):
            self.at(self.user.restore)
        for _ in range(o.blackouts):
            self.at(self._blackout)
        for _ in range(o.power_cuts):
            self.at(self._power_cut)
        for _ in range(o.lost_disks):
            self.at(self.losses.disks)
        self.mischief.plague()

    def at(self, strike: Callable[[], None]) -> None:
        """Some time while anything may go wrong."""
        self.world.at(self.world.rng.uniform(5.0, self.options.safety_s), strike)

    def _syncer_hangs(self) -> None:
        rng = self.world.rng
        syncer, seconds = rng.choice(self.syncers), rng.uniform(2.0, 15.0)
        syncer.hang(seconds, replaced=rng.random() < 0.5, clock_stops=rng.random() < 0.3)

    def _learner_hangs(self) -> None:
        rng = self.world.rng
        after = rng.uniform(0.5, 8.0) if rng.random() < 0.4 else None
        stops = rng.random() < 0.3
        if stops:
            self.watch.reached("a learner's clock stood still")
        node = rng.choice(self.learners)
        node.hang(rng.uniform(1.0, 12.0), replaced_after_s=after, clock_stops=stops)

    def _blackout(self) -> None:
        """Every process dies at once; what is at the hub and on disks stays."""
        self.world.counts["blackouts"] += 1
        for syncer in self.syncers:
            syncer.crash_all(self.world.rng.uniform(0.5, 6.0))
        for node in self.learners:
            node.crash(self.world.rng.uniform(0.5, 8.0))

    def _power_cut(self) -> None:
        """The hub loses records of a shard that it had acknowledged, none of which a snapshot
        covers.

        The init record and terms are kept: what made sense of everything later, and what
        learners have seen of leaders, is not to be had again from anywhere else.
        """
        rng = self.world.rng
        shards = self.hub.shards
        shard = shards[0] if len(shards) == 1 else rng.choice(shards)
        syncers = [n for n in self.syncers if n.shard is shard]
        # A checkpoint's part is as good as a snapshot.
        covered = max([self._checkpointed(shard.number), *(s.disk.covers() for s in syncers)])
        stays = TapeInit | TapeTerm | TapeRebirth
        kept = [n for n, r in enumerate(shard.tape, 1) if isinstance(r, stays)]
        covered = max([covered, *kept])
        lost = min(rng.randint(1, 3), len(shard.tape) - covered)
        if lost > 0 and not self.watch.ended:
            self.world.counts["power cuts"] += 1
            gone = shard.tape[-lost:]
            del shard.tape[-lost:]
            self.watch.lost(shard.number, shard.tape, gone)
            # Its connections are gone as well. A second leader that slept through all of it could
            # find its place on the tape again by chance: one such disaster at a time.
            for syncer in syncers:
                syncer.crash_all(rng.uniform(0.5, 3.0))

    def _checkpointed(self, shard: int) -> int:
        """Record that the newest complete checkpoint covers; 0: there is none."""
        root = self.hub.vault
        for ref in reversed(Checkpoints(root).complete(self.spec.folder)):
            part = written_part(self.spec, shard, root, parse_reference(ref)[2])
            if part is not None:
                return int(part[0]["seq"])
        return 0

    def _over(self) -> bool:
        return bool(self.watch.ended) and all(n.left for n in self.learners)

    def _partition(self, process: str) -> None:
        rng = self.world.rng
        way = rng.choice(["in", "out", "both"])
        begin, seconds = rng.uniform(3.0, self.options.safety_s), rng.uniform(1.0, 12.0)

        def cut(up: bool) -> None:
            link = self.world.link(process)
            if way in ("out", "both"):
                link.out = up
            if way in ("in", "both"):
                link.into = up

        self.world.counts["partitions"] += 1
        self.world.at(begin, lambda: cut(False))
        self.world.at(begin + seconds, lambda: cut(True))

    def _slow_link(self, process: str) -> None:
        rng = self.world.rng
        begin, seconds = rng.uniform(3.0, self.options.safety_s), rng.uniform(2.0, 12.0)

        def slow(is_slow: bool) -> None:
            self.world.link(process).slow = is_slow

        self.watch.reached("slow links")
        self.world.at(begin, lambda: slow(True))
        self.world.at(begin + seconds, lambda: slow(False))

    def _check_liveness(self, healed_at: float) -> None:
        """The run ends, everybody leaves, and everybody was merged again if there was time."""
        w, world = self.watch, self.world
        if not w.ended:
            w.broken("liveness", f"no end {LIVENESS_S:.0f} s after the heal ({self.why()})")
            return
        for node in self.learners:
            if node.left in (LOST, FREED):
                continue
            # One that was restarted after the end is told so.
            if node.left not in (w.ended, "refused"):
                w.broken("liveness", f"{node.name} ends as {node.left!r} ({self.why()})")
            # One that stood still until everybody had left was told nothing.
            told = node.hung_until <= node.left_at
            if told and any(life.alive and world.now >= life.frozen_until for life in node.lives):
                w.broken("I10", f"an old process of {node.name} goes on for ever")
            # Within a minute of its own steps after the heal, whatever happened before; one that
            # stood still then, after that.
            able_at = max(healed_at, node.hung_until, node.came_at)
            for of in w.of:
                time_enough = of.round_at - able_at > 60 * node.step_s
                if time_enough and of.members.merged_at.get(node.name, -1.0) < healed_at:
                    of.report("I10", f"{node.name} was never merged again after the heal")

    def _check_end(self) -> None:
        """What is committed has reached everybody, and can be executed again."""
        w = self.watch
        for of, shard in zip(w.of, self.hub.shards, strict=True):
            begun = of.restores + of.rebirths
            of.limits.down(self.hub.dn, of.terms + len(of.epochs), begun)
            if self.options.syncers == 1:  # standbys execute all of it as it goes
                assert of.numbers is not None
                of.numbers.execute(shard.tape, of.executed, self.hub.vault)
        if not w.ended:
            return
        restored = not any(of.merges.lost.restores for of in w.of)
        # A stop may overtake a restore in one shard; where no learner was there after that, nobody
        # could tell it that another one went back.
        told = any(node.left not in (LOST, FREED) for node in self.learners)
        if restored and told and len({of.wish for of in w.of}) > 1:
            w.broken("I6", f"shards went back as asked at {[of.wish for of in w.of]}")
        versions = [max(of_p) for of_p in zip(*(of.merges.versions for of in w.of), strict=True)]
        # Who left a run that was over knows nothing of records that were lost after that.
        epochs = [begun for of in w.of for begun in of.epochs]
        newest = max((epoch for epoch, _ in epochs), default=0)
        lost_at = min((at for epoch, at in epochs if epoch == newest), default=0.0)
        # Nor of what came before another end, where the end that it was told of was lost.
        knew_at = max(lost_at, *(of.ended_at for of in w.of))
        for node in self.learners:
            life = node.lives[-1]
            if node.left != w.ended or life.exchange is None or node.left_at < knew_at:
                continue
            adopted = life.exchange.counters.adopted_P
            if adopted != versions:
                w.broken("I6", f"{node.name} ends with {adopted}, the tape {versions}")

    def why(self) -> str:
        """State and reason, as the syncer gives them."""
        node = self.leader
        life = None if node is None else node.life
        if life is None:
            return f"nobody leads; the coordinator: {self.fleet.waiting or 'nothing'}"
        state, reason = life.machine.announcer.state(self.world.now)
        return f"{state}: {reason}"


def play(seed: int, options: Options | None = None) -> Verdict:
    """One seed; an exception of the product is a violation too."""
    with TemporaryDirectory(prefix="diloco-sim-", dir=MEMORY if MEMORY.is_dir() else None) as disk:
        return _played(Scenario(seed, options or Options.drawn(seed), Path(disk)))


def _played(scenario: Scenario) -> Verdict:
    try:
        return scenario.run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"crash: {error!r} at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
        found: list[str] = [*scenario.watch.violations, text]
        counts: dict[str, Any] = dict(scenario.world.counts)
        return Verdict(scenario.seed, found, counts, scenario.watch.rounds, scenario.world.now)
