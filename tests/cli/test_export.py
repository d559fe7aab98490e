"""`diloco export` against a scripted server: shown, downloaded, cut off, resumed."""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

import diloco_cli.api
from diloco_cli import downloading
from diloco_cli.__main__ import main
from diloco_cli.commands import export as command
from diloco_cli.words import CONFLICT, FAILED, INVALID, NO_CLUSTER, UNKNOWN
from diloco_client import Client
from diloco_shared.hf.weights import digest_of, open_weights

FILES = {
    "model.safetensors": bytes(range(256)) * 8000,
    "config.json": b"{}\n",
    "diloco.json": b'{"format": 1}\n',
}
PLACE = "/v1/runs/demo/exports"


class Server:
    """One export, which is complete after `looks` looks at it."""

    def __init__(self) -> None:
        self.looks = 2
        self.state: dict[str, Any] = {"state": "complete"}
        self.files = dict(FILES)
        self.asked: list[Any] = []
        self.ranges: list[str] = []
        self.removed: list[str] = []
        self.removes = 204
        self.begun = self.busy = 0
        self.refuses: tuple[int, dict[str, str]] | None = None
        # Of what a file's answer is made: by default all of it.
        self.body: Callable[[bytes], Any] = lambda data: data

    def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method == "POST" and path == PLACE:
            self.busy -= 1
            if self.refuses and self.busy:
                return httpx.Response(self.refuses[0], json=self.refuses[1])
            self.begun += 1
            self.asked.append(json.loads(request.content))
            return httpx.Response(202, json=self.view())
        if request.method == "DELETE":
            self.removed.append(path.removeprefix(f"{PLACE}/"))
            return httpx.Response(self.removes)
        if path == f"{PLACE}/e{self.begun}":
            self.looks -= 1
            return httpx.Response(200, json=self.view())
        if path.startswith(f"{PLACE}/e{self.begun}/files/"):
            return self.file(path.rpartition("/")[2], request.headers.get("Range", ""))
        problem = {"title": "No such export", "detail": f"known: e{self.begun}"}
        return httpx.Response(404, json=problem)

    def view(self) -> dict[str, Any]:
        shown = {
            "id": f"e{self.begun}",
            "run": "demo",
            "asked": {"version": None, "checkpoint": "", "dtype": "fp32"},
            "steps": 240,
            "versions": [4, 5, 4],
            "files": [],
            "progress": {"stage": "fetching", "bytes_done": 50, "bytes_total": 100},
        }
        if self.looks > 0:
            return shown | {"state": "running"}
        files = [
            {"name": name, "bytes": len(data), "sha256": hashlib.sha256(FILES[name]).hexdigest()}
            for name, data in self.files.items()
        ]
        return shown | {"files": files, "progress": None, "reason": ""} | self.state

    def file(self, name: str, asked: str) -> httpx.Response:
        self.ranges.append(f"{name} {asked}".strip())
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        code = 206 if start else 200
        return httpx.Response(code, content=self.body(self.files[name][start:]))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()

    def client(url: str, token: str, **_: str) -> Client:
        return Client(url, token, transport=httpx.MockTransport(found.handle))

    monkeypatch.setattr(diloco_cli.api, "Client", client)
    monkeypatch.setattr(command, "LOOK_S", 0.0)
    monkeypatch.setattr(downloading, "RETRY_S", 0.0)
    monkeypatch.setenv("DILOCO_URL", "http://far:1")
    monkeypatch.setenv("DILOCO_TOKEN", "t0ken")
    return found


