"""The supervisor's parts: restart policy, logs, the data folder."""

import asyncio
import contextlib
import errno
import fcntl
import io
import os
import socket
import stat
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from waiting import until

import diloco_cli.up.folder
import diloco_cli.up.process
import diloco_cli.up.stack
from diloco_cli.cluster import endpoint_of
from diloco_cli.commands import local
from diloco_cli.up import attended
from diloco_cli.up.folder import DETACHED_OUT, Folder, supervisor_of
from diloco_cli.up.process import (
    LOOP,
    PAUSE_S,
    PAUSE_S_MAX,
    WELL_S,
    Child,
    Restarts,
    bound,
    last_line,
)
from diloco_cli.up.stack import EachLearner, Stack, free_port
from diloco_cli.words import CONFLICT, CliError
from diloco_client import ApiError, Unreachable
from diloco_learner.settings import Settings
from diloco_shared.process.membership import DataFolder


def test_the_first_restart_is_prompt_and_a_crash_loop_backs_off() -> None:
    restarts, now, pauses = Restarts(), 0.0, []
    for _ in range(10):
        restarts.started(now)
        now += 1.0
        pauses.append(restarts.died(now))
    assert pauses[0] == PAUSE_S <= 0.3
    assert pauses == sorted(pauses)
    assert pauses[1] == 2 * PAUSE_S
    assert pauses[-1] == PAUSE_S_MAX
    assert restarts.total == 10


def test_a_crash_loop_is_told_and_a_long_life_ends_it() -> None:
    restarts = Restarts()
    for number in range(1, LOOP + 1):
        restarts.started(0.0)
        restarts.died(0.5)
        assert restarts.looping == (number == LOOP)
    restarts.started(0.0)
    assert restarts.died(WELL_S) == PAUSE_S
    assert not restarts.looping


def test_a_log_is_cut_while_somebody_appends_to_it(tmp_path: Path) -> None:
    """I12."""
    log = tmp_path / "a.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 90 + b"the end of it")
        assert not bound(log, 104)
        assert bound(log, 100)
        assert log.stat().st_size == 0
        writer.write(b"and on")
    assert log.read_bytes() == b"and on"
    kept = (tmp_path / "a.log.1").read_bytes()
    assert len(kept) == 100
    assert kept.endswith(b"the end of it")


def test_a_log_is_cut_where_there_is_no_room_for_a_copy(tmp_path: Path) -> None:
    """I12."""
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 100)
    (tmp_path / "a.log.1").symlink_to("/dev/full")
    assert bound(log, 100)
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("a.log", 0)]


