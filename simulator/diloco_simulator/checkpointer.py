"""Run-wide checkpoints at a simulated leader: the product's files, in a folder that all reach."""

from typing import TYPE_CHECKING, Any

from diloco_shared.protocol.checkpoints import Object
from diloco_shared.protocol.records import Restore
from diloco_syncer.checkpoints import PARTS_S
from diloco_syncer.edges.parts import load, prune, seal, write_part, written_part
from diloco_syncer.events import Capture, Event, Kept, Loaded, Seal, Sealed
from diloco_syncer.replay import State
from diloco_syncer.store import FragmentStore

if TYPE_CHECKING:
    from diloco_simulator.syncer_life import SyncerLife

# Between two looks at whether another shard has written its part, in virtual seconds.
PART_LOOK_S = 0.5


class Checkpointer:
    """Of one process."""

    def __init__(self, life: "SyncerLife") -> None:
        self.life = life
        self.world, self.spec = life.world, life.spec
        self.shard = life.shard.number
        self.vault = life.hub.vault
        self.captured: tuple[Capture, dict[str, Any], Object] | None = None
        self.loaded: dict[int, State] = {}  # by serial of the wish; the newest

    def _later(self, event: Event) -> None:
        """What takes a disk's time is over, if this process still lives then."""
        seconds = self.world.rng.uniform(0.05, 1.0) * self.world.options.disk_s
        self.world.after(seconds, lambda: self.life.enter(lambda: self.life.give(event)))

    def capture(self, effect: Capture) -> None:
        """Write the state as it is now."""
        store, history = self.life.store, self.life.machine.history.meta()
        assert store is not None
        if self.world.chance(self.world.options.disk_full, "checkpoint not written"):
            self._later(Sealed(effect.number, fault="no space left on the device"))
            return
        self.life.checks.cuts.keeps(self.life.leader, effect.number, history, store)
        meta, arrays = store.meta(), store.state_arrays()
        part = write_part(self.spec, self.shard, self.vault, effect.number, history, meta, arrays)
        self.captured = (effect, history, part)
        self._later(Kept(effect.number))

    def seal(self, effect: Seal) -> None:
        """The manifest over what is there; by one shard for all."""
        if self.shard:
            self.life.enter(lambda: self.life.give(Sealed(effect.number)))
        else:
            self._seal(effect, self.life.now + PARTS_S)

    def _seal(self, effect: Seal, until: float) -> None:
        assert self.captured is not None
        captured, history, part = self.captured
        parts = [(history, part)]
        for n in range(1, self.spec.algorithm.shards):
            found = written_part(self.spec, n, self.vault, effect.number)
            if found is None and self.life.now < until:
                self.world.after(
                    PART_LOOK_S, lambda: self.life.enter(lambda: self._seal(effect, until))
                )
                return
            if found is None:
                self._later(Sealed(effect.number, fault=f"syncer shard {n} gave no part"))
                return
            parts.append(found)
        try:
            learners = seal(self.spec, self.vault, captured, parts, effect)
        except ValueError as error:
            self._later(Sealed(effect.number, fault=str(error)[:400]))
            return
        prune(self.spec, self.vault, effect)
        self._later(Sealed(effect.number, tuple(sorted(learners))))

    def load(self, restore: Restore) -> None:
        """Read a checkpoint; the store is kept for `install`."""
        try:
            state = load(self.spec, self.shard, restore.source, self.vault)
        except (OSError, ValueError, KeyError) as error:
            self._later(Loaded(restore, fault=str(error)[:400]))
            return
        self.loaded = {restore.serial: state}
        self._later(Loaded(restore, state.manifest.run, state.history, state.digest))

    def install(self, serial: int) -> FragmentStore:
        """The store that was loaded, once."""
        state = self.loaded.pop(serial)
        number = state.manifest.number
        self.life.checks.cuts.goes_back(self.life.leader, number, state.history, state.store)
        return state.store
