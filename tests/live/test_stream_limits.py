"""Limits of a run's streams on a real server with little storage."""

from pathlib import Path

import pytest

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamFull
from diloco_shared.bus.run_streams import ensure_run_streams
from diloco_shared.process.nats_server import NatsServer

pytestmark = pytest.mark.live
MB = 1 << 20


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
