"""What commands say of answers that are lost, late, of something else, or of a run that is gone."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import diloco_cli.api
from diloco_cli.api import answers
from diloco_cli.commands import runs
from diloco_cli.commands.local import _ready
from diloco_cli.up.folder import Folder
from diloco_cli.words import CONFLICT, FAILED, NO_CLUSTER, UNKNOWN
from diloco_client import Client
from diloco_coordinator.api.views import brief_view, run_view
from diloco_shared.checking import check
from diloco_shared.protocol.records import RunPhase, RunRecord
from diloco_shared.spec.run import written

Diloco = Callable[..., tuple[int, str, str]]
Handle = Callable[[httpx.Request], httpx.Response]
NO_RUN = {"title": "No such run", "detail": "there is no run 'gone'; known: demo"}


class Server:
    """Answers as it is told to; requests are kept."""

    def __init__(self) -> None:
        self.handle: Handle = lambda _: httpx.Response(404, json=NO_RUN)
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.path}")
        return self.handle(request)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """At http://far:1."""
    found = Server()

    def client(url: str, token: str, **_: str) -> Client:
        return Client(url, token, transport=httpx.MockTransport(found))

    monkeypatch.setattr(diloco_cli.api, "Client", client)
    monkeypatch.setenv("DILOCO_URL", "http://far:1")
    monkeypatch.setenv("DILOCO_TOKEN", "t0ken")
    return found


def test_a_loop_of_deletions_ends_where_the_run_is_gone(server: Server, diloco: Diloco) -> None:
    """It was typed twice, say."""
    status, out, err = diloco("delete", "gone")
    assert (status, out) == (UNKNOWN, "") and "there is no run 'gone'" in err
    said = "there is no run gone: nothing is left to delete\n"
    assert diloco("delete", "gone", "--if-present") == (0, said, "")
    going = {"title": "The run is not over", "detail": "it is being stopped: try again"}
    server.handle = lambda _: httpx.Response(409, json=going)
    assert diloco("delete", "gone", "--if-present")[0] == CONFLICT
    server.handle = lambda _: httpx.Response(404, text="<h1>Not found</h1>")
    assert diloco("delete", "gone", "--if-present")[0] == UNKNOWN, "that is no coordinator"
    server.handle = lambda _: httpx.Response(204)
    assert diloco("delete", "gone", "--if-present") == (0, "run gone is deleted\n", "")


def test_a_cluster_is_ready_once_its_own_coordinator_answers(
    server: Server, tmp_path: Path
) -> None:
    """Two clusters that begin at once find the same port free. One of them gets it."""
    folder = Folder(tmp_path)
    folder.announce(url="http://127.0.0.1:8400")
    theirs, ready = "other", 200

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(ready)
        known = request.headers["Authorization"] == f"Bearer {theirs}"
        return httpx.Response(200 if known else 401, json={"name": "admin", "title": "?"})

    def both() -> set[bool]:
        return {answers(tmp_path), _ready(tmp_path, os.getpid())}

    server.handle = handle
    assert both() == {False}, "the coordinator has not made its token yet"
    mine = folder.secret("admin-token")
    assert both() == {False}, "that is another cluster's coordinator"
    theirs = mine
    assert both() == {True} and not _ready(tmp_path, os.getpid() + 1)
    ready = 503
    assert both() == {False}


class Restarting:
    """A cluster with one run, whose rounds come one a page. What it says of them, in turn."""

    def __init__(self, run: dict[str, Any], rounds: list[dict[str, Any]], *said: Any) -> None:
        told = {"events": [], "next": 0}
        self.answers = {"/v1/runs": {"runs": [run], "next": None}, "/v1/events": told}
        self.rounds, self.said, self.after = rounds, [*said], list[int]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/rounds"):
            return httpx.Response(200, json=self.answers[request.url.path])
        self.after.append(int(request.url.params["after"]))
        match self.said.pop(0) if self.said else 200:
            case 200:
                first, *rest = [r for r in self.rounds if r["seq"] > self.after[-1]]
                page = {"rounds": [first], "next": first["seq"] if rest else None}
                return httpx.Response(200, json=page)
            case int(status):
                return httpx.Response(status, json={"title": "No answer", "detail": "restarted"})
            case error:
                raise error


