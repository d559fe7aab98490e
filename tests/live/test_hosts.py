"""An island of several processes and a learner of one; a process of the island really dies."""

import asyncio
import signal
from pathlib import Path

import httpx
import pytest
from live.bare_run import Run, a_run, spec
from live.processes import Process
from waiting import NotYet, until

from diloco_shared.hub.nats_server import NatsServer, free_port
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import CHUNK_BYTES
from diloco_shared.protocol.messages import TapeRound
from diloco_shared.protocol.records import MemberRecord
from diloco_shared.protocol.wire import decode, decode_tape
from diloco_shared.spec.run import RunSpec

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(900)]


def large(corpus: Path) -> RunSpec:
    """A model of which each host has whole chunks, and little to compute."""
    given = spec(corpus).model_dump(mode="json")
    given["algorithm"] |= {"fragments": 2, "codec_up": "fp32", "codec_down": "fp32"}
    given["model"]["context_tokens"], given["inner"]["batch_sequences"] = 16, 4
    given["model"]["overrides"]["hidden"] = 32768
    return RunSpec.model_validate(given)


ALGORITHM = large(Path()).algorithm


def island(run: Run, name: str, hosts: int) -> list[Process]:
    """Its processes, started as a supervisor of each host would; process 0 last."""
    told = {
        "DILOCO_HOSTS": str(hosts),
        "DILOCO_HOST_ADDRESS": f"127.0.0.1:{free_port('127.0.0.1')}",
    }
    started = [
        run.start(
            "diloco_learner",
            f"{name}.{index}" if index else name,
            DILOCO_ID=name,
            DILOCO_HOST_INDEX=str(index),
            **told,
        )
        for index in reversed(range(hosts))
    ]
    return started[::-1]


async def rounds(run: Run, last: int) -> list[TapeRound]:
    """Those on the tape up to that one."""
    found: list[TapeRound] = []
    async with run.bus.read(subjects.tape_stream("r"), "tape.r.>") as records:
        async for stored in records:
            record = decode_tape(stored.payload)
            if isinstance(record, TapeRound):
                found.append(record)
                if record.round >= last:
                    break
    return found


async def named_slow(run: Run, learner: str, host: str) -> bool:
    """Whether an event names that host; others may have kept an island waiting before."""
    events = await run.events("straggling-host")
    return any(e.source == learner and host in e.text for e in events)


async def carried(run: Run, name: str) -> dict[str, dict[str, int]]:
    """By host of an island, but for process 0: the bytes of its own connection to the hub."""
    entry = await run.bus.kv_get(subjects.MEMBERS, name)
    assert entry is not None and entry.value is not None
    address = decode(entry.value, MemberRecord).address
    said = await asyncio.to_thread(httpx.get, f"http://{address}/healthz", timeout=30)
    found: dict[str, dict[str, int]] = said.json()["carried"]
    return found


async def all_carry(run: Run, name: str, hosts: int) -> None:
    """Every host has carried whole chunks itself, and the learner's report counts their bytes."""

    async def shared() -> dict[str, dict[str, int]]:
        shown = await carried(run, name)
        if len(shown) < hosts - 1 or any(min(b.values()) <= CHUNK_BYTES for b in shown.values()):
            raise NotYet(shown)
        return shown

    shown = await until(shared, "a share of each host, both ways", every_s=0.5)
    report = await run.reported(lambda p: p.learner == name)
    assert report.sockets is not None
    whole = report.sockets.data_up, report.sockets.data_down
    for what, total in zip(("hub_bytes_out", "hub_bytes_in"), whole, strict=True):
        others = sum(one[what] for one in shown.values())
        assert total > others
        print("of", total, what, "the other hosts carried", others)


@pytest.mark.parametrize("hosts", [2, 4])
async def test_an_island_dies_as_one_and_comes_back_as_one(
    nats_server: NatsServer, tmp_path: Path, hosts: int
) -> None:
    async with a_run(nats_server, tmp_path, large) as run:
        for name in ("s", "l-1", "l-2"):
            await run.assign(name, "r")
        run.start("diloco_syncer", "s")
        run.start("diloco_learner", "l-1")
        first, second, *others = island(run, "l-2", hosts)
        await run.reported(lambda p: p.learner == "l-2")
        await run.reported(lambda p: p.learner == "l-2" and p.step >= 5)
        before = await run.merged("l-2", 0)
        await all_carry(run, "l-2", hosts)

        # One that stands still for a while is told by name.
        second.popen.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2.5)
        second.popen.send_signal(signal.SIGCONT)
        await until(lambda: named_slow(run, "l-2", "host 1 ("), "who is slow")

        second.kill()
        for process in (first, *others):
            process.told = True  # to end: their process 1 was
        assert await asyncio.to_thread(first.ended) == 1
        for process in others:
            # Gloo, which carries values between processors, may be quicker: it aborts its process.
            assert await asyncio.to_thread(process.ended) in (1, -signal.SIGABRT)
        said = first.log.read_text()
        assert "the island ends" in said and "host 1 (" in said and "is gone" in said

        first, second, *others = island(run, "l-2", hosts)
        await run.reported(lambda p: p.learner == "l-2" and p.incarnation == 1)
        await run.reported(lambda p: p.learner == "l-2" and p.incarnation == 1 and p.step > 0)
        after = await run.merged("l-2", 1)
        assert after.round > before.round
        recovered = [e for e in await run.events("recovered") if e.source == "l-2"][-1]
        assert recovered.data["source"] == "donor"
        assert recovered.data["donor"] == "l-1"
        # The donor has one device, the newcomer several: the moments are the same bits.
        donated = [e for e in await run.events("donated") if e.data["newcomer"] == "l-2"]
        assert recovered.data["moments"] in {e.data["moments"] for e in donated}
        meanwhile = [r for r in await rounds(run, after.round) if r.at > recovered.at]
        print("rounds to its first merge, at the other learner's pace:", len(meanwhile))
        # Five processes share this machine's processors, and the other learner does not wait: what
        # is promised is promised for rounds at its own speed, and those its own steps tell.
        (own,) = [v for v in after.verdicts if v.learner == "l-2"]
        every, fragments = ALGORITHM.sync_every_steps, ALGORITHM.fragments
        print("rounds to its first merge, at its own pace:", own.step_to * fragments / every)
        assert own.step_to * fragments / every <= every, "it contributes within H rounds (I10)"
        survivor = [p for p in run.reports if p.learner == "l-1"]
        assert {p.incarnation for p in survivor} == {0}
        print("the other learner waited, in seconds:", survivor[-1].wait_s)
        assert survivor[-1].wait_s <= 0.1, "nobody waits for an island that died (I8)"

        # Told to stop, any one of them ends all in order: the moments are kept.
        for process in (first, second, *others):
            process.told = True
        second.popen.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(second.ended) == 0
        for process in (first, *others):
            assert await asyncio.to_thread(process.ended) == 1
        last = [p for p in run.reports if p.learner == "l-2"][-1]
        assert last.state == "finished"
        kept = list((tmp_path / "l-2" / "checkpoints").glob("*/*.safetensors"))
        assert kept, "the moments of all processes, in the folder of process 0"
