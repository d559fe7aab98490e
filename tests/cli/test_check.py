"""`diloco check`: one line a check, what to do, and a status that a script can go by."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from learner.exporting.publishing import kept
from learner.exporting.publishing import spec as published
from shared.corpora.texts import folder_of, prepared
from waiting import wait_until

from diloco_cli.__main__ import main
from diloco_cli.checking import _SILENT, Checker
from diloco_cli.commands.check import lines_of
from diloco_cli.run_file import fill_in
from diloco_cli.words import FAILED, INVALID
from diloco_learner.preflight.findings import CHECKS, SOFTWARE, Finding
from diloco_shared.checking import load
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.training import train_tokenizer
from diloco_shared.hf.weights import digest_of, open_weights
from diloco_shared.spec.run import RunSpec

GOLDEN = Path(__file__).parents[1] / "interop" / "golden"
SPEC = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
RUN = """
name = "checked"
[algorithm]
fragments = 3
[model]
{model}
context_tokens = 8
[data]
source = "text"
virtual_shards = 4
validation_fraction = 0.2
[inner]
batch_sequences = 2
[budget]
steps = 12
"""
SMALL = "overrides = {width = 8, layers = 1, heads = 2, kv_heads = 2, head_width = 4, hidden = 8}"
Diloco = Callable[..., tuple[int, str, str]]


@pytest.fixture
def diloco(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Diloco:
    """Run `diloco check` where run.toml and text/ lie: exit status, standard output and error."""
    folder_of(tmp_path / "text", 60, words=20)
    monkeypatch.setenv("DILOCO_CORPORA", str(tmp_path / "corpora"))
    paths = [Path(path).absolute() for path in sys.path if path]
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, paths)))
    monkeypatch.chdir(tmp_path)

    def command(run: str, *arguments: str) -> tuple[int, str, str]:
        (tmp_path / "run.toml").write_text(run)
        monkeypatch.setattr("sys.argv", ["diloco", "check", "run.toml", *arguments])
        status = 0
        try:
            main()
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        out, err = capfd.readouterr()
        return status, out, err

    return command


@pytest.mark.whole
def test_a_run_that_can_work_is_said_to_in_a_line_for_each_check(diloco: Diloco) -> None:
    status, out, _ = diloco(RUN.format(model=SMALL))
    lines = out.splitlines()
    assert status == 0, out
    assert [line[9:24].strip() for line in lines[:-1]] == list(CHECKS)
    assert all(line.startswith("ok  ") for line in lines[:-1])
    assert "tokens a second" in lines[-2]
    assert lines[-1] == "the run can work on this machine"


@pytest.mark.whole
def test_what_is_wrong_is_said_with_what_to_do_and_the_rest_is_skipped(
    diloco: Diloco, tmp_path: Path
) -> None:
    """A model that speaks: nothing of that is taken for an answer."""
    model = "def factory(config):\n    print('{}', flush=True)\n    return config.nothing\n"
    (tmp_path / "own_model.py").write_text(model)
    status, out, err = diloco(RUN.format(model='factory = "own_model:factory"'))
    assert status == FAILED
    lines = out.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("WRONG"))
    assert lines[at].startswith("WRONG    model          AttributeError: ")
    assert lines[at].endswith("own_model.py:3)")
    assert lines[at + 1].startswith("         to do          mend the model")
    assert "skipped  step           needs what is not sound: model" in lines
    assert lines[-1] == "1 check found something wrong: mend it, and check again"
    assert "Traceback" not in out + err and err.startswith("{}")


@pytest.mark.whole
def test_a_program_gets_all_of_it_as_json(diloco: Diloco, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "text")
    folder_of(tmp_path / "root" / "text", 60, words=20)
    status, out, _ = diloco(
        RUN.format(model=f"{SMALL}\nparameters = 1"), "--json", "--data-root", "root"
    )
    assert status == INVALID and out == ""
    status, out, _ = diloco(RUN.format(model='factory = "none:f"'), "--json", "--data-root", "root")
    found = json.loads(out)
    assert status == FAILED and not found["ok"]
    assert [check["name"] for check in found["checks"]] == list(CHECKS)
    by_name = {check["name"]: check for check in found["checks"]}
    assert by_name["corpus"]["ok"] and by_name["corpus"]["figures"]["tokens"] > 0
    assert by_name["compile"]["skipped"] and not by_name["model"]["skipped"]
    assert "PYTHONPATH" in by_name["model"]["remedy"]


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (RUN.format(model='preset = "nano"\nheads = 3'), "model.heads: is no setting"),
        (
            RUN.replace("[", 'preset = "nano"\n[', 1).format(model=""),
            "preset: is no setting here; there is algorithm.preset and model.preset",
        ),
        (RUN.format(model='preset = "nan"'), "has 1 fault\n  model.preset: "),
        (RUN.format(model="overrides = {heads = 3}"), "has 1 fault\n  model.overrides."),
        (RUN.replace("fragments = 3", "fragments = 0").format(model=""), "algorithm.fragments"),
        (RUN.replace("steps = 12", "").format(model=""), "budget: give exactly one"),
        (RUN.replace("[data]", "[data").format(model=""), "cannot be read"),
        ("name =", "run.toml cannot be read"),
        ("", "name: Field required"),
    ],
)
def test_faults_of_the_file_are_listed_as_config_lists_them(
    run: str, says: str, diloco: Diloco
) -> None:
    status, out, err = diloco(run)
    assert (status, out) == (INVALID, "")
    assert says in err and "Traceback" not in err


@pytest.mark.whole
def test_without_its_weights_nothing_is_known_of_the_model_and_the_text_is_looked_at(
    diloco: Diloco, tmp_path: Path
) -> None:
    (tmp_path / "w").mkdir()
    status, out, _ = diloco(RUN.format(model='weights = "w"'))
    assert status == FAILED
    assert f"WRONG    weights        {tmp_path}/w/config.json: No such file or directory" in out
    verdicts = {line[9:24].strip(): line.split()[0] for line in out.splitlines()[:-1]}
    for name in ("model", "device memory", "vocabulary", "host memory", "disk", "step"):
        assert verdicts[name] == "skipped", name
    assert verdicts["corpus"] == verdicts["sequences"] == "ok"
    # What else is wrong with the file is told first.
    status, _, err = diloco(RUN.format(model='weights = "w"').replace("steps", "stops"))
    assert status == INVALID and "budget.stops" in err


# --------------------------------------------------------------------------------------------------
# The process that checks.


def of_process(program: str, check_s_max: float = 60.0) -> list[Finding]:
    checker = Checker(".", command=(sys.executable, "-c", program), check_s_max=check_s_max)
    return list(checker.findings(SPEC))


BEGINS = "import json, os, sys; print(json.dumps({'begins': 'step'}), flush=True); "


def test_what_a_process_said_that_ended_before_it_was_asked_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = subprocess.Popen

    def ended(*arguments: Any, **options: Any) -> Any:
        process = begun(*arguments, **options)
        process.wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", ended)
    (finding,) = of_process(BEGINS + "os.kill(os.getpid(), 9)")
    assert (finding.name, finding.verdict) == ("step", "WRONG")


def test_a_check_that_ends_its_process_is_named(tmp_path: Path) -> None:
    (finding,) = of_process(BEGINS + "os.kill(os.getpid(), 9)")
    assert (finding.name, finding.verdict) == ("step", "WRONG")
    assert "memory may have run out" in finding.text and finding.remedy
    (finding,) = of_process(BEGINS + "os._exit(3)")
    assert "(status 3)" in finding.text
    (finding,) = of_process("raise SystemExit(2)")
    assert (finding.name, finding.ok) == (SOFTWARE, False)


@pytest.mark.parametrize(
    ("name", "to_do"),
    [("weights", "that the weights lie on"), ("disk", "look for what waits")],
)
def test_a_check_that_never_comes_back_is_given_up(name: str, to_do: str) -> None:
    """It may have gone on for hours before: what is told is since when it was silent."""
    stays = BEGINS.replace("step", name) + "sys.stdin.read(); import time; time.sleep(600)"
    (finding,) = of_process(stays, 5.0)
    assert (finding.name, finding.text) == (name, "gave no sign for 0 minutes")
    assert to_do in finding.remedy


def test_what_is_to_be_done_of_a_silent_check_is_said_of_checks_that_there_are() -> None:
    assert {*_SILENT} <= {*CHECKS, SOFTWARE}


def test_a_check_ends_with_whoever_asked_for_it() -> None:
    """It would go on compiling, and nobody would hear what comes of it."""
    asks = (
        "import os, subprocess, sys\n"
        "told = '--parent', str(os.getpid())\n"
        "command = [sys.executable, '-m', 'diloco_learner.preflight', *told]\n"
        "child = subprocess.Popen(command, stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", asks], **pipes) as parent:  # type: ignore
        child = psutil.Process(int(parent.stdout.readline()))
        # Another process holds its standard input, so that only its parent's end ends it.
        held = os.open(f"/proc/{child.pid}/fd/0", os.O_WRONLY)
        parent.kill()
    wait_until(lambda: not child.is_running() or child.status() == "zombie", "its end")
    os.close(held)


def test_lines_that_are_no_findings_are_passed_over() -> None:
    last = Finding(CHECKS[-1], True, "loss 1").view()
    told = f"print('noise'); print('[1]'); print(json.dumps({json.dumps(last)!s}))"
    found = of_process(BEGINS + told.replace("true", "True").replace("false", "False"))
    assert [(f.name, f.ok) for f in found] == [(CHECKS[-1], True)]


def test_a_line_says_ok_wrong_or_skipped() -> None:
    assert lines_of(Finding("disk", True, "3 GB")) == ["ok       disk           3 GB"]
    bad = lines_of(Finding("disk", False, "none", "make room"))
    assert bad == ["WRONG    disk           none", "         to do          make room"]
    assert lines_of(Finding("disk", False, "x", skipped=True))[0].startswith("skipped  disk")


# --------------------------------------------------------------------------------------------------
# What is filled in, here and at submission.


def test_weights_and_corpora_that_lie_here_are_filled_in(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "llama", tmp_path / "w")
    corpus = prepared(folder_of(tmp_path / "text", 60), tmp_path / "c")
    parts = [{"source": "c", "weight": 1}, {"source": "far", "weight": 1}, "strange"]
    body = {
        "model": {"weights": "w", "overrides": {"width": 3}},
        "data": {"source": "c", "mixture": parts},
    }
    assert fill_in(body, tmp_path) == []
    assert body["model"]["weights_digest"] == digest_of(open_weights(tmp_path / "w"))  # type: ignore
    assert body["model"]["overrides"]["width"] == 3, "what is said stays"  # type: ignore
    assert parts[0]["digest"] == corpus.digest  # type: ignore
    assert "digest" not in parts[1]
    assert "digest" not in body["data"], "its source is not read beside a mixture"
    again = json.loads(json.dumps(body))
    assert fill_in(again, tmp_path) == [] and again == body


def test_what_is_filled_in_makes_no_faults(tmp_path: Path) -> None:
    texts = [folder_of(tmp_path / f"text-{n}", 60 + n) for n in (1, 2)]
    corpora = [prepared(text, tmp_path / str(n)) for n, text in enumerate(texts, 1)]
    parts = [{"source": str(n), "weight": 1} for n in (1, 2)]
    for data in ({"source": "1", "mixture": parts}, {"source": "1", "mixture": []}):
        body = {"name": "r", "budget": {"steps": 1}, "data": data}
        assert fill_in(body, tmp_path) == []
        found = [part.digest for part in load(tomli_w.dumps(body)).data.sources]
        assert found == [corpus.digest for corpus in corpora[: len(found)]]


def test_what_is_here_and_not_sound_is_told(tmp_path: Path) -> None:
    prepared(folder_of(tmp_path / "text", 60), tmp_path / "c")
    (tmp_path / "c" / "index.json").write_text("{")
    body = {"model": {"weights": "none"}, "data": {"source": "c"}}
    faults = fill_in(body, tmp_path)
    assert [fault.path for fault in faults] == ["data.source", "model.weights"]
    assert "is no index" in faults[0].message and "no such folder" in faults[1].message
    assert fill_in({"model": 3, "data": [1]}, tmp_path) == []
    assert fill_in({"model": {}, "data": {"source": "a\0b", "mixture": 4}}, tmp_path) == []


def test_tokens_that_the_weights_do_not_know_are_told(tmp_path: Path) -> None:
    """`bytes` is what a file has that names no tokenizer."""
    shutil.copytree(GOLDEN / "llama", tmp_path / "w")
    texts = folder_of(tmp_path / "texts", 60)
    tokenizer = train_tokenizer(find(str(texts)), 300, tmp_path / "bpe")
    shutil.copy(tmp_path / "bpe" / "tokenizer.json", tmp_path / "w")
    prepared(texts, tmp_path / "c", with_=tokenizer)
    prepared(texts, tmp_path / "b")
    wrong = ({"source": "texts"}, {"source": "b"}, {}, None)
    right = ({"source": "texts", "tokenizer": "w"}, {"source": "c"}, {"source": "far"})
    for data in (*wrong, *right, {"source": "texts", "tokenizer": "far"}):
        for digest in ({}, {"weights_digest": "0" * 32}):
            body = {"model": {"weights": "w", **digest}} | ({} if data is None else {"data": data})
            faults = fill_in(body, tmp_path)
            assert [f.path for f in faults] == ["data.tokenizer"] * (data in wrong), data
            assert all("come with another one" in f.message for f in faults)


def test_what_lies_where_nobody_may_look_is_left_to_learners_or_told(
    tmp_path: Path, shut: Callable[[Path], None]
) -> None:
    prepared(folder_of(tmp_path / "text", 60), tmp_path / "root" / "c")
    shut(tmp_path / "root")
    body = {"data": {"source": "root/c"}, "model": {"weights": "root/w"}}
    (fault,) = fill_in(body, tmp_path)
    assert "digest" not in body["data"]
    where = tmp_path / "root" / "w"
    assert (fault.path, fault.message) == ("model.weights", f"{where}: Permission denied")


def test_a_run_wide_checkpoint_is_filled_in_where_it_can_be_read(tmp_path: Path) -> None:
    """Elsewhere it is left to the coordinator, as the weights of a run are to its export."""
    for weights in ("checkpoint:r.abc123/000001", "run:other"):
        body = {"model": {"weights": weights}}
        assert fill_in(body, tmp_path) == [] and body == {"model": {"weights": weights}}
    (fault,) = fill_in({"model": {"weights": "checkpoint:r.a/000001"}}, tmp_path, str(tmp_path))
    assert fault.path == "model.weights" and "there is no checkpoint" in fault.message
    kept(tmp_path, published())
    body = {"model": {"weights": "checkpoint:r.abc123/000001"}}
    assert fill_in(body, tmp_path, str(tmp_path)) == []
    assert body["model"]["preset"] == "nano" and len(body["model"]["weights_digest"]) == 32
