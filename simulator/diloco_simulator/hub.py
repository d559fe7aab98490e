"""What the bus keeps: the run's streams, every shard's tape and lease, and who listens."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diloco_shared.config import RunSpec
from diloco_shared.protocol.messages import TapeRecord
from diloco_simulator.capacity import Capacities, record_bytes
from diloco_simulator.world import Log, World
from diloco_syncer.lease import Held

# Why an append was refused.
CONFLICT, FULL = -1, -2


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
    archived: int = 0  # of those, the first so many take no room on the stream any more
    lease: Held | None = None
    lease_revision: int = 0

    @property
    def held(self) -> int:
        """Bytes on the stream."""
        return sum(record_bytes(r) for r in self.tape[self.archived :])


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
        self.room = Capacities()
        self.incarnations: dict[str, int] = {}
        # Who listens to what is sent to a name; without an entry, the process of that name.
        self.processes: dict[str, tuple[str, ...]] = {}
        # Several processes may have one name: one that hung, and the one that replaced it.
        self.ears: defaultdict[str, list[Ear]] = defaultdict(list)
        self.on_record: Callable[[int, int, TapeRecord], None] = lambda shard, seq, record: None

    def append(self, shard: int, record: TapeRecord, expect_last: int) -> int:
        """The sequence, CONFLICT or FULL: the commit point and the fence."""
        tape = self.shards[shard].tape
        if expect_last != len(tape):
            return CONFLICT
        more = record_bytes(record)
        if self.world.squeezed or self.shards[shard].held + more > self.room.tape:
            self.world.counts["TAPE full"] += 1
            return FULL
        tape.append(record)
        self.on_record(shard, len(tape), record)
        return len(tape)

    def limit(self, room: Capacities) -> None:
        """From now on no stream takes more."""
        self.room = room
        self.up.limit, self.dn.limit, self.state.limit = room.up, room.down, room.state

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
