"""Places of checkpoints that hang: they keep threads of their own, and few of them."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from threading import Event, current_thread
from typing import Any

import pytest
from waiting import PATIENCE_S, until

from diloco_shared.checkpoints import place_threads_io as place_threads
from diloco_shared.checkpoints.place_threads_io import CALLS_MAX, PlaceThreads
from diloco_shared.checkpoints.vault_io import VaultError
from diloco_shared.protocol import pace
from diloco_shared.protocol.pace import STORED_BYTES_PER_S

KNOWN: ContextVar[str] = ContextVar("known", default="nothing")
HANGS = """
import asyncio, threading
from diloco_shared.checkpoints.place_threads_io import PlaceThreads

async def main():
    begun = threading.Event()
    def hang():
        begun.set()
        threading.Event().wait()
    task = asyncio.create_task(PlaceThreads().within(60.0, "a share", hang))
    await asyncio.to_thread(begun.wait)
    task.cancel()

asyncio.run(main())
"""


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Set once the place answers; who was left behind is not waited for until then."""
    monkeypatch.setattr(place_threads, "LEFT_S", 0.0)
    event = Event()
    yield event
    event.set()


async def free_again(threads: PlaceThreads) -> None:
    await until(lambda: not threads._calls["a share"])


async def test_a_call_that_takes_too_long_is_left_behind_and_the_next_one_is_refused(
    answers: Event,
) -> None:
    threads = PlaceThreads()
    with pytest.raises(VaultError, match="a share did not answer within 0 s"):
        await threads.within(0.01, "a share", answers.wait)
    for _ in range(3):
        with pytest.raises(VaultError, match="an earlier call is not over in a share"):
            await threads.within(PATIENCE_S, "a share", int)
    assert await threads.within(PATIENCE_S, "a bucket", lambda: "there") == "there"
    answers.set()
    await free_again(threads)
    assert await threads.within(PATIENCE_S, "a share", lambda: "there") == "there"


async def test_a_call_whose_caller_is_gone_counts_as_well(answers: Event) -> None:
    threads = PlaceThreads()
    task = asyncio.create_task(threads.within(PATIENCE_S, "a share", answers.wait))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(VaultError, match="an earlier call is not over"):
        await threads.within(PATIENCE_S, "a share", int)


async def test_what_was_left_behind_a_moment_ago_is_waited_for(
    answers: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_threads, "LEFT_S", PATIENCE_S)
    threads = PlaceThreads()
    with pytest.raises(VaultError, match="did not answer"):
        await threads.within(0.0, "a share", answers.wait)
    asyncio.get_running_loop().call_later(0.01, answers.set)
    assert await threads.within(PATIENCE_S, "a share", lambda: "there") == "there"


async def test_so_many_calls_wait_for_a_place_and_no_more(answers: Event) -> None:
    threads = PlaceThreads()
    waiting = [threads.within(PATIENCE_S, "a share", answers.wait) for _ in range(CALLS_MAX)]
    tasks = [asyncio.create_task(one) for one in waiting]
    await until(lambda: len(threads._calls.get("a share", ())) == CALLS_MAX)
    with pytest.raises(VaultError, match="an earlier call is not over"):
        await threads.within(PATIENCE_S, "a share", int)
    answers.set()
    assert await asyncio.gather(*tasks) == [True] * CALLS_MAX
    assert threads._calls == {"a share": []}, "nothing is held of what came of them"


async def test_the_places_own_errors_are_told_as_they_are() -> None:
    def fails() -> None:
        raise TimeoutError("the server says so")

    threads = PlaceThreads()
    with pytest.raises(TimeoutError, match="the server says so"):
        await threads.within(60.0, "a share", fails)
    assert await threads.within(PATIENCE_S, "a share", lambda: "there") == "there"


async def test_a_call_knows_for_whom_it_is_made() -> None:
    KNOWN.set("this")
    assert await PlaceThreads().within(PATIENCE_S, "a share", KNOWN.get) == "this"
    assert await PlaceThreads().within(PATIENCE_S, "a share", lambda: current_thread().daemon)


async def test_a_read_has_the_time_of_its_bytes_and_a_look_at_how_many_they_are(
    answers: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (place_threads, pace):
        monkeypatch.setattr(module, "ANSWER_S", 0.01)
    threads, limits, plainly = PlaceThreads(), list[float](), PlaceThreads.within

    async def within(self: PlaceThreads, seconds: float, *what: Any, **more: Any) -> Any:
        limits.append(seconds)
        return await plainly(self, PATIENCE_S, *what, **more)

    with monkeypatch.context() as patched:
        patched.setattr(PlaceThreads, "within", within)
        read = threads.read("a share", lambda: 40 * STORED_BYTES_PER_S, sorted, "ba")
        assert await read == ["a", "b"]
        assert limits == [0.01, 40.01]
    with pytest.raises(VaultError, match="a share did not answer"):
        await threads.read("a share", lambda: 0, answers.wait)


def test_a_process_ends_although_a_call_hangs() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0
