"""How `diloco up` ends: what learners are granted, what they are told of it, and what is seen."""

import asyncio
import io
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from waiting import until

import diloco_cli.up.process
from diloco_cli.commands import local
from diloco_cli.commands.local import DOWN_S, _ends_s
from diloco_cli.up import attended
from diloco_cli.up.folder import DETACHED_OUT, Folder
from diloco_cli.up.process import STOP_S, Child
from diloco_cli.up.stack import CLOSING_S, LEARNERS_STOP_S, EachLearner, Stack, _stop_s
from diloco_cli.words import INVALID, CliError
from diloco_shared.process.stopping import until_stopped


def stack_of(path: Path, learners: int = 1) -> Stack:
    stack = Stack(path / "d", learners=learners, port=0, chaos=False, each=EachLearner())
    stack.nats = SimpleNamespace(url="nats://x")  # type: ignore[assignment]
    return stack


@pytest.mark.parametrize(("given", "seconds"), [("", LEARNERS_STOP_S), ("300", 300.0)])
def test_learners_are_told_what_they_are_granted_and_others_are_as_quick_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, seconds: float
) -> None:
    monkeypatch.setenv("DILOCO_STOP_S", given)
    stack = stack_of(tmp_path)
    stack.stop_s = _stop_s()
    children = {child.name: child for child in stack._all_children()}
    learner = children.pop("learner-1")
    assert float(learner.environment["DILOCO_STOP_S"]) == seconds
    assert learner.stop_s == seconds + CLOSING_S
    assert {child.stop_s for child in children.values()} == {STOP_S}
    assert not any("DILOCO_STOP_S" in child.environment for child in children.values())


@pytest.mark.parametrize("given", ["soon", "nan", "inf"])
def test_what_is_no_time_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("DILOCO_STOP_S", given)
    with pytest.raises(CliError, match=f"DILOCO_STOP_S: '{given}' is no number") as raised:
        asyncio.run(stack_of(tmp_path).run())
    assert raised.value.status == INVALID and not (tmp_path / "d").exists()


async def test_one_that_does_not_stop_in_its_time_is_killed_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diloco_cli.up.process, "dies_with_parent", lambda: None)
    said: list[str] = []
    script, log = "trap '' TERM; echo ready; while :; do sleep 1; done", tmp_path / "learner-1.log"
    child = Child("learner-1", ["/bin/sh", "-c", script], {}, log, said.append, stop_s=0.01)
    running = asyncio.create_task(child.run())
    await until(lambda: log.exists() and log.read_bytes() == b"ready\n", "its first word")
    await child.stop()
    await running
    assert said == ["learner-1 did not stop within 0 s, and is killed"]


def lives(child: Child) -> None:
    child.process = SimpleNamespace(pid=os.getpid(), returncode=None)  # type: ignore[assignment]


def ends(child: Child) -> None:
    child.process = None


def test_whoever_is_waited_for_is_named_learners_first(tmp_path: Path) -> None:
    stack = stack_of(tmp_path, learners=6)
    stack.children = list(stack._all_children())
    for child in stack.children:
        lives(child)
    ends(stack.children[2])
    assert stack.waits_for() == (
        "waits for learner-2, learner-3, learner-4, learner-5 and 1 more to stop (30 s at most, to "
        "save their state); Ctrl-C again ends everything at once"
    )
    for child in stack.children[3:]:
        ends(child)
    assert stack.waits_for().startswith("waits for coordinator, syncer-1 to stop; Ctrl-C again")
    for child in stack.children:
        ends(child)
    assert stack.waits_for() == "waits for the message server to stop"


