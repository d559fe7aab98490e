"""The keeper of a message server: what it makes of a disk that takes nothing."""

import errno
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from waiting import wait_until

from diloco_shared.hub import leaves as hub_leaves
from diloco_shared.hub.leaves import PASSWORD
from diloco_shared.hub.watch import NO_SPACE, ROOM_BYTES, HubWatch
from diloco_shared.process import keep_hub
from diloco_shared.process.keep_hub import Rereading


@pytest.mark.parametrize(
    ("files", "inodes", "why"), [(9, 0, ""), (9, 1, "room again"), (0, 0, "room again")]
)
def test_without_inodes_there_is_no_room_for_a_new_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, inodes: int, why: str
) -> None:
    """Some file systems count none, and have room."""
    room = {"f_bavail": ROOM_BYTES >> 12, "f_frsize": 1 << 12}
    said = SimpleNamespace(f_blocks=1 << 20, f_files=files, f_favail=inodes, **room)
    watch = HubWatch()
    watch.said(NO_SPACE)
    monkeypatch.setattr(os, "statvfs", lambda _: said)
    found = watch.look(0.0, answers=True, free_bytes=keep_hub._free(str(tmp_path)))
    assert why in found and bool(found) == bool(why)


def test_of_a_disk_that_is_away_nothing_is_free(tmp_path: Path) -> None:
    assert keep_hub._free(str(tmp_path)) > 0
    assert keep_hub._free(str(tmp_path / "not" / "there")) == 0


class FullDisk:
    """Takes nothing at first."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.taken: list[bytes] = []

    def write(self, line: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.taken.append(line)

    def flush(self) -> None:
        pass


def test_a_server_whose_log_finds_no_room_is_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would wait for its full pipe; what it says is heard also while it is lost."""
    disk, watch = FullDisk(2), HubWatch()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(buffer=disk))
    keep_hub._pass_on([b"one\n", b"[ERR] " + NO_SPACE, b"three\n"], watch)
    assert disk.taken == [b"three\n"] and watch.no_space


def test_the_keeper_outlives_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(1)
    monkeypatch.setattr(sys, "stderr", disk)
    keep_hub._say("it is lost")
    assert not disk.failures
    keep_hub._say("it is read")
    line = "".join(map(str, disk.taken))
    assert re.fullmatch(r"keep_hub: \d{4}(-\d\d){2} \d\d(:\d\d){2} UTC: it is read\n", line)


class Reread:
    """A server that is told to read its configuration, and tells when it did so last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loaded: str = "monday") -> None:
        self.loaded, self.signals, self.cut = loaded, list[int](), list[object]()
        self.said: list[str] = []
        monkeypatch.setattr(keep_hub, "READS_S", 0.0)
        monkeypatch.setattr(keep_hub, "loaded_at", lambda monitor, port: self.loaded)
        monkeypatch.setattr(keep_hub, "_cut_leaves", lambda *given: self.cut.append(given))
        monkeypatch.setattr(keep_hub, "_say", self.said.append)
        monkeypatch.setattr(keep_hub, "_digests", lambda files: f"{files} of {self.files}")
        self.files = "january"
        process: Any = SimpleNamespace(send_signal=self.signals.append)
        self.reading = Rereading(
            process, ("127.0.0.1", 4222), ("127.0.0.1", 8222), ["accounts"], "c"
        )


def test_leaves_are_cut_off_once_the_server_has_read_who_may_be_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Reread(monkeypatch)
    server.reading.look(99.0)
    assert server.signals == server.cut == [], "nothing was asked"
    server.reading.ask(100.0)
    server.reading.look(100.1)
    assert server.signals == [signal.SIGHUP] and server.cut == []
    server.loaded = "tuesday"
    for now in (101.0, 102.0, 200.0):
        server.reading.look(now)
    assert server.cut == [(["accounts"], "c")] and server.signals == [signal.SIGHUP], "once"


@pytest.mark.parametrize(
    ("command", "config"),
    [
        (["nats-server", "-c", "/etc/nats.conf"], "/etc/nats.conf"),
        (["nats-server", "-D", "--config=/etc/nats.conf", "-cluster", "x"], "/etc/nats.conf"),
        (["nats-server", "-cluster", "x"], ""),
        (["nats-server", "-c"], ""),
    ],
)
def test_leaves_are_cut_off_at_the_server_that_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], config: str
) -> None:
    """Its configuration may lie elsewhere than the files that it includes, as on Kubernetes."""
    hub, other = tmp_path / "hub", tmp_path / "certificates"
    for folder in (hub, other):
        folder.mkdir()
    (hub / PASSWORD).write_text("secret")
    asked, said = list[tuple[Path, Path]](), list[str]()
    monkeypatch.setattr(hub_leaves, "cut", lambda *given: asked.append(given) or 2)
    monkeypatch.setattr(keep_hub, "_say", said.append)
    files = [f"{other}/hub.pem", f"{hub}/accounts.conf"]
    keep_hub._cut_leaves(files, keep_hub._config_of(command))
    assert asked == [(hub, Path(config or hub / "nats-server.conf"))]
    assert said == ["leaf nodes were cut off, 2 in all: those that may be in come back"]


def test_leaves_of_a_hub_whose_certificate_lies_elsewhere_are_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is the only file which its keeper looks at; its password lies with its configuration."""
    hub, other = tmp_path / "hub", tmp_path / "certificates"
    for folder in (hub, other):
        folder.mkdir()
    (hub / PASSWORD).write_text("secret")
    asked = list[tuple[Path, Path]]()
    monkeypatch.setattr(hub_leaves, "cut", lambda *given: asked.append(given) or 0)
    keep_hub._cut_leaves([f"{other}/fullchain.pem"], f"{hub}/nats-server.conf")
    assert asked == [(hub, hub / "nats-server.conf")]


