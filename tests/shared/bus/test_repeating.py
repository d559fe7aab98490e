"""What is tried again, how it is said, and what passes through."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from diloco_shared.bus.port import Conflict, Refused, Unavailable
from diloco_shared.bus.repeating import (
    AT_ONCE,
    CONFLICTS_MAX,
    again_and_again,
    against_others,
    pause_after,
    some_at_once,
    until_done,
)

WITHOUT = (0.0, 0.0)  # pauses


def failing(*errors: Exception) -> Callable[[], Awaitable[str]]:
    """Fails with these, one after the other; then it does it."""
    left = list(errors)

    async def what() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return what


async def test_what_the_bus_does_not_do_is_tried_until_it_is_done() -> None:
    what = failing(Unavailable("away"), Refused("no"), Conflict("late"))
    assert await until_done(what, "it", pauses=WITHOUT) == "done"


async def test_what_is_waited_for_is_said_once_for_every_kind_of_trouble() -> None:
    what = failing(Unavailable("1"), Unavailable("2"), Refused("3"), Unavailable("4"))
    with capture_logs() as said:
        await until_done(what, "it", pauses=WITHOUT)
    assert [(s["doing"], s["error"]) for s in said] == [("it", "1"), ("it", "3")]


@pytest.mark.parametrize("error", [ValueError("a bug"), asyncio.CancelledError()])
async def test_what_is_no_trouble_of_the_bus_passes_through(error: BaseException) -> None:
    async def what() -> None:
        raise error

    with pytest.raises(type(error)):
        await until_done(what, "it", pauses=WITHOUT)
    with pytest.raises(type(error)):
        await again_and_again(what, "it", 0.0)


async def test_the_caller_says_what_else_is_waited_out_and_what_is_not() -> None:
    what = failing(ValueError("not yet"), Refused("no"), Conflict("lost"))
    trouble = (Refused, Conflict, ValueError)
    with pytest.raises(Conflict):
        await until_done(what, "it", pauses=WITHOUT, trouble=trouble, fatal=Conflict)


async def test_the_last_trouble_is_raised_when_no_attempt_is_left() -> None:
    with pytest.raises(Unavailable, match="first"):
        await until_done(failing(Unavailable("first")), "it", until=time.monotonic())


async def test_a_wait_can_be_cancelled() -> None:
    waiting = asyncio.create_task(until_done(failing(Unavailable("away")), "it", pauses=(60, 60)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_looks_go_on_over_trouble_until_one_is_the_last() -> None:
    seen: list[int] = []

    async def look() -> bool | None:
        seen.append(len(seen))
        if len(seen) in (2, 3, 5):
            raise Unavailable(f"look {len(seen)}")
        return True if len(seen) == 6 else None

    with capture_logs() as said:
        await again_and_again(look, "it", 0.0)
    assert len(seen) == 6
    assert [s["error"] for s in said] == ["look 2", "look 5"], "said again after a look that did it"


async def test_what_was_begun_has_ended_when_some_of_it_fails_and_no_more_is_begun() -> None:
    """A late request could meet what follows."""
    begun, ended = list[int](), list[int]()

    async def work(n: int) -> None:
        begun.append(n)
        await asyncio.sleep(0)
        if n == 3:
            raise Unavailable("away")
        await asyncio.sleep(0.01)
        ended.append(n)

    with pytest.raises(Unavailable):
        await some_at_once(map(work, range(3 * AT_ONCE)))
    assert begun == list(range(AT_ONCE)) and ended == [n for n in begun if n != 3]
    begun.clear()
    await some_at_once(work(n) for n in range(4, 4 + 2 * AT_ONCE))
    assert len(begun) == 2 * AT_ONCE


def test_each_pause_is_twice_the_one_before_up_to_the_longest() -> None:
    assert [pause_after(n, (0.2, 2.0)) for n in range(1, 7)] == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert pause_after(100_000, (0.2, 2.0)) == 2.0, "a server that is away for weeks"


async def test_who_writes_against_others_reads_anew_and_gives_up_in_the_end() -> None:
    lost = 0

    async def what() -> str:
        nonlocal lost
        if lost < conflicts:
            lost += 1
            raise Conflict(f"{lost}")
        return "written"

    conflicts = 2
    assert await against_others(what, 3) == "written"
    lost, conflicts = 0, 9
    with pytest.raises(Conflict, match=r"^3$"):
        await against_others(what, 3)
    lost, conflicts = 0, CONFLICTS_MAX
    with pytest.raises(Conflict):
        await against_others(what)
    assert lost == CONFLICTS_MAX
