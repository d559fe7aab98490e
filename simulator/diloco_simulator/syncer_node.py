"""A simulated machine for syncers: its disk, and its processes one after another.

A process that stands still may be replaced by a second one, and then go on: two leaders.
"""

from typing import Any

from diloco_simulator.hub import Hub
from diloco_simulator.syncer_life import NAME, SyncerLife
from diloco_simulator.watch import Watch
from diloco_syncer.events import Wanted

# Snapshots kept on the disk, as the product keeps them.
SNAPSHOTS = 2


class SyncerNode:
    """Keeps the snapshots; a process is rebuilt from them and the tape."""

    def __init__(self, hub: Hub, watch: Watch, learners: list[str]) -> None:
        self.hub = hub
        self.world = hub.world
        self.watch = watch
        self.learners = learners
        self.disk: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.lives: list[SyncerLife] = []
        self.life: SyncerLife | None = None  # the newest, if it lives
        self.wanted: Wanted | None = None

    def start(self) -> None:
        self.life = life = SyncerLife(self, f"{NAME}-{len(self.lives)}")
        self.lives.append(life)
        life.begin()

    def gone(self, life: SyncerLife, restart_s: float) -> None:
        """A process is over, by a crash or because it was deposed; the supervisor restarts it."""
        life.alive = False
        if self.life is life:
            self.life = None
            self.world.after(restart_s, self._restart)

    def crash(self, restart_s: float) -> None:
        if self.life is not None:
            self.world.counts["syncer crashes"] += 1
            self.gone(self.life, restart_s)

    def crash_all(self, restart_s: float) -> None:
        """Also those that stand still."""
        self.crash(restart_s)
        for life in self.lives:
            life.alive = False

    def _restart(self) -> None:
        if self.life is None:
            self.start()

    def hang(self, seconds: float, *, replaced: bool) -> None:
        """Stand still; `replaced`: another process leads meanwhile, and this one must notice."""
        if self.life is None:
            return
        self.world.counts["syncer hangs"] += 1
        self.life.frozen_until = self.world.now + seconds
        if replaced:
            self.world.counts["failovers"] += 1
            self.start()

    def keep(self, meta: dict[str, Any], arrays: dict[str, Any]) -> None:
        """A snapshot is on the disk."""
        self.disk = [*self.disk, (meta, arrays)][-SNAPSHOTS:]

    def wish(self, wanted: Wanted) -> None:
        """What the user wants, told to whoever lives and to every process to come."""
        self.wanted = wanted
        for life in self.lives:
            if life.alive:
                self.world.request(NAME, lambda: None, lambda _, who=life: who.wish())  # type: ignore[misc]
