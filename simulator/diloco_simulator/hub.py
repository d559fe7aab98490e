"""What the bus keeps: the run's streams, the tape, incarnations, wishes, and who listens."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
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


class Hub:
    """Survives every process."""

    def __init__(self, world: World, spec: RunSpec) -> None:
        self.world = world
        self.spec = spec
        self.up = Log(world, "UP")
        self.dn = Log(world, "DN")
        self.state = Log(world, "STATE")
        self.tape: list[TapeRecord] = []  # sequence n is at index n - 1
        self.incarnations: dict[str, int] = {}
        self.lease: Held | None = None
        self.lease_revision = 0
        # Who listens to what is sent to a name; without an entry, the process of that name.
        self.processes: dict[str, tuple[str, ...]] = {}
        # Several processes may have one name: one that hung, and the one that replaced it.
        self.ears: defaultdict[str, list[Ear]] = defaultdict(list)
        self.on_record: Callable[[int, TapeRecord], None] = lambda seq, record: None

    def append(self, record: TapeRecord, expect_last: int) -> int:
        """The sequence, or -1 for a conflict: the commit point and the fence."""
        if expect_last != len(self.tape):
            return -1
        self.tape.append(record)
        self.on_record(len(self.tape), record)
        return len(self.tape)

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