async def test_a_log_that_cannot_be_cut_ends_nothing_and_what_nobody_sees_is_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12."""
    monkeypatch.setattr(diloco_cli.up.stack, "LOGS_S", 0.0)
    looked: list[str] = []
    often = asyncio.Event()

    def full(log: Path) -> bool:
        looked.append(log.name)
        if min(looked.count(name) for name in ("a.log", "supervisor.out")) > 1:
            often.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(diloco_cli.up.stack, "bound", full)
    stack = Stack(tmp_path, learners=1, port=0, chaos=False, each=EachLearner())
    stack.folder.logs.mkdir()
    for name in ("a.log", "a.log.1", "supervisor.out"):
        (stack.folder.logs / name).touch()
    bounding = asyncio.create_task(stack._bound_logs())
    waiting = asyncio.create_task(often.wait())
    await asyncio.wait({bounding, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert often.is_set() and not bounding.done()
    assert "a.log.1" not in looked
    bounding.cancel()


@pytest.mark.parametrize(("number", "goes_on"), [(errno.ENOSPC, True), (errno.EIO, False)])
async def test_a_full_disk_hides_what_a_cluster_shows_and_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, goes_on: bool
) -> None:
    """Unlike a terminal that is gone."""
    room = asyncio.Event()

    class Output(io.StringIO):
        failed = 0

        def write(self, text: str) -> int:
            if self.failed < 2:
                self.failed += 1
                raise OSError(number, os.strerror(number))
            room.set()
            return super().write(text)

    async def started(*_: Any) -> None:
        pass

    def nothing_yet(*_: Any) -> None:
        stack.told("something happened")

    stack = Stack(tmp_path, learners=1, port=0, chaos=False, each=EachLearner())
    monkeypatch.setattr(attended, "LOOK_S", 0.0)
    monkeypatch.setattr(attended, "started", started)
    monkeypatch.setattr(attended, "connect", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(attended, "newest", nothing_yet)
    file = Output()
    looking = asyncio.create_task(attended._look_on(stack, Console(file=file)))
    waiting = asyncio.create_task(room.wait())
    await asyncio.wait({looking, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert (room.is_set(), looking.done()) == (goes_on, not goes_on)
    for task in (looking, waiting):
        task.cancel()
    if not goes_on:
        with pytest.raises(OSError, match="Input/output"):
            await looking


async def test_a_token_that_was_rotated_is_read_anew_and_nonsense_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The screen goes on: else `up` would stop the whole cluster, or show old figures for ever."""
    connected: list[int] = []
    looks: list[Any] = [
        KeyError("val_loss"),
        KeyError("val_loss"),
        Unreachable("nobody"),
        ApiError(503, "away", "try again"),
        ApiError(401, "no such token", "rotated"),
        None,
    ]
    enough = asyncio.Event()

    async def started(*_: Any) -> None:
        pass

    def newest(*_: Any) -> None:
        if len(looks) == 1:
            enough.set()
            return
        if isinstance(found := looks.pop(0), Exception):
            raise found

    def connect(_: Any) -> Any:
        connected.append(1)
        return contextlib.nullcontext()

    stack = Stack(tmp_path, learners=1, port=0, chaos=False, each=EachLearner())
    monkeypatch.setattr(attended, "LOOK_S", 0.0)
    monkeypatch.setattr(attended, "SILENT_S", -1.0)
    monkeypatch.setattr(attended, "started", started)
    monkeypatch.setattr(attended, "connect", connect)
    monkeypatch.setattr(attended, "newest", newest)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(enough, "set", partial(loop.call_soon_threadsafe, enough.set))
    looking = asyncio.create_task(attended._look_on(stack, Console(file=io.StringIO())))
    await enough.wait()
    looking.cancel()
    told = list(stack.messages)
    assert len(connected) == 2, "anew, with what the token's file has by now"
    assert sum("cannot show this: KeyError('val_loss')" in line for line in told) == 1
    assert sum(attended.SILENT in line for line in told) == 1


