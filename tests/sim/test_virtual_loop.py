"""Virtual time: nobody waits, and everything happens in its order."""

import asyncio
import time
from random import Random

import pytest

from diloco_simulator.virtual_loop import ORIGIN, WALL, Idle, play


def test_an_hour_passes_at_once_for_every_clock() -> None:
    async def main() -> tuple[float, float, float]:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time(), time.monotonic(), time.time()

    before = time.monotonic()
    assert play(main(), Random(1)) == (3600.0, ORIGIN + 3600.0, WALL + 3600.0)
    assert time.monotonic() >= before, "the clocks are the machine's again"


def test_threads_are_over_some_virtual_time_later() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        work = asyncio.create_task(asyncio.to_thread(order.append, "thread"))
        order.append("caller")
        await work
        return order

    assert play(main(), Random(1)) == ["caller", "thread"]


def test_what_a_thread_raises_its_caller_gets() -> None:
    def fails() -> None:
        raise OSError("no space left on the device")

    async def main() -> None:
        await asyncio.to_thread(fails)

    with pytest.raises(OSError, match="no space"):
        play(main(), Random(1))


def test_a_timeout_strikes_at_its_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert play(main(), Random(1)) == 5.0


def test_nobody_waits_for_ever() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Idle):
        play(main(), Random(1))
