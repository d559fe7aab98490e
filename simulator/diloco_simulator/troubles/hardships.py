"""Rarer troubles of a whole world, with dice of their own: others fall as they did without them.

Full streams and a hub without room, stores that nobody reaches, machines that cannot compute, noise
to those who listen, half-sent initial parameters, two coordinators, and a run whose state is lost.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_learner.app import Learner
from diloco_shared.bus.port import BusError, Delivery
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import describe
from diloco_shared.protocol.messages import InitManifest
from diloco_shared.protocol.wire import encode
from diloco_simulator.troubles.lies import STRANGER
from diloco_simulator.virtual_loop import Hosted
from diloco_simulator.worlds.constants import CHUNKS
from diloco_simulator.worlds.processes import App

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# How many worlds have each kind.
OFTEN, RARE = 0.3, 0.2
# What lasts is over after so long, in virtual seconds; a learner tries again after half a minute.
SPELL_S, UNFIT_S = (5.0, 25.0), (1.0, 12.0)
# A process stands still for longer than another needs to join under its name.
STILL_S = (4.0, 15.0)
# Streams that an operator narrows.
KINDS = subjects.STREAM_KINDS
# What one of them may still take, in bytes.
LEFT = (0, 200, 2000)
# What is said by noise, and how often.
NOISE, NOISES = (b"\xff\x00", b"", b"\x80"), 12
# Until a run has streams that a stranger can write to, looked for so often, in virtual seconds.
STREAMS_LOOKS, LOOK_S = 300, 0.1


class Hardships:
    """Of one world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.rng = Random(f"hardships {world.seed}")
        self.counts = world.found.counts
        self.early: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """What strikes while the run begins."""
        if Random(f"half-sent {self.world.seed}").random() < RARE:
            self.early = self.world.loop.create_task(self._half_sent())

    def plan(self) -> None:
        """Draw when what happens."""
        kinds: tuple[tuple[Callable[[], None], float], ...] = (
            (self._narrow, OFTEN),
            (self._store_away, OFTEN),
            (self._unfit, OFTEN),
            (self._noise, OFTEN),
            (self._two_coordinators, RARE),
            (self._lose_state, RARE),
            (self._second_learner, OFTEN),
        )
        for strike, often in kinds:
            if self.rng.random() < often:
                at = self.rng.uniform(3.0, self.world.options.safety_s)
                self.world.loop.call_later(at, self._strike, strike)

    def _strike(self, strike: Callable[[], None]) -> None:
        if self.world.scene.faulty:
            strike()

    def heal(self) -> None:
        """The hub has room again; whoever needs more takes it by itself."""
        self.world.broker.storage_max = 0

    # --- the hub -------------------------------------------------------------------------------

    def _narrow(self) -> None:
        """A stream is full at once, and the hub has no room to make it larger for a while."""
        broker, run = self.world.broker, self.world.spec.name
        stream = subjects.run_stream(run, self.rng.choice(KINDS))
        if not broker.exists(stream) or broker.storage_max:
            return
        self.counts["streams narrowed"] += 1
        narrow = max(broker.info(stream).bytes, 1) + self.rng.choice(LEFT)
        broker.narrow(stream, narrow)
        broker.storage_max = broker.storage().reserved
        requests = self.world.visitors.requests
        requests.come(requests.lacks_room)
        self.world.loop.call_later(self.rng.uniform(*SPELL_S), self.heal)

    # --- stores and machines -------------------------------------------------------------------

    def _store_away(self) -> None:
        """Nobody reaches checkpoints and archives."""
        self.counts["the store of checkpoints away"] += 1
        until = self.world.loop.now + self.rng.uniform(*SPELL_S)
        self.world.disks.store_away_until = until

    def _unfit(self) -> None:
        """A learner comes back, and its device does not for a while."""
        world = self.world
        if not world.learners:
            return
        machine, until = self.rng.choice(world.learners), world.loop.now + 1.0
        until += self.rng.uniform(*UNFIT_S)
        machine.begins = partial(self._without_device, machine.begins, until)
        self.counts["learners without a device"] += 1
        world.crash(machine, 1.0)

    def _without_device(
        self, begins: Callable[[App, Hosted], None], until: float, app: App, process: Hosted
    ) -> None:
        begins(app, process)
        assert isinstance(app, Learner)
        computing: Any = app.computing
        build = computing.build

        def without_device(*of: Any, **how: Any) -> Any:
            if self.world.scene.faulty and self.world.loop.now < until:
                raise RuntimeError("no device")
            return build(*of, **how)

        computing.build = without_device

    def _lose_state(self) -> None:
        """No syncer's disk has it any more."""
        self.counts["states lost"] += 1
        for machine in list(self.world.syncers):
            self.counts["disks lost"] += 1
            machine.wipe()
            self.world.start(machine, self.rng.uniform(0.5, 6.0))

    def _two_coordinators(self) -> None:
        """A second one on another host, while the first goes on or stands still."""
        world, seconds = self.world, self.rng.uniform(3.0, 15.0)
        self.counts["two coordinators"] += 1
        world.troubles.twins.append(twin := world.twin(world.coordinator))
        twin.start()
        process = world.coordinator.process
        if process is not None and self.rng.random() < 0.5:
            process.freeze()
            world.loop.call_later(seconds, process.thaw)
        world.loop.call_later(seconds + self.rng.uniform(0.0, 5.0), twin.kill)

    def _second_learner(self) -> None:
        """Of one name, elsewhere, while the first stands still; then both are there for a while."""
        world = self.world
        machine = self.rng.choice(world.learners) if world.learners else None
        process = None if machine is None else machine.process
        if machine is None or process is None or process.frozen:
            return
        self.counts["two learners of a name"] += 1
        world.troubles.twins.append(twin := world.twin(machine))
        process.freeze()
        twin.start()
        still_s = self.rng.uniform(*STILL_S)
        world.loop.call_later(still_s, process.thaw)
        world.loop.call_later(still_s + self.rng.uniform(*SPELL_S), twin.kill)

    # --- strangers -----------------------------------------------------------------------------

    def _noise(self) -> None:
        """To whoever listens or answers: nothing comes of it."""
        self.counts["noise to everybody"] += 1
        run, machines = self.world.spec.name, self.world.machines
        learners = [m.name for m in self.world.learners] or [STRANGER]
        heard = (
            subjects.pull(run),
            *(subjects.grant(run, name) for name in learners),
            *(subjects.donate(run, name) for name in learners),
            *(subjects.chaos(machine.name) for machine in machines),
            *(subjects.snapshot_wish(run, n) for n in range(self.world.options.shards)),
        )
        for _ in range(NOISES):
            subject, payload = self.rng.choice(heard), self.rng.choice(NOISE)
            self.world.broker.publish(Delivery(subject, payload))

    async def _half_sent(self) -> None:
        """Somebody names initial parameters of which the stream holds nothing, before others."""
        world, run = self.world, self.world.spec.name
        for _ in range(STREAMS_LOOKS):
            if world.broker.exists(subjects.up_stream(run)):
                break
            await asyncio.sleep(LOOK_S)
        self.counts["initial parameters half sent"] += 1
        for p in range(world.spec.algorithm.fragments):
            subject = subjects.initial(run, STRANGER, 0, p)
            blob = describe(subject, b"nothing", chunk_bytes=CHUNKS.value)
            manifest = InitManifest(
                run=run,
                learner=STRANGER,
                incarnation=0,
                config_hash="f" * 32,
                layout=(),
                fragment=p,
                blob=blob,
            )
            try:
                world.broker.append(f"{subject}.m", encode(manifest), {}, None, None)
            except BusError:
                self.counts["strangers without room"] += 1
