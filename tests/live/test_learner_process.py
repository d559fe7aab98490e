"""Real learner processes, a real syncer and a real nats-server; one learner really dies."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from live.processes import PATIENCE_S, Services, services
from waiting import NotYet, until

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamSpec
from diloco_shared.process.nats_server import NatsServer
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Progress, TapeRound
from diloco_shared.protocol.records import Assignment, Event, RunRecord
from diloco_shared.protocol.wire import decode, decode_tape, encode
from diloco_shared.spec.run import RunSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def spec(corpus: Path) -> RunSpec:
    """A model that compiles in a moment, on a text that is read in one."""
    return RunSpec.model_validate(
        {
            "name": "r",
            "seed": 5,
            # On loopback a round takes longer than two such steps: let it overlap with more.
            "algorithm": {"fragments": 3, "sync_every_steps": 24, "overlap_steps": 8},
            "model": {"overrides": {"width": 16, "layers": 1, "hidden": 16}},
            "data": {"source": str(corpus), "virtual_shards": 8, "validation_fraction": 0.2},
            "membership": {"learners_min": 2, "heartbeat_s": 0.5, "lease_s": 3.0},
            "evaluation": {"every_steps": 100_000, "sequences": 32},
            "budget": {"steps": 100_000},
        }
    )


def write_corpus(folder: Path) -> Path:
    folder.mkdir()
    for n in range(40):
        (folder / f"text-{n:02d}.txt").write_text(f"file {n} is the {n}th of forty.\n" * 400)
    return folder


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


# The demo (test_demo.py) shows this of three learners under a supervisor.
@pytest.mark.long
async def test_a_killed_learner_recovers_from_a_donor_and_is_merged_again(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with a_run(nats_server, tmp_path) as run:
        for name in ("s", "l-1", "l-2"):
            await run.assign(name, "r")
        run.start("diloco_syncer", "s")
        survivor = run.start("diloco_learner", "l-1")
        victim = run.start("diloco_learner", "l-2")
        await run.reported(lambda p: p.learner == "l-2" and p.step >= 30)
        before = await run.merged("l-2", 0)

        assert victim.kill() == -signal.SIGKILL
        again = run.start("diloco_learner", "l-2")
        # The survivor never stops (I8), and the victim is back under the next number (I10); its
        # last words may still be on their way.
        await run.reported(lambda p: p.learner == "l-2" and p.incarnation == 1 and p.step > 0)
        after = await run.merged("l-2", 1)
        assert after.round > before.round
        (recovered,) = [e for e in await run.events("recovered") if e.source == "l-2"]
        assert recovered.data["source"] == "donor" and recovered.data["donor"] == "l-1"
        steps = [p.step for p in run.reports if p.learner == "l-1"]
        assert {p.incarnation for p in run.reports if p.learner == "l-1"} == {0}
        assert steps == sorted(steps)

        assert await asyncio.to_thread(again.stop) == 0
        assert (await run.reported(lambda p: p.learner == "l-1")).state == "stepping"
        last = [p for p in run.reports if p.learner == "l-2"][-1]
        assert last.state == "finished"
        assert await asyncio.to_thread(survivor.stop) == 0


async def test_a_second_process_on_the_same_folder_is_told_who_has_it(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with a_run(nats_server, tmp_path) as run:
        first = run.start("diloco_learner", "l-1")
        await _registered(run)
        second = run.start("diloco_learner", "l-1")
        assert await asyncio.to_thread(second.ended) == 2
        assert f"process {first.popen.pid}" in second.log.read_text()


def test_a_learner_without_a_server_says_so_and_ends(tmp_path: Path) -> None:
    with services(tmp_path, "nats://127.0.0.1:9") as running:
        process = running.start("diloco_learner", "l-1")
        assert process.ended() == 1
        assert "url=127.0.0.1:9" in process.log.read_text()


async def _registered(run: Run) -> Any:
    async with run.bus.kv_watch(subjects.MEMBERS, "l-1") as entries:
        async for entry in entries:
            if entry.value is not None:
                return entry
