"""A run without a coordinator: a test writes what one would, and hears what learners report."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from live.processes import PATIENCE_S, Services, services
from live.tiny import tiny, write_corpus
from waiting import NotYet, until

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamSpec
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Progress, TapeRound
from diloco_shared.protocol.records import Assignment, Event, RunRecord
from diloco_shared.protocol.wire import decode, decode_tape, encode
from diloco_shared.spec.run import RunSpec


def spec(corpus: Path) -> RunSpec:
    """The tiny run, of this text."""
    text = {"source": str(corpus), "virtual_shards": 8, "validation_fraction": 0.2}
    return RunSpec.model_validate(tiny(data=text))


class Run:
    """What a coordinator would do, and what a test wants to see."""

    def __init__(
        self, bus: NatsBus, running: Services, make: Callable[[Path], RunSpec] = spec
    ) -> None:
        self.make = make
        self.bus = bus
        self.running = running
        self.start = running.start
        self.reports: list[Progress] = []

    async def assign(self, member: str, run: str) -> None:
        value = encode(Assignment(member=member, run=run, at=time.time()))
        await self.bus.kv_put(subjects.ASSIGNMENTS, member, value)

    async def prepare(self) -> None:
        for bucket in subjects.BUCKETS:
            await self.bus.ensure_bucket(bucket)
        await self.bus.ensure_stream(
            StreamSpec(subjects.EVENTS_STREAM, (subjects.EVENTS_FILTER,), 1 << 20, drop_oldest=True)
        )
        record = RunRecord(
            name="r",
            spec=self.make(write_corpus(self.running.data / "corpus")).model_dump(mode="json"),
            desired="running",
            quorum=1,
            created_at=time.time(),
        )
        await self.bus.kv_put(subjects.RUNS, "r", encode(record))

    async def listen(self) -> None:
        async with self.bus.subscribe(subjects.progress("r", "*"), limit=65536) as deliveries:
            async for d in deliveries:
                self.reports.append(decode(d.payload, Progress))

    async def reported(self, condition: Callable[[Progress], bool]) -> Progress:
        """The first report from now on that meets `condition`."""
        seen = len(self.reports)

        def met() -> Progress:
            self.running.check()
            for p in self.reports[seen:]:
                if condition(p):
                    return p
            raise NotYet(f"last: {self.reports[-1:]}")

        found: Progress = await until(met, "such a report", patience_s=PATIENCE_S)
        return found

    async def merged(self, learner: str, incarnation: int) -> TapeRound:
        """The first committed round with a contribution of this life."""
        async with self.bus.read(subjects.tape_stream("r"), "tape.r.>") as records:
            async for stored in records:
                record = decode_tape(stored.payload)
                if isinstance(record, TapeRound) and any(
                    (v.learner, v.incarnation, v.outcome) == (learner, incarnation, "merged")
                    for v in record.verdicts
                ):
                    return record
        raise AssertionError("the tape ended")

    async def events(self, kind: str) -> list[Event]:
        stored = await self.bus.fetch(subjects.EVENTS_STREAM, subjects.event("r", kind))
        return [decode(s.payload, Event) for s in stored]


@asynccontextmanager
async def a_run(
    server: NatsServer, data: Path, make: Callable[[Path], RunSpec] = spec
) -> AsyncIterator[Run]:
    async with AsyncExitStack() as stack:
        bus = await NatsBus.connect(server.url, name="test")
        stack.push_async_callback(bus.close)
        running = stack.enter_context(services(data, server.url, DILOCO_DATA_ROOT=str(data)))
        run = Run(bus, running, make)
        await run.prepare()
        listening = asyncio.create_task(run.listen())
        stack.callback(listening.cancel)
        yield run