def test_what_is_shown_to_nobody_is_appended_so_that_it_can_be_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12: else it would have its old length again after the cut."""
    out = tmp_path / "logs" / DETACHED_OUT
    out.parent.mkdir()
    out.write_text("of another time")
    flags: list[int] = []

    def start(_: list[str], *, stdout: Any, **__: Any) -> SimpleNamespace:
        flags.append(fcntl.fcntl(stdout, fcntl.F_GETFL))
        return SimpleNamespace(pid=1)

    monkeypatch.setattr(local.subprocess, "Popen", start)
    monkeypatch.setattr(local, "_ready", lambda *_: True)
    Folder(tmp_path).announce(url="http://127.0.0.1:1")
    local._detached(tmp_path, [])
    assert flags[0] & os.O_APPEND and not out.stat().st_size


def test_a_cluster_that_runs_keeps_what_it_has_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one in its folder would be refused; it had emptied the file by then."""
    running, out = Folder(tmp_path), tmp_path / "logs" / DETACHED_OUT
    running.take()
    out.write_text("what has happened so far\n")
    monkeypatch.setattr(local.subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(CliError, match=f"another instance works in .*process {os.getpid()}") as no:
        local._detached(tmp_path, [])
    running.release()
    assert no.value.status == CONFLICT and out.read_text() == "what has happened so far\n"


async def test_a_folder_that_cannot_be_used_is_said_alike_in_the_background(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CliError, match=rf"^the data folder {file} cannot be used: ") as attended:
        await Stack(file, learners=1, port=0, chaos=False, each=EachLearner()).run()
    with pytest.raises(CliError) as detached:
        local._detached(file, [])
    assert str(detached.value) == str(attended.value)
    assert detached.value.status == attended.value.status


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert last_line(log) == ""
    log.write_bytes(b"first\nTypeError: no\n\n")
    assert last_line(log) == "TypeError: no"


@pytest.fixture
def started_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours between fork and exec: jax may have threads here, which hold locks."""
    monkeypatch.setattr(diloco_cli.up.process, "dies_with_parent", lambda: None)


@pytest.mark.usefixtures("started_plainly")
@pytest.mark.parametrize(("status", "told"), [(2, 2), (1, 1)])
async def test_a_wrong_set_up_is_told_at_once_in_the_process_own_words(
    tmp_path: Path, status: int, told: int
) -> None:
    said: list[str] = []
    script = f"echo 'learner: DILOCO_DUTY_CYCLE: too low'; exit {status}"
    log = tmp_path / "learner-1.log"
    child = Child("learner-1", ["/bin/sh", "-c", script], {}, log, said.append)
    running = asyncio.create_task(child.run())
    await until(lambda: child.restarts.total == 1, "its first end")
    await child.stop()
    await running
    assert said[0] == f"learner-1 ended (status {status}), starting again in {PAUSE_S} s"
    wrong = f"learner-1 cannot start: learner: DILOCO_DUTY_CYCLE: too low (all in {log})"
    assert said[1:] == [wrong][: told - 1]


def _session_of(pid: int | None) -> str:
    """How Linux weighs that session; as if it were told, where it weighs none."""
    file = Path(f"/proc/{pid}/autogroup")
    return file.read_text("ascii") if file.exists() else " nice 7"


@pytest.mark.usefixtures("started_plainly")
async def test_a_learner_leaves_the_processor_to_others_once_it_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Linux shares processors out by sessions, and refuses at first."""
    monkeypatch.setattr(diloco_cli.up.process, "SETTLE_S", 0.0)
    monkeypatch.setattr(diloco_cli.up.process, "SETTLE_AGAIN_S", 0.0)
    refusals, write = [BlockingIOError()], Path.write_text

    def refused_once(path: Path, *given: Any) -> int:
        if refusals:
            raise refusals.pop()
        return write(path, *given)

    monkeypatch.setattr(Path, "write_text", refused_once)
    log, command = tmp_path / "learner-1.log", ["/bin/sleep", "60"]
    child = Child("learner-1", command, {}, log, lambda _: None, niceness=7)
    running = asyncio.create_task(child.run())
    await until(lambda: child.pid and os.getpriority(os.PRIO_PROCESS, child.pid) == 7)
    await until(lambda: not refusals and " nice 7" in _session_of(child.pid), "its session's value")
    await child.stop()
    await running


def test_a_folder_is_taken_by_one_at_a_time_who_is_named(tmp_path: Path) -> None:
    first = Folder(tmp_path)
    assert supervisor_of(tmp_path) == 0
    first.take()
    assert supervisor_of(tmp_path) == os.getpid()
    with pytest.raises(CliError, match=f"process {os.getpid()}") as raised:
        Folder(tmp_path).take()
    assert raised.value.status == CONFLICT
    first.release()
    assert supervisor_of(tmp_path) == 0
    second = Folder(tmp_path)
    second.take()
    second.release()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CliError, match=r"file/data cannot be used"):
        Folder(tmp_path / "file" / "data").take()


def test_a_full_disk_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diloco_cli.up.folder, "FREE_BYTES_MIN", 1 << 60)
    with pytest.raises(CliError, match="is full"):
        Folder(tmp_path).take()
    assert supervisor_of(tmp_path) == 0


def test_an_unknown_crash_point_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_CRASH_AT", "syncer-1/lunch")
    stack = Stack(tmp_path / "data", learners=1, port=0, chaos=False, each=EachLearner())
    with pytest.raises(CliError, match=r"DILOCO_CRASH_AT: .*there is no 'lunch'; known: before-"):
        asyncio.run(stack.run())
    assert list(tmp_path.iterdir()) == []


