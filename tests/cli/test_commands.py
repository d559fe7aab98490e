"""The commands against a server that answers from a table: output, errors, exit statuses."""

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

import diloco_cli.api
from diloco_cli.__main__ import main
from diloco_cli.up.folder import Folder
from diloco_cli.words import CONFLICT, INVALID, NO_CLUSTER, REFUSED, UNKNOWN
from diloco_client import Client

Row = dict[str, Any]
Answer = tuple[int, Any]


EVALUATION = {"val_loss": 1.5, "steps": 96, "each": {"code": 1.25, "talk": 2.0}}


class Server:
    """Routes and what they answer; requests are kept."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[httpx.Request] = []

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        problem = {"title": "No such thing", "detail": "known: a, b"}
        status, body = self.answers.get(f"{request.method} {request.url.path}", (404, problem))
        return httpx.Response(status, json=body)

    @property
    def last_body(self) -> Any:
        return json.loads(self.requests[-1].content)


@pytest.fixture
def server(
    monkeypatch: pytest.MonkeyPatch, run: Row, rounds: list[Row], events: list[Row]
) -> Server:
    """A cluster at http://far:1 with one run."""
    found = Server()
    found.answers = {
        "GET /v1/runs": (200, {"runs": [run], "next": None}),
        "GET /v1/runs/demo": (200, run),
        "GET /v1/runs/demo/rounds": (200, {"rounds": rounds, "next": None}),
        "GET /v1/runs/demo/metrics": (200, {"evaluations": [EVALUATION]}),
        "GET /v1/events": (200, {"events": events, "next": 500}),
        "GET /v1/members": (200, {"members": []}),
    }

    def client(url: str, token: str, **_: str) -> Client:
        return Client(url, token, transport=httpx.MockTransport(found.handle))

    monkeypatch.setattr(diloco_cli.api, "Client", client)
    monkeypatch.setenv("DILOCO_URL", "http://far:1")
    monkeypatch.setenv("DILOCO_TOKEN", "t0ken")
    return found


Diloco = Callable[..., tuple[int, str, str]]


