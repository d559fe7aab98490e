"""PrioritySemaphore: so many at a time, the most needed first, and none is lost."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_learner.exchange.priority_semaphore_io import PrioritySemaphore

pytestmark = pytest.mark.virtual


class Work:
    """Acquires as it is told to, each until it is told to end."""

    def __init__(self, most: int) -> None:
        self.semaphore = PrioritySemaphore(most)
        self.began: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.releases: dict[str, Callable[[], None]] = {}

    def start(self, name: str, *rank: int) -> "asyncio.Task[None]":
        self.ends[name] = asyncio.Event()
        return asyncio.create_task(self._work(name, rank))

    async def _work(self, name: str, rank: tuple[int, ...]) -> None:
        async with self.semaphore.acquired(rank) as permit:
            self.began.append(name)
            self.releases[name] = permit.release
            await self.ends[name].wait()

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
            await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_most_needed_comes_next_and_among_equals_the_first() -> None:
    work = Work(2)
    tasks = [work.start(n, 5) for n in "ab"]
    await settled()
    tasks += [work.start("late", 7), work.start("one", 3), work.start("two", 3)]
    await settled()
    assert work.began == ["a", "b"]
    await work.end("a", "b", "one", "two", "late")
    assert work.began == ["a", "b", "one", "two", "late"]
    await asyncio.gather(*tasks)
    assert work.semaphore.left == 2


async def test_who_is_first_waits_for_nothing() -> None:
    semaphore, order = PrioritySemaphore(1), list[str]()

    async def first() -> None:
        async with semaphore.acquired((1,)):
            order.append("first")

    task = asyncio.create_task(first())
    asyncio.get_running_loop().call_soon(order.append, "another")
    await task
    assert order == ["first", "another"]


async def test_a_permit_that_is_released_is_somebody_elses_and_counts_once() -> None:
    work = Work(1)
    tasks = [work.start("still", 1), work.start("next", 2)]
    await settled()
    work.releases["still"]()
    await settled()
    assert work.began == ["still", "next"]
    work.releases["still"]()
    await work.end("still", "next")
    await asyncio.gather(*tasks)
    assert work.semaphore.left == 1


async def test_who_gives_up_waiting_takes_no_permit_along() -> None:
    work = Work(1)
    tasks = [work.start("a", 1), work.start("gives up", 2), work.start("b", 3)]
    await settled()
    tasks[1].cancel()
    await work.end("a")
    assert work.began == ["a", "b"]
    await work.end("b")
    assert work.semaphore.left == 1


async def test_a_permit_that_comes_together_with_a_cancellation_is_passed_on() -> None:
    work = Work(1)
    tasks = [work.start("a", 1), work.start("cancelled", 2), work.start("b", 3)]
    await settled()
    work.releases["a"]()
    tasks[1].cancel()
    await settled()
    assert work.began == ["a", "b"]
    await work.end("a", "b")
    assert work.semaphore.left == 1


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=12))
def test_never_more_than_so_many(most: int, ranks: list[int]) -> None:
    semaphore, now, peak = PrioritySemaphore(most), [0], [0]

    async def work(rank: int) -> None:
        async with semaphore.acquired((rank,)):
            now[0] += 1
            peak[0] = max(peak[0], now[0])
            await asyncio.sleep(0)
            now[0] -= 1

    async def all_of_them() -> None:
        works: list[Awaitable[None]] = [work(rank) for rank in ranks]
        await asyncio.gather(*works)

    asyncio.run(all_of_them())
    assert peak[0] == min(most, len(ranks)) and semaphore.left == most
