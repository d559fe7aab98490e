"""Real learner processes, a real syncer and a real nats-server; one learner really dies."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from diloco_shared.config import RunSpec
from diloco_shared.edges.bus import StreamSpec
from diloco_shared.edges.nats_bus import NatsBus
from diloco_shared.edges.nats_server import NatsServer
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Progress, TapeRound
from diloco_shared.protocol.records import Assignment, Event, RunRecord
from diloco_shared.protocol.wire import decode, decode_tape, encode

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

# Another test on the same two cores may make each step of this one take several times as long.
PATIENCE_S = 120.0


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


class Process:
    """A service as its supervisor starts it."""

    def __init__(self, module: str, name: str, url: str, data: Path) -> None:
        self.log = data / f"{name}.log"
        with self.log.open("ab") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module],
                env={
                    **os.environ,
                    "DILOCO_ID": name,
                    "DILOCO_NATS_URL": url,
                    "DILOCO_DATA": str(data),
                    "DILOCO_THREADS": "1",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=out,
                stderr=out,
            )

    async def ended(self) -> int:
        return await asyncio.to_thread(self.popen.wait, 60)

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


class Run:
    """What a coordinator would do, and what a test wants to see."""

    def __init__(self, bus: NatsBus, url: str, data: Path) -> None:
        self.bus = bus
        self.url = url
        self.data = data
        self.processes: list[Process] = []
        self.reports: list[Progress] = []

    def start(self, module: str, name: str) -> Process:
        process = Process(module, name, self.url, self.data)
        self.processes.append(process)
        return process

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
            spec=spec(write_corpus(self.data / "corpus")).model_dump(mode="json"),
            desired="running",
            quorum=1,
            created_at=time.time(),
        )
        await self.bus.kv_put(subjects.RUNS, "r", encode(record))

    async def listen(self) -> None:
        async with self.bus.subscribe(subjects.progress("r", "*"), limit=65536) as deliveries:
            async for d in deliveries:
                self.reports.append(decode(d.payload, Progress))

    async def until(self, condition: Callable[[Progress], bool]) -> Progress:
        """The first report from now on that meets `condition`."""
        seen, deadline = len(self.reports), time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for p in self.reports[seen:]:
                if condition(p):
                    return p
            seen = len(self.reports)
            for process in self.processes:
                assert process.popen.poll() in (None, -signal.SIGKILL), process.log.read_text()
            await asyncio.sleep(0.01)
        logs = {p.log.name: p.log.read_text(errors="replace")[-4000:] for p in self.processes}
        raise AssertionError("\n".join(f"== {name}\n{text}" for name, text in logs.items()))

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
async def a_run(server: NatsServer, data: Path) -> AsyncIterator[Run]:
    async with AsyncExitStack() as stack:
        bus = await NatsBus.connect(server.url, name="test")
        stack.push_async_callback(bus.close)
        run = Run(bus, server.url, data)
        await run.prepare()
        listening = asyncio.create_task(run.listen())
        stack.callback(listening.cancel)
        stack.callback(lambda: [p.end() for p in run.processes])
        yield run


async def test_a_killed_learner_recovers_from_a_donor_and_is_merged_again(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with a_run(nats_server, tmp_path) as run:
        for name in ("s", "l-1", "l-2"):
            await run.assign(name, "r")
        run.start("diloco_syncer", "s")
        survivor = run.start("diloco_learner", "l-1")
        victim = run.start("diloco_learner", "l-2")
        await run.until(lambda p: p.learner == "l-2" and p.step >= 30)
        before = await run.merged("l-2", 0)

        victim.popen.kill()
        assert await victim.ended() == -signal.SIGKILL
        again = run.start("diloco_learner", "l-2")
        # The survivor never stops (I8), and the victim is back under the next number (I10).
        first = await run.until(lambda p: p.learner == "l-2" and p.step > 0)
        assert first.incarnation == 1
        after = await run.merged("l-2", 1)
        assert after.round > before.round
        (recovered,) = [e for e in await run.events("recovered") if e.source == "l-2"]
        assert recovered.data["source"] == "donor" and recovered.data["donor"] == "l-1"
        steps = [p.step for p in run.reports if p.learner == "l-1"]
        assert {p.incarnation for p in run.reports if p.learner == "l-1"} == {0}
        assert steps == sorted(steps)

        again.popen.terminate()
        assert await again.ended() == 0
        run.processes.remove(again)
        assert (await run.until(lambda p: p.learner == "l-1")).state == "stepping"
        last = [p for p in run.reports if p.learner == "l-2"][-1]
        assert last.state == "finished"
        survivor.popen.terminate()
        assert await survivor.ended() == 0
        run.processes.remove(survivor)


async def test_a_second_process_on_the_same_folder_is_told_who_has_it(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with a_run(nats_server, tmp_path) as run:
        first = run.start("diloco_learner", "l-1")
        await _registered(run)
        second = Process("diloco_learner", "l-1", run.url, tmp_path)
        assert await second.ended() == 2
        assert f"process {first.popen.pid}" in second.log.read_text()


async def test_a_learner_without_a_server_says_so_and_ends(tmp_path: Path) -> None:
    process = Process("diloco_learner", "l-1", "nats://127.0.0.1:9", tmp_path)
    assert await process.ended() == 1
    assert "nats://127.0.0.1:9" in process.log.read_text()


async def _registered(run: Run) -> Any:
    async with run.bus.kv_watch(subjects.MEMBERS, "l-1") as entries:
        async for entry in entries:
            if entry.value is not None:
                return entry
