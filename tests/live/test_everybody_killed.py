"""A power cut in small: everything is killed at once and started again on the same data folder."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from live.stack import Up, spec, until, up
from live.tape_checks import (
    check_against_an_unfailed_execution,
    check_tape,
    connect,
    published,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def kill_everybody(stack: Up) -> None:
    """The supervisor is stopped first, so that it starts nobody again; the server dies last."""
    supervisor, *children = stack.family()
    server = stack.nats()
    supervisor.suspend()
    for process in (*(c for c in children if c.pid != server.pid), server, supervisor):
        process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert stack.process is not None
    stack.process.wait()
    stack.client.close()


async def anchors(stack: Up) -> dict[tuple[int, int], str]:
    """(fragment, version) -> digest of what is published."""
    bus = await connect(stack.folder, stack.endpoint()["nats"])
    try:
        return await published(bus)
    finally:
        await bus.close()


def evaluations(stack: Up) -> list[dict[str, Any]]:
    return [e["data"] for e in stack.told("evaluation")]


def test_everybody_is_killed_and_the_run_goes_on_from_its_last_round(tmp_path: Path) -> None:
    often = {"evaluation": {"every_steps": 48, "sequences": 64}}
    with up(tmp_path / "data", "--learners", "2", "--syncers", "2") as stack:
        stack.client.create_run(spec(**often))
        until(lambda: len(evaluations(stack)) >= 6, "evaluations")
        before, anchors_before = stack.rounds(), asyncio.run(anchors(stack))
        losses_before = evaluations(stack)
        kill_everybody(stack)

        stack.start()
        stack.goes_on("everybody's death", more=12)
        rounds = stack.rounds()
        check_tape(rounds)
        assert rounds[: len(before)] == before, "history is what it was"
        assert rounds[-1]["term"] > before[-1]["term"]
        assert not stack.told("init")[1:], "nobody began anew"
        # What was published is what it was, bit for bit, and learners went on from it.
        anchors_after = asyncio.run(anchors(stack))
        both = anchors_before.keys() & anchors_after.keys()
        assert all(anchors_before[key] == anchors_after[key] for key in both)
        last, again = losses_before[-1], losses_before[-1]["steps"]
        later = until(
            lambda: next((e for e in evaluations(stack) if e["steps"] > again), None),
            "an evaluation afterwards",
        )
        assert all(a >= b for a, b in zip(later["versions"], last["versions"], strict=True))
        spread = max(e["val_loss"] for e in losses_before[-3:])
        assert later["val_loss"] <= spread * 1.02, "the loss did not jump"

        stack.end()
        check_tape(stack.rounds())

        async def executed() -> int:
            bus = await connect(stack.folder, stack.endpoint()["nats"])
            try:
                return await check_against_an_unfailed_execution(bus, stack.folder)
            finally:
                await bus.close()

        assert asyncio.run(executed()) == stack.committed()
