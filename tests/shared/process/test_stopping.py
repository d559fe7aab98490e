"""A process ends in order when it is told to, and what a killed one started ends with it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from diloco_shared.process.stopping import until_stopped

CHILD = """
import subprocess, sys, time
from diloco_shared.process.stopping import dies_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                         preexec_fn=dies_with_parent())
print(child.pid, flush=True)
time.sleep(60)
"""
WORKER = """
import os, signal, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from diloco_shared.process.stopping import dies_with_parent
if __name__ == "__main__":
    started = dies_with_parent(signal.SIGTERM)
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=started) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 60).result()
"""


# Far more than a signal takes on a busy machine, and less than they would live by themselves.
GONE_S = 20


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
@pytest.mark.parametrize("source", [CHILD, WORKER], ids=["child", "pool worker"])
def test_it_ends_with_a_parent_that_was_killed(source: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"  # spawned workers import what started them: a file
    script.write_text(source, encoding="utf-8")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        pid = int(it.stdout.readline())
        assert running(pid)
        it.send_signal(signal.SIGKILL)
    wait_until(lambda: not running(pid), patience_s=GONE_S)


def running(pid: int) -> bool:
    """Whether it is there, and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


TWICE = [
    ([signal.SIGTERM, signal.SIGINT], False, False),
    ([signal.SIGINT, signal.SIGINT], False, False),
    ([signal.SIGTERM, signal.SIGINT], True, True),
    ([signal.SIGTERM, signal.SIGTERM], False, True),
    ([signal.SIGINT, signal.SIGTERM], False, True),
    ([signal.SIGHUP, signal.SIGHUP], False, True),
]


@pytest.mark.parametrize(("sent", "once", "whole"), TWICE)
async def test_ctrl_c_alone_cuts_the_cleaning_up_short(
    sent: list[int], once: bool, whole: bool
) -> None:
    """Whoever asked is told of all that came: an island's host is told by others and by itself."""
    first, second = sent
    assert await told(first, second, once=once) == (set(sent), whole)
    assert await until_stopped(asyncio.sleep(0)) == frozenset()


async def told(first: int, second: int, **how: Any) -> tuple[frozenset[int], bool]:
    """Which signals came, and whether all was cleaned up although a second one came meanwhile."""
    ends: list[str] = []

    async def work() -> None:
        try:
            if first:
                os.kill(os.getpid(), first)
                await asyncio.sleep(GONE_S)
        finally:
            os.kill(os.getpid(), second)
            await asyncio.sleep(0.05)
            ends.append("cleaned up")

    return await until_stopped(work(), **how), bool(ends)


@pytest.mark.parametrize(("sent", "whole"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
async def test_what_ends_by_itself_is_as_if_it_had_been_told(sent: int, whole: bool) -> None:
    assert await told(0, sent, ending=lambda: True) == ({sent}, whole)
