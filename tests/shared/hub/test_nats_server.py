"""When a server that runs is started anew: told by its log, its disk and its answers."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from diloco_shared.hub import nats_server
from diloco_shared.hub.nats_binary import BinaryError
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.hub.watch import (
    NO_SPACE,
    READ_BYTES,
    ROOM_BYTES,
    SILENT_FULL_S,
    SILENT_S,
    Changes,
    HubWatch,
    answers,
)

INFO = b'INFO {"server_id":"x"}\r\n'


@pytest.mark.parametrize(("free", "ails"), [(ROOM_BYTES, True), (0, False), (None, False)])
def test_it_is_started_anew_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int | None, ails: bool
) -> None:
    """Without inodes there is none, and a file system that is away says nothing."""
    server = NatsServer(tmp_path, name="n")
    server.log_path.parent.mkdir(parents=True, exist_ok=True)
    server.log_path.write_bytes(b"all is well\n")
    monkeypatch.setattr(NatsServer, "running", True)
    monkeypatch.setattr(nats_server, "free_bytes", lambda _: free)
    monkeypatch.setattr(nats_server, "answers", lambda *_: True)
    assert not server.ails(), "it has said nothing"
    with server.log_path.open("ab") as log:
        log.write(b"[ERR] " + NO_SPACE)
    assert bool(server.ails()) is ails


def test_a_line_that_is_not_whole_yet_is_read_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what a client sent would stand alone, and seem to be the server's own."""
    server = NatsServer(tmp_path, name="n")
    server.log_path.write_bytes(b"[1] [INF] well\n[1] [ERR] 10.0.0.9:4 - cid:6 - ")
    server._watch.said(server._read_log())
    with server.log_path.open("ab") as log:
        log.write(b"n" + NO_SPACE)
    server._watch.said(server._read_log())
    assert not server._watch.no_space
    with server.log_path.open("ab") as log:
        log.write(b"\n[1] [ERR] write" + NO_SPACE + b"\n")
    assert server._read_log().startswith(b"[1] [ERR] 10.0.0.9:4"), "whole lines alone are behind"
    assert server._read_log() == b""
    line = b"one line that is as long as what is read at once"
    monkeypatch.setattr(nats_server, "LOG_BYTES_MAX", len(line))
    server.log_path.write_bytes(line)
    assert (server._read_log(), server._read_log()) == (line, b"")


async def test_a_start_waits_for_as_long_as_the_server_reads_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is ended would have to read all of it once more."""
    server, left, read = (
        NatsServer(tmp_path, name="n"),
        [None] * 50,
        iter(range(0, 10**9, READ_BYTES)),
    )

    async def info(*_: object) -> dict[str, object] | None:
        return left.pop() if left else {"server_name": "n", "jetstream": True}

    monkeypatch.setattr(NatsServer, "running", True)
    monkeypatch.setattr(nats_server, "_POLL_S", 0.0)
    monkeypatch.setattr(nats_server, "_info", info)
    monkeypatch.setattr(nats_server, "read_by", lambda _: next(read))
    assert await server._ready(1e-9) and not left
    left[:] = [None] * 50
    monkeypatch.setattr(nats_server, "read_by", lambda _: None)
    with pytest.raises(BinaryError, match="and reads nothing more"):
        await server._ready(1e-9)
    assert left


def test_one_that_was_told_to_stand_still_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NatsServer(tmp_path, name="n")
    monkeypatch.setattr(NatsServer, "running", True)
    monkeypatch.setattr(NatsServer, "_signal", lambda *_: None)
    server.log_path.write_bytes(NO_SPACE)
    server.pause()
    assert not server.ails()
    server.resume()
    monkeypatch.setattr(nats_server, "answers", lambda *_: True)
    assert "room again" in server.ails()


@pytest.mark.parametrize(("said", "patience_s"), [(b"", SILENT_S), (NO_SPACE, SILENT_FULL_S)])
def test_one_that_answers_nothing_is_started_anew_in_time(said: bytes, patience_s: float) -> None:
    """And sooner after a write that failed: then it may hold a lock for ever."""
    watch = HubWatch()
    watch.said(said)
    assert not watch.look(-1.0, answers=True, free_bytes=0)
    assert not watch.look(0.0, answers=False, free_bytes=0)
    assert not watch.look(patience_s - 1.0, answers=False, free_bytes=0)
    assert "answered nothing" in watch.look(patience_s, answers=False, free_bytes=0)


def test_one_answer_is_enough() -> None:
    watch = HubWatch()
    watch.look(0.0, answers=False, free_bytes=0)
    watch.look(SILENT_S - 1.0, answers=True, free_bytes=0)
    assert not watch.look(SILENT_S, answers=False, free_bytes=0)


def test_a_change_is_read_twice_and_a_file_that_is_away_waits() -> None:
    changes = Changes((1, "a"))
    assert [changes.look((1, "a")), changes.look((1, None))] == [False, False]
    assert [changes.look((2, "a")) for _ in range(4)] == [True, True, False, False]
    # Another change in between is read twice as well.
    assert [changes.look((v, "a")) for v in (3, 4, 4, 4)] == [True, True, True, False]
    # One that is away for long, such as a certificate of somebody else's, keeps no other one back.
    assert [changes.look((5, None)) for _ in range(3)] == [True, True, False]
    assert [changes.look((5, v)) for v in ("a", "b")] == [False, True]


@contextmanager
def speaking(first: bytes, reply: bytes) -> Iterator[int]:
    """A server that greets and gives one reply to whatever it is asked; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            client, _ = listening.accept()
            with client, suppress(OSError):
                client.sendall(first)
                client.recv(4096)
                client.sendall(reply)
                client.recv(4096)  # until the other side is gone

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(5.0)


@pytest.mark.parametrize(
    ("first", "reply", "expected"),
    [
        (INFO, b"PING\r\nMSG _INBOX.1 1 2\r\n{}\r\n", True),
        (INFO, b"-ERR 'Authorization Violation'\r\n", True),  # it cannot be asked
        (INFO, b"HMSG _INBOX.1 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n", False),  # streams are off
        (INFO, b"PONG\r\n", False),  # it lives, and says nothing of its streams
        (b'INFO {"tls_required":true}\r\n', b"", True),
        (b"INFO nonsense\r\n", b"", False),
        (b"", b"", False),
    ],
)
def test_what_counts_as_an_answer(first: bytes, reply: bytes, expected: bool) -> None:
    with speaking(first, reply) as port:
        assert answers("127.0.0.1", port, "t", timeout_s=0.5) is expected


def test_one_that_listens_to_nobody_yet_has_not_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert answers("127.0.0.1", port, timeout_s=0.5) is None


def test_who_holds_a_folder_is_read_whatever_stood_there(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, name="n")
    path = tmp_path / "holder"
    path.write_text('{"owner": 123456789, "server": 123456789, "of": "an older release"}')
    server._lock_fd = os.open(path, os.O_RDWR)
    try:
        server._write_holder()
        assert nats_server._holder(server._lock_fd) == {"owner": os.getpid(), "server": 0}
    finally:
        server._unlock()
