"""Threads for places of checkpoints: few at once, and a process that ends waits for none."""

import asyncio
import subprocess
import sys
import threading

import pytest
from waiting import PATIENCE_S, until

from diloco_coordinator.api import vaults_io
from diloco_coordinator.api.problems_io import Problem
from diloco_coordinator.api.vaults_io import THREADS_MAX, Vaults

HANGS = """
import asyncio, threading
from diloco_coordinator.api.vaults_io import Vaults

async def main():
    begun = threading.Event()
    def hang():
        begun.set()
        threading.Event().wait()
    task = asyncio.create_task(Vaults().ask(hang))
    await asyncio.to_thread(begun.wait)
    task.cancel()

asyncio.run(main())
"""


async def test_so_many_wait_for_a_place_and_the_next_one_has_its_turn_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vaults_io, "ASK_S_MAX", 0.05)
    vaults, go, asked = Vaults(), threading.Event(), list[int]()

    def hangs() -> None:
        asked.append(1)
        go.wait()

    waiting = [asyncio.create_task(vaults.ask(hangs)) for _ in range(3 * THREADS_MAX)]
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(answer, Problem) and answer.status == 503 for answer in answers)
    assert len(asked) == THREADS_MAX
    go.set()
    monkeypatch.setattr(vaults_io, "ASK_S_MAX", PATIENCE_S)
    assert await vaults.ask(lambda: "there") == "there"
    await until(lambda: vaults._threads._free._value == THREADS_MAX)


def test_a_process_ends_although_a_place_hangs() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0
