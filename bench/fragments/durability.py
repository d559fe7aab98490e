"""What it costs that tape and buckets are on disk when they are acknowledged.

Two servers side by side take turns: one as the product configures it (the tape synced, bulk
streams not), one that syncs nothing (every two minutes), as JetStream does by default.
"""

import asyncio
import statistics
import time
from pathlib import Path

from diloco_shared.bus.blobs import put_blob
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Bus, StreamSpec
from diloco_shared.hub.nats_server import NatsServer

RECORD_BYTES, RECORDS = 1024, 300
LIMIT = 8 << 30


async def durability(folder: Path, mib: int, repeats: int) -> dict[str, float]:
    """Appends of a record a second, and MB a second of fragments; a round has one record."""
    rows: dict[str, list[float]] = {}
    servers = {
        "synced": NatsServer(folder / "synced"),
        "unsynced": NatsServer(folder / "unsynced", sync=False),
    }
    buses: dict[str, NatsBus] = {}
    try:
        for name, server in servers.items():
            await server.start()
            buses[name] = bus = await NatsBus.connect(server.url, name=name)
            await bus.ensure_stream(StreamSpec("TAPE", ("tape.>",), LIMIT))
            bulk_synced = name == "unsynced"  # of that server: written before it is acknowledged
            await bus.ensure_stream(StreamSpec("UP", ("up.>",), LIMIT, synced=bulk_synced))
        payload = bytes(mib << 20)
        for repeat in range(repeats + 1):
            # Each is first in turn: what one writes out is still on its way when the other begins.
            for name, bus in list(buses.items())[:: 1 if repeat % 2 else -1]:
                appends = await _appends(bus)
                put = await _put(bus, f"up.{repeat}", payload)
                if repeat:  # the first warms up
                    rows.setdefault(f"records_per_s_{name}", []).append(appends)
                    rows.setdefault(f"bulk_mb_per_s_{name}", []).append(put)
    finally:
        for bus in buses.values():
            await bus.close()
        await asyncio.gather(*(server.stop() for server in servers.values()))
    found = {name: statistics.median(some) for name, some in rows.items()}
    found["rounds_per_s_at_most"] = found["records_per_s_synced"]
    found["bulk_of_unsynced"] = found["bulk_mb_per_s_synced"] / found["bulk_mb_per_s_unsynced"]
    return found


async def _appends(bus: Bus) -> float:
    last = await bus.last("TAPE", "tape.0")
    end, began = (0 if last is None else last.seq), time.perf_counter()
    for _ in range(RECORDS):
        end = await bus.append("tape.0", bytes(RECORD_BYTES), expect_last=end)
    return RECORDS / (time.perf_counter() - began)


async def _put(bus: Bus, subject: str, payload: bytes) -> float:
    began = time.perf_counter()
    await put_blob(bus, subject, payload)
    rate = len(payload) / 1e6 / (time.perf_counter() - began)
    await bus.purge("UP", subject)
    return rate
