"""A simulated machine for a learner: its disk, and its processes one after another.

A process that stands still may be replaced by a second one, and then go on: two processes of one
learner, of which only the newer may count (I10).
"""

import math
from collections.abc import Callable

from diloco_learner.events import AnchorReady, Evaluate
from diloco_shared.numerics.digest import digest_array
from diloco_shared.protocol.messages import ContributionManifest, PublicationManifest
from diloco_simulator.hub import Hub
from diloco_simulator.learner_life import LearnerLife
from diloco_simulator.tiny import Computation
from diloco_simulator.watch import Watch
from diloco_simulator.world import RETRY_S

# How one left that was not there when the others were told of the end.
FREED = "freed"


class LearnerNode:
    """Keeps the checkpoint on its disk; starts processes until one leaves for good."""

    def __init__(
        self,
        hub: Hub,
        name: str,
        make: Callable[[], Computation],
        watch: Watch,
        *,
        step_s: float = 1.0,
    ) -> None:
        self.hub = hub
        self.world = hub.world
        self.name = name
        self.make = make
        self.watch = watch
        self.step_s = step_s
        self.checkpoint: tuple[int, bytes] | None = None  # epoch, inner state
        self.life: LearnerLife | None = None  # the newest, if it lives
        self.lives: list[LearnerLife] = []
        self.left = ""
        self.left_at = float("inf")
        self.freed = False  # its run was over, and nobody is given to it any more
        self.hung_until = 0.0
        self.came_at = math.inf  # when its first process began
        self.damaged: set[tuple[int, int]] = set()  # (epoch, fragment) that came with a wrong byte
        self.on_evaluate: Callable[[LearnerLife, Evaluate], None] = lambda life, effect: None
        self.tamper: Callable[[ContributionManifest, bytes], tuple[ContributionManifest, bytes]] = (
            lambda manifest, payload: (manifest, payload)
        )

    def start(self) -> None:
        """A new process, if none lives; given to no run any more, it works for none."""
        if self.freed and self.life is None and not self.left:
            self.left, self.left_at = FREED, self.world.now
        if self.life is None and not self.left:
            self.came_at = min(self.came_at, self.world.now)
            self.life = life = LearnerLife(self)
            self.lives.append(life)
            life.begin()

    def gone(self, life: LearnerLife, restart_s: float | None) -> None:
        """A process is over; if it was the newest, the supervisor starts another one."""
        if life.alive and not self.left:
            self.watch.learner_died(life)
        life.alive = False
        self.watch.silent(self.name, life.incarnation)
        if self.life is life:
            self.life = None
            if restart_s is None:
                self.left_at = self.world.now
            else:
                self.world.after(restart_s, self.start)

    def take_in(
        self, life: LearnerLife, m: PublicationManifest, payload: bytes
    ) -> AnchorReady | None:
        """Offer a publication to the process's anchors: a sound one must be taken.

        Sometimes a byte is not right: that must be seen, and the sound one comes later.
        """
        if self.world.chance(self.world.options.corrupt, "corrupted"):
            return self._damaged(life, m, payload)
        before = life.book.refused.copy()
        ready = life.book.offer(m, payload)
        faults = set(life.book.refused - before) - {"waiting"}
        # A damaged delta that waited for this one is found now, by its header or its digest.
        found = faults <= {"malformed", "digest"} and (m.epoch, m.fragment) in self.damaged
        if faults and not found:
            self.watch.broken("I4", f"{life.life} finds a publication bad: {faults}")
        self.watch.pace.published(life.life, m.epoch)
        return ready

    def _damaged(
        self, life: LearnerLife, m: PublicationManifest, payload: bytes
    ) -> AnchorReady | None:
        damaged = bytearray(payload)
        damaged[self.world.rng.randrange(len(damaged))] ^= 0xFF
        ready = life.book.offer(m, bytes(damaged))
        self.damaged.add((m.epoch, m.fragment))
        if ready is None:
            self.world.after(RETRY_S, lambda: life.publication(m, payload))
        elif ready.version == m.version:
            # The last digits of a small delta may make no difference to the anchor.
            anchor_F = life.book.take(m.epoch, m.fragment, m.version)
            if digest_array(anchor_F) != m.anchor_digest:
                self.watch.broken("I4", f"{life.life} takes version {m.version} with a wrong byte")
        return ready

    def crash(self, restart_s: float) -> None:
        """The process is gone with all it had in memory; another one starts later."""
        if self.life is not None:
            self.world.counts["learner crashes"] += 1
            self.gone(self.life, restart_s)

    def lose(self, how: str) -> None:
        """The machine never comes back, with whatever runs on it."""
        if self.life is not None:
            self.gone(self.life, None)
        self.left = how
        for life in (one for one in self.lives if one.alive):
            life.alive = False
            self.watch.silent(self.name, life.incarnation)

    def leaves(self, life: LearnerLife, how: str) -> None:
        """A process ends, and no other one is started."""
        self.left = self.left or how
        self.gone(life, None)

    def wipe(self, restart_s: float) -> None:
        """Its disk is empty, and its process another one."""
        self.crash(restart_s)
        self.checkpoint = None

    def hang(
        self, seconds: float, *, replaced_after_s: float | None = None, clock_stops: bool = False
    ) -> None:
        """The process stands still and then goes on as if nothing had happened.

        `replaced_after_s`: when another process takes its place, perhaps before it goes on.
        """
        life = self.life
        if life is None:
            return
        self.world.counts["learner hangs"] += 1
        life.freeze(seconds, clock_stops=clock_stops)
        self.hung_until = max(self.hung_until, self.world.now + seconds)
        self.watch.silent(self.name, life.incarnation)
        if replaced_after_s is not None:
            self.world.counts["doubles"] += 1
            self.life = None
            self.world.after(replaced_after_s, self.start)
