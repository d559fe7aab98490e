"""Virtual time: nobody waits, and everything happens in its order."""

import asyncio
from contextlib import suppress
from random import Random

import pytest

from diloco_shared import ambient
from diloco_simulator.virtual_loop import ORIGIN, WALL, Hosted, Idle, NoEnd, VirtualLoop, play


def test_an_hour_passes_at_once_for_every_clock() -> None:
    async def main() -> tuple[float, float, float]:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time(), ambient.monotonic(), ambient.wall()

    before = ambient.monotonic()
    assert play(main(), Random(1)) == (3600.0, ORIGIN + 3600.0, WALL + 3600.0)
    assert ambient.monotonic() >= before, "the clocks are the machine's again"


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


def test_who_does_not_end_with_its_world_is_named() -> None:
    """It would be collected in the midst of a later world."""

    async def stubborn() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def main() -> None:
        kept.add(asyncio.create_task(stubborn(), name="stubborn"))

    kept = set[asyncio.Task[None]]()
    with pytest.raises(NoEnd, match="told 20 times to end, these go on: stubborn"):
        play(main(), Random(1))
    for task in kept:  # its loop is closed: nobody asks what becomes of it
        task._log_destroy_pending = False
        task.get_coro().close()


def test_who_is_killed_while_the_world_ends_ends_with_it() -> None:
    """What waited for a thread was never woken, and was collected in the midst of a later world."""
    ended: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        parent = Hosted(loop, "parent")
        child = Hosted(loop, "child", owner=parent)

        async def works() -> None:
            try:
                for _ in range(9):
                    with suppress(asyncio.CancelledError):
                        await asyncio.to_thread(lambda: None)
            finally:
                ended.append("child")

        async def attends() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                child.kill()
                ended.append("parent")

        kept.update((child.run(works()), parent.run(attends())))
        await asyncio.sleep(0)

    kept = set[asyncio.Task[None]]()
    play(main(), Random(1))
    assert sorted(ended) == ["child", "parent"]


@pytest.mark.parametrize("suspended", [False, True])
def test_the_clock_of_a_suspended_machine_stands_still(suspended: bool) -> None:
    """Timers that it has set come so much later, and it cannot tell that time has passed."""
    seen: list[tuple[str, float, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        process = Hosted(loop, "syncer-1")

        def see(what: str) -> None:
            seen.append((what, loop.now, ambient.monotonic() - ORIGIN))

        async def work() -> None:
            asyncio.get_running_loop().call_later(6.0, see, "timer")
            for what in ("first", "second", "third"):
                await asyncio.sleep(2.0)
                see(what)

        process.run(work())
        await asyncio.sleep(3.0)
        process.freeze(suspended=suspended)
        await asyncio.sleep(10.0)
        process.thaw()
        assert ambient.monotonic() - ORIGIN == 13.0, "the world's clock goes on"
        await asyncio.sleep(30.0)

    play(main(), Random(1))
    if suspended:
        third = ("third", 16.0, 6.0)
        assert seen == [("first", 2.0, 2.0), ("second", 14.0, 4.0), ("timer", 16.0, 6.0), third]
    else:
        rest = [("timer", 13.0, 13.0), ("second", 13.0, 13.0), ("third", 15.0, 15.0)]
        assert [s for s in seen if s[0] == "first"] == [("first", 2.0, 2.0)]
        assert sorted(seen[1:]) == sorted(rest)


def test_a_machine_that_is_suspended_twice_is_late_by_both() -> None:
    async def main() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        process = Hosted(loop, "learner-1")
        task = process.run(asyncio.sleep(5.0))
        for _ in range(2):
            await asyncio.sleep(1.0)
            process.freeze(suspended=True)
            await asyncio.sleep(4.0)
            process.thaw()
        await task
        return loop.now, process.behind_s, process.monotonic - ORIGIN

    assert play(main(), Random(1)) == (13.0, 8.0, 5.0)
