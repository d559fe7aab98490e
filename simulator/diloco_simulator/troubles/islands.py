"""What goes wrong between the hosts of an island: one dies, stands still, is slow, or is to stop.

With dice of its own, so that other troubles fall as they did without it.
"""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from diloco_simulator.islands.computing import IslandLearner
from diloco_simulator.islands.processes import Follower, Island
from diloco_simulator.virtual_loop import Hosted

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# Of the silence that counts as death: so long stands still who goes on, and who is given up.
SHORT, LONG = (0.4, 0.8), (1.5, 4.0)
# What makes a host's link slow is over after so many virtual seconds.
SLOW_FOR_S = (3.0, 12.0)
# A host that carries is without the hub for so many virtual seconds.
CUT_FOR_S, NOT_FOUND_FOR_S = (2.0, 15.0), (15.0, 30.0)
# A contribution that is put together is put by its chunks, an answer to them, and its manifest.
PUTTING_WAYS = 3.0
# With one of these told and not taken up a host dies.
ORDERS = ("Step", "Adopt", "Contribute", "Decided", "Hold", "Gather")
# As a host keeps its share of one of these, its link is cut.
GIVEN = ("Share", "Share", "ShareFragment")
# Deaths are planned for this share of the time of troubles: some wait for their moment.
SOON = 0.6
# Half of the machines that die close no connection.
WORDLESS = 0.5


