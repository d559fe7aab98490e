"""What simulated processes have in common: they die, stand still, and have clocks of their own."""

from collections.abc import Callable

from diloco_simulator.world import World

# Monotonic clocks begin anywhere: a time of one process means nothing to another.
ORIGIN_S_MAX = 1e5
# Wall time at virtual time 0, in seconds since 1970.
WALL = 1_700_000_000.0


class Process:
    """`enter` is the only way into a process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.frozen_until = 0.0
        self.clock_stopped_s = 0.0  # of the present standstill, if its clock stands still too
        faulty, skew_s = world.faulty, world.options.wall_skew_s
        self.origin = world.rng.uniform(0.0, ORIGIN_S_MAX) if faulty else 0.0
        self.skew_s = world.rng.uniform(-skew_s, skew_s) if faulty and skew_s else 0.0

    @property
    def now(self) -> float:
        """Its monotonic clock."""
        return self.world.now + self.origin

    @property
    def wall(self) -> float:
        return WALL + self.world.now + self.skew_s

    def ring_at(self, own_time: float, action: Callable[[], None]) -> None:
        """`action` in this process once its clock is past `own_time`."""

        def ring() -> None:
            if self.now < own_time:  # its clock stood still meanwhile
                self.ring_at(own_time, action)
            else:
                action()

        self.world.at(own_time - self.origin + 1e-6, lambda: self.enter(ring))

    def freeze(self, seconds: float, *, clock_stops: bool = False) -> None:
        """Stand still, and go on as if nothing had happened.

        `clock_stops`: as the clock of a suspended machine does; the process cannot notice. One that
        already stands still for longer than that is not woken by it.
        """
        if self.world.now + seconds <= self.frozen_until:
            return
        self.frozen_until = self.world.now + seconds
        self.clock_stopped_s = seconds if clock_stops else 0.0

    def enter(self, action: Callable[[], None]) -> None:
        """Run `action` in this process: later if it stands still, never if it is gone."""
        if not self.alive:
            return
        if self.world.now < self.frozen_until:
            self.world.at(self.frozen_until, lambda: self.enter(action))
            return
        if self.frozen_until:
            self.frozen_until = 0.0
            self.origin -= self.clock_stopped_s
            self.thawed(noticed=not self.clock_stopped_s)
        if self.alive:
            action()

    def thawed(self, *, noticed: bool) -> None:
        """It goes on; `noticed`: its clock shows that time has passed."""