@pytest.fixture
def diloco(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Diloco:
    """Run the command: exit status, standard output, standard error."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["diloco", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        status = 0
        try:
            main()
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return command


def test_the_command_says_which_version_it_is(diloco: Diloco) -> None:
    status, out, _ = diloco("--version")
    assert (status, out) == (0, f"decoupled-diloco {version('decoupled-diloco')}\n")


def test_a_command_speaks_to_the_cluster_of_the_environment(server: Server, diloco: Diloco) -> None:
    status, out, _ = diloco("status", "demo", "--json")
    assert status == 0
    assert json.loads(out)["name"] == "demo"
    (request, *_) = server.requests
    assert request.url.host == "far"
    assert request.headers["authorization"] == "Bearer t0ken"


def test_options_come_before_the_environment(
    server: Server, diloco: Diloco, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DILOCO_TOKEN")
    (tmp_path / "token").write_text("other\n")
    diloco("runs", "--url", "http://near:2", "--token-file", str(tmp_path / "token"))
    assert server.requests[0].url.host == "near"
    assert server.requests[0].headers["authorization"] == "Bearer other"


def test_without_a_name_the_newest_run_is_meant(server: Server, diloco: Diloco, run: Row) -> None:
    older = run | {"name": "older", "created_at": 0.5}
    server.answers["GET /v1/runs"] = (200, {"runs": [run, older], "next": None})
    _, out, _ = diloco("status")
    assert out.startswith("run demo: finished - its budget is used up\n")


def test_without_a_name_a_run_that_is_going_on_is_meant(
    server: Server, diloco: Diloco, run: Row
) -> None:
    """Not one that waits behind it, nor one that is over."""
    others = [
        run | {"name": "going", "created_at": 0.5, "state": "running", "reason": "2 of 2 ready"},
        run | {"name": "later", "created_at": 9.0, "state": "queued", "reason": "waits"},
    ]
    server.answers["GET /v1/runs"] = (200, {"runs": [*others, run], "next": None})
    server.answers["GET /v1/runs/going/metrics"] = (200, {"evaluations": []})
    server.answers["GET /v1/runs/going/rounds"] = (200, {"rounds": [], "next": None})
    assert diloco("status")[1].startswith("run going: running - 2 of 2 ready\n")


def test_status_tells_alive_participating_and_useful_apart(server: Server, diloco: Diloco) -> None:
    _, out, _ = diloco("status")
    assert "learners: 3 are alive, and 2 take part in merges" in out
    assert "tokens: 153,600 were processed, and 80.0 % were useful" in out
    assert "validation loss: it is 1.5000 after 96 steps" in out
    assert "by corpus: code 1.2500, talk 2.0000" in out
    assert "round 4 was committed: it merged 3 contributions" in out
    assert "2 of 3 learners were ready, and a merge needs 2; it waited 0.25 s more" in out
    assert "data-parallel training would have sent 800 kB" in out
    assert "refused: late 2" in out


def test_rounds_say_why_each_learner_was_merged_or_not(server: Server, diloco: Diloco) -> None:
    status, out, _ = diloco("rounds", "demo", "--newest", "4")
    assert status == 0
    assert "round 1 of fragment 1 was committed: it merged 3 contributions" in out
    assert "  b did not come in time: is silent" in out
    assert "round 0" not in out
    # Rounds that are not shown are not fetched either.
    assert server.requests[-1].url.params["newest"] == "4"
    diloco("status")
    assert server.requests[-1].url.params["newest"] == "1"


@pytest.mark.parametrize("command", ["rounds", "report", "status"])
def test_a_run_that_waits_for_learners_has_no_rounds_yet(
    server: Server, diloco: Diloco, run: Row, command: str
) -> None:
    run |= {"status": None, "state": "queued", "reason": "queued: 0 of 1 learners free"}
    server.answers["GET /v1/runs/demo/rounds"] = (503, {"title": "no tape"})
    assert diloco(command, "demo")[0] == 0


AWAY = {"title": "The bus does not answer", "detail": "no answer; try again in a few seconds"}


def test_status_says_what_is_known_while_the_message_server_is_away(
    server: Server, diloco: Diloco, run: Row
) -> None:
    run |= {"state": "running", "reason": "2 of 2 ready; the coordinator is cut off"}
    server.answers["GET /v1/runs/demo/rounds"] = (503, AWAY)
    status, out, _ = diloco("status")
    assert status == 0 and out.startswith("run demo: running - 2 of 2 ready; the coordinator is")
    why = "The bus does not answer: no answer; try again in a few seconds"
    assert out.endswith(f"\nthe rounds cannot be read now: {why}\n")
    assert json.loads(diloco("status", "--json")[1])["state"] == "running"


def test_status_and_report_say_what_is_known_of_a_run_whose_tape_cannot_be_read(
    server: Server, diloco: Diloco, tmp_path: Path
) -> None:
    """That does not pass, and one record is no reason to show nothing."""
    strange = {"title": "Written by another release", "detail": "record 7 cannot be read"}
    server.answers["GET /v1/runs/demo/rounds"] = (409, strange)
    for command in ("status", "report"):
        status, out, _ = diloco(command)
        assert status == 0
        assert "the rounds cannot be read: Written by another release: record 7" in out
    assert diloco("rounds")[0] == CONFLICT, "whoever asks for them alone"
    page = tmp_path / "r.html"
    status, out, told = diloco("report", "--html", str(page))
    assert status == CONFLICT and not out and not page.exists() and "record 7" in told


def test_a_report_without_rounds_has_no_figure_that_needs_them(
    server: Server, diloco: Diloco, run: Row, tmp_path: Path
) -> None:
    server.answers["GET /v1/runs/demo/rounds"] = (503, AWAY)
    status, out, _ = diloco("report")
    assert status == 0 and "the rounds cannot be read now: The bus does not answer" in out
    committed, skipped = (run["status"][f"rounds_{of}"] for of in ("committed", "skipped"))
    assert f"rounds: {committed} committed, {skipped} skipped\n" in out
    assert "was taken away\n" in out and "went on without it" not in out
    figures = json.loads(diloco("report", "--json")[1])
    assert figures["rounds_committed_while_down"] is None and figures["others_asked"] is None
    page = tmp_path / "r.html"
    status, out, told = diloco("report", "--html", str(page))
    assert status == NO_CLUSTER and not out and not page.exists()
    assert told.startswith(f"diloco: {page} is not written, since the rounds cannot be read: ")


def test_a_coordinator_that_took_the_request_is_not_said_to_be_away(
    server: Server, diloco: Diloco, run: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = server.handle

    def waits(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/rounds"):
            raise httpx.ReadTimeout("timed out", request=request)
        return answer(request)

    monkeypatch.setattr(server, "handle", waits)
    status, out, _ = diloco("status")
    assert status == 0 and out.startswith("run demo: finished")
    why = "the coordinator at http://far:1 took the request, and has not answered it within 70 s: "
    rounds = "it may be waiting for the message server, so try again in a few seconds"
    other = "it may be busy, or wait for something itself, so try again in a few seconds"
    assert out.endswith(f"the rounds cannot be read now: {why}{rounds}\n")
    assert diloco("rounds") == (NO_CLUSTER, "", f"diloco: {why}{other}\n")


def test_report_writes_a_page_and_prints_figures(
    server: Server, diloco: Diloco, tmp_path: Path
) -> None:
    page = tmp_path / "r.html"
    status, out, _ = diloco("report", "demo", "--json", "--html", str(page))
    figures = json.loads(out)
    assert status == 0
    assert figures["rounds_committed_while_down"] == 2
    assert {"machine", "versions", "command", "seed"} <= figures.keys()
    assert page.read_text().startswith("<!doctype html>")


def test_an_event_that_cannot_be_read_is_passed_over(
    server: Server, diloco: Diloco, events: list[Row], tmp_path: Path
) -> None:
    """Of a coordinator of an older release, which lets them through."""
    asked = ("report", "--html", str(tmp_path / "r.html"))
    told = [diloco(*command)[:2] for command in (asked, ("watch",))]
    bad = [
        ("setting", {"name": "paused"}),
        ("returned", {}),
        ("returned", {"learner": "b", "incarnation": 1, "rounds": "x"}),
        ("evaluation", {}),
        ("fault-applied", {"kind": "kill"}),
    ]
    last = {"source": "b", "text": "x", "run": "demo", "at": events[-1]["at"], "seq": 600}
    more = [last | {"kind": kind, "data": data} for kind, data in bad]
    server.answers["GET /v1/events"] = (200, {"events": [*events, *more], "next": 600})
    assert [diloco(*command)[:2] for command in (asked, ("watch",))] == told
    assert told[0][0] == 0


def test_a_report_for_people_says_where_its_page_is(
    server: Server, diloco: Diloco, tmp_path: Path
) -> None:
    page = tmp_path / "r.html"
    status, out, _ = diloco("report", "demo", "--html", str(page))
    assert status == 0 and out.endswith(f"page with charts: {page}\n")
    assert "{" not in out, "sentences, and no dictionaries"
    nowhere = tmp_path / "no" / "such" / "r.html"
    status, out, told = diloco("report", "demo", "--html", str(nowhere))
    assert status != 0 and not out
    assert told == f"diloco: {nowhere} cannot be written: no such file or directory\n"


@pytest.mark.parametrize(
    ("verb", "then"),
    [
        ("pause", "every learner rests after its step"),
        ("resume", "the learners go on"),
        ("stop", "it merges once more, and ends"),
    ],
)
def test_verbs_change_the_run(
    server: Server, diloco: Diloco, run: Row, verb: str, then: str
) -> None:
    server.answers[f"POST /v1/runs/demo/{verb}"] = (200, run)
    assert diloco(verb, "demo")[:2] == (0, f"run demo: {then}\n")


def test_a_run_without_its_state_begins_again_when_asked_to(
    server: Server, diloco: Diloco, run: Row
) -> None:
    server.answers["POST /v1/runs/demo/begin-again"] = (202, run)
    told = "run demo begins a new epoch from its published parameters\n"
    assert diloco("begin-again", "demo")[:2] == (0, told)


def test_watch_ends_with_the_run_and_speaks_json_lines(server: Server, diloco: Diloco) -> None:
    status, out, _ = diloco("watch", "--json")
    assert status == 0
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["finished"]
    assert "run demo: finished" in diloco("watch")[1]


@pytest.mark.parametrize(
    ("arguments", "body"),
    [
        (["kill", "b"], {"kind": "kill", "target": "b", "after_s": 0.0}),
        (["kill", "b", "--at-step", "0"], {"kind": "kill", "target": "b", "at_step": 0}),
        (["hang", "nats", "--for", "3", "--after", "1"], {"duration_s": 3.0, "after_s": 1.0}),
        (["slow", "b", "--factor", "4"], {"factor": 4.0, "duration_s": 10.0}),
    ],
)
def test_chaos_asks_for_what_was_said(
    server: Server, diloco: Diloco, arguments: list[str], body: Row
) -> None:
    server.answers["POST /v1/chaos"] = (202, {"id": "fault-1", "when": "in 0 s"})
    status, out, _ = diloco("chaos", *arguments)
    assert status == 0
    assert out.startswith("fault-1: ")
    assert body.items() <= server.last_body.items()
    assert ("duration_s" in server.last_body) == (arguments[0] in ("hang", "slow"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kill", "b", "--for", "5"], "--for is for hang and slow"),
        (["hang", "b", "--factor", "3"], "--factor is for slow"),
    ],
)
def test_an_option_of_another_fault_is_not_ignored(
    server: Server, diloco: Diloco, arguments: list[str], said: str
) -> None:
    server.answers["POST /v1/chaos"] = (202, {"id": "fault-1", "when": "in 0 s"})
    status, _, err = diloco("chaos", *arguments)
    assert status != 0 and said in err
    assert server.requests == []


@pytest.mark.parametrize("option", ["--for", "--after", "--factor"])
def test_a_fault_without_an_end_is_refused(server: Server, diloco: Diloco, option: str) -> None:
    status, _, err = diloco("chaos", "slow", "b", option, "inf")
    assert (status, err) == (INVALID, f"diloco: {option} inf: give a number that is finite\n")
    assert server.requests == []


def test_an_unknown_run_or_learner_is_told_with_the_known_ones(
    server: Server, diloco: Diloco
) -> None:
    status, out, err = diloco("chaos", "kill", "nobody")
    assert (status, out) == (UNKNOWN, "")
    assert err == "diloco: No such thing: known: a, b\n"
    assert diloco("status", "other")[0] == UNKNOWN


def test_every_fault_of_a_run_is_named(server: Server, diloco: Diloco, tmp_path: Path) -> None:
    faults = [{"path": "algorithm.fragments", "message": "must be at least 1"}]
    faults += [{"path": "budget", "message": "give exactly one"}]
    problem = {"title": "Invalid run", "detail": "2 faults", "errors": faults}
    server.answers["POST /v1/runs"] = (422, problem)
    file = tmp_path / "run.toml"
    file.write_text('name = "x"\n')
    status, _, err = diloco("submit", str(file))
    assert status == INVALID
    assert "  algorithm.fragments: must be at least 1\n  budget: give exactly one" in err


def test_a_name_that_is_taken_is_a_conflict_unless_told_otherwise(
    server: Server, diloco: Diloco, tmp_path: Path
) -> None:
    server.answers["POST /v1/runs"] = (409, {"title": "The name is taken", "detail": "choose"})
    file = tmp_path / "run.toml"
    file.write_text('name = "demo"\n')
    assert diloco("submit", str(file))[0] == CONFLICT
    assert diloco("submit", str(file), "--if-absent")[0] == 0


@pytest.mark.parametrize("text", ["name = ", "\xff"])
def test_a_file_that_is_no_toml_is_named(
    server: Server, diloco: Diloco, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode("latin-1"))
    status, _, err = diloco("submit", str(file))
    assert status == INVALID
    assert str(file) in err
    assert diloco("submit", str(tmp_path / "none.toml"))[0] == INVALID


def test_a_value_of_toml_that_json_has_not_is_named(
    server: Server, diloco: Diloco, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "name = 2024-01-01\n[inner]\nlearning_rate = inf\n"
        "[data]\nmixture = [{source = 'a'}, {weight = nan, source = 07:30:00}]\n"
    )
    status, _, err = diloco("submit", str(file))
    assert status == INVALID
    assert err == (
        "diloco: name: is a date: put it in quotes; "
        "inner.learning_rate: is inf: give a number that is finite; "
        "data.mixture.1.weight: is nan: give a number that is finite; "
        "data.mixture.1.source: is a time: put it in quotes\n"
    )
    assert server.requests == []


def test_a_refused_token_says_where_tokens_are(server: Server, diloco: Diloco) -> None:
    server.answers["GET /v1/runs"] = (401, {"title": "A token is needed", "detail": "send it"})
    status, _, err = diloco("runs")
    assert status == REFUSED
    assert "DILOCO_TOKEN" in err


def test_chaos_that_is_off_is_refused(server: Server, diloco: Diloco) -> None:
    off = {"title": "Chaos is off", "detail": "start the deployment with DILOCO_CHAOS=1"}
    server.answers["POST /v1/chaos"] = (403, off)
    status, _, err = diloco("chaos", "kill", "b")
    assert status == REFUSED
    assert "DILOCO_CHAOS=1" in err


def test_no_run_says_how_to_get_one(server: Server, diloco: Diloco) -> None:
    server.answers["GET /v1/runs"] = (200, {"runs": [], "next": None})
    status, _, err = diloco("watch")
    assert status == UNKNOWN
    assert "diloco submit run.toml" in err


def test_a_member_is_drained_and_back(server: Server, diloco: Diloco) -> None:
    member = {"id": "a", "role": "learner", "alive": True, "assigned": "", "pid": 7, "host": "h"}
    server.answers["POST /v1/members/a/drain"] = (200, member | {"draining": True})
    server.answers["DELETE /v1/members/a/drain"] = (200, member | {"draining": False})
    assert "a: alive, draining, has no run" in diloco("drain", "a")[1]
    assert "a: alive, has no run" in diloco("drain", "a", "--undo")[1]


def test_a_syncer_that_drains_says_what_it_waits_for(server: Server, diloco: Diloco) -> None:
    member = {"id": "s", "role": "syncer", "alive": True, "assigned": "r", "pid": 7, "host": "h"}
    member |= {"draining": True, "state": "leading", "stays": "hands over run r to t"}
    server.answers["POST /v1/members/s/drain"] = (200, member)
    said = " ".join(diloco("drain", "s")[1].split())
    assert said.startswith("s: alive, draining, works for r, leading (syncer, process 7 on h")
    assert said.endswith("): hands over run r to t")


def test_a_learner_that_cannot_work_is_not_said_to(server: Server, diloco: Diloco) -> None:
    common = {"role": "learner", "alive": True, "assigned": "demo", "pid": 7, "host": "h"}
    unfit = {"id": "a", **common, "state": "unfit", "reason": "there is no /text", "learner": None}
    members = [unfit, {"id": "b", **common, "state": "working", "reason": ""}]
    server.answers["GET /v1/members"] = (200, {"members": members})
    assert diloco("members")[1].splitlines() == [
        "a: alive, cannot work for demo (learner, process 7 on h): there is no /text",
        "b: alive, works for demo (learner, process 7 on h)",
    ]


def test_syncers_show_what_they_do_for_their_run(server: Server, diloco: Diloco) -> None:
    common = {"role": "syncer", "alive": True, "assigned": "demo", "pid": 7, "host": "h"}
    standby = {"state": "standby", "reason": "", "lag_records": 3}
    unfit = {"state": "ineligible", "reason": "record 8", "lag_records": 40}
    members = [{"id": "s1", **common, **standby}, {"id": "s2", **common, **unfit}]
    server.answers["GET /v1/members"] = (200, {"members": members})
    assert diloco("members")[1].splitlines() == [
        "s1: alive, works for demo, standby, 3 records behind (syncer, process 7 on h)",
        "s2: alive, works for demo, ineligible, 40 records behind (syncer, process 7 on h): "
        "record 8",
    ]


def test_the_page_of_a_cluster_has_its_token_where_no_server_sees_it(
    server: Server, diloco: Diloco
) -> None:
    assert diloco("page")[:2] == (0, "http://far:1/#token=t0ken\n")
    assert server.requests == []


@pytest.mark.parametrize(
    ("words", "done"),
    [
        ("delete demo", {"run": "demo", "deleted": True}),
        ("delete gone --if-present", {"run": "gone", "deleted": False}),
        ("forget a", {"member": "a", "forgotten": True}),
        ("token revoke eve", {"name": "eve", "revoked": True}),
        ("page", {"page": "http://far:1/#token=t0ken"}),
    ],
)
def test_what_was_done_is_told_to_a_script(
    server: Server, diloco: Diloco, words: str, done: Row
) -> None:
    for path in ("runs/demo", "members/a", "tokens/eve"):
        server.answers[f"DELETE /v1/{path}"] = (200, {})
    server.answers["DELETE /v1/runs/gone"] = (404, {"title": "No such run", "detail": "known: a"})
    status, out, err = diloco(*words.split(), "--json")
    assert (status, json.loads(out), err) == (0, done, "")


# --- without a server ----------------------------------------------------------------------------


def test_no_cluster_here_says_how_to_get_one(diloco: Diloco, tmp_path: Path) -> None:
    status, out, err = diloco("status", "--data", str(tmp_path))
    assert (status, out) == (NO_CLUSTER, "")
    assert "diloco up" in err and "--url" in err
    assert diloco("down", "--data", str(tmp_path))[0] == NO_CLUSTER


def test_a_cluster_that_does_not_answer_is_named(diloco: Diloco, free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}"
    status, _, err = diloco("status", "--url", url, "--token", "x")
    assert status == NO_CLUSTER
    assert url in err


def test_a_coordinator_that_is_being_started_again_is_waited_for_and_not_started_twice(
    diloco: Diloco, free_port: int, tmp_path: Path
) -> None:
    """After `diloco chaos kill coordinator`: `diloco up` is there, and starts it again."""
    folder = Folder(tmp_path)
    folder.take()
    folder.secret("admin-token")
    folder.announce(url=f"http://127.0.0.1:{free_port}", nats="")
    status, _, err = diloco("status", "--data", str(tmp_path))
    assert status == NO_CLUSTER
    assert f"'diloco up' is running here (process {os.getpid()})" in err and "try again" in err
    folder.release()
    assert "is not running any more: start it again" in diloco("status", "--data", str(tmp_path))[2]


def test_a_url_without_a_token_or_a_scheme_is_refused(diloco: Diloco) -> None:
    assert diloco("status", "--url", "http://far:1")[0] == REFUSED
    assert diloco("status", "--url", "far:1", "--token", "x")[0] == INVALID


def test_config_names_every_fault_and_prints_what_is_good(diloco: Diloco, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "A B"\n[algorithm]\nfragments = 0\nspeed = 9\n')
    status, _, err = diloco("config", str(file))
    assert status == INVALID
    for path in ("name", "algorithm.fragments", "algorithm.speed", "budget"):
        assert f"  {path}: " in err
    file.write_text('name = "x"\n[budget]\nsteps = 10\n')
    status, out, _ = diloco("config", str(file), "--json")
    assert status == 0
    assert json.loads(out)["algorithm"]["sync_every_steps"] == 24


def test_every_setting_is_explained(diloco: Diloco) -> None:
    status, out, _ = diloco("config", "--explain")
    assert status == 0
    settings = [line for line in out.splitlines() if " = " in line and ": " in line]
    assert any(line.startswith("algorithm.quorum = 1: Contributions that") for line in settings)
    assert all(line.split(": ", 1)[1] for line in settings), "a setting without a reason"
    assert "preset short" in out
    assert diloco("config")[0] == 2


def test_versions_are_told(diloco: Diloco) -> None:
    _, out, _ = diloco("version", "--json")
    assert "decoupled-diloco" in json.loads(out)["versions"]


def test_members_of_a_hub_that_lost_its_majority_are_those_heard_last(
    server: Server, diloco: Diloco
) -> None:
    ready = server.handle

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(503, text="the hub has lost its majority\n")
        return ready(request)

    server.handle = handle  # type: ignore[method-assign]
    status, out, _ = diloco("members")
    assert status == 0
    assert out.splitlines()[0] == "the hub has lost its majority; this is what was heard last"
    told = "the coordinator cannot reach the message server, and this is what it heard last"
    server.answers["GET /v1/members"] = (200, {"members": [], "cut_off": told})
    assert diloco("members")[1].splitlines()[0] == told, "in the words that came with them"
    server.answers["GET /v1/members"] = (200, {"members": [], "cut_off": ""})
    assert "heard last" not in diloco("members")[1]
