"""Key-value buckets: the same promises from the in-memory bus and from JetStream."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from diloco_shared.bus.port import Bus, Conflict, KeyEntry
from diloco_shared.bus.run_streams import ensure_buckets
from diloco_shared.bus.stream_kv import POLL_S, bucket_stream

pytestmark = pytest.mark.virtual

Open = Callable[[], AbstractAsyncContextManager[tuple[Bus, Bus]]]


async def test_create_put_update_get_delete(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_bucket("b")
        await two.ensure_bucket("b")
        assert await one.kv_get("b", "k") is None
        first = await one.kv_create("b", "k", b"1")
        assert await two.kv_get("b", "k") == KeyEntry("k", b"1", first)
        second = await two.kv_put("b", "k", b"2")
        third = await one.kv_update("b", "k", b"3", second)
        assert first < second < third
        assert await two.kv_get("b", "k") == KeyEntry("k", b"3", third)
        await two.kv_delete("b", "k")
        assert await one.kv_get("b", "k") is None
        assert await one.kv_all("b") == {}


async def test_create_needs_a_key_that_does_not_live(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_bucket("b")
        await one.kv_create("b", "k", b"1")
        with pytest.raises(Conflict):
            await two.kv_create("b", "k", b"2")
        await one.kv_delete("b", "k")
        await two.kv_create("b", "k", b"2")
        entry = await one.kv_get("b", "k")
        assert entry is not None
        assert entry.value == b"2"


async def test_update_needs_the_newest_revision(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_bucket("b")
        old = await one.kv_create("b", "k", b"1")
        new = await one.kv_put("b", "k", b"2")
        with pytest.raises(Conflict):
            await two.kv_update("b", "k", b"3", old)
        await two.kv_update("b", "k", b"3", new)
        await two.kv_delete("b", "k")
        with pytest.raises(Conflict):
            await two.kv_update("b", "k", b"4", new)


async def test_an_end_may_be_for_one_revision_alone(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_bucket("b")
        old = await one.kv_create("b", "k", b"1")
        new = await two.kv_put("b", "k", b"2")
        with pytest.raises(Conflict):
            await one.kv_delete("b", "k", revision=old)
        assert await one.kv_get("b", "k") == KeyEntry("k", b"2", new)
        await one.kv_delete("b", "k", revision=new)
        assert await two.kv_get("b", "k") is None
        with pytest.raises(Conflict):
            await one.kv_delete("b", "k", revision=new)


async def test_of_many_creators_one_wins(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_bucket("b")
        await one.kv_put("b", "k", b"")
        await one.kv_delete("b", "k")
        outcomes = await asyncio.gather(
            *(bus.kv_create("b", "k", b"x") for bus in (one, two) * 6), return_exceptions=True
        )
        assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
        assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 11


async def test_keys_with_dots_are_kept_apart(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_bucket("b")
        await one.ensure_bucket("other")
        await one.kv_put("b", "run.a", b"1")
        await one.kv_put("b", "run.b", b"2")
        await one.kv_put("other", "run.a", b"3")
        found = await two.kv_all("b")
        assert {key: entry.value for key, entry in found.items()} == {"run.a": b"1", "run.b": b"2"}


async def test_watch_tells_what_is_there_then_every_change(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_bucket("b")
        await one.kv_put("b", "x", b"old")
        await one.kv_put("b", "gone", b"")
        await one.kv_delete("b", "gone")
        r1 = await one.kv_put("b", "x", b"1")
        async with two.kv_watch("b") as changes:
            # Who read all keys just before may know it: it must be told, though the watch is not.
            gone = await anext(changes)
            assert (gone.key, gone.value) == ("gone", None)
            assert await anext(changes) == KeyEntry("x", b"1", r1)
            r2 = await one.kv_put("b", "y", b"2")
            assert await anext(changes) == KeyEntry("y", b"2", r2)
            await one.kv_delete("b", "x")
            deleted = await anext(changes)
            assert (deleted.key, deleted.value) == ("x", None)
            r3 = await one.kv_create("b", "x", b"3")
            assert await anext(changes) == KeyEntry("x", b"3", r3)


async def test_watch_tells_of_a_bucket_that_was_put_back_with_lower_revisions(
    open_buses: Open,
) -> None:
    async with open_buses() as (one, two):
        await one.ensure_bucket("b")
        await one.kv_put("b", "gone", b"")
        for n in range(40):
            await one.kv_put("b", "k", b"%d" % n)
        async with two.kv_watch("b") as changes:
            assert [(await anext(changes)).key for _ in range(2)] == ["gone", "k"]
            # As long as it takes a watch to know the stream's sizes.
            await asyncio.sleep(1.5 * POLL_S)
            await one.delete_stream(bucket_stream("b"))
            await one.ensure_bucket("b")
            r = await one.kv_put("b", "k", b"new")
            told = [await anext(changes) for _ in range(2)]
            assert told[0] == KeyEntry("k", b"new", r, anew=True)
            assert (told[1].key, told[1].value, told[1].anew) == ("gone", None, True)
            await one.kv_put("b", "gone", b"back")
            assert (await anext(changes)).value == b"back"
            await one.kv_delete("b", "k")
            last = await anext(changes)
            assert (last.key, last.value) == ("k", None)


async def test_watch_of_some_keys(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_bucket("b")
        async with two.kv_watch("b", "run.*") as changes:
            await one.kv_put("b", "other", b"")
            await one.kv_put("b", "run.a", b"1")
            assert (await anext(changes)).key == "run.a"


async def test_iteration_of_a_watch_ends_with_the_bus(open_buses: Open) -> None:
    async with open_buses() as (one, _):
        await one.ensure_bucket("b")
        async with one.kv_watch("b") as changes:
            await one.close()
            assert [entry async for entry in changes] == []


async def test_who_may_make_no_buckets_takes_those_that_are_there(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        made: list[str] = []
        making = two.ensure_bucket

        async def make(bucket: str, *, replicas: int = 1) -> None:
            made.append(bucket)
            await making(bucket, replicas=replicas)

        two.ensure_bucket = make  # type: ignore[method-assign]
        await one.ensure_bucket("a")
        await ensure_buckets(two, ("a", "b"))
        assert made == ["b"]
        await ensure_buckets(two, ("a", "b"), renew=True)
        assert made == ["b", "a", "b"]
        await one.kv_put("b", "k", b"v")