def export(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Its exit status."""
    monkeypatch.setattr("sys.argv", ["diloco", "export", "demo", *arguments])
    try:
        main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def whole(folder: Path) -> None:
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == FILES
    assert not folder.with_name(f"{folder.name}.partial").exists()


def test_what_it_says_and_writes(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export(monkeypatch, "--to", "taken") == 0
    whole(tmp_path / "taken")
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "the coordinator reads the run: 50 B of 100 B",
        "downloading: 0 B of 2.048 MB",
    ]
    assert said.out.splitlines() == [
        "taken: the weights of demo at step 240 (3 fragments at versions 4 to 5), fp32",
        "  model.safetensors: 2.048 MB, checked",
        "  config.json: 3 B, checked",
        "  diloco.json: 14 B, checked",
        '  it loads with transformers: AutoModelForCausalLM.from_pretrained("taken")',
        "  the coordinator keeps its copy until newer ones replace it: export e1",
    ]
    assert server.asked == [{"version": None, "checkpoint": None, "dtype": "fp32"}]
    assert server.removed == [], "somebody asked for it"


def test_a_model_of_ones_own_is_loaded_otherwise(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    del server.files["config.json"]
    monkeypatch.chdir(tmp_path)
    assert export(monkeypatch, "--to", "taken") == 0
    said = 'it loads with safetensors: safetensors.numpy.load_file("taken/model.safetensors")'
    assert said in capsys.readouterr().out


def test_wishes_are_passed_on_and_json_is_all_that_is_printed(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    to = str(tmp_path / "a" / "b")
    assert export(monkeypatch, "--to", to, "--version", "4", "--dtype", "bf16", "--json") == 0
    said = capsys.readouterr()
    assert (json.loads(said.out)["folder"], said.err) == (to, "")
    assert export(monkeypatch, "--to", f"{to}2", "--checkpoint", "3") == 0
    assert server.asked == [
        {"version": 4, "checkpoint": None, "dtype": "bf16"},
        {"version": None, "checkpoint": "3", "dtype": "fp32"},
    ]
    assert export(monkeypatch, "--to", f"{to}3", "--checkpoint", "3", "--version", "1") == INVALID
    assert "not both" in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_refused_before_anything_is_asked(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis").touch()
    assert export(monkeypatch, "--to", str(full)) == CONFLICT
    assert export(monkeypatch, "--to", str(full / "thesis")) == INVALID
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "mine").touch()
    assert export(monkeypatch, "--to", str(tmp_path / "new")) == CONFLICT
    said = capsys.readouterr().err
    assert "holds something already" in said and "no folder" in said
    assert "holds something that is no download" in said
    assert server.begun == 0 and (tmp_path / "new.partial" / "mine").exists()
    (full / "thesis").unlink()
    assert export(monkeypatch, "--to", str(full)) == 0
    whole(full)


@pytest.mark.parametrize(
    ("to", "status", "says"),
    [
        ("new", CONFLICT, "new.partial is there and is no folder: move it away first"),
        ("/", INVALID, "/ is no folder to make: name one below it"),
        ("new.partial/new", FAILED, "new.partial/new cannot be written: "),
        ("n" * 300, FAILED, "cannot be written: file name too long; name another folder"),
    ],
)
def test_a_folder_that_cannot_be_made_is_said_before_anything_is_asked(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    to: str,
    status: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.partial").write_text("mine")
    assert export(monkeypatch, "--to", to) == status
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert server.begun == 0
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("new.partial", "mine")]


def test_a_folder_where_nobody_may_write_is_said_before_anything_is_asked(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def denied(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as nobody:  # root may write anywhere
        nobody.setattr(os, "open", denied)
        status = export(nobody, "--to", str(tmp_path / "new"))
    assert status == FAILED
    said = f"diloco: {tmp_path / 'new'} cannot be written: permission denied; name another folder\n"
    assert capsys.readouterr().err == said
    assert server.begun == 0


def test_a_folder_is_downloaded_into_by_one_command_at_a_time(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Two would write the same files at once."""
    to, statuses = tmp_path / "taken", []

    def meanwhile(data: bytes) -> bytes:
        statuses.append(export(monkeypatch, "--to", str(to)))
        return data

    server.body = meanwhile
    assert export(monkeypatch, "--to", str(to)) == 0
    whole(to)
    assert statuses == [CONFLICT] * len(FILES) and server.begun == 1
    said = f"another command downloads into {to}: wait until it is done, or name another folder"
    assert said in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [to], "the lock is let go"


def cut(after: int) -> Callable[[bytes], Any]:
    """An answer that breaks off."""

    def body(data: bytes) -> Any:
        def pieces() -> Iterator[bytes]:
            yield data[:after]
            if len(data) > after:
                raise httpx.ReadError("the link is down")

        return pieces()

    return body


def test_what_is_cut_off_goes_on_where_it_was(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.body = cut(1_000_000)
    assert export(monkeypatch, "--to", str(tmp_path / "taken")) == 0
    whole(tmp_path / "taken")
    assert server.ranges[:3] == [
        "model.safetensors",
        "model.safetensors bytes=1000000-",
        "model.safetensors bytes=2000000-",
    ]


@pytest.mark.parametrize("code", [502, 503, 504])
def test_a_download_goes_on_behind_a_proxy_that_lost_its_server_for_a_moment(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    """As long as one that nobody answers: no longer, and the same command goes on then."""
    file, refused = server.file, [1]

    def away(name: str, asked: str) -> httpx.Response:
        if refused and asked:
            refused.pop()
            return httpx.Response(code, text="<h1>Bad gateway</h1>")
        return file(name, asked)

    server.body = cut(1_000_000)
    monkeypatch.setattr(server, "file", away)
    assert export(monkeypatch, "--to", str(tmp_path / "taken")) == 0
    assert not refused
    whole(tmp_path / "taken")

    monkeypatch.setattr(downloading, "PATIENCE_S", -1.0)
    monkeypatch.setattr(server, "file", lambda *_: httpx.Response(code))
    assert export(monkeypatch, "--to", str(tmp_path / "again")) == NO_CLUSTER
    monkeypatch.setattr(downloading, "PATIENCE_S", 120.0)
    monkeypatch.setattr(server, "file", lambda *_: httpx.Response(404))
    assert export(monkeypatch, "--to", str(tmp_path / "again")) == UNKNOWN, "that does not pass"


def test_a_command_that_was_ended_goes_on_with_the_same_export(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(downloading, "PATIENCE_S", -1.0)
    to = tmp_path / "taken"

    def never(data: bytes) -> Any:
        raise httpx.ConnectError("refused")

    whole_body = server.body
    server.body = lambda data: cut(500_000)(data) if len(data) == 2_048_000 else never(data)
    assert export(monkeypatch, "--to", str(to)) == NO_CLUSTER
    assert not to.exists()
    assert (tmp_path / "taken.partial" / "model.safetensors").stat().st_size == 500_000
    server.body, server.ranges = whole_body, []
    assert export(monkeypatch, "--to", str(to)) == 0
    whole(to)
    assert server.begun == 1 and server.ranges[0] == "model.safetensors bytes=500000-"


@pytest.mark.parametrize("wish", [("--dtype", "bf16"), ("--version", "4")])
def test_what_is_left_of_another_export_is_not_used(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wish: tuple[str, ...]
) -> None:
    to = tmp_path / "taken"
    target = downloading.Target(to)
    target.begin(command._mark("http://far:1", "demo", {"dtype": "fp32"}, "e0"))
    (target.partial / "model.safetensors").write_bytes(b"of another export")
    target.let_go()
    assert export(monkeypatch, "--to", str(to), *wish) == 0
    whole(to)
    assert server.ranges[0] == "model.safetensors"


def test_an_export_that_is_gone_is_asked_for_anew(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    to = tmp_path / "taken"
    wish = {"version": None, "checkpoint": None, "dtype": "fp32"}
    downloading.Target(to).begin(command._mark("http://far:1", "demo", wish, "removed"))
    assert export(monkeypatch, "--to", str(to)) == 0
    whole(to)


def test_damage_on_the_way_is_fetched_again_and_told_when_it_stays(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    damaged = iter([True])
    server.body = lambda data: b"\xff" + data[1:] if next(damaged, False) else data
    assert export(monkeypatch, "--to", str(tmp_path / "first")) == 0
    whole(tmp_path / "first")
    server.body = lambda data: b"\xff" + data[1:]
    assert export(monkeypatch, "--to", str(tmp_path / "second")) == FAILED
    assert "came 2 times with another digest" in capsys.readouterr().err
    assert not (tmp_path / "second").exists()


def test_a_longer_answer_than_the_file_changes_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.body = lambda data: data + b"more"
    assert export(monkeypatch, "--to", str(tmp_path / "taken")) == 0
    whole(tmp_path / "taken")


def test_a_disk_that_is_full_is_named_and_what_is_here_is_kept(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert export(monkeypatch, "--to", str(tmp_path / "taken")) == FAILED
    said = capsys.readouterr().err
    assert "cannot be written: no space left on device" in said and "goes on from there" in said
    assert not (tmp_path / "taken").exists()
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["../../home/.profile", "/etc/passwd", ".hidden", ""])
def test_no_name_of_a_file_leads_out_of_the_folder(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
) -> None:
    server.state = {"state": "complete", "files": [{"name": name, "bytes": 1, "sha256": "0" * 64}]}
    assert export(monkeypatch, "--to", str(tmp_path / "taken")) == FAILED
    assert "tells of a strange file" in capsys.readouterr().err
    assert not (tmp_path / "taken").exists() and server.ranges == []


def test_one_that_fails_says_why(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    server.state = {"state": "failed", "reason": "version 3 of run 'demo' is not kept"}
    assert export(monkeypatch, "--to", str(tmp_path / "taken")) == FAILED
    said = capsys.readouterr().err
    assert "diloco: the export failed: version 3 of run 'demo' is not kept" in said
    server.refuses = (404, {"title": "No such run", "detail": "there is no run 'demo'"})
    assert export(monkeypatch, "--to", str(tmp_path / "taken")) == UNKNOWN
    assert "diloco: No such run: there is no run 'demo'" in capsys.readouterr().err


def test_another_export_is_waited_for(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    server.busy, busy = 3, {"title": command.BUSY, "detail": "export e9 is being made: wait"}
    server.refuses = (409, busy)
    assert export(monkeypatch, "--to", str(tmp_path / "taken")) == 0
    whole(tmp_path / "taken")
    assert capsys.readouterr().err.startswith("waits for another export to end\n")
    monkeypatch.setattr(command, "WAIT_S", -1.0)
    server.busy = 3
    assert export(monkeypatch, "--to", str(tmp_path / "more")) == CONFLICT
    assert "export e9 is being made: wait" in capsys.readouterr().err


# --- progress ------------------------------------------------------------------------------------


def test_lines_come_at_every_stage_and_now_and_then() -> None:
    said: list[str] = []
    times = iter([0.0, 1.0, 10.0, 10.5, 11.0])
    lines = command.Lines(said.append, lambda: next(times))
    for stage, done in (
        ("fetching", 1),
        ("fetching", 2),
        ("fetching", 3),
        ("writing", 4),
        ("writing", 5),
    ):
        lines(stage, done, 9)
    assert said == [
        "the coordinator reads the run: 1 B of 9 B",
        "the coordinator reads the run: 3 B of 9 B",
        "the coordinator writes files: 4 B of 9 B",
    ]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_terminal_has_a_bar_that_fits(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    with command._progress(console) as progress:
        for stage in command.WORDS.values():
            progress.add_task(stage, total=47_100_000_000, completed=23_000_000_000)
        progress.refresh()
        shown = Console(file=io.StringIO(), width=width)
        shown.print(progress.get_renderable())
    lines = shown.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in lines)
    assert "23.0/47.1 GB" in "".join(lines)


# --- a run that begins from another one ----------------------------------------------------------

MODEL = Path(__file__).parents[1] / "interop" / "golden" / "llama"
FROM_RUN = """
name = "more"
[model]
weights = "run:demo@3"
context_tokens = 8
[budget]
steps = 4
"""


@pytest.fixture
def submitting(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    """Where a model is exported, and runs are taken."""
    files = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    monkeypatch.setitem(globals(), "FILES", files)
    server.files = dict(files)
    exports, server.submitted = server.handle, []  # type: ignore[attr-defined]

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/runs":
            return exports(request)
        server.submitted.append(json.loads(request.content))  # type: ignore[attr-defined]
        return httpx.Response(201, json={"name": "more", "state": "queued", "reason": ""})

    monkeypatch.setattr(server, "handle", handle)
    monkeypatch.setenv("DILOCO_DATA_ROOT", str(tmp_path / "data"))
    return server


def submit(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, *more: str) -> int:
    (folder / "run.toml").write_text(text)
    monkeypatch.setattr("sys.argv", ["diloco", "submit", str(folder / "run.toml"), "--json", *more])
    try:
        main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def test_the_weights_of_a_run_are_put_below_the_data_root(
    submitting: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert submit(monkeypatch, tmp_path, FROM_RUN) == 0
    assert submitting.asked == [{"version": 3, "checkpoint": None, "dtype": "fp32"}]
    (sent,) = submitting.submitted
    assert sent["model"]["weights"] == "from-runs/demo-1"
    folder = tmp_path / "data" / "from-runs" / "demo-1"
    assert sent["model"]["weights_digest"] == digest_of(open_weights(folder))
    submitting.looks = 2
    whole = FROM_RUN.replace('weights = "run:demo@3"\n', "")
    assert submit(monkeypatch, tmp_path, whole, "--from-run", "demo") == 0
    assert submitting.asked[-1]["version"] is None
    assert submitting.submitted[-1]["model"]["weights"] == "from-runs/demo-2"


def test_two_runs_that_begin_from_one_at_once_have_weights_of_their_own(
    submitting: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = downloading.Target(tmp_path / "data" / "from-runs" / "demo-1")
    assert submit(monkeypatch, tmp_path, FROM_RUN) == 0
    assert submitting.submitted[-1]["model"]["weights"] == "from-runs/demo-2"
    other.let_go()
    submitting.looks = 2
    assert submit(monkeypatch, tmp_path, FROM_RUN) == 0
    assert submitting.submitted[-1]["model"]["weights"] == "from-runs/demo-1"


def test_a_run_that_cannot_be_begun_from_says_what_to_do(
    submitting: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pinned = FROM_RUN.replace("[budget]", f'weights_digest = "{"0" * 32}"\n[budget]')
    assert submit(monkeypatch, tmp_path, pinned) == INVALID
    assert "publishes other weights than the file says" in capsys.readouterr().err
    submitting.looks = 2
    del submitting.files["config.json"]
    assert submit(monkeypatch, tmp_path, FROM_RUN) == INVALID
    assert "begin from a checkpoint of it instead" in capsys.readouterr().err
    assert submit(monkeypatch, tmp_path, FROM_RUN.replace("demo@3", "demo@new")) == INVALID
    assert "give run:NAME or run:NAME@VERSION" in capsys.readouterr().err
    assert submit(monkeypatch, tmp_path, FROM_RUN, "--from-run", "demo") == INVALID
    assert "leave that or --from-run out" in capsys.readouterr().err
    problem = {"title": "Nothing to export yet", "detail": "'demo' has published no parameters yet"}
    submitting.refuses = 409, problem
    assert submit(monkeypatch, tmp_path, FROM_RUN) == CONFLICT
    assert "has published no parameters yet" in capsys.readouterr().err
    assert not submitting.submitted
