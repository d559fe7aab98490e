"""Real learner processes, a real syncer and a real nats-server; one learner really dies."""

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from live.bare_run import Run, a_run
from live.processes import services

from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.protocol import subjects

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


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
        assert await asyncio.to_thread(second.ended) == 1
        assert f"process {first.popen.pid}" in second.log.read_text()


@pytest.mark.parametrize("module", ["diloco_learner", "diloco_syncer"])
def test_a_taken_port_is_a_wrong_set_up(
    module: str, nats_server: NatsServer, tmp_path: Path
) -> None:
    """Another process has it for as long as it lives: Slurm's script would try for ever."""
    with socket.socket() as other, services(tmp_path, nats_server.url) as running:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        process = running.start(module, "a", DILOCO_HEALTH_PORT=str(port))
        process.told = True
        assert process.ended() == 2
        log = process.log.read_text()
    assert f"port {port} of 127.0.0.1 is taken: set DILOCO_HEALTH_PORT" in log
    assert "Traceback" not in log


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
