"""A simulated machine for syncers: its disk, and its processes one after another.

A process that stands still may be replaced by a second one, and then go on: two leaders.
"""

from typing import Any

from diloco_simulator.hub import Hub
from diloco_simulator.syncer_life import NAME, SyncerLife
from diloco_simulator.watch import Watch
from diloco_syncer.events import Wanted
from diloco_syncer.history import History
from diloco_syncer.store import FragmentStore

# Snapshots kept on the disk, as the product keeps them.
SNAPSHOTS = 2


class SyncerNode:
    """Keeps the snapshots; a process is rebuilt from them and the tape."""

    def __init__(self, hub: Hub, watch: Watch, learners: list[str], process: str = NAME) -> None:
        self.hub = hub
        self.world = hub.world
        self.watch = watch
        self.learners = learners
        self.process = process
        self.others: list[SyncerNode] = []  # machines of the same run
        self.disk: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.lives: list[SyncerLife] = []
        self.life: SyncerLife | None = None  # the newest, if it lives
        self.wanted: Wanted | None = None

    @property
    def alone(self) -> bool:
        return not self.others

    def newest(self) -> tuple[History, FragmentStore | None]:
        """What the newest snapshot on the disk holds."""
        spec = self.hub.spec
        if not self.disk:
            return History(spec), None
        meta, arrays = self.disk[-1]
        store = FragmentStore.restore(meta["store"], arrays, spec.algorithm)
        return History.restore(spec, meta["history"]), store

    def of_leader(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The newest snapshot of another machine whose process leads, if it can be reached."""
        for node in self.others:
            if node.reachable and node.life is not None and node.life.machine.leading and node.disk:
                return node.disk[-1]
        return None

    @property
    def reachable(self) -> bool:
        link = self.world.link(self.process)
        frozen = self.life is not None and self.world.now < self.life.frozen_until
        return self.life is not None and link.out and link.into and not frozen

    def behind(self, covers: int) -> bool:
        """Whether a standby is seen here that has not executed record `covers`."""
        if not self.reachable or self.life is None or self.life.following is None:
            return False
        return not self.life.machine.leading and self.life.following.history.seq < covers

    def start(self) -> None:
        self.life = life = SyncerLife(self, f"{self.process}-{len(self.lives)}")
        self.lives.append(life)
        life.begin()

    def gone(self, life: SyncerLife, restart_s: float) -> None:
        """A process is over, by a crash or because it was deposed; the supervisor restarts it."""
        life.alive = False
        self.watch.leases.gone(self.process)
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
        if replaced and self.alone:
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
                self.world.request(self.process, lambda: None, lambda _, who=life: who.wish())  # type: ignore[misc]