@pytest.mark.parametrize("lasts", [False, True])
def test_one_page_that_does_not_come_throws_no_other_away(
    server: Server,
    diloco: Diloco,
    run: Any,
    rounds: Any,
    monkeypatch: pytest.MonkeyPatch,
    lasts: bool,
) -> None:
    """A long run has thousands of pages, and a coordinator may be started anew meanwhile."""
    monkeypatch.setattr(diloco_cli.api, "AGAIN_S", 0.0)
    monkeypatch.setattr(runs, "PATIENCE_S", -1.0 if lasts else 150.0)
    gone = 503, httpx.ConnectError("refused"), httpx.ReadTimeout("late")
    server.handle = cluster = Restarting(run, rounds, 200, *gone)
    status, out, _ = diloco("report", "--json")
    assert status == 0 and (json.loads(out)["others_asked"] is None) == lasts
    first, *others = [r["seq"] for r in rounds[:-1]]
    assert cluster.after == ([0, first] if lasts else [0, first, first, first, first, *others])


def test_rounds_of_which_none_come_are_told_of_at_once(
    server: Server, diloco: Diloco, run: Any, rounds: Any
) -> None:
    """Nothing was read that would be lost."""
    server.handle = cluster = Restarting(run, rounds, 503)
    status, out, _ = diloco("report")
    assert status == 0 and "the rounds cannot be read now" in out and cluster.after == [0]


@pytest.fixture
def run_toml(tmp_path: Path) -> str:
    file = tmp_path / "run.toml"
    file.write_text('name = "demo"\n[budget]\nsteps = 96\n', encoding="utf-8")
    return str(file)


def half(phase: RunPhase) -> dict[str, Any]:
    """What is told of a run whose coordinator died while it was submitted, or deleted."""
    spec = written(check({"name": "demo", "budget": {"steps": 96}}))
    record = RunRecord(
        name="demo", spec=spec, desired="running", quorum=1, created_at=1.0, phase=phase
    )
    return run_view(record, None, brief_view(record, None, (), []))


def test_half_a_submission_is_no_run_that_exists(
    server: Server, diloco: Diloco, run_toml: str
) -> None:
    """Nobody works for it. Another submission takes it up."""
    taken = {"title": "The name is taken", "detail": "choose"}
    views, answers = [half("submitting"), half("there")], [httpx.Response(201, json=half("there"))]

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=views.pop(0))
        return answers.pop(0)

    server.handle = handle
    submit = ("submit", run_toml, "--if-absent")
    assert diloco(*submit)[0] == 0 and server.asked == ["GET /v1/runs/demo", "POST /v1/runs"]
    assert diloco(*submit)[0] == 0 and len(server.asked) == 3 and not answers
    views, answers = [half("submitting")] * 2, [httpx.Response(409, json=taken)]
    status, _, err = diloco(*submit)
    assert status == CONFLICT and "choose" in err, "another coordinator is at it, and may yet die"


def test_a_conflict_about_something_else_is_told_as_it_is(
    server: Server, diloco: Diloco, run_toml: str
) -> None:
    """As of a checkpoint that is being removed: there is no run of that name."""
    about = {"title": "The checkpoint is being removed", "detail": "take another one"}

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(404, json=NO_RUN)
        return httpx.Response(409, json=about)

    server.handle = handle
    status, out, err = diloco("submit", run_toml, "--if-absent")
    assert (status, out) == (CONFLICT, "") and "take another one" in err


def test_a_run_that_is_being_deleted_is_none_that_exists(
    server: Server, diloco: Diloco, run_toml: str
) -> None:
    server.handle = lambda _: httpx.Response(200, json=half("deleting"))
    status, out, err = diloco("submit", run_toml, "--if-absent")
    assert (status, out) == (CONFLICT, "") and "if that was cut off, delete it again" in err


