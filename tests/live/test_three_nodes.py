"""A hub of three message servers whose nodes are killed: payloads, rights, and a run (I6, I9)."""

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from live.processes import environment
from r3 import Cluster
from waiting import until

from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.nats.access import TlsFiles
from diloco_shared.bus.nats.backups import ServerStreams
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import BusError, StreamSpec, TooFewNodes, TransferProgress
from diloco_shared.bus.repeating import until_done
from diloco_shared.bus.run_streams import ensure_buckets, ensure_run_streams
from diloco_shared.hub import backup as hub_backup
from diloco_shared.hub import folder as hub_folder
from diloco_shared.protocol import subjects as s
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec, written

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
LIMITS = dict.fromkeys(s.STREAM_KINDS, 512 * MIB)
DN = s.dn_stream("r")


class Hub(Cluster):
    """Its message servers alone."""

    def open(self) -> None:
        self.prepare()
        for node in self.nodes:
            self.start_node(node)

    @asynccontextmanager
    async def bus(self, name: str, at: int, connections: int = 1) -> AsyncIterator[NatsBus]:
        """A connection of an identity that begins at one of the nodes."""
        certificate = hub_folder.certificate_of(self.hub, name)
        bus = await NatsBus.connect(
            self.url(at),
            name=name,
            credentials=self.hub / hub_folder.CREDENTIALS / name,
            tls=TlsFiles(self.hub / hub_folder.AUTHORITY, certificate),
            connections=connections,
        )
        try:
            yield bus
        finally:
            await bus.close()

    async def as_it_was(self) -> None:
        await until(self._whole)

    def _whole(self) -> bool:
        try:
            return self.whole()
        except (OSError, KeyError):
            return False


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Hub]:
    """With all three nodes."""
    found = Hub(folder)
    try:
        found.open()
        await found.as_it_was()
        yield found
    finally:
        found.close()


async def test_payloads_outlive_the_node_of_their_connections_and_the_one_that_leads(
    tmp_path: Path,
) -> None:
    first, second = (random.Random(n).randbytes(64 * MIB) for n in range(2))
    async with running(tmp_path) as hub, hub.bus("coordinator", 0) as coordinator:
        await ensure_run_streams(coordinator, "r", LIMITS, replicas=3)
        leader = await asyncio.to_thread(hub.leader, DN)
        own = next(node for node in hub.nodes if node != leader)
        async with hub.bus("syncer-a", hub.nodes.index(own), connections=2) as syncer:
            # In the middle of chunks, the node that the lanes are connected to.
            progress = TransferProgress()
            putting = asyncio.create_task(
                put_blob(syncer, "dn.r.0.0.1.1", first, progress=progress)
            )
            await until(lambda: progress.stored >= 8)
            hub.kill(own.name)
            blob = await putting
            assert (await coordinator.stream_info(DN)).messages == blob.chunks == 128
            hub.start_node(own)
            await hub.as_it_was()

            # And the one that leads the stream.
            leader = await asyncio.to_thread(hub.leader, DN)
            progress = TransferProgress()
            putting = asyncio.create_task(
                put_blob(syncer, "dn.r.0.0.2.1", second, progress=progress)
            )
            await until(lambda: progress.stored >= 8)
            hub.kill(leader.name)
            other = await putting
            assert (await syncer.stream_info(DN)).messages == 256
            # As after a crash of its machine: it comes back with nothing, and gets all from others.
            shutil.rmtree(hub.hub / "store" / leader.name)
            hub.start_node(leader)
            await hub.as_it_was()

        gone = next(number for number, node in enumerate(hub.nodes) if node != leader)
        async with hub.bus("oslo", gone, connections=2) as learner:
            came: list[int] = []
            getting = asyncio.create_task(get_blob(learner, DN, blob, moved=came.append))
            await until(lambda: getting.done() or sum(came) >= 8)
            hub.kill(hub.nodes[gone].name)
            assert await getting == first
            # Any copy is asked, and none that is behind is believed.
            assert len(await learner.fetch(DN, other.subject)) == other.chunks