def test_an_endpoint_is_announced_whole_and_withdrawn(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.announce(url="http://127.0.0.1:1")
    assert endpoint_of(tmp_path)["url"] == "http://127.0.0.1:1"
    assert endpoint_of(tmp_path)["pid"] == os.getpid()
    folder.withdraw()
    with pytest.raises(CliError, match="no cluster runs"):
        endpoint_of(tmp_path)


def test_an_endpoint_that_cannot_be_announced_is_told(tmp_path: Path) -> None:
    (tmp_path / "endpoint.json").mkdir()
    with pytest.raises(CliError, match="cannot be used"):
        Folder(tmp_path).announce(url="http://127.0.0.1:1")


def test_a_secret_is_new_each_time_and_for_its_owner_only(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    secrets = [folder.secret("nats-token") for _ in range(2)]
    assert secrets[0] != secrets[1]
    path = tmp_path / "nats-token"
    assert path.read_text().strip() == secrets[1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def begun(path: Path, *, throwaway: bool) -> None:
    folder = Folder(path)
    folder.take()
    try:
        folder.begin(throwaway=throwaway)
    finally:
        folder.release()


def test_a_demo_begins_anew_after_a_demo(tmp_path: Path) -> None:
    begun(tmp_path, throwaway=True)
    (tmp_path / "nats").mkdir()
    (tmp_path / "learner-1").mkdir()
    (tmp_path / "compiled").mkdir()
    begun(tmp_path, throwaway=True)
    assert not (tmp_path / "nats").exists()
    assert not (tmp_path / "learner-1").exists()
    assert (tmp_path / "compiled").exists(), "compiled programs are worth keeping"


@pytest.mark.parametrize("demo_before", [True, False])
def test_a_demo_removes_nothing_of_a_cluster_that_was_ever_used_otherwise(
    tmp_path: Path, demo_before: bool
) -> None:
    if demo_before:
        begun(tmp_path, throwaway=True)
    begun(tmp_path, throwaway=False)
    (tmp_path / "nats").mkdir()
    begun(tmp_path, throwaway=True)
    assert (tmp_path / "nats").exists()


@pytest.mark.parametrize(
    "left", ["syncer-a/snapshots/12", "learner-1/checkpoints", "coordinator/exports", "logs/mine"]
)
def test_a_demo_removes_nothing_of_members_whose_hub_is_elsewhere(
    tmp_path: Path, left: str
) -> None:
    """They keep their state in a folder of the same name, which has no message server's."""
    (tmp_path / left).mkdir(parents=True)
    for _ in "12":
        with pytest.raises(CliError, match=f"holds {left.partition('/')[0]} of .*--data") as raised:
            begun(tmp_path, throwaway=True)
        assert raised.value.status == CONFLICT
        assert (tmp_path / left).exists()


def test_a_demo_begins_where_a_cluster_could_not_start(tmp_path: Path) -> None:
    begun(tmp_path, throwaway=False)
    (tmp_path / "logs" / "supervisor.log").touch()
    begun(tmp_path, throwaway=True)
    begun(tmp_path, throwaway=True)
    assert not [*(tmp_path / "logs").iterdir()]


def test_a_demo_after_a_demo_removes_nothing_of_members_that_came_in_between(
    tmp_path: Path,
) -> None:
    begun(tmp_path, throwaway=True)
    (tmp_path / "learner-1").mkdir()
    found = DataFolder.claim(tmp_path, "syncer")
    begun(tmp_path, throwaway=True)
    assert found.path.exists() and not (tmp_path / "learner-1").exists()
    (tmp_path / "learner-1").mkdir()
    given = DataFolder(tmp_path, "syncer-1")
    with pytest.raises(CliError, match=f"process {os.getpid()} works in .*syncer-1") as raised:
        begun(tmp_path, throwaway=True)
    assert raised.value.status == CONFLICT
    assert given.path.exists() and (tmp_path / "learner-1").exists()
    found.release()
    given.release()


def test_a_taken_port_is_told_and_zero_finds_a_free_one() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(CliError, match="is taken"):
            free_port(holder.getsockname()[1])
    assert free_port(0) > 0


def test_learners_here_may_import_what_lies_here_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else gets the setting."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/own/modules")
    monkeypatch.setenv("DILOCO_CHECKPOINT_ROOTS", "/more")
    monkeypatch.delenv("DILOCO_FACTORIES", raising=False)

    def told(name: str) -> dict[str, str]:
        stack = Stack(tmp_path / "d", learners=1, port=0, chaos=False, each=EachLearner())
        stack.nats = SimpleNamespace(url="nats://x")  # type: ignore[assignment]
        (child,) = [c for c in stack._all_children() if c.name == name]
        return dict(child.environment)

    assert told("learner-1")["DILOCO_FACTORIES"] == f"{tmp_path}/,/own/modules/"
    assert "DILOCO_FACTORIES" not in told("coordinator")
    assert told("coordinator")["DILOCO_CHECKPOINT_ROOTS"] == "/more"
    monkeypatch.setenv("DILOCO_FACTORIES", "mine")
    assert told("learner-1")["DILOCO_FACTORIES"] == "mine"
    monkeypatch.setenv("DILOCO_FACTORIES", "not-a-module")
    with pytest.raises(CliError, match="DILOCO_FACTORIES has the entry 'not-a-module'"):
        told("learner-1")


def test_a_learners_settings_reach_it_or_are_known_to_be_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one belongs to `_inherited`, or here: it must not be dropped without a word."""
    anothers = {
        # Of a learner of several hosts, which `up` numbers itself if there are any.
        *("hosts", "host_index", "host_address", "host_silence_s", "hosts_carry"),
        "hosts_checkpoints",
        # Of the message server: its own has one secret, and needs no more.
        *("nats_ca", "nats_client_cert", "nats_client_key", "nats_credentials", "nats_token"),
        "nats_token_file",
        # Of one process among several on a machine, and of its link.
        *("ids", "health_host", "health_port", "connections"),
        *("uplink_bytes_per_s", "downlink_bytes_per_s", "checkpoints"),
    }
    for name in Settings.model_fields:
        monkeypatch.setenv(f"DILOCO_{name.upper()}", "given")
    stack = Stack(tmp_path / "d", learners=1, port=0, chaos=False, each=EachLearner())
    stack.nats = SimpleNamespace(url="nats://x")  # type: ignore[assignment]
    (child,) = [c for c in stack._all_children() if c.name == "learner-1"]
    dropped = {n for n in Settings.model_fields if f"DILOCO_{n.upper()}" not in child.environment}
    assert dropped == anothers


@pytest.mark.parametrize("given", ["", "mine/token", "/run/secrets/token"])
def test_the_coordinator_has_its_token_where_other_commands_look_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """And nobody else is told."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DILOCO_ADMIN_TOKEN_FILE", given)
    stack = Stack(tmp_path, learners=1, port=0, chaos=False, each=EachLearner())
    stack.nats = SimpleNamespace(url="nats://x")  # type: ignore[assignment]
    told = {c.name: c.environment.get("DILOCO_ADMIN_TOKEN_FILE") for c in stack._all_children()}
    stack.folder.announce(url="http://127.0.0.1:1")
    assert told.pop("coordinator") == (endpoint_of(tmp_path)["token_file"] if given else None)
    assert {*told.values()} == {None}


async def test_more_gpus_than_there_are_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    asked = {"learners": 2, "port": 0, "chaos": False, "each": EachLearner(devices=2)}
    with pytest.raises(CliError, match="2 learners of 2 need 4 GPUs, and this machine has 2"):
        await Stack(tmp_path / "data", **asked).run()
    assert not (tmp_path / "data").exists()


def test_each_learner_sees_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    stack = Stack(tmp_path / "data", learners=2, port=0, chaos=False, each=EachLearner())
    stack.gpus = stack._gpus()
    stack.nats = SimpleNamespace(url="nats://127.0.0.1:1")  # type: ignore[assignment]
    seen = {c.name: c.environment.get("CUDA_VISIBLE_DEVICES") for c in stack._all_children()}
    assert (seen["learner-1"], seen["learner-2"]) == ("0,1", "2,3")
    crowded = Stack(tmp_path / "data", learners=5, port=0, chaos=False, each=EachLearner())
    assert [share[0] for share in crowded._gpus()] == ["0", "1", "2", "3", "0"]
    assert crowded.messages[-1].endswith("5 learners share 4 GPUs: each is slower")


def test_the_processes_of_a_learner_share_its_gpus_and_meet_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    given: dict[str, Any] = {"port": 0, "chaos": False, "each": EachLearner(hosts=2)}
    stack = Stack(tmp_path / "data", learners=2, **given)
    stack.gpus = stack._gpus()
    stack.nats = SimpleNamespace(url="nats://127.0.0.1:1")  # type: ignore[assignment]
    told = {c.name: c.environment for c in stack._all_children() if c.name.startswith("learner")}
    assert [*told] == ["learner-1", "learner-1.1", "learner-2", "learner-2.1"]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in told.values()] == ["0", "1", "2", "3"]
    assert [e["DILOCO_HOST_INDEX"] for e in told.values()] == ["0", "1", "0", "1"]
    assert {e["DILOCO_HOSTS"] for e in told.values()} == {"2"}
    assert told["learner-2.1"]["DILOCO_ID"] == "learner-2"
    meetings = [e["DILOCO_HOST_ADDRESS"] for e in told.values()]
    assert meetings[0] == meetings[1] != meetings[2] == meetings[3]
    with pytest.raises(CliError, match="1 GPU of a learner cannot be divided among 2 processes"):
        Stack(tmp_path / "data", learners=4, **given)._gpus()
