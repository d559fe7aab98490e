"""What a message server's silence means, and what its monitoring is asked."""

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from diloco_shared.hub import watch as hub_watch
from diloco_shared.hub.watch import (
    LISTENS,
    NO_SPACE,
    READ_BYTES,
    READING_S_MAX,
    ROOM_BYTES,
    SILENT_FULL_S,
    SILENT_S,
    UNANSWERED_S,
    HubWatch,
    answers,
    loaded_at,
    read_by,
)

PORT = 4222


def silent(watch: HubWatch, now: float) -> str:
    return watch.look(now, answers=False, free_bytes=0)


@pytest.mark.parametrize(("said", "limit_s"), [(b"fine", SILENT_S), (NO_SPACE, SILENT_FULL_S)])
def test_a_server_that_says_nothing_for_long_is_started_anew(said: bytes, limit_s: float) -> None:
    watch = HubWatch()
    watch.said(said)
    assert watch.look(999.0, answers=True, free_bytes=0) == ""
    for now in (1000.0, 1000.0 + limit_s - 1):
        assert silent(watch, now) == ""
    why = f"it has answered nothing about its streams for {limit_s:.0f} s"
    assert silent(watch, 1000.0 + limit_s) == why


FULL = b"[7] 2026/11/30 10:08:44.625 [ERR] Filestore [S] Critical write error: write /d/1.blk"
SENT = b"[7] 2026/11/30 10:08:44.625 [ERR] 10.0.0.9:41862 - "


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        (FULL + NO_SPACE + b"\n", True),
        (FULL + NO_SPACE, True),
        (SENT + b'cid:6 - authentication error - User "no space left on device"\n', False),
        (SENT + b"cid:6 - n" + NO_SPACE + b"\n", False),
        (SENT + b"lid:6 - n" + NO_SPACE + b"\n", False),
        (SENT + b"rid:6 - n" + NO_SPACE + b"\n", False),
        # It writes others all the same.
        (b"[7] [WRN] Stream create failed: mkdir /d" + NO_SPACE + b" (10077)\n", False),
    ],
)
def test_nobody_who_reaches_its_port_makes_a_server_run_out_of_disk(
    line: bytes, counts: bool
) -> None:
    """It logs what they send, whoever they are, and would be started anew again and again."""
    watch = HubWatch()
    watch.said(b"[7] [INF] all is well\n" + line)
    assert watch.no_space is counts


def test_nobody_who_reaches_its_port_makes_a_server_have_listened() -> None:
    watch = HubWatch()
    watch.said(SENT + b'cid:6 - authentication error - User "' + LISTENS + b'"\n')
    assert not watch.listened
    watch.said(b"[7] [INF] " + LISTENS + b" 10.0.0.1:4222\n")
    assert watch.listened


def test_a_server_that_has_not_answered_yet_may_read_what_it_keeps() -> None:
    """It would begin anew each time it is started anew."""
    watch = HubWatch()
    silent(watch, 1000.0)
    assert silent(watch, 1000.0 + UNANSWERED_S - 1) == ""
    assert silent(watch, 1000.0 + UNANSWERED_S) != ""


def reads(watch: HubWatch, now: float, read_bytes: int | None) -> str:
    return watch.look(now, answers=False, free_bytes=0, read_bytes=read_bytes)


@pytest.mark.parametrize("said", [b"fine", NO_SPACE])
def test_a_server_that_reads_on_is_left_to_it(said: bytes) -> None:
    """After a power cut it may have to read all that it keeps, and would begin anew for ever."""
    watch = HubWatch()
    watch.said(said)
    patience_s = SILENT_FULL_S if said == NO_SPACE else UNANSWERED_S
    for n in range(4):
        assert reads(watch, 1000.0 + n * (patience_s - 1), n * READ_BYTES) == ""
    last = 1000.0 + 3 * (patience_s - 1)
    assert reads(watch, last + patience_s - 1, 4 * READ_BYTES - 1) == "", "our own questions"
    assert reads(watch, last + patience_s, 4 * READ_BYTES - 1) != ""


def test_a_server_that_reads_for_half_a_day_reads_in_a_circle() -> None:
    watch, step_s = HubWatch(), UNANSWERED_S / 2
    for n in range(int(READING_S_MAX / step_s)):
        assert reads(watch, n * step_s, n * READ_BYTES) == ""
    assert reads(
        watch, READING_S_MAX, 10**12
    ) == "it has answered nothing about its streams for " + (f"{READING_S_MAX:.0f} s")


def test_once_it_has_answered_what_it_reads_does_not_count() -> None:
    watch = HubWatch()
    watch.look(999.0, answers=True, free_bytes=0, read_bytes=0)
    assert reads(watch, 1000.0, 1) == ""
    assert reads(watch, 1000.0 + SILENT_S, 10**12) != ""


def refuses(watch: HubWatch, now: float, read_bytes: int = 0) -> str:
    return watch.look(now, answers=None, free_bytes=0, read_bytes=read_bytes)


def test_a_server_that_hangs_before_it_listens_is_started_anew() -> None:
    """That it refuses is no answer: it reads what it keeps, or nothing more."""
    watch = HubWatch()
    for n in range(4):
        assert refuses(watch, n * (UNANSWERED_S - 1), n * READ_BYTES) == "", "it reads on"
    last = 3 * (UNANSWERED_S - 1)
    assert refuses(watch, last + UNANSWERED_S - 1, 3 * READ_BYTES) == ""
    assert refuses(watch, last + UNANSWERED_S, 3 * READ_BYTES) != ""


def test_a_server_has_all_its_time_to_read_once_it_listens_as_well() -> None:
    """A node of several listens first, and then reads what it keeps."""
    watch = HubWatch()
    refuses(watch, 1000.0)
    silent(watch, 1001.0)
    assert silent(watch, 1000.0 + UNANSWERED_S - 1) == ""


