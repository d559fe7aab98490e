"""A full stream or disk is named within seconds, and what waited goes on when there is room."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live.gate import connected
from live.small_disk import MIB, small_disk
from syncer.conftest import Driver, spec
from syncer.contexts import context
from waiting import until

from diloco_coordinator.runs.registry_io import events_stream
from diloco_shared.bus.blobs import get_blob
from diloco_shared.bus.port import Bus, StreamSpec
from diloco_shared.bus.stream_kv import bucket_stream
from diloco_shared.checkpoints.tape_archive_io import TapeArchive
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.hub.watch import LOOK_S
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import PublicationManifest, TapeTerm
from diloco_shared.protocol.wire import decode
from diloco_syncer.events import Publish
from diloco_syncer.history.archiving_io import TapeArchiver
from diloco_syncer.history.tape_io import Tape
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.snapshots.snapshots_io import SnapshotStore
from diloco_syncer.streams.fullness_io import Fullness, Signs
from diloco_syncer.streams.storage_io import Storage

pytestmark = pytest.mark.live

RUN = "t"
PAYLOAD = bytes(range(256)) * (6 * MIB // 256)


class Still(Storage):
    """Raises no limit: the run has to do with what there is."""

    async def _grow(self) -> None:
        pass


class Leading:
    """The edges of a leader that publish, append and look, around a machine driven by hand."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.driver = Driver(spec())
        self.driver.start("a", "b")
        self.outbox = Outbox(context(self.driver.spec, bus))
        self.tape = Tape(bus, RUN)
        self.kinds: list[str] = []
        self.fullness = Fullness(
            context(self.driver.spec, bus),
            self.driver.machine,
            self.outbox,
            self.tape,
            Still(self.driver.spec, bus, lambda: (0, 0), self.outbox.tell),
            self._put,
            Signs(lambda: False, lambda: False, lambda: False),
        )

    def _put(self, event: Any) -> None:
        self.kinds += [e.kind for e in self.driver.give(event) if hasattr(e, "kind")]

    @property
    def state(self) -> tuple[str, str]:
        return self.driver.machine.announcer.state(self.driver.now)

    async def comes_to(self, state: str) -> str:
        """Its reason, once the run's state is `state`."""
        await until(lambda: self.state[0] == state, f"the state {state}")
        return self.state[1]

    async def publish(self, version: int) -> None:
        h = self.driver.machine.history
        effect = Publish(-1, 0, h.epoch, h.term, version, -1, (), {}, h.stamp, 0)
        await self.outbox.publish(effect, PAYLOAD, "fp32", 8, "0" * 32, h.layout, 1)


async def streams(bus: Bus, **bytes_max: int) -> None:
    for kind in subjects.STREAM_KINDS:
        name = subjects.run_stream(RUN, kind)
        captured = subjects.run_streams(RUN)[name]
        limit = bytes_max.get(kind, 64 * MIB)
        await bus.ensure_stream(StreamSpec(name, (captured,), limit, synced=kind == "TAPE"))


@asynccontextmanager
async def leading(bus: Bus) -> AsyncIterator[Leading]:
    found = Leading(bus)
    looking = asyncio.create_task(found.fullness.keep())
    try:
        yield found
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def arrived(bus: Bus, version: int) -> bool:
    stored = await bus.last(f"DN-{RUN}", subjects.publication(RUN, 0, 0, version, 1) + ".m")
    assert stored is not None
    blob = decode(stored.payload, PublicationManifest).blob
    return bytes(await get_blob(bus, f"DN-{RUN}", blob, timeout_s=30)) == PAYLOAD


async def test_a_stream_one_chunk_too_small_is_named_and_goes_on(nats_server: NatsServer) -> None:
    async with connected(nats_server.url) as bus:
        await streams(bus, DN=len(PAYLOAD) - 1)
        async with leading(bus) as leader:
            publishing = asyncio.create_task(leader.publish(1))
            reason = await leader.comes_to("full")
            assert reason.startswith("DN is full: ")
            assert "raise this stream's limit with 'nats stream edit'" in reason
            assert not publishing.done()
            await streams(bus, DN=2 * len(PAYLOAD))
            await publishing
            await leader.comes_to("running")
            assert [k for k in leader.kinds if k in ("full", "room-again")] == [
                "full",
                "room-again",
            ]
        assert await arrived(bus, 1)


