"""An island alone in its run, whose hosts write its checkpoints: it goes on from them.

It comes back as islands of other sizes. No learner is there to give it moments.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from live.bare_run import Run, a_run, spec
from live.processes import Process
from waiting import NotYet, until

from diloco_learner.recovery.checkpoint_io import sequence_of
from diloco_shared.hub.nats_server import NatsServer, free_port
from diloco_shared.protocol.records import Event
from diloco_shared.spec.run import RunSpec

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(900)]

EVERY = 40  # steps


def alone(corpus: Path) -> RunSpec:
    given = spec(corpus).model_dump(mode="json")
    given["membership"]["learners_min"] = 1
    given["keeping"]["checkpoint_every_steps"] = EVERY
    given["inner"]["batch_sequences"] = 4
    return RunSpec.model_validate(given)


def start(run: Run, hosts: int, devices: int, place: Path, **other: str) -> list[Process]:
    """The island's processes; `other`: the place of host 1, where it has another one."""
    told = {
        "DILOCO_HOSTS": str(hosts),
        "DILOCO_HOST_ADDRESS": f"127.0.0.1:{free_port('127.0.0.1')}",
        "DILOCO_HOSTS_CHECKPOINTS": str(place),
        "DILOCO_ID": "l-1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} " + os.environ["XLA_FLAGS"],
    }
    started = []
    for index in reversed(range(hosts)):
        more = told | {"DILOCO_HOST_INDEX": str(index)} | (other if index == 1 else {})
        started.append(run.start("diloco_learner", f"l-1.{index}" if index else "l-1", **more))
    return started[::-1]


def complete(place: Path) -> list[int]:
    """Sequences of complete checkpoints."""
    return sorted(int(path.parent.name) for path in place.glob("*/l-1/*/whole.*.json"))


async def kept(run: Run, place: Path, least: int) -> list[int]:
    def there() -> list[int]:
        run.running.check()
        found = complete(place)
        if not found or found[-1] < least:
            raise NotYet(found)
        return found

    found: list[int] = await until(there, f"a checkpoint from {least} on", patience_s=180)
    return found


async def newest(run: Run, kind: str, many: int) -> list[Event]:
    async def there() -> list[Event]:
        found = [e for e in await run.events(kind) if e.source == "l-1"]
        if len(found) < many:
            raise NotYet(found)
        return found

    found: list[Event] = await until(there, f"{many} events {kind}", patience_s=60)
    return found


async def ends(processes: list[Process], status: int) -> None:
    for process in processes:
        process.told = True
    for process in processes:
        assert await asyncio.to_thread(process.ended) == status


async def life(run: Run, incarnation: int) -> None:
    """It trains: some steps have been taken."""
    await run.reported(lambda p: p.incarnation == incarnation and p.step > 5)


async def test_an_island_goes_on_from_what_its_hosts_have_written(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    place = tmp_path / "shared"
    async with a_run(nats_server, tmp_path, alone) as run:
        for name in ("s", "l-1"):
            await run.assign(name, "r")
        run.start("diloco_syncer", "s")
        island = start(run, 2, 2, place)
        found = await kept(run, place, sequence_of(0, 0, 2 * EVERY))
        assert found[-1] % EVERY == 0 and len(found) <= 3
        island[1].kill()
        await ends([island[0]], 1)
        assert not list((tmp_path / "l-1" / "checkpoints").glob("*/*.safetensors"))

        # It comes back as one process of two devices. The newest one is damaged meanwhile.
        last, before = complete(place)[-1], complete(place)[-2]
        (part, *_) = place.glob(f"*/l-1/{last}/moments/ocdbt.process_1/d/*")
        data = part.read_bytes()
        part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        (one,) = start(run, 1, 2, place)
        await life(run, 1)
        (recovered,) = await newest(run, "recovered", 1)
        assert recovered.data["source"] == "checkpoint"
        (skipped,) = await newest(run, "checkpoint-skipped", 1)
        assert f"checkpoint {last} passed over" in skipped.text and "damaged" in skipped.text
        one.told = True
        one.popen.send_signal(signal.SIGTERM)
        await ends([one], 0)
        final = complete(place)[-1]
        assert final > max(last, before) and sequence_of(0, 1, 0) < final < sequence_of(0, 2, 0)

        # And as four hosts. All are told to stop: what they had is complete before they end.
        island = start(run, 4, 1, place)
        await life(run, 2)
        assert [e.data["source"] for e in await newest(run, "recovered", 2)] == ["checkpoint"] * 2
        assert len(await newest(run, "checkpoint-skipped", 1)) == 1
        for process in island:
            process.told = True
            process.popen.send_signal(signal.SIGTERM)
        await ends(island, 0)
        (found_last,) = complete(place)[-1:]
        assert sequence_of(0, 2, 0) < found_last < sequence_of(0, 3, 0)

        # One host has another folder under that name: it is told, and all go on without.
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        island = start(run, 2, 1, place, DILOCO_HOSTS_CHECKPOINTS=str(elsewhere))
        await life(run, 3)
        (failed, *_) = await newest(run, "checkpoint-failed", 1)
        assert "host 1 (" in failed.text and "is not the folder that process 0 sees" in failed.text
        await run.reported(lambda p: p.incarnation == 3 and p.step > 3 * EVERY)
        assert len(await newest(run, "checkpoint-failed", 1)) == 1, "it is told once"
        assert complete(place)[-1] == found_last and not complete(elsewhere)
