"""A coordinator that is started while the hub is away: its own port says so before it gives up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from waiting import until

from diloco_coordinator import app
from diloco_coordinator.app import Settings, serve
from diloco_shared.bus.port import Unavailable
from diloco_shared.hub.nats_server import free_port
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

CONNECTED = "diloco_hub_connected"


async def metrics(port: int) -> dict[str, Any]:
    """Of a process's own port: name -> (what it means, value of the newest sample)."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    families = text_string_to_metric_families(text)
    return {f.name: (f.documentation, f.samples[-1].value) for f in families if f.samples}


async def ready(port: int) -> tuple[int, str]:
    """Status of /readyz, and what it says of the hub."""
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/readyz")
    return answer.status_code, answer.json()["bus"]


async def test_a_coordinator_says_that_it_waits_for_the_hub_and_then_that_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the alert HubAway could not come: there would be no metric at all."""
    there, port = asyncio.Event(), free_port("127.0.0.1")

    @asynccontextmanager
    async def connected(settings: Settings, name: str) -> AsyncIterator[MemoryBus]:
        await there.wait()
        yield MemoryBus(MemoryBroker(), name)

    monkeypatch.setattr(app, "connected", connected)
    settings = Settings(data=tmp_path, port=0, health_port=port)
    serving = asyncio.create_task(serve(settings))
    try:
        before = await until(lambda: metrics(port), tolerated=(httpx.TransportError,))
        assert before.keys() == {CONNECTED} and before[CONNECTED][1] == 0.0
        assert await ready(port) == (503, "away")
        there.set()
        await until(lambda: ready_at(port))
        after = await metrics(port)
        assert after[CONNECTED] == (before[CONNECTED][0], 1.0), "one metric, with one meaning"
        assert "diloco_members" in after
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


async def ready_at(port: int) -> bool:
    return await ready(port) == (200, "connected")


async def test_a_coordinator_that_finds_no_hub_ends_and_leaves_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor starts it again, at the same port."""

    @asynccontextmanager
    async def connected(settings: Settings, name: str) -> AsyncIterator[MemoryBus]:
        raise Unavailable("no answer")
        yield

    monkeypatch.setattr(app, "connected", connected)
    settings = Settings(data=tmp_path, port=0, health_port=free_port("127.0.0.1"))
    for _ in range(2):
        with pytest.raises(Unavailable, match="no answer"):
            await serve(settings)