async def test_a_full_tape_is_archived_and_goes_on(nats_server: NatsServer, tmp_path: Path) -> None:
    snapshots = SnapshotStore(tmp_path / "snapshots")
    archive = TapeArchive(str(tmp_path / "root"), "t.1")
    async with connected(nats_server.url) as bus:
        await streams(bus, TAPE=64 << 10)
        async with leading(bus) as leader:
            tape = leader.tape
            TapeArchiver(context(leader.driver.spec, bus, snapshots=snapshots), tape, archive)

            async def append(count: int) -> None:
                for _ in range(count):
                    number = tape.end + 1
                    await tape.append(TapeTerm(epoch=0, term=number, leader="s" * 400, at=0.0))

            appending = asyncio.create_task(append(300))
            reason = await leader.comes_to("full")
            assert reason.startswith("TAPE is full: ")
            assert "no snapshot covers" in reason
            for _ in range(2):
                await asyncio.to_thread(snapshots.save, tape.end, {}, {"x": np.zeros(1)})

            async def appended() -> bool:
                await asyncio.to_thread(snapshots.save, tape.end, {}, {"x": np.zeros(1)})
                return appending.done()

            await until(appended, "room for every record", every_s=0.2)
            appending.result()
            await leader.comes_to("running")
        info = await bus.stream_info(f"TAPE-{RUN}")
        assert info.first_seq > 1
        assert info.last_seq == 300
        found = await Tape(bus, RUN, 0, archive).read()
        assert [seq for seq, _ in found] == list(range(1, 301))
        assert [r.term for _, r in found if isinstance(r, TapeTerm)] == list(range(1, 301))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 128 * MIB) as folder:
        yield folder


@asynccontextmanager
async def hub_on(disk: Path) -> AsyncIterator[tuple[NatsServer, Bus]]:
    """A message server that keeps everything on `disk`, and a bus with the run's streams."""
    server = NatsServer(disk / "nats", name="test")
    await server.start()
    try:
        async with connected(server.url) as bus:
            await streams(bus)
            yield server, bus
    finally:
        await server.stop()


async def keeping(server: NatsServer) -> None:
    """As `diloco up` does: a failed write may leave the server without any answer."""
    while True:
        await asyncio.sleep(LOOK_S)
        if await asyncio.to_thread(server.ails):
            await server.terminate()
            await server.start()


async def test_a_hub_out_of_disk_is_named_and_goes_on(disk: Path) -> None:
    async with hub_on(disk) as (server, bus):
        filler = disk / "filler"
        filler.write_bytes(bytes(122 * MIB))
        async with leading(bus) as leader:
            publishing = asyncio.create_task(leader.publish(1))
            keeper = asyncio.create_task(keeping(server))
            reason = await leader.comes_to("full")
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            assert reason.startswith("the hub's disk is full")
            assert "no space left on device" in reason
            assert not publishing.done()
            assert not server.ails(), "there is no room yet"
            filler.unlink()
            assert "room again" in server.ails()
            await server.terminate()
            await server.start()
            assert not server.ails()
            async with asyncio.timeout(60):
                await publishing
            await leader.comes_to("running")
        assert await arrived(bus, 1)


async def test_a_hub_out_of_disk_is_named_by_a_leader_that_only_waits_for_its_lease(
    disk: Path,
) -> None:
    async with hub_on(disk) as (server, bus):
        filler = disk / "filler"
        with suppress(OSError):
            filler.write_bytes(bytes(128 * MIB))
        async with leading(bus) as leader:
            leader.fullness.lapsed = lambda: True
            assert (await leader.comes_to("full")).startswith("the hub's disk is full")
            filler.unlink()
            await server.terminate()
            await server.start()
            await leader.comes_to("running")


async def test_the_tape_and_buckets_are_synced_and_bulk_is_not(nats_server: NatsServer) -> None:
    """What the server says that it does, of streams made and of streams found."""
    assert '"sync_interval": "always"' in (nats_server.store_dir / "nats-server.conf").read_text()
    async with connected(nats_server.url) as bus:
        await streams(bus)
        await streams(bus)
        buckets = (*subjects.BUCKETS, *subjects.PRIVATE_BUCKETS)
        for bucket in (*buckets, *buckets):
            await bus.ensure_bucket(bucket)
        names = [*subjects.run_streams(RUN), *map(bucket_stream, buckets)]
        modes = {}
        for name in names:
            answer = await bus.request(f"$JS.API.STREAM.INFO.{name}", b"{}")
            assert b'"error"' not in answer, answer
            modes[name] = b'"persist_mode":"async"' in answer
        bulk = {f"{kind}-{RUN}" for kind in ("UP", "DN", "STATE")}
        assert modes == {name: name in bulk for name in names}


@pytest.mark.parametrize("named", [False, True])
async def test_events_are_synced_unless_sites_could_slow_the_tape_down_so(
    nats_server: NatsServer, named: bool
) -> None:
    async with connected(nats_server.url) as bus:
        await bus.ensure_stream(events_stream(named=named))
        answer = await bus.request(f"$JS.API.STREAM.INFO.{subjects.EVENTS_STREAM}", b"{}")
        assert b'"error"' not in answer and (b'"persist_mode":"async"' in answer) is named
