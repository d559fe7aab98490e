"""`diloco generate`: which model is meant, and what cannot write; the answer to a message."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_cli.__main__ import main
from diloco_cli.words import INVALID, NO_CLUSTER
from diloco_shared.corpora.tokenizers import ByteTokenizer
from diloco_shared.hf.tokenizer import files_of

GOLDEN = Path(__file__).parents[1] / "interop" / "golden"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["diloco", "generate", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("nowhere/model",), INVALID, "there is no folder nowhere/model"),
        # Of a run: where there is no cluster, nobody can be asked.
        (("corpus",), NO_CLUSTER, "no cluster"),
        (("./corpus",), INVALID, "config.json: No such file"),
        (("..",), INVALID, "config.json: No such file"),
        (("model", "--top-p", "0"), INVALID, "top_p (0) must be above 0"),
        (("model", "--chat"), INVALID, "give one with --prompt"),
        (("model", "--chat-template", "t"), INVALID, "is for --chat"),
        (("model",), INVALID, "the tokenizer has 256 tokens, and the model 48"),
    ],
)
def test_a_folder_with_a_model_is_one_and_any_other_name_is_a_runs(
    words: tuple[str, ...],
    status: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DILOCO_URL", raising=False)
    (tmp_path / "corpus").mkdir()
    shutil.copytree(GOLDEN / "llama", tmp_path / "model")
    for name, content in files_of(ByteTokenizer()).items():
        (tmp_path / "model" / name).write_bytes(content)
    assert run(monkeypatch, *words) == status
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_folder_that_nobody_may_look_into_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shut: Callable[[Path], None],
) -> None:
    shut(tmp_path)
    assert run(monkeypatch, str(tmp_path / "model")) == INVALID
    assert capsys.readouterr().err.endswith("/model cannot be read: permission denied\n")


@pytest.mark.whole
def test_a_message_is_answered_after_what_the_template_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "llama", tmp_path / "model")
    for name, content in files_of(ByteTokenizer()).items():
        (tmp_path / "model" / name).write_bytes(content)
    file = tmp_path / "model" / "tokenizer.json"
    raw = json.loads(file.read_text())
    letters = sorted(raw["model"]["vocab"].items(), key=lambda item: item[1])[:47]
    file.write_text(json.dumps(raw | {"model": raw["model"] | {"vocab": dict(letters)}}))
    (tmp_path / "t").write_text("{% for m in messages %}({{ m.content }}){% endfor %}")

    def told(*words: str) -> str:
        assert run(monkeypatch, "model", "--temperature", "0", "--tokens", "9", *words) == 0
        return capsys.readouterr().out

    said = told("--prompt", "!!", "--chat", "--chat-template", "t").rstrip("\n")
    # What stands before the words of an answer is read, too.
    assert said and told("--prompt", "(!!)(").rstrip("\n") == f"(!!)({said}"
    assert said not in told("--prompt", "!!"), "else the template would not be seen"
    (tmp_path / "t").write_text("{{ raise_exception('only about trains') }}")
    words = ("model", "--prompt", "!", "--chat", "--chat-template", "t")
    assert run(monkeypatch, *words) == INVALID
    assert "only about trains" in capsys.readouterr().err
