"""Who works in the worlds of `ends`: real syncers, idle learners, a bus far away."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import TypeVar

from diloco_shared.edges.bus import BusError, Delivery, Stored
from diloco_shared.edges.membership import DataFolder, Membership
from diloco_shared.edges.memory_broker import MemoryBroker
from diloco_shared.edges.memory_bus import MemoryBus
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Beat, Progress
from diloco_shared.protocol.wire import decode, encode
from diloco_syncer.app import Syncer
from diloco_syncer.settings import Settings

T = TypeVar("T")

# Between two reports of a learner, in seconds; and how many say that it has left.
REPORT_S, LAST_REPORTS = 0.5, 3
FRAGMENTS = 2


class FarBus(MemoryBus):
    """A client some way off: every message takes a seeded time, one way."""

    def __init__(self, broker: MemoryBroker, name: str, rng: Random, delay_s: float) -> None:
        super().__init__(broker, name)
        self.rng, self.delay_s = rng, delay_s

    def _way_s(self) -> float:
        return self.rng.expovariate(1 / self.delay_s)

    async def _call(
        self, operation: str, subject: str, timeout_s: float, work: Callable[[], T]
    ) -> T:
        await asyncio.sleep(self._way_s())
        done = await super()._call(operation, subject, timeout_s, work)
        await asyncio.sleep(self._way_s())
        return done

    async def publish(self, subject: str, payload: bytes) -> None:
        if self.connected:
            self._count_out(subject, payload)
            loop = asyncio.get_running_loop()
            loop.call_later(self._way_s(), self.broker.publish, Delivery(subject, payload))

    @asynccontextmanager
    async def _reading(
        self, stream: str, subject: str, start_seq: int, *, plain: bool
    ) -> AsyncIterator[AsyncIterator[Stored]]:
        async with super()._reading(stream, subject, start_seq, plain=plain) as messages:
            yield self._late(messages)

    async def _late(self, messages: AsyncIterator[Stored]) -> AsyncIterator[Stored]:
        async for stored in messages:
            await asyncio.sleep(self._way_s())
            yield stored


class SyncerProcess:
    """The product's syncer under one name; killed, nothing of it is said any more."""

    def __init__(self, name: str, folder: Path, client: Callable[[str], FarBus]) -> None:
        self.name, self.folder, self.client = name, folder, client
        self.task: asyncio.Task[None] | None = None
        self.lock: DataFolder | None = None
        self.buses: list[FarBus] = []

    def start(self) -> None:
        """A new process."""
        self.lock = lock = DataFolder(self.folder, self.name)
        control, data = (self.client(f"{self.name}-{plane}") for plane in ("control", "data"))
        self.buses = [control, data]
        settings = Settings(id=self.name, data=self.folder)
        self.task = asyncio.create_task(Syncer(settings, control, data, lock).run())

    def kill(self) -> None:
        """As by SIGKILL: its key and its lease run out by themselves."""
        for bus in self.buses:
            bus.disconnect()
        if self.task is not None:
            self.task.cancel()  # nobody waits for it: nothing that it does now can be seen
        if self.lock is not None:
            self.lock.release()
        self.task = self.lock = None


class IdleLearner:
    """Joins runs, reports steps that it does not take, and leaves when it is told of the end."""

    def __init__(self, name: str, client: Callable[[str], FarBus]) -> None:
        self.name = name
        self.bus = client(name)
        self.membership = Membership(self.bus, name, "learner", f"lock-of-{name}")
        self.over = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        for bucket in subjects.BUCKETS:
            await self.bus.ensure_bucket(bucket)
        await self.membership.register()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.membership.keep())
            work: asyncio.Task[None] | None = None
            async for run in self.membership.assignments():
                if work is not None:
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                work = tasks.create_task(self._work(run)) if run else None

    async def _work(self, run: str) -> None:
        self.over.clear()
        self.membership.update(run=run, state="working")
        await self.membership.refresh()
        hearing = asyncio.create_task(self._hear(run))
        try:
            last = 0
            while last < LAST_REPORTS:
                last += self.over.is_set()
                with suppress(BusError):
                    await self.bus.publish(
                        subjects.progress(run, self.name), encode(self._report())
                    )
                await asyncio.sleep(REPORT_S)
        finally:
            hearing.cancel()
            self.membership.update(run="", state="idle")
            await self.membership.refresh()

    async def _hear(self, run: str) -> None:
        async with self.bus.subscribe(subjects.beat(run)) as beats:
            async for delivery in beats:
                if decode(delivery.payload, Beat).state in ("finished", "stopped"):
                    self.over.set()

    def _report(self) -> Progress:
        none = (0,) * FRAGMENTS
        return Progress(
            learner=self.name,
            incarnation=0,
            epoch=0,
            state="finished" if self.over.is_set() else "recovering",
            step=0,
            tokens=0,
            c_steps=none,
            c_tokens=none,
            adopted=(-1,) * FRAGMENTS,
            adopted_at=none,
            loss=0.0,
            step_s=0.0,
            wait_s=0.0,
        )