def test_events_of_a_run_that_never_was_are_an_error(server: Server, diloco: Diloco) -> None:
    told: list[Any] = []
    run = {"name": "demo", "state": "queued"}
    answers = {"/v1/events": {"events": told, "next": 0}, "/v1/runs/demo": run}

    def handle(request: httpx.Request) -> httpx.Response:
        found = answers.get(request.url.path)
        return (
            httpx.Response(404, json=NO_RUN) if found is None else httpx.Response(200, json=found)
        )

    server.handle = handle
    status, out, err = diloco("events", "gone")
    assert (status, out) == (UNKNOWN, "") and "known: demo" in err
    assert diloco("events", "gone", "--json")[0] == UNKNOWN
    assert diloco("events", "demo") == diloco("events") == (0, "nothing happened yet\n", "")
    told.append({"seq": 1, "at": 0.0, "source": "a", "kind": "leave", "text": "a", "data": {}})
    del server.asked[:]
    assert diloco("events", "gone")[0] == 0, "it was deleted, and this is left"
    assert server.asked == ["GET /v1/events"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("stop", "demo"), "what was asked for may have been done all the same, so look before"),
        (("delete", "demo"), "what was asked for may have been done all the same, so look before"),
        (("members",), "try again in a few seconds, and if that is no help, see that the address"),
    ],
)
def test_a_lost_answer_is_not_said_to_be_nobodys(
    server: Server, diloco: Diloco, command: tuple[str, ...], says: str
) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/runs/demo" and request.method == "GET":
            return httpx.Response(200, json={"name": "demo", "state": "running"})
        raise httpx.ReadError("connection reset")

    server.handle = handle
    status, out, err = diloco(*command)
    lost = "the coordinator at http://far:1 took the request, and its answer was lost (connection "
    assert (status, out) == (NO_CLUSTER, "") and err.startswith(f"diloco: {lost}") and says in err


def test_who_does_not_answer_a_change_may_have_made_it(server: Server, diloco: Diloco) -> None:
    def handle(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("timed out")

    server.handle = handle
    for command in (("create", "demo"), ("delete", "demo", "3")):
        status, _, err = diloco("checkpoint", *command)
        assert status == NO_CLUSTER and "may have been done all the same" in err
        assert "message server" not in err


@pytest.mark.parametrize("command", [("runs",), ("status",), ("status", "demo"), ("members",)])
def test_json_of_something_else_is_no_traceback(
    server: Server, diloco: Diloco, command: tuple[str, ...]
) -> None:
    bodies: list[Any] = [[], {}, {"status": "ok"}]
    for body in bodies:
        said = json.dumps(body)
        server.handle = lambda _, said=said: httpx.Response(200, text=said)  # type: ignore[misc]
        status, out, err = diloco(*command)
        assert (status, out) == (FAILED, "")
        assert err.startswith("diloco: No API there: what answers at http://far:1 sends other JSON")


@pytest.mark.parametrize("code", [502, 503, 504])
def test_a_proxy_without_a_coordinator_behind_it_does_not_answer(
    server: Server, diloco: Diloco, code: int
) -> None:
    server.handle = lambda _: httpx.Response(code, text="<h1>Bad gateway</h1>")
    assert diloco("runs")[0] == NO_CLUSTER


def test_a_redirect_names_the_address_to_use(server: Server, diloco: Diloco) -> None:
    server.handle = lambda r: httpx.Response(
        301, headers={"Location": str(r.url.copy_with(scheme="https"))}
    )
    status, _, err = diloco("runs")
    assert status == FAILED
    assert err == (
        "diloco: The address is another one: what answers at http://far:1 sends on to "
        "https://far:1: use that address\n"
    )


def test_rows_of_the_audit_stay_whole_in_a_pipe(server: Server, diloco: Diloco) -> None:
    row = {
        "at": 0.0,
        "actor": "anna",
        "address": "10.0.0.1",
        "method": "POST",
        "route": "/v1/runs/{run}/checkpoints/{number}/restore",
        "target": {"run": "demo", "number": "3", "as": "again"},
        "status": 403,
        "outcome": "refused",
        "why": "The token does not allow this",
        "left_out": 5,
    }
    server.handle = lambda _: httpx.Response(200, json={"rows": [row, row]})
    status, out, _ = diloco("audit")
    lines = out.splitlines()
    assert status == 0 and len(lines) == 2
    assert all("anna  POST" in line and "refused before it" in line for line in lines)
