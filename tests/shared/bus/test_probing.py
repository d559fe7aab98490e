"""Probes of a link: how much they take, and that they end whatever the link does."""

import asyncio

import pytest

from diloco_shared.bus.nats.probing import PORTION_BYTES, Rate, _in_portions
from diloco_shared.bus.port import Unavailable


async def test_portions_grow_until_all_that_is_allowed_has_moved() -> None:
    sizes: list[int] = []

    async def portion(size: int) -> int:
        sizes.append(size)
        return size

    rate = await _in_portions(portion, 8 << 20, 60.0)
    assert sizes == [PORTION_BYTES << n for n in range(len(sizes))]
    assert sum(sizes) <= 8 << 20 < sum(sizes) + 2 * sizes[-1]
    assert (rate.bytes, rate.moved) == (sizes[-1], sum(sizes))


async def test_a_link_that_takes_nothing_ends_in_time_and_gives_no_rate() -> None:
    async def portion(_: int) -> int:
        await asyncio.Event().wait()
        return 0

    assert await _in_portions(portion, 8 << 20, 0.05) == Rate(0, 0.0, 0)


async def test_a_link_that_stops_gives_the_rate_of_what_has_passed() -> None:
    passed = 0

    async def portion(size: int) -> int:
        nonlocal passed
        if size > 2 * PORTION_BYTES:
            await asyncio.Event().wait()
        passed += size
        return size

    rate = await _in_portions(portion, 8 << 20, 0.2)
    assert rate.moved == passed == 3 * PORTION_BYTES


async def test_the_next_portion_is_left_out_where_it_would_take_too_long() -> None:
    async def portion(size: int) -> int:
        await asyncio.sleep(0.2)
        return size

    rate = await _in_portions(portion, 8 << 20, 0.5)
    assert rate.moved == PORTION_BYTES


async def test_what_is_stored_in_small_messages_is_read_at_least_once() -> None:
    async def portion(_: int) -> int:
        return 10

    assert (await _in_portions(portion, 5, 60.0)).moved == 10


async def test_a_lost_connection_is_told() -> None:
    async def portion(_: int) -> int:
        raise OSError("gone")

    with pytest.raises(Unavailable, match="lost meanwhile"):
        await _in_portions(portion, 8 << 20, 1.0)
