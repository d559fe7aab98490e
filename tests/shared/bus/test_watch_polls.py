"""What the polls of a watch ask for, and find, where reading brings nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from waiting import until

from diloco_shared.bus import stream_kv
from diloco_shared.bus.port import KeyEntry
from diloco_shared.bus.stream_kv import bucket_stream
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


class Deaf(MemoryBus):
    """Its readings bring nothing, and it counts how often it is asked for all keys."""

    asked_for_all = 0

    @asynccontextmanager
    async def read_raw(self, *what: Any, **more: Any) -> AsyncIterator[Any]:
        async def silence() -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield None

        yield silence()

    async def kv_all(self, bucket: str, key: str = ">") -> dict[str, KeyEntry]:
        self.asked_for_all += 1
        return await super().kv_all(bucket, key)


@asynccontextmanager
async def watched(
    monkeypatch: pytest.MonkeyPatch, *keys: str, of: str = ">"
) -> AsyncIterator[tuple[Deaf, Any]]:
    """A watch that knows all that the bucket holds."""
    monkeypatch.setattr(stream_kv, "POLL_S", 0.02)
    bus = Deaf(MemoryBroker(), "a")
    await bus.ensure_bucket("b")
    for key in keys:
        await bus.kv_put("b", key, b"1")
    async with asyncio.timeout(30), bus.kv_watch("b", of) as changes:
        assert [(await anext(changes)).key for _ in keys] == list(keys)
        yield bus, changes
    await bus.close()


async def test_a_poll_asks_for_what_is_new_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The status of one run changes all the time, and those of two hundred others lie beside it."""
    async with watched(monkeypatch, "x", "y") as (bus, changes):
        await until(lambda: changes._held == {"x", "y"})
        before = bus.asked_for_all
        for n in range(5):
            await bus.kv_put("b", "x", b"%d" % n)
            told = await anext(changes)
            assert (told.key, told.value, told.anew) == ("x", b"%d" % n, False)
        await bus.kv_put("b", "z", b"new")
        assert (await anext(changes)).key == "z"
        await bus.kv_delete("b", "y")
        told = await anext(changes)
        assert (told.key, told.value) == ("y", None)
        assert bus.asked_for_all == before


async def test_a_key_that_ends_without_a_word_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though others are written meanwhile."""
    async with watched(monkeypatch, "x", "y") as (bus, changes):
        await until(lambda: changes._held == {"x", "y"})
        await bus.purge(bucket_stream("b"), "$KV.b.x")
        await bus.kv_put("b", "z", b"1")
        told = {entry.key: entry.value for entry in [await anext(changes), await anext(changes)]}
        assert told == {"x": None, "z": b"1"}


async def test_a_watch_of_some_keys_asks_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of the stream are of others as well."""
    async with watched(monkeypatch, "k.x", "k.y", of="k.*") as (bus, changes):
        await bus.kv_put("b", "k.x", b"2")
        assert (await anext(changes)).value == b"2"
        assert changes._held is None
