"""One seeded world from start to verdict: safety while anything may go wrong, then liveness."""

from dataclasses import dataclass, field
from typing import Any

from diloco_shared.config import RunSpec
from diloco_simulator.hub import Hub
from diloco_simulator.learner_node import LearnerNode
from diloco_simulator.options import Options
from diloco_simulator.syncer_node import NAME, SyncerNode
from diloco_simulator.tiny import TinyTrainer
from diloco_simulator.watch import Watch
from diloco_simulator.world import World

# Once healed, a run of a few dozen steps of a second must be over well within this time.
LIVENESS_S = 1200.0


@dataclass(slots=True)
class Verdict:
    """What became of one seed."""

    seed: int
    violations: list[str]
    counts: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    virtual_s: float = 0.0


def spec_of(options: Options, seed: int) -> RunSpec:
    """The run of a tiny world."""
    return RunSpec.model_validate(
        {
            "name": "sim",
            "seed": seed,
            "algorithm": {
                "fragments": options.fragments,
                "sync_every_steps": 3 * options.fragments,
                "overlap_steps": options.overlap_steps,
                "quorum": options.quorum,
                "keyframe_every": options.keyframe_every,
                "pull_timeout_s_min": 3.0,
            },
            "membership": {
                "learners_min": options.learners,
                "lease_s": 5.0,
                "heartbeat_s": 1.0,
            },
            "keeping": {
                "snapshot_every_rounds": options.snapshot_every_rounds,
                "checkpoint_every_steps": 10,
            },
            "budget": {"steps": options.steps},
        }
    )


class Scenario:
    """A world with its processes."""

    def __init__(self, seed: int, options: Options) -> None:
        self.seed = seed
        self.options = options
        self.world = World(seed, options)
        self.spec = spec_of(options, seed)
        self.hub = Hub(self.world, self.spec)
        self.watch = Watch(self.world, options.quorum)
        self.hub.on_record = self.watch.record
        names = [f"l{m}" for m in range(options.learners)]
        self.syncer = SyncerNode(self.hub, self.watch, names)
        self.learners = [self._learner(m, name) for m, name in enumerate(names)]

    def _learner(self, m: int, name: str) -> LearnerNode:
        def make() -> TinyTrainer:
            o = self.options
            return TinyTrainer(o.fragments, m, self.seed, self.spec.tokens_per_step)

        speeds = self.options.speeds
        return LearnerNode(self.hub, name, make, self.watch, step_s=1.0 / speeds[m % len(speeds)])

    def run(self) -> Verdict:
        """Safety phase, heal, liveness phase."""
        world, rng, o = self.world, self.world.rng, self.options
        self.syncer.start()
        for node in self.learners:
            world.after(rng.uniform(0.0, 2.0), node.start)
        for _ in range(o.syncer_hangs):
            replaced = rng.random() < 0.5
            seconds = rng.uniform(2.0, 15.0)
            world.at(
                rng.uniform(5.0, o.safety_s),
                lambda s=seconds, r=replaced: self.syncer.hang(s, replaced=r),  # type: ignore[misc]
            )
        for _ in range(o.learner_hangs):
            node = rng.choice(self.learners)
            seconds = rng.uniform(1.0, 12.0)
            world.at(rng.uniform(5.0, o.safety_s), lambda n=node, s=seconds: n.hang(s))  # type: ignore[misc]
        for _ in range(o.partitions):
            self._partition(rng.choice([NAME, *(n.name for n in self.learners)]))
        world.run(o.safety_s)
        world.heal()
        healed_at = world.now
        before = dict(self.watch.merged_at)
        over = self._over
        world.run(healed_at + LIVENESS_S, over)
        self._check_liveness(before, healed_at)
        return Verdict(
            self.seed,
            list(self.watch.violations),
            dict(world.counts),
            self.watch.rounds,
            world.now,
        )

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

    def _check_liveness(self, before: dict[str, float], healed_at: float) -> None:
        """The run ends, everybody leaves, and everybody was merged again if there was time."""
        w = self.watch
        if not w.ended:
            w.violations.append(
                f"liveness: no end {LIVENESS_S:.0f} s after the heal ({self.why()})"
            )
        stuck = [n.name for n in self.learners if not n.left]
        if w.ended and stuck:
            w.violations.append(f"liveness: {', '.join(stuck)} never left ({self.why()})")
        long_enough = self.world.now - healed_at > 60 * max(n.step_s for n in self.learners)
        for node in self.learners:
            if long_enough and w.merged_at.get(node.name, -1.0) <= before.get(node.name, -1.0):
                w.violations.append(f"I10: {node.name} was never merged again after the heal")

    def why(self) -> str:
        """State and reason, as the syncer gives them."""
        life = self.syncer.life
        if life is None:
            return "no syncer"
        state, reason = life.machine.announcer.state(self.world.now)
        return f"{state}: {reason}"


def play(seed: int, options: Options | None = None) -> Verdict:
    """One seed; an exception of the product is a violation too."""
    scenario = Scenario(seed, options or Options.drawn(seed))
    try:
        return scenario.run()
    except Exception as error:
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"crash: {error!r} at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
        found: list[str] = [*scenario.watch.violations, text]
        counts: dict[str, Any] = dict(scenario.world.counts)
        return Verdict(seed, found, counts, scenario.watch.rounds, scenario.world.now)
