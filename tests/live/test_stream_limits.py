"""Limits of a run's streams on a real server with little storage."""

from pathlib import Path

import pytest

from diloco_shared.bus.nats.backups import ServerStreams
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamFull
from diloco_shared.bus.run_streams import ensure_run_streams
from diloco_shared.hub import backup as hub_backup
from diloco_shared.hub.nats_server import NatsServer

pytestmark = pytest.mark.live
MB, TB = 1 << 20, 1 << 40


async def test_a_limit_grows_up_to_what_the_server_has_left(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, max_file_bytes=100 * MB)
    await server.start()
    bus = await NatsBus.connect(server.url, name="test")
    try:
        await ensure_run_streams(bus, "r", {"UP": 60 * MB, "DN": 10 * MB})
        # Creation would want room for all of it once more.
        await ensure_run_streams(bus, "r", {"UP": 80 * MB})
        assert (await bus.stream_info("UP-r")).bytes_max == 80 * MB
        with pytest.raises(StreamFull, match="insufficient storage"):
            await ensure_run_streams(bus, "r", {"DN": 30 * MB})
        with pytest.raises(StreamFull, match="insufficient storage"):
            await ensure_run_streams(bus, "other", {"UP": 30 * MB})
        assert (await bus.stream_info("DN-r")).bytes_max == 10 * MB
        assert (await bus.storage()).reserved == 90 * MB
    finally:
        await bus.close()
        await server.stop()


@pytest.mark.parametrize("of_hub", [False, True])
async def test_a_hub_is_put_back_however_much_its_streams_may_hold(
    of_hub: bool, tmp_path: Path
) -> None:
    """Limits are promises: they may be more than a disk has, and count at the server that is to
    hold them, not at the one that puts them back."""
    server, limits = NatsServer(tmp_path / "lost"), {"UP": 3 * TB, "DN": 4 * TB}
    await server.start()
    bus = await NatsBus.connect(server.url, name="test")
    try:
        await ensure_run_streams(bus, "r", limits)
        await hub_backup.take(ServerStreams(bus), tmp_path / "backup")
    finally:
        await bus.close()
        await server.stop()
    backup, _ = await hub_backup.put_back(tmp_path / "backup", tmp_path / "store", of_hub=of_hub)
    assert {s.name[:2]: s.config["max_bytes"] for s in backup.streams} == limits