async def test_that_is_seen_once_the_screen_is_gone_until_all_have_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Line:
        def __init__(self, text: Any) -> None:
            self.text = text

        def __enter__(self) -> None:
            seen.append(self.text())

        def __exit__(self, *_: object) -> None:
            seen.append("gone")

    class Stopping(Stack):
        async def run(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("stops")
                await asyncio.sleep(0)
                seen.append("stopped")

        def waits_for(self) -> str:
            return "waits"

    async def look_on(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("no screen")

    monkeypatch.setattr(attended, "meanwhile", Line)
    monkeypatch.setattr(attended, "_look_on", look_on)
    stack = Stopping(tmp_path, learners=1, port=0, chaos=False, each=EachLearner())
    task = asyncio.create_task(attended.attend(stack, Console()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen.index("no screen") < seen.index("waits") < seen.index("gone")
    assert seen.index("stopped") < seen.index("gone")


def test_diloco_down_waits_for_as_long_as_the_cluster_says(tmp_path: Path) -> None:
    assert _ends_s(tmp_path) == DOWN_S
    folder = Folder(tmp_path)
    folder.take()
    folder.announce(url="http://127.0.0.1:1")
    assert _ends_s(tmp_path) == DOWN_S, "of an earlier release"
    folder.announce(url="http://127.0.0.1:1", ends_s=323.0)
    assert _ends_s(tmp_path) == 323.0
    folder.withdraw()
    assert _ends_s(tmp_path) == 323.0, "it stops already, and is told so once more"
    folder.release()
    assert _ends_s(tmp_path) == DOWN_S, "the next one says it itself"


async def test_whoever_stops_it_once_more_kills_nobody(tmp_path: Path) -> None:
    """As `diloco down` does in another terminal, and a service manager behind it."""
    done: list[str] = []
    saves, told = asyncio.Event(), asyncio.Event()

    class Saving:
        name, pid = "learner-1", 1

        async def stop(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)  # while it saves its state
            asyncio.get_running_loop().call_later(0.05, told.set)
            await told.wait()
            done.append("saved")

        def kill(self) -> None:
            done.append("killed")

    class Started(Stack):
        async def run(self) -> None:
            saves.set()
            try:
                await asyncio.Event().wait()
            finally:
                await self._stopped()

    async def stopped(**_: Any) -> None:
        done.append("message server")

    stack = Started(tmp_path, learners=1, port=0, chaos=False, each=EachLearner())
    stack.nats = SimpleNamespace(stop=stopped)  # type: ignore[assignment]
    stack.syncers, stack.children = -1, [Saving()]  # type: ignore[list-item]

    async def down() -> None:
        await saves.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    first = asyncio.create_task(down())
    console = Console(file=io.StringIO())
    await until_stopped(attended.attend(stack, console), ending=lambda: stack.stopping)
    await first
    assert done == ["saved", "message server"]


def test_what_is_started_in_the_background_has_as_long_as_it_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, waited = Folder(tmp_path), list[float]()
    folder.announce(url="http://127.0.0.1:1", ends_s=323.0)

    class Slow:
        pid = 1

        def terminate(self) -> None:
            folder.withdraw()
            folder.release()

        def wait(self, seconds: float) -> None:
            waited.append(seconds)

    local._stop(Slow(), tmp_path)  # type: ignore[arg-type]
    assert waited == [323.0 + local.DOWN_MORE_S]


def begun(
    monkeypatch: pytest.MonkeyPatch, path: Path, script: str
) -> tuple["subprocess.Popen[bytes]", BaseException]:
    """What `up --detach` has started, where Ctrl-C comes before it answers, and how that ended."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(_: list[str], **how: Any) -> "subprocess.Popen[bytes]":
        started.append(popen(["/bin/sh", "-c", script], **how))
        return started[0]

    def asks(*_: object) -> bool:
        if "ready" in (path / "logs" / DETACHED_OUT).read_text():
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(local.subprocess, "Popen", start)
    monkeypatch.setattr(local, "_ready", asks)
    with pytest.raises((KeyboardInterrupt, CliError)) as raised:
        local._detached(path, [])
    return started[0], raised.value


def test_what_is_started_in_the_background_is_stopped_by_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "trap 'echo stops; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    child, why = begun(monkeypatch, tmp_path, script)
    assert isinstance(why, KeyboardInterrupt)
    assert child.poll() == 0
    assert (tmp_path / "logs" / DETACHED_OUT).read_text() == "ready\nstops\n"
    assert capsys.readouterr().out == "Stopped.\n"


def test_what_does_not_stop_soon_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "DOWN_S", 0.01)
    monkeypatch.setattr(local, "DOWN_MORE_S", 0.0)
    data = tmp_path / "my data"
    child, why = begun(monkeypatch, data, "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    try:
        text = f"process {child.pid} is still stopping; diloco down --data '{data}' waits for it"
        assert str(why) == text
    finally:
        child.kill()
        child.wait()
