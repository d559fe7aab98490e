"""A simulated machine for syncers: its disk, and its processes one after another.

A process that stands still may be replaced by a second one, and then go on: two leaders.
"""

from pathlib import Path

from diloco_simulator.hub import Hub
from diloco_simulator.syncer_disk import Disk
from diloco_simulator.syncer_inbox import NAME
from diloco_simulator.syncer_life import SyncerLife
from diloco_simulator.watch import Watch
from diloco_syncer.events import Wanted
from diloco_syncer.history import History
from diloco_syncer.store import FragmentStore


class SyncerNode:
    """Keeps the snapshots; a process is rebuilt from them and the tape."""

    def __init__(
        self,
        hub: Hub,
        watch: Watch,
        learners: list[str],
        process: str = NAME,
        disk: Disk | None = None,
        shard: int = 0,
    ) -> None:
        self.hub = hub
        self.world = hub.world
        self.watch = watch
        self.learners = learners
        self.process = process
        self.shard = hub.shards[shard]
        self.checks = watch.of[shard]
        self.others: list[SyncerNode] = []  # machines of the same shard
        self.disk = disk or Disk()
        self.folder = Path(hub.vault) / "nowhere"  # where no other syncer keeps anything
        self.lives: list[SyncerLife] = []
        self.life: SyncerLife | None = None  # the newest, if it lives
        self.wanted: Wanted | None = None
        self.lost = False  # for good
        self.disk_full_until = 0.0

    @property
    def alone(self) -> bool:
        return not self.others and not self.world.options.replaced

    def newest(self) -> tuple[History, FragmentStore | None]:
        """What the newest sound snapshot on the disk holds."""
        spec = self.hub.spec
        found, passed_over = self.disk.newest()
        if passed_over:
            self.watch.reached("torn snapshot passed over")
        if found is None:
            return History(spec, self.shard.number), None
        meta, arrays = found
        store = FragmentStore.restore(meta["store"], arrays, spec.algorithm)
        return History.restore(spec, meta["history"]), store

    def leader(self) -> "SyncerNode | None":
        """Another machine whose process leads and has a snapshot, if it can be reached."""
        for node in self.others:
            leads = node.life is not None and node.life.machine.leading
            if leads and node.reachable and node.disk.covers():
                return node
        return None

    def giver(self, after: int) -> "SyncerNode | None":
        """A machine with a process, leading or not, and a snapshot past record `after`."""
        first = self.leader()
        there = [*([first] if first else []), *(n for n in self.others if n.reachable)]
        return next((n for n in there if n.disk.covers() > after), None)

    def peers(self, shows: str) -> list[str]:
        """Others of the shard whose member record shows this."""
        found = []
        for node in self.others:
            following = node.life.following if node.life is not None else None
            if node.reachable and following is not None and following.shows == shows:
                found.append(node.process)
        return found

    @property
    def reachable(self) -> bool:
        link = self.world.link(self.process)
        frozen = self.life is not None and self.world.now < self.life.frozen_until
        return self.life is not None and link.out and link.into and not frozen

    @property
    def disk_full(self) -> bool:
        """Whether a snapshot finds no room now."""
        return self.world.faulty and self.world.now < self.disk_full_until

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
        if life.alive:
            life.over()
        life.alive = False
        self.checks.leases.gone(self.process)
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

    def on_an_empty_disk(self, restart_s: float, *, renamed: bool) -> None:
        """Its machine is gone with all that it kept; another one starts in its place."""
        self.crash_all(restart_s)
        self.disk.wipe()
        if renamed:
            self.process += "x"

    def _restart(self) -> None:
        if self.life is None and not self.lost:
            self.start()

    def lose(self, how: str) -> None:
        """The machine never comes back, nor does its disk."""
        self.world.counts[f"syncers {how}"] += 1
        self.lost = True
        self.crash_all(0.0)
        self.disk.wipe()

    def wipe(self, restart_s: float) -> None:
        """Its disk is empty, and its process another one."""
        self.crash_all(restart_s)
        self.disk.wipe()

    def hang(self, seconds: float, *, replaced: bool, clock_stops: bool = False) -> None:
        """Stand still; `replaced`: another process leads meanwhile, and this one must notice."""
        if self.life is None:
            return
        self.world.counts["syncer hangs"] += 1
        self.life.freeze(seconds, clock_stops=clock_stops)
        if clock_stops:
            # It will trust its lease for longer than it may: only the tape fences it.
            self.watch.reached("a syncer's clock stood still")
            self.checks.leases.gone(self.process)
        if replaced and self.alone and not self.lost:
            self.world.counts["failovers"] += 1
            self.start()

    def wish(self, wanted: Wanted) -> None:
        """What the user wants, told to whoever lives and to every process to come."""
        self.wanted = wanted
        for life in self.lives:
            if life.alive:
                self.world.request(self.process, lambda: None, lambda _, who=life: who.wish())  # type: ignore[misc]
