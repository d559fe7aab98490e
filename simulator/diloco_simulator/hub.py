"""What the bus keeps: the run's streams, every shard's tape and lease, and who listens."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diloco_shared.config import RunSpec
from diloco_shared.protocol.messages import TapeRecord
from diloco_simulator.world import Log, World
from diloco_syncer.lease import Held


@dataclass(frozen=True, slots=True)
class Ear:
    """One process that hears what is sent to its name."""

    alive: Callable[[], bool]
    receive: Callable[[Any], None]


@dataclass(slots=True)
class Shard:
    """Of one syncer shard: its tape, and who leads it."""

    number: int
    tape: list[TapeRecord] = field(default_factory=list)  # sequence n is at index n - 1
    lease: Held | None = None
    lease_revision: int = 0


class Hub:
    """Survives every process."""

    def __init__(self, world: World, spec: RunSpec) -> None:
        self.world = world
        self.spec = spec
        self.vault = ""  # folder of run-wide checkpoints
        self.up = Log(world, "UP")
        self.dn = Log(world, "DN")
        self.state = Log(world, "STATE")
        self.shards = [Shard(n) for n in range(spec.algorithm.shards)]
        self.incarnations: dict[str, int] = {}
        # Who listens to what is sent to a name; without an entry, the process of that name.
        self.processes: dict[str, tuple[str, ...]] = {}
        # Several processes may have one name: one that hung, and the one that replaced it.
        self.ears: defaultdict[str, list[Ear]] = defaultdict(list)
        self.on_record: Callable[[int, int, TapeRecord], None] = lambda shard, seq, record: None

    def append(self, shard: int, record: TapeRecord, expect_last: int) -> int:
        """The sequence, or -1 for a conflict: the commit point and the fence."""
        tape = self.shards[shard].tape
        if expect_last != len(tape):
            return -1
        tape.append(record)
        self.on_record(shard, len(tape), record)
        return len(tape)

    def next_incarnation(self, learner: str) -> int:
        """Compare-and-set, which at one hub is an increment."""
        number = self.incarnations.get(learner, -1) + 1
        self.incarnations[learner] = number
        return number

    def listen(self, name: str, alive: Callable[[], bool], receive: Callable[[Any], None]) -> None:
        self.ears[name] = [*(e for e in self.ears[name] if e.alive()), Ear(alive, receive)]

    def send(self, source: str, target: str, message: Any) -> None:
        """A core message to whoever lives at `target` when it arrives."""

        def deliver(process: str) -> None:
            for ear in self.ears[process]:
                if ear.alive():
                    ear.receive(message)

        for process in self.processes.get(target, (target,)):
            self.world.core(source, process, partial(deliver, process))
