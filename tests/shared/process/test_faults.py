"""What ended a process is said once for each fault."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from structlog.testing import capture_logs

from diloco_shared.bus.port import Unavailable
from diloco_shared.process.faults import in_a_task, leaves, tell


def test_faults_are_told_without_the_groups_around_them() -> None:
    away, wrong = Unavailable("nobody answers"), ValueError("7")
    group = BaseExceptionGroup("outer", [away, BaseExceptionGroup("inner", [wrong])])
    assert leaves(group) == [away, wrong]
    assert leaves(wrong) == [wrong]
    with capture_logs() as said:
        tell(group, "nats://me:geheim@hub:4222")
    assert [(line["event"], line["error"]) for line in said] == [
        ("no bus", "nobody answers"),
        ("failed, to be started again", "ValueError('7')"),
    ]
    assert said[0]["url"] == "hub:4222"


def test_a_fault_of_the_system_tells_its_path() -> None:
    with capture_logs() as said:
        tell(PermissionError(13, "Permission denied", "/data/x"), "nats://hub:4222")
    assert said[0]["error"] == "PermissionError: [Errno 13] Permission denied: '/data/x'"


# A service that a signal ends, as after a fault in compiled code.
STRUCK = """
import os
import signal
import {package}.app as app
from {package}.__main__ import main

async def serve(*_):
    os.kill(os.getpid(), signal.SIGBUS)

app.serve = serve
main()
"""


@pytest.mark.parametrize("package", ["diloco_coordinator", "diloco_syncer", "diloco_learner"])
def test_what_a_signal_ends_says_where_it_stood(package: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STRUCK.format(package=package)],
        env=os.environ | {"GLIBC_TUNABLES": ""},
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in ended.stderr and "in serve" in ended.stderr


async def _fails_while(cancelled: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_ends_late(cancelled))
        await asyncio.sleep(0)
        raise ValueError("7")


async def _ends_late(cancelled: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.set()
        await asyncio.sleep(0.05)


async def test_a_cancellation_that_a_group_would_hide_comes_through() -> None:
    ends = asyncio.Event()

    async def goes_on() -> str:
        try:
            await in_a_task(_fails_while(ends))
        except* ValueError:
            pass
        return "it went on"

    task = asyncio.create_task(goes_on())
    await ends.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_is_done_in_a_task_is_as_it_is_without_one() -> None:
    async def gives(what: int) -> int:
        return 6 // what

    assert await in_a_task(gives(2)) == 3
    with pytest.raises(ZeroDivisionError):
        await in_a_task(gives(0))
