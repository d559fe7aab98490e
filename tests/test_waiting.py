"""Waiting ends with what was waited for, or with a failure that says what never came and why."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from waiting import NotYet, until, wait_until


def awaited(condition: Callable[[], Any], *arguments: Any, **settings: Any) -> Any:
    return asyncio.run(until(condition, *arguments, **settings))


BOTH = pytest.mark.parametrize("wait", [wait_until, awaited])


@BOTH
def test_the_first_true_value_is_returned(wait: Any) -> None:
    answers = iter([0, "", "there", "later"])
    assert wait(lambda: next(answers), every_s=0) == "there"


@BOTH
def test_what_never_came_is_told_with_the_last_trouble(wait: Any) -> None:
    def condition() -> None:
        raise NotYet("two of three")

    with pytest.raises(AssertionError, match=r"never came in 0 s: all three \(two of three\)"):
        wait(condition, "all three", patience_s=0)
    with pytest.raises(AssertionError, match=r"the answer \(ConnectionResetError: gone\)"):
        wait(lambda: gone(), "the answer", patience_s=0, tolerated=(OSError,))
    with pytest.raises(AssertionError, match=r"lambda: 1 > 2"):
        wait(lambda: 1 > 2, patience_s=0)


@BOTH
def test_what_is_not_tolerated_ends_the_wait_at_once(wait: Any) -> None:
    with pytest.raises(ConnectionResetError):
        wait(lambda: gone(), "the answer", tolerated=(ValueError,))


def test_a_coroutine_may_be_the_condition() -> None:
    async def condition() -> int:
        await asyncio.sleep(0)
        return 7

    assert awaited(condition) == 7


def gone() -> None:
    raise ConnectionResetError("gone")
