"""What a message server's silence means, and what its monitoring is asked."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from diloco_shared.process import hub_watch
from diloco_shared.process.hub_watch import (
    NO_SPACE,
    ROOM_BYTES,
    SILENT_FULL_S,
    SILENT_S,
    UNANSWERED_S,
    HubWatch,
    answers,
    loaded_at,
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


def test_a_server_that_has_not_answered_yet_may_read_what_it_keeps() -> None:
    """It would begin anew each time it is started anew."""
    watch = HubWatch()
    silent(watch, 1000.0)
    assert silent(watch, 1000.0 + UNANSWERED_S - 1) == ""
    assert silent(watch, 1000.0 + UNANSWERED_S) != ""


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


@pytest.mark.parametrize(
    ("port", "tls", "wants"),
    [(PORT, True, "N1"), (PORT, False, ""), (PORT + 1, True, ""), (PORT + 1, False, "")],
)
def test_it_wants_tls_if_its_own_monitoring_says_so(
    monitoring: Monitoring, port: int, tls: bool, wants: str
) -> None:
    monitoring.says["/varz"] = {"port": port, "tls_required": tls, "server_id": "N1"}
    assert hub_watch._wants_tls(monitoring.place, PORT, 5.0) == wants


@pytest.mark.parametrize(
    ("said", "lives"),
    [
        ({"server_id": "N1"}, True),
        ({"server_id": "N1", "disabled": True}, False),
        ({"server_id": "N2", "disabled": True}, True),  # nobody can ask ours
    ],
)
def test_a_server_that_wants_tls_is_asked_by_its_monitoring(
    monitoring: Monitoring, said: dict[str, Any], lives: bool
) -> None:
    monitoring.says["/varz"] = {"port": PORT, "tls_required": True, "server_id": "N1"}
    monitoring.says["/jsz"] = said
    assert answers("127.0.0.1", PORT, monitor=monitoring.place) is lives