class IslandTroubles:
    """Of one world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.rng = Random(f"islands {world.seed}")
        self.counts = world.found.counts
        self.still: list[Hosted] = []

    def plan(self) -> None:
        """Draw when what happens."""
        o = self.world.options
        if not o.hosts:
            return
        # Those first that are at a moment of their own, each once.
        deaths = [self.dies_untaken, self.dies_encoded, self.dies_putting]
        deaths += [self.dies_keeping, self.dies_giving]
        self.rng.shuffle(deaths)
        deaths += [self.dies] * o.host_deaths
        for death in deaths[: o.host_deaths]:
            at = self.rng.uniform(3.0, SOON * o.safety_s)
            self.world.loop.call_later(at, self._strike, death)
        for count, strike in (
            (o.host_hangs, self.stands_still),
            (o.host_stops, self.told_to_stop),
            (o.slow_hosts, self.slow),
        ):
            for _ in range(count):
                at = self.rng.uniform(3.0, o.safety_s)
                self.world.loop.call_later(at, self._strike, strike)

        if o.carriers:
            self._plan_of_carriers()

    def _plan_of_carriers(self) -> None:
        """Each kind once, in any order, as far as there are so many."""
        kinds = [self.cut_off, self.loses_the_hub, self.dies_carrying, self.dies_fetching]
        kinds += [self.cut_off_giving, self.cut_off_fetching, self.begins_cut_off]
        self.rng.shuffle(kinds)
        for strike in kinds[: self.world.options.cut_carriers]:
            at = self.rng.uniform(3.0, SOON * self.world.options.safety_s)
            self.world.loop.call_later(at, self._strike, strike)

    def heal(self) -> None:
        """Nobody stands still, is slow, or is to die any more."""
        for process in self.still:
            process.thaw()
        for island in self.islands:
            island.armed.clear()
            for follower in island.followers.values():
                follower.cable.slow = False

    def _strike(self, strike: Callable[[], None]) -> None:
        if self.world.scene.faulty and self.islands:
            strike()

    # --- who -----------------------------------------------------------------------------------

    @property
    def islands(self) -> list[Island]:
        """Of the learners that are there."""
        apps = (machine.app for machine in self.world.learners)
        return [app.computing.leading.island for app in apps if isinstance(app, IslandLearner)]

    @property
    def followers(self) -> list[Follower]:
        return [f for island in self.islands for f in island.followers.values()]

    def _somebody(self) -> Follower:
        return self.rng.choice(self.followers)

    # --- deaths --------------------------------------------------------------------------------

    def dies(self, follower: Follower | None = None) -> None:
        """One that follows, now."""
        follower = follower or self._somebody()
        if follower.process is not None:
            self.counts["islands: a host dies"] += 1
            follower.dies(closes=self.rng.random() >= WORDLESS)

    def dies_untaken(self) -> None:
        """An order is told, and one of the hosts will never take it up."""

        def strike(island: Island, index: int) -> None:
            self.counts["islands: a host dies with an order told and not taken"] += 1
            self.dies(self.rng.choice(list(island.followers.values())))

        self._at(f"told {self.rng.choice(ORDERS)}", strike)

    def dies_encoded(self) -> None:
        """A host has encoded its part of a contribution, and never gives it."""
        self._dies_at("encoded", "with its part not given")

    def dies_keeping(self) -> None:
        """A host keeps its part of an anchor, or some of it, which nobody has adopted yet."""
        self._dies_at("keeps an anchor", "with an anchor not adopted")

    def dies_giving(self) -> None:
        """A host is to give its part of an anchor that a delta adds to, and never does."""
        self._dies_at("gives an anchor", "in the middle of a gather")

    def dies_carrying(self) -> None:
        """A host has stored some of its share, and never says that all of it is there."""
        self._dies_at("carries", "in the middle of its share")

    def dies_fetching(self) -> None:
        """A host is to fetch its run of an anchor's chunks, and never brings them."""
        self._dies_at("fetches", "in the middle of a run")

    def _dies_at(self, moment: str, how: str) -> None:
        def strike(island: Island, index: int) -> None:
            self.counts[f"islands: a host dies {how}"] += 1
            self.dies(island.followers[index])

        self._at(moment, strike)

    def dies_putting(self) -> None:
        """Process 0, with a contribution put together and not put, or half put."""

        def strike(island: Island, index: int) -> None:
            leading = island.leading
            assert leading is not None
            process, putting = leading.process, set(leading.life.putting)

            def die() -> None:
                if not self.world.scene.faulty or process.killed or island.machine is None:
                    return
                if putting & leading.life.putting:
                    self.counts["islands: process 0 dies in the middle of a put"] += 1
                self.world.crash(island.machine, self.rng.uniform(0.5, 6.0))

            seconds = self.rng.uniform(0.0, PUTTING_WAYS * self.world.options.delay_s)
            leading.cable.later(seconds, die)

        self._at("gathered", strike)

    def _at(self, moment: str, strike: Callable[[Island, int], None]) -> None:
        """Once, in the island that comes to that moment first."""
        struck: list[Island] = []

        def once(island: Island, index: int) -> None:
            if not struck and self.world.scene.faulty:
                struck.append(island)
                strike(island, index)

        for island in self.islands:
            island.armed.setdefault(moment, []).append(once)

    # --- what does not die -----------------------------------------------------------------------

    def stands_still(self) -> None:
        """For less than counts as death, or for longer."""
        short = self.rng.random() < 0.5
        self.stands_still_for(self._somebody(), SHORT if short else LONG)

    def stands_still_for(self, follower: Follower, share: tuple[float, float]) -> None:
        """`share`: of the silence that counts as death."""
        process = follower.process
        if process is None or process.frozen:
            return
        longer = share[0] > 1.0
        self.counts[
            "islands: a host stands still " + ("for long" if longer else "for a while")
        ] += 1
        process.freeze()
        self.still.append(process)
        seconds = follower.island.silence_s * self.rng.uniform(*share)
        follower.cable.later(seconds, process.thaw)

    def slow(self) -> None:
        """What one of the hosts hears and says takes longer."""
        follower = self._somebody()
        self.counts["islands: a host's link is slow"] += 1
        follower.cable.slow = True
        seconds = self.rng.uniform(*SLOW_FOR_S)
        follower.cable.later(seconds, setattr, follower.cable, "slow", False)

    def cut_off(
        self, follower: Follower | None = None, for_s: tuple[float, float] | None = None
    ) -> None:
        """What a host sends to the hub, or is sent by it, does not come through for a while."""
        follower = follower or self._somebody()
        self.counts["islands: a carrier is cut off"] += 1
        link, way = self.world.net.link(follower.host), self.rng.choice(["out", "into"])
        setattr(link, way, False)
        seconds = self.rng.uniform(*(for_s or CUT_FOR_S))
        follower.cable.later(seconds, setattr, link, way, True)

    def cut_off_giving(self) -> None:
        """A host that keeps its share of what the island gives away."""

        def strike(island: Island, index: int) -> None:
            self.cut_off(self.rng.choice(list(island.followers.values())))

        self._at(f"told {self.rng.choice(GIVEN)}", strike)

    def cut_off_fetching(self) -> None:
        """A host that is to fetch its run of an anchor's chunks."""
        self._at("fetches", lambda island, index: self.cut_off(island.followers[index]))

    def begins_cut_off(self) -> None:
        """A host dies, and does not find the hub once it is there again."""
        follower = self._somebody()
        self.cut_off(follower, NOT_FOUND_FOR_S)
        self.dies(follower)

    def loses_the_hub(self, follower: Follower | None = None) -> None:
        """A host's connection to the hub breaks, and is there again some time later."""
        follower = follower or self._somebody()
        if follower.way is not None:
            self.counts["islands: a carrier loses the hub"] += 1
            follower.way.breaks(self.rng.uniform(*CUT_FOR_S))

    def told_to_stop(self) -> None:
        """The island ends in order."""
        self.counts["islands: a host is told to stop"] += 1
        self._somebody().told_to_stop()