@pytest.mark.parametrize("by", ["its log", "an answer"])
def test_one_that_has_listened_and_refuses_is_left_alone(by: str) -> None:
    """It listens elsewhere than its keeper was told, or ends."""
    watch = HubWatch()
    if by == "its log":
        watch.said(b"[1] [INF] " + LISTENS + b" 10.0.0.1:4222\n")
    else:
        watch.look(999.0, answers=True, free_bytes=0)
    for now in (1000.0, 1000.0 + UNANSWERED_S, 1000.0 + READING_S_MAX):
        assert refuses(watch, now) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody says")
def test_what_a_process_has_read_is_what_it_has_read(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_bytes(bytes(4 * READ_BYTES))
    before = read_by(os.getpid())
    assert before is not None
    assert len(kept.read_bytes()) == 4 * READ_BYTES
    after = read_by(os.getpid())
    assert after is not None and after - before >= 4 * READ_BYTES
    assert read_by(2**22 + 1) is None, "there is no such process"


def test_an_answer_in_between_ends_the_silence() -> None:
    watch = HubWatch()
    watch.look(999.0, answers=True, free_bytes=0)
    silent(watch, 1000.0)
    assert watch.look(1001.0, answers=True, free_bytes=0) == ""
    assert silent(watch, 1000.0 + SILENT_S) == "", "it begins to be silent"
    assert silent(watch, 1000.0 + 2 * SILENT_S - 1) == ""
    assert silent(watch, 1000.0 + 2 * SILENT_S) != ""


def test_room_is_of_no_interest_to_a_server_that_never_lacked_it() -> None:
    assert HubWatch().look(0.0, answers=True, free_bytes=ROOM_BYTES) == ""


class Monitoring:
    """As nats-server has it, with what a test has it say."""

    def __init__(self) -> None:
        self.says: dict[str, Any] = {}
        said = self.says

        class Answering(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(said[self.path.partition("?")[0]]).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Answering)
        self.place = ("127.0.0.1", self.server.server_address[1])


@pytest.fixture
def monitoring() -> Iterator[Monitoring]:
    found = Monitoring()
    serving = threading.Thread(target=found.server.serve_forever, args=(0.02,))
    serving.start()
    yield found
    found.server.shutdown()
    serving.join()
    found.server.server_close()


def test_when_it_read_its_configuration_is_told_by_its_own_monitoring(
    monitoring: Monitoring,
) -> None:
    monitoring.says["/varz"] = {"port": PORT, "config_load_time": "today"}
    assert loaded_at(monitoring.place, PORT) == "today"
    assert loaded_at(monitoring.place, PORT + 1) == "", "another server's"
    monitoring.says["/varz"] = {"port": PORT}
    assert loaded_at(monitoring.place, PORT) == ""
    monitoring.says["/varz"] = ["no object"]
    assert loaded_at(monitoring.place, PORT) == ""


TLS, AUTH = {"tls_required": True}, {"auth_required": True}


@pytest.mark.parametrize(
    ("port", "wants", "token", "closed"),
    [
        (PORT, TLS, "", "N1"),
        (PORT, TLS, "t", "N1"),
        (PORT, AUTH, "", "N1"),
        (PORT, AUTH, "t", ""),
        (PORT, {}, "", ""),
        (PORT + 1, TLS | AUTH, "", ""),
    ],
)
def test_it_lets_nobody_in_if_its_own_monitoring_says_so(
    monitoring: Monitoring, port: int, wants: dict[str, bool], token: str, closed: str
) -> None:
    monitoring.says["/varz"] = {"port": port, "server_id": "N1"} | wants
    assert hub_watch._closed(monitoring.place, PORT, token, 5.0) == closed


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A server that wants TLS or credentials: it takes down who comes without."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.setblocking(False)
        yield found


def came(listening: socket.socket) -> bool:
    try:
        listening.accept()[0].close()
    except BlockingIOError:
        return False
    return True


SAID: list[tuple[dict[str, Any], bool]] = [
    ({"server_id": "N1"}, True),
    ({"server_id": "N1", "disabled": True}, False),
    ({"server_id": "N2", "disabled": True}, True),  # nobody can ask ours
]


@pytest.mark.parametrize("wants", [TLS, AUTH])
@pytest.mark.parametrize(("said", "lives"), SAID)
def test_a_server_that_is_closed_is_asked_by_its_monitoring(
    monitoring: Monitoring,
    listening: socket.socket,
    said: dict[str, Any],
    lives: bool,
    wants: dict[str, bool],
) -> None:
    """Alone, once it is known to listen: it logs each connection that comes without."""
    port = listening.getsockname()[1]
    monitoring.says["/varz"] = {"port": port, "server_id": "N1"} | wants
    monitoring.says["/jsz"] = said
    assert answers("127.0.0.1", port, monitor=monitoring.place, listened=True) is lives
    assert not came(listening)
    assert answers("127.0.0.1", port, monitor=monitoring.place) is lives
    assert came(listening)


@pytest.mark.parametrize(("said", "lives"), SAID)
def test_what_monitoring_says_of_a_server_that_does_not_listen_yet_is_no_answer(
    monitoring: Monitoring, listening: socket.socket, said: dict[str, Any], lives: bool
) -> None:
    """It answers while the server reads what it keeps."""
    port = listening.getsockname()[1]
    listening.close()
    monitoring.says["/varz"] = {"port": port, "tls_required": True, "server_id": "N1"}
    monitoring.says["/jsz"] = said
    assert answers("127.0.0.1", port, monitor=monitoring.place) is None
    assert answers("127.0.0.1", port, monitor=monitoring.place, listened=True) is lives
