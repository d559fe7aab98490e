"""What a learner of several hosts computes with: see `computing_io` of training.

The set-up of a process comes first: `gathered` in process 0, `followed` in the others. Both wait
until all are there, and then let jax's processes meet, which must be before jax is asked for its
devices.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import structlog

from diloco_learner.events import Leave
from diloco_learner.hosts import plan
from diloco_learner.hosts.following_io import follow
from diloco_learner.hosts.hand import Hand
from diloco_learner.hosts.held_anchors import Holder
from diloco_learner.hosts.keeping_io import HostsCheckpoints, Nobody
from diloco_learner.hosts.leading_io import Hosts
from diloco_learner.hosts.place import HostPlace
from diloco_learner.hosts.sharded_io import Shards
from diloco_learner.hosts.trainer import HostsTrainer
from diloco_learner.hosts.whole import HostLost, OfWork, ReadOn
from diloco_learner.models import forget
from diloco_learner.training import platforms
from diloco_learner.training.computing_io import (
    Built,
    Check,
    OnThisMachine,
    go_on,
    island_of,
    opened,
)
from diloco_learner.training.mailbox_io import Mailbox
from diloco_learner.training.mesh import mesh_over, of_all
from diloco_learner.training.speed import Island
from diloco_learner.training.train import TrainLoop
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.process.serving import connected_for_data
from diloco_shared.reach.local import Reach
from diloco_shared.spec.mesh import MeshSizes, fitted, mesh_of
from diloco_shared.spec.run import RunSpec

if TYPE_CHECKING:
    from diloco_learner.settings import Settings

log = structlog.get_logger()

# jax's processes are all there when they begin to meet.
MEET_S = 60
# Of jax's own watch over its processes, which ends them without a word: ours is quicker.
JAX_SILENCE_S = 300
# Between two looks for hosts that keep the others waiting, in seconds.
LOOK_S = 1.0
# A dead process shows first in the programs that waited for it, and a moment later to us.
SHOWN_S = 5.0


class OnHosts(OnThisMachine):
    """On the devices of all processes of an island; of process 0."""

    def __init__(self, hosts: Hosts, *of_this_machine: Any, checkpoints: str = "") -> None:
        """`checkpoints`: the place of those that all hosts write, or ""."""
        super().__init__(*of_this_machine)
        self.hosts = hosts
        self.checkpoints = checkpoints
        self.tell: Callable[[str, str], Awaitable[None]] | None = None  # an event, once it is set
        # Its `work`: of a run whose model is built; `begun`: whether the others are told to begin.
        self.building = threading.local()
        self.holder: Holder | None = None  # of the anchors of the trainer that works

    def there(self) -> Sequence[Any]:
        return jax.devices()

    def sizes(self, spec: RunSpec, devices: int) -> MeshSizes:
        return of_all(super().sizes(spec, devices), devices, spec.inner.batch_sequences)

    def trainer(self, program: Program, sizes: MeshSizes, separator: int | None) -> Trainer:
        """Once every host has what the run needs. Raises ValueError where one has not."""
        text = program.spec.model_dump_json()
        between = -1 if separator is None else separator
        order = plan.Prepare(text, str(sizes), between, program.unread)
        link: OfWork = self.building.work
        link.check()
        self._close()  # a restore begins a new life in this process
        answers = link.answers(link.tell(order))
        if faults := [bytes(fault).decode() for fault in answers.values() if len(fault)]:
            raise ValueError("; ".join(faults))
        self.building.begun = True
        trainer = HostsTrainer(program, link)
        self.holder = trainer.holder
        return trainer

    def build(self, spec: RunSpec, check: Check = go_on, *, begun: bool = False) -> Built:
        """With checkpoints that all hosts write, where there is a place for them.

        In a thread, which goes on should the work be over before it is done: see `OfWork`. Once the
        others are told to begin, it goes on in any case: they make their moments together.
        """
        check()  # the work that begins with the next line ends the one before
        link = self.building.work = self.hosts.work()
        self.building.begun = False

        def unless_begun() -> None:
            if not self.building.begun:
                check()

        built = super().build(spec, unless_begun, begun=begun)
        if not self.checkpoints:
            return built
        names = {0: "process 0"} | {n: host.name for n, host in self.hosts.hosts.items()}
        shards = Shards(self.checkpoints, 0, self.hosts.place.hosts)
        return replace(built, keeper=partial(HostsCheckpoints, built.trainer, shards, link, names))

    def island(self) -> Island:
        """Memory is that of this host."""
        found = island_of(jax.local_devices())
        late = {name: pace["late_s"] for name, pace in self.hosts.shown().items()}
        return replace(found, devices=max(len(self.devices), 1), hosts=late)

    async def train(self, loop: TrainLoop, mailbox: Mailbox) -> Leave:
        """Raises HostLost once another process is gone: the thread may wait for it for ever."""
        return await unless_lost(self.training(loop, mailbox), self.hosts, self.tell)

    @property
    def lost(self) -> str:
        return self.hosts.lost

    async def over(self, within_s: float | None = None) -> None:
        """Tell the others. One that is busy takes orders late, and whoever tells one waits for
        that: another thread does, while this process goes on to give signs of life at the hub."""
        await in_time(self._over, within_s)

    def _over(self) -> None:
        self._close()
        if not self.hosts.lost:
            self.hosts.end_work()

    def _close(self) -> None:
        """A thread may still be taking in an anchor of what is left."""
        if self.holder is not None:
            self.holder.close()
        self.holder = None


async def in_time(work: Callable[[], None], within_s: float | None) -> None:
    """Have a thread do it. A process that ends waits for that for so many seconds at most; what it
    could not tell, its end tells. Raises what `work` does."""
    doing = asyncio.ensure_future(asyncio.to_thread(work))
    if not (await asyncio.wait({doing}, timeout=within_s))[0]:
        log.warning("a host is busy, and is not told that this process ends", after_s=within_s)
        return
    doing.result()


class OnOneHost(OnThisMachine):
    """On the devices of one process, which keeps its checkpoints where all hosts of an island do:
    so it may be one life of an island that has several in others."""

    def __init__(self, *of_this_machine: Any, checkpoints: str) -> None:
        super().__init__(*of_this_machine)
        self.checkpoints = checkpoints

    def build(self, spec: RunSpec, check: Check = go_on, *, begun: bool = False) -> Built:
        """See `OnHosts.build`."""
        built, shards = super().build(spec, check, begun=begun), Shards(self.checkpoints)
        names = {0: "this process"}
        return replace(
            built, keeper=partial(HostsCheckpoints, built.trainer, shards, Nobody(), names)
        )


class Losing(Protocol):
    """What may lose one of its processes: see `leading_io.Hosts`."""

    when_lost: Callable[[], None] | None

    @property
    def lost(self) -> str: ...

    def straggling(self) -> str: ...


async def unless_lost(
    ended: asyncio.Future[Leave], hosts: Losing, tell: Callable[[str, str], Awaitable[None]] | None
) -> Leave:
    """What a training ends with; `tell` says meanwhile who keeps the others waiting.

    Raises HostLost once a process is gone, whatever the training waits for.
    """
    lost, here = asyncio.Event(), asyncio.get_running_loop()
    hosts.when_lost = partial(_soon, here, lost)
    losing = asyncio.ensure_future(lost.wait())
    either: list[asyncio.Future[Any]] = [ended, losing]
    try:
        while not hosts.lost and not ended.done():
            await asyncio.wait(either, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if tell is not None and (text := hosts.straggling()):
                await tell("straggling-host", text)
        if ended.done() and ended.exception() is None:
            return ended.result()
        await asyncio.wait({losing}, timeout=SHOWN_S)
        if hosts.lost:
            raise HostLost(hosts.lost)
        return ended.result()
    finally:
        hosts.when_lost = None
        losing.cancel()


def _soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set it, of another thread."""
    loop.call_soon_threadsafe(event.set)


