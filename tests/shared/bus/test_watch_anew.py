"""What a watch tells once the server was started anew: each key again, and which keys those are."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from diloco_shared.bus import stream_kv
from diloco_shared.bus.port import KeyEntry, Unavailable
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


@asynccontextmanager
async def watched(
    monkeypatch: pytest.MonkeyPatch, *keys: str
) -> AsyncIterator[tuple[MemoryBroker, Any, AsyncIterator[KeyEntry]]]:
    """A watch of these keys that has told all of them, and knows the server's life."""
    monkeypatch.setattr(stream_kv, "POLL_S", 0.02)
    broker = MemoryBroker()
    bus: Any = MemoryBus(broker, "a")
    await bus.ensure_bucket("b")
    for key in keys:
        await bus.kv_put("b", key, b"1")
    async with asyncio.timeout(30), bus.kv_watch("b") as changes:
        assert [(await anext(changes)).key for _ in keys] == list(keys)
        await asyncio.sleep(0.1)
        yield broker, bus, changes
    await bus.close()


async def test_each_key_is_told_anew_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch, "x", "y") as (broker, bus, changes):
        broker.restart()
        told = [await anext(changes) for _ in range(2)]
        assert [(entry.key, entry.anew) for entry in told] == [("x", True), ("y", True)]
        await bus.kv_put("b", "x", b"2")
        later = await anext(changes)
        assert (later.key, later.value, later.anew) == ("x", b"2", False)


async def test_all_are_told_though_a_poll_fails_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next poll finds the life that the failed one had seen."""
    async with watched(monkeypatch, "x") as (broker, bus, changes):
        read, failures = bus.kv_all, list[str]()

        async def away(bucket: str, key: str) -> dict[str, KeyEntry]:
            if not failures:
                failures.append(bucket)
                raise Unavailable("the server is busy")
            found: dict[str, KeyEntry] = await read(bucket, key)
            return found

        bus.kv_all = away
        broker.restart()
        told = await anext(changes)
        assert (told.key, told.anew, failures) == ("x", True, ["b"])


async def test_what_is_told_first_says_nothing_of_other_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the poll waits for its answer, a key that nobody has seen yet comes by reading."""
    async with watched(monkeypatch, "x") as (broker, bus, changes):
        read, busy = bus.kv_all, asyncio.Event()

        async def slow(bucket: str, key: str) -> dict[str, KeyEntry]:
            await busy.wait()
            found: dict[str, KeyEntry] = await read(bucket, key)
            return found

        bus.kv_all = slow
        broker.restart()
        await asyncio.sleep(0.1)
        await bus.kv_put("b", "new", b"1")
        assert (await anext(changes)).key == "new"
        busy.set()
        told = await anext(changes)
        assert (told.key, told.value, told.anew) == ("x", b"1", True)