def test_leaves_that_cannot_be_cut_off_are_said_to_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(keep_hub, "_say", said.append)
    config = tmp_path / "elsewhere.conf"
    config.write_text("listen: 0.0.0.0:4222\n")
    keep_hub._cut_leaves([f"{tmp_path}/accounts.conf"], str(config))
    assert said == [], "it takes none"
    config.write_text("leafnodes { listen: 0.0.0.0:7422 }\n")
    keep_hub._cut_leaves([f"{tmp_path}/accounts.conf"], str(config))
    assert said == [f"{keep_hub.UNCUT}: there is no {PASSWORD} in {tmp_path}"]


def test_a_server_that_could_not_read_it_is_told_of_and_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Reread(monkeypatch)
    server.reading.ask(100.0)
    for now in (102.9, 103.0, 104.0):
        server.reading.look(now)
    assert server.said.count(keep_hub.UNREAD) == 1 and len(server.signals) == 1
    server.reading.look(110.0)
    assert len(server.signals) == 2 and server.cut == []
    server.reading.look(113.0)
    assert server.said.count(keep_hub.UNREAD) == 2
    server.loaded = ""  # it does not answer: whether it lives is looked at elsewhere
    server.reading.look(119.0)
    assert server.cut == [] and server.said.count(keep_hub.UNREAD) == 2


def test_one_that_cannot_be_asked_is_taken_to_have_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Reread(monkeypatch, loaded="")
    server.reading.ask(100.0)
    server.reading.look(100.1)
    assert server.cut == [(["accounts"], "c")]
    assert server.said[1:] == [f"{keep_hub.UNSAID} ['accounts'] of january"], "nobody has seen it"


def test_that_it_has_read_a_list_is_said_once_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of which list: whoever waits for it may have changed the list again meanwhile."""
    server = Reread(monkeypatch)
    server.reading.ask(100.0, last=False)
    server.loaded, server.files = "tuesday", "february"
    server.reading.look(100.1)
    assert not any("has read" in text for text in server.said), "it is asked once more"
    server.reading.ask(101.0)
    server.files = "march"
    for now in (101.1, 102.0):
        server.reading.look(now)
    assert not any("has read" in text for text in server.said), "it has not"
    server.loaded = "wednesday"
    for now in (103.0, 104.0):
        server.reading.look(now)
    assert server.said[2:] == ["it has read ['accounts'] of february"]


def test_a_file_is_named_with_the_digits_that_others_show_of_it(tmp_path: Path) -> None:
    (tmp_path / "accounts.conf").write_text("abc")
    (tmp_path / "folder").mkdir()
    names = ("accounts.conf", "hub.pem", "folder")
    assert keep_hub._digests([f"{tmp_path}/{name}" for name in names]) == (
        "accounts.conf (ba7816bf8f01), hub.pem (No such file or directory), folder (Is a directory)"
    )


def test_a_server_that_wants_a_token_is_asked_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It logs each connection that has none, every two seconds."""
    (tmp_path / "token").write_text("s3cret\n")
    asked: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(keep_hub, "run", lambda *given: asked.append(given) or 0)
    assert keep_hub.main(["--token-file", str(tmp_path / "token"), "/data", "nats-server"]) == 0
    assert keep_hub.main(["/data", "nats-server"]) == 0
    assert [given[-1] for given in asked] == ["s3cret", ""]


# Takes no notice of a terminal that is closed, as nats-server, which reads its configuration again.
SERVER = "import signal, time; signal.signal(signal.SIGHUP, signal.SIG_IGN); time.sleep(600)"
# Has what follows take notice of it, also where the tests run under `nohup`.
HEEDFUL = """import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.executable, sys.argv[1:])"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_a_server_ends_with_its_keeper(number: signal.Signals, tmp_path: Path) -> None:
    """Nobody would read what it says, and it would end at a word of it later."""
    keeper = ["-m", "diloco_shared.process.keep_hub", "--monitor", "", str(tmp_path)]
    command = [sys.executable, "-c", HEEDFUL, sys.executable, *keeper, sys.executable, "-c", SERVER]
    with psutil.Popen(command) as process:
        (server,) = wait_until(process.children)
        wait_until(lambda: "time.sleep" in " ".join(server.cmdline()))
        process.send_signal(number)
    # It was told to end by its keeper, whose exit status is that of the server.
    assert process.returncode == (-number if number == signal.SIGKILL else 256 - signal.SIGTERM)
    wait_until(lambda: not server.is_running())
