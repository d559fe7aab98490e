"""An export that only a command needs goes as soon as it is here."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from cli import test_export
from cli.test_export import FROM_RUN, Server, server, submit, submitting, whole

from diloco_cli.api import connect
from diloco_cli.cluster import Where
from diloco_cli.commands import generate
from diloco_cli.from_run import put_weights
from diloco_cli.words import INVALID, CliError
from diloco_client import ApiError

__all__ = ["server", "submitting"]  # fixtures

FAR = Where(url="http://far:1", token="t0ken")


@pytest.mark.parametrize("removes", [204, 503])
def test_what_a_model_writes_leaves_no_export_behind(server: Server, removes: int) -> None:
    """It would push out one that somebody asked for."""
    server.removes = removes
    with generate._folder(FAR, "demo", quiet=True) as folder:
        assert server.removed == ["e1"], "before the model is read, which takes a while"
        whole(folder)


@pytest.mark.parametrize("state", ["complete", "failed"])
def test_neither_does_one_that_comes_to_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    server.state = {"state": state, "reason": "a full disk"}
    monkeypatch.setattr(server, "file", lambda *_: httpx.Response(404))
    failed = pytest.raises(CliError, match="a full disk" if state == "failed" else "Not Found")
    with failed, generate._folder(FAR, "demo", quiet=True):
        pass
    assert server.removed == ["e1"]


def test_weights_of_a_run_that_are_here_need_no_export_any_more(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that was cut off does: the same command goes on with it."""
    with monkeypatch.context() as lost:
        lost.setattr(server, "file", lambda *_: httpx.Response(404))
        with connect(FAR) as client, pytest.raises(ApiError):
            put_weights(client, begins(), tmp_path, quiet=True)
    assert server.removed == []
    spec = begins()
    with connect(FAR) as client:
        put_weights(client, spec, tmp_path, quiet=True)
    assert spec == {"model": {"weights": "from-runs/demo-1"}}
    assert (server.begun, server.removed) == (1, ["e1"])


def begins() -> dict[str, Any]:
    return {"model": {"weights": "run:demo"}}


def test_weights_with_another_tokenizer_are_downloaded_once(
    submitting: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What lies beside them is known only then; and the whole model would be fetched again."""
    submitting.files["tokenizer.json"] = test_export.FILES["tokenizer.json"] = b"{}"
    assert submit(monkeypatch, tmp_path, FROM_RUN) == INVALID
    said = capsys.readouterr().err
    assert "come with another one (tokenizer.json)" in said and not submitting.submitted
    assert "set model.weights = 'from-runs/demo-1' in the file" in said
    (tmp_path / "data" / "from-runs" / "demo-1" / "tokenizer.json").unlink()
    assert submit(monkeypatch, tmp_path, FROM_RUN.replace("run:demo@3", "from-runs/demo-1")) == 0
    assert submitting.begun == len(submitting.submitted) == 1


def test_a_run_that_exists_needs_nothing_that_it_began_from(
    submitting: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script that begins it, if it is not there, ends well however often it runs."""
    other, there = submitting.handle, list[str]()

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "GET" and request.url.path == "/v1/runs/more":
            there.append(request.url.path)
            return httpx.Response(200, json={"name": "more", "state": "done", "reason": ""})
        answer: httpx.Response = other(request)
        return answer

    monkeypatch.setattr(submitting, "handle", handle)
    gone = FROM_RUN.replace("run:demo@3", "from-runs/gone")
    # Somebody has made room.
    (tmp_path / "data" / "from-runs" / "gone").mkdir(parents=True)
    assert submit(monkeypatch, tmp_path, gone) == INVALID
    for text in (FROM_RUN, gone):
        assert submit(monkeypatch, tmp_path, text, "--if-absent") == 0
    assert (submitting.begun, submitting.submitted, len(there)) == (0, [], 2)
    assert submit(monkeypatch, tmp_path, gone.replace('"more"', '""'), "--if-absent") == INVALID
