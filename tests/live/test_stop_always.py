"""A stop ends a run within its time, whatever the run waits for; then it can be deleted."""

import asyncio
import signal
import time
from typing import Any

import pytest
from live.stack import Stack, spec

from diloco_client import ApiError
from diloco_shared.bus.port import StreamFull

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

# Ten seconds are promised; two busy cores may take twice as long for anything.
STOPPED_S = 20.0


@pytest.fixture
def stack(shared: Stack) -> Stack:
    return shared


def begin(stack: Stack, quorum: int = 1) -> None:
    algorithm = {"fragments": 6, "quorum": quorum, "overlap_steps": 8}
    stack.client.create_run(spec(algorithm=algorithm))


def trains(stack: Stack) -> None:
    """Both learners step, and rounds are committed."""
    stack.wait_until(lambda: len(stack.committed()) > 6, "rounds")
    stack.wait_until(lambda: len(stack.status()["participating"]) == 2, "both learners")


def stop(stack: Stack) -> dict[str, Any]:
    """Stop it; the run as it ends, in time."""

    def accepted() -> bool:
        try:
            stack.client.stop("r")
        except ApiError as error:
            if error.status < 500:
                raise
            return False
        return True

    stack.wait_until(accepted, "a coordinator that can be told")
    began = time.monotonic()
    stack.wait_until(
        lambda: stack.client.run("r")["state"] == "stopped", "the end", patience_s=STOPPED_S
    )
    print(f"stopped after {time.monotonic() - began:.1f} s")
    run: dict[str, Any] = stack.client.run("r")
    return run


def test_while_learners_begin(stack: Stack) -> None:
    begin(stack)
    stack.wait_until(lambda: stack.status()["state"] in ("waiting", "bootstrapping"), "its leader")
    stop(stack)
    stack.clear()


def test_starved_since_a_learner_hangs(stack: Stack) -> None:
    """K = 2, and one of two stands still."""
    begin(stack, quorum=2)
    trains(stack)
    stack.send(signal.SIGSTOP, "learner-2")
    try:
        stack.wait_until(lambda: stack.status()["state"] == "starved", "that it is said")
        assert stop(stack)["status"]["settled"] in (True, False)
    finally:
        stack.send(signal.SIGCONT, "learner-2")
    assert stack.rounds()[-1]["outcome"] == "skipped"
    stack.clear()


@pytest.mark.long
def test_in_the_moment_in_which_a_learner_hangs(stack: Stack) -> None:
    begin(stack, quorum=2)
    trains(stack)
    stack.send(signal.SIGSTOP, "learner-1")
    try:
        stop(stack)
    finally:
        stack.send(signal.SIGCONT, "learner-1")
    stack.clear()


def test_while_no_syncer_answers(stack: Stack) -> None:
    """The coordinator ends it; whoever led then finds it over."""
    begin(stack)
    trains(stack)
    stack.send(signal.SIGSTOP, "syncer-1", "syncer-2")
    try:
        run = stop(stack)
        assert run["status"]["forced"]
        stack.clear()
    finally:
        stack.send(signal.SIGCONT, "syncer-1", "syncer-2")


@pytest.mark.long
def test_when_its_leader_is_killed_at_that_moment(stack: Stack) -> None:
    begin(stack)
    trains(stack)
    stack.send(signal.SIGKILL, stack.leader())
    stop(stack)
    stack.clear()


async def fill(stack: Stack) -> None:
    """DN takes no more: a stranger's bytes, which no purge of the run's own removes."""
    async with stack.bus() as bus:
        for size in (1 << 19, 1 << 10):
            n = 0
            try:
                while True:
                    await bus.append(f"dn.r.stranger.{size}.{n}", bytes(size))
                    n += 1
            except StreamFull:
                continue


@pytest.mark.long
def test_while_a_stream_is_full(stack: Stack) -> None:
    begin(stack)
    trains(stack)
    asyncio.run(fill(stack))
    stack.wait_until(lambda: stack.status()["state"] == "full", "that it is said")
    stack.wait_until(lambda: stack.told("full"), "its event")
    assert {e["data"]["place"] for e in stack.told("full")} == {"DN"}
    stop(stack)
    stack.clear()


@pytest.mark.long
def test_while_it_goes_back_to_a_checkpoint(stack: Stack) -> None:
    begin(stack)
    trains(stack)
    kept = stack.diloco("checkpoint", "create", "r")
    stack.goes_on("the checkpoint")
    stack.client.restore("r", kept["number"])
    stop(stack)
    stack.clear()


def test_while_the_message_server_starts_again(stack: Stack) -> None:
    begin(stack)
    trains(stack)
    stack.nats().kill()
    stop(stack)
    stack.clear()