def gathered(place: HostPlace, silence_s: float, *, carried: bool = False) -> Hosts:
    """In process 0: the others, once all are there. OSError where they do not come. `carried`:
    whether they carry to the hub what they can."""
    hosts = Hosts(place, silence_s, carried=carried)
    hosts.gather()
    meet(place, hosts.meeting)
    return hosts


def followed(place: HostPlace, settings: "Settings") -> None:
    """In the others: carry out what process 0 tells, until the process ends."""
    reading = ReadOn()
    shards = Shards(settings.hosts_checkpoints, place.index, place.hosts, reading)
    hand = Hand(partial(programs, settings.reach, moved=reading.moved), shards)
    name = f"{settings.id or 'island'}-{place.index}-data"
    connect = partial(connected_for_data, settings.of_host(place.hosts), name)
    carries = settings.hosts_carry == "all"
    carrying = connect if carries else None
    follow(place, hand, partial(meet, place), carrying, reading, stop_s=settings.stop_s)


def programs(
    reach: Reach, order: plan.Prepare, moved: Callable[[], object] = lambda: None
) -> Program:
    """Those of a run, on the devices of all processes. Whatever a model of one's own raises.

    `moved`: called whenever some more is read of the weights that the run begins with.
    """
    spec, sizes = RunSpec.model_validate_json(order.spec), mesh_of(order.mesh)
    if spec.model.factory is not None:
        reach.factories.check(spec.model.factory)
    platforms.check()
    there = jax.devices()
    fitted(sizes, len(there), spec.inner.batch_sequences)
    assert sizes is not None
    try:
        beginning = opened(spec, reach, begun=order.begun, moved=moved)
        separator = None if order.separator < 0 else order.separator
        return Program.build(spec, beginning, separator, mesh_over(sizes, there))
    except (Exception, SystemExit):
        forget(spec.model)
        raise


def meet(place: HostPlace, meeting: str) -> None:
    """Let jax's processes meet there, and find each other's devices."""
    port = meeting.rpartition(":")[2]
    # A signal to end is this process's own affair, and no end of another one's is jax's: it would
    # abort all of them, without a word that tells why.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        meeting,
        place.hosts,
        place.index,
        cluster_detection_method="deactivate",
        initialization_timeout=MEET_S,
        heartbeat_timeout_seconds=JAX_SILENCE_S,
        coordinator_bind_address=f"[::]:{port}" if "[" in meeting else f"0.0.0.0:{port}",
    )
    jax.devices()  # which waits for all: so here, where all are
