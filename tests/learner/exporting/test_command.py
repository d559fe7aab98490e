"""The exporting program as its coordinator starts it: its arguments, its lines, its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared.corpora.conversations import LINES, lines_of, sums

from diloco_learner.exporting.__main__ import _Teller, arguments, as_asked, of_tokenizer, say
from diloco_learner.exporting.files import config_of
from diloco_shared.corpora.chat import Chat
from diloco_shared.corpora.prepare import prepare
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.templates import compiled
from diloco_shared.corpora.tokenizers import ByteTokenizer
from diloco_shared.protocol.exports import (
    LINE_BYTES_MAX,
    ExportDone,
    ExportFailed,
    ExportMoved,
    parse_line,
)
from diloco_shared.spec.run import RunSpec

# A port where nobody listens: port 1 is a service's of old, and never a message server's.
NOBODY = "nats://127.0.0.1:1"


def test_what_is_wanted_is_read_from_thearguments(tmp_path: Path) -> None:
    given = ["r", "--to", str(tmp_path), "--version", "3", "--dtype", "bf16"]
    found = arguments([*given, "--file", "a.json", "--file", "b.json", "--token", "eos_token_id=0"])
    assert (found.run, found.version, found.dtype, found.to) == ("r", 3, "bf16", tmp_path)
    assert (found.file, found.token) == ([Path("a.json"), Path("b.json")], ["eos_token_id=0"])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--version", "3", "--checkpoint", "r/000001"], "not both"),
        (["--token", "eos"], "give NAME=ID"),
        (["--dtype", "fp8"], "invalid choice"),
        (["--version", "newest"], "invalid int"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(
    wrong: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(["r", "--to", "x", *wrong])
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_progress_is_told_now_and_then_and_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    teller = _Teller(say)
    for done in range(1001):
        teller.moved(ExportMoved(stage="fetching", done=done, total=1000))
    said = [parse_line(line.encode()) for line in capsys.readouterr().out.splitlines()]
    assert 2 <= len(said) < 500
    assert said[-1] == ExportMoved(stage="fetching", done=1000, total=1000)


def test_lines_are_read_as_they_were_written_and_nothing_else_is() -> None:
    failed = ExportFailed(reason="ü" * 500)
    for line in (ExportDone(), failed, ExportMoved(stage="writing", done=1, total=2)):
        text = line.model_dump_json().encode()
        assert parse_line(text) == line and len(text) < LINE_BYTES_MAX
    for text in (b"", b"null", b"{}", b'{"kind":"moved","stage":"x","done":1,"total":2}', b"\xff"):
        assert parse_line(text) is None


def test_what_ends_an_answer_is_written_where_others_look_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that has learned to answer never writes what ends a document."""
    source = lines_of(tmp_path / "talk.jsonl", [{"messages": one} for one in sums(60)])
    chat = Chat(compiled(LINES.replace("<|im_end|>", "|"), "t", {}))
    prepare(find(str(source), chat=chat), ByteTokenizer(), tmp_path / "talk", 0.2)
    body = {"name": "r", "budget": {"steps": 1}, "data": {"source": "talk"}}
    spec = RunSpec.model_validate(body)
    call = ["r", "--to", str(tmp_path / "to")]
    found = as_asked(of_tokenizer(spec, tmp_path), arguments(call))
    ends = [0, ord("|")]
    assert found.tokens == {"bos_token_id": 0, "eos_token_id": ends, "pad_token_id": None}
    assert json.loads(found.contents["generation_config.json"]) == found.tokens
    config = config_of(spec, "fp32", dict(found.tokens))
    assert config is not None and config["eos_token_id"] == ends
    one = as_asked(of_tokenizer(spec, tmp_path), arguments([*call, "--token", "eos_token_id=7"]))
    assert one.tokens["eos_token_id"] == 7 and "generation_config.json" not in one.contents

    def missing(*given: object) -> None:
        raise ValueError("jinja2 is not installed")

    monkeypatch.setattr("diloco_shared.hf.tokenizer.template_of", missing)
    without = of_tokenizer(spec, tmp_path)
    assert without.tokens["eos_token_id"] == 0 and "tokenizer.json" in without.contents


def test_a_model_reads_as_much_as_before_it_was_trained_on() -> None:
    for kind, windowed in (("1b", False), ("12b", True)):
        for before, said in ((0, 512), (64, 512), (131_072, 131_072)):
            model = {"preset": kind, "context_tokens": 512, "weights_context": before}
            spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}, "model": model})
            config = config_of(spec, "fp32", {})
            assert config is not None and config["max_position_embeddings"] == said
            assert not windowed or config["sliding_window"] == 1024


def ended(*arguments: str, **environment: str) -> ExportFailed:
    """Why a process that cannot make an export says that it cannot."""
    done = subprocess.run(
        [sys.executable, "-m", "diloco_learner.exporting", *arguments],
        env=os.environ | environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr, done.stderr
    said = parse_line(done.stdout.splitlines()[-1])
    assert isinstance(said, ExportFailed)
    return said


def test_one_whose_owner_is_gone_does_nothing(tmp_path: Path) -> None:
    wanted = ["r", "--to", str(tmp_path / "out"), "--owner", str(os.getppid())]
    done = subprocess.run(
        [sys.executable, "-m", "diloco_learner.exporting", *wanted],
        env=os.environ | {"DILOCO_NATS_URL": NOBODY},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_no_message_server_is_told_in_a_line(tmp_path: Path) -> None:
    said = ended("r", "--to", str(tmp_path / "out"), DILOCO_NATS_URL=NOBODY)
    assert "127.0.0.1:1" in said.reason
    assert not any(tmp_path.iterdir())


def test_a_checkpoint_that_is_not_there_needs_no_message_server(tmp_path: Path) -> None:
    wanted = ("r", "--to", str(tmp_path / "out"), "--checkpoint", "r.ab/000001")
    said = ended(*wanted, DILOCO_NATS_URL=NOBODY, DILOCO_CHECKPOINTS=str(tmp_path / "root"))
    assert "there is no checkpoint r.ab/000001" in said.reason