async def test_copies_of_streams_and_who_may_connect_are_the_same_on_every_node(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as hub, hub.bus("coordinator", 0) as coordinator:
        await ensure_buckets(coordinator, s.BUCKETS)
        assert (await coordinator.stream_info("KV_members")).replicas == 1
        await ensure_buckets(coordinator, s.BUCKETS, renew=True, replicas=3)
        await ensure_buckets(coordinator, s.BUCKETS, renew=True, replicas=1)
        assert (await coordinator.stream_info("KV_members")).replicas == 3
        with pytest.raises(TooFewNodes, match="no suitable peers"):
            await coordinator.ensure_stream(StreamSpec("X", ("x.>",), MIB, replicas=5))
        # One copy, of which a node that is killed must lose nothing either: see `_may_lose`.
        await ensure_run_streams(coordinator, "r", LIMITS, replicas=1)
        await ensure_run_streams(coordinator, "r", LIMITS, replicas=3)

        async def has_three() -> bool:
            return (await coordinator.stream_info(DN)).replicas == 3

        # While copies are added the stream may have no leader for a moment.
        await until(has_three, tolerated=(BusError,))

        async with hub.bus("oslo", 1) as oslo, hub.bus("bergen", 2) as bergen:
            key = s.member_key("oslo", "learner", named=True)
            await oslo.kv_put(s.MEMBERS, key, b"1")
            assert (await bergen.kv_all(s.MEMBERS)).keys() == {key}
            hub.diloco("site", "revoke", "bergen", "--hub", str(hub.hub))
            await until(lambda: not bergen.connected)
            await oslo.kv_put(s.MEMBERS, key, b"2")
            assert oslo.connected and coordinator.connected


async def test_a_backup_is_put_back_on_a_hub_of_three_nodes(tmp_path: Path) -> None:
    """Each node has its copy before any of them starts, and the copies know each other."""
    (tmp_path / "before").mkdir()
    backup = tmp_path / "backup"
    async with running(tmp_path / "before") as hub, hub.bus("coordinator", 0) as coordinator:
        await ensure_buckets(coordinator, s.BUCKETS, renew=True, replicas=3)
        await ensure_run_streams(coordinator, "r", LIMITS, replicas=3)
        spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 8}})
        run = RunRecord(name="r", spec=written(spec), desired="running", quorum=1, created_at=1.0)
        await coordinator.kv_put(s.RUNS, "r", encode(run))  # without it the streams are nobody's
        async with hub.bus("syncer-a", 1) as syncer:
            blob = await put_blob(syncer, "dn.r.0.0.1.1", bytes(4 * MIB))
        await hub_backup.take(ServerStreams(coordinator), backup)

    (tmp_path / "after").mkdir()
    later = Hub(tmp_path / "after")
    later.prepare()
    told = await asyncio.to_thread(
        later.diloco, "hub", "restore", str(backup), "--hub", str(later.hub)
    )
    assert "carry each of these folders to the machine of its node" in told
    try:
        # The one that was filled first stays away: the others have all of it.
        for node in later.nodes[1:]:
            later.start_node(node)
        async with later.bus("coordinator", 1) as coordinator:
            info = await until_done(lambda: coordinator.stream_info(DN), "a leader")
            assert (info.messages, info.replicas) == (blob.chunks, 3)
            assert await get_blob(coordinator, DN, blob) == bytes(4 * MIB)
        later.start_node(later.nodes[0])
        await later.as_it_was()
    finally:
        later.close()


def test_a_run_goes_on_without_a_node_and_without_a_majority_it_waits(tmp_path: Path) -> None:
    """The short form of the drill; the script says what did not happen, and ends with 1."""
    found = tmp_path / "r3.json"
    short = ("--kills", "1", "--away", "20", "--cost", "0")
    done = subprocess.run(
        [sys.executable, "bench/r3.py", *short, "--json", str(found)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    report = json.loads(found.read_text())
    (kill,) = report["kills"]
    assert kill["gap_s"] > kill["round_s"] and kill["new_terms"] == 0
    assert all("lost its majority" in text for text in report["majority"]["said"].values())
    assert min(report["majority"]["steps_meanwhile"].values()) > 0
    assert report["end"]["rounds_lost"] == 0
    assert report["end"]["rounds_executed_again"] == report["end"]["rounds_merged"]
