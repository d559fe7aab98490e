"""Core messages: the same promises from the in-memory bus and from NATS."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from diloco_shared.bus.port import Bus, Delivery, Refused, Unavailable

Open = Callable[[], AbstractAsyncContextManager[tuple[Bus, Bus]]]


async def test_a_subscriber_gets_what_matches(open_buses: Open) -> None:
    async with open_buses() as (one, two), two.subscribe("a.*.c") as got:
        await one.publish("a.b.c", b"1")
        await one.publish("a.b", b"other")
        await one.publish("a.b.c.d", b"other")
        await one.publish("a.x.c", b"2")
        assert await anext(got) == Delivery("a.b.c", b"1")
        assert await anext(got) == Delivery("a.x.c", b"2")


async def test_a_full_wildcard_matches_any_depth_but_not_none(open_buses: Open) -> None:
    async with open_buses() as (one, two), two.subscribe("a.>") as got:
        await one.publish("a", b"other")
        await one.publish("a.b", b"1")
        await one.publish("a.b.c.d", b"2")
        assert (await anext(got)).payload == b"1"
        assert (await anext(got)).payload == b"2"


async def test_every_subscriber_gets_a_copy(open_buses: Open) -> None:
    async with (
        open_buses() as (one, two),
        one.subscribe("s") as first,
        two.subscribe("s") as second,
    ):
        await one.publish("s", b"x")
        assert (await anext(first)).payload == (await anext(second)).payload == b"x"


async def test_a_slow_subscriber_loses_the_oldest_and_it_is_counted(open_buses: Open) -> None:
    async with (
        open_buses() as (one, two),
        two.subscribe("s", limit=3) as got,
        two.subscribe("s") as every,
    ):
        for number in range(10):
            await one.publish("s", str(number).encode())
        for _ in range(10):
            await anext(every)
        # What one subscription took, the other has got as well: both are fed in turn.
        assert [(await anext(got)).payload for _ in range(3)] == [b"7", b"8", b"9"]
        assert two.traffic.dropped == {"s": 7}


async def test_a_request_is_answered(open_buses: Open) -> None:
    async def double(request: Delivery) -> bytes:
        return request.payload * 2

    async with open_buses() as (one, two):
        async with two.serve("double", double):
            assert await one.request("double", b"ab") == b"abab"
            answers = await asyncio.gather(*(one.request("double", bytes([n])) for n in range(20)))
            assert answers == [bytes([n, n]) for n in range(20)]
        # A round trip of `two` says that the server knows it listens no more.
        for bus in (two, one):
            with pytest.raises(Unavailable, match="nobody listens on double"):
                await bus.request("double", b"ab")


async def test_a_handler_that_fails_answers_nothing_and_goes_on(open_buses: Open) -> None:
    async def touchy(request: Delivery) -> bytes:
        return b"%d" % (1 // len(request.payload))

    async with open_buses() as (one, two), two.serve("touchy", touchy):
        with pytest.raises(Unavailable, match="no answer on touchy"):
            await one.request("touchy", b"", timeout_s=0.2)
        assert await one.request("touchy", b"x") == b"1"


async def test_a_cancelled_iteration_can_go_on(open_buses: Open) -> None:
    async with open_buses() as (one, two), two.subscribe("s") as got:
        waiting = asyncio.ensure_future(anext(got))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await one.publish("s", b"x")
        assert (await anext(got)).payload == b"x"


async def test_iteration_ends_when_the_bus_is_closed(open_buses: Open) -> None:
    async with open_buses() as (one, _), one.subscribe("s") as got:
        assert one.connected
        await one.close()
        assert not one.connected
        assert [delivery async for delivery in got] == []
        with pytest.raises(Unavailable):
            await one.request("s", b"")
        await one.publish("s", b"lost without an error")


async def test_traffic_counts_payloads(open_buses: Open) -> None:
    async with open_buses() as (one, two), two.subscribe("s") as got:
        out, incoming = one.traffic.bytes_out, two.traffic.bytes_in
        await one.publish("s", b"x" * 1000)
        await anext(got)
        assert one.traffic.bytes_out - out == two.traffic.bytes_in - incoming == 1000


async def test_a_message_above_the_limit_is_refused(open_buses: Open) -> None:
    async with open_buses() as (one, _):
        with pytest.raises(Refused, match="exceed the server's limit"):
            await one.request("s", bytes((2 << 20) + 1))
