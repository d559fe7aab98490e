"""`diloco data`: from a folder of text to a corpus, and one clear line for what is wrong."""

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from shared.corpora.conversations import LINES, lines_of, said, sums
from shared.corpora.texts import folder_of

from diloco_cli.__main__ import main
from diloco_cli.commands import data as module
from diloco_cli.words import FAILED
from diloco_learner.data.corpus import digest, load
from diloco_shared.corpora.prepared import open_corpus
from diloco_shared.spec.run import Data

Diloco = Callable[..., tuple[int, str, str]]


@pytest.fixture
def diloco(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Diloco:
    """Run the command: exit status, standard output, standard error."""

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["diloco", "data", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return command


def test_from_text_to_a_corpus(diloco: Diloco, tmp_path: Path) -> None:
    text, bpe, to = folder_of(tmp_path / "text", 200), tmp_path / "bpe", tmp_path / "corpus"
    status, out, err = diloco("train-tokenizer", text, "--vocabulary", "300", "--to", bpe)
    assert status == 0 and f"{bpe}: " in out and "digest" in out
    assert "reads: 10 kB of 10 kB" in err
    options = ("--tokenizer", bpe, "--validation-fraction", "0.1", "--workers", "2")
    status, out, err = diloco("prepare", text, "--to", to, *options)
    assert status == 0
    corpus = open_corpus(to)
    assert corpus.digest in out and f"{len(corpus.train):,}" in out
    lines = err.splitlines()
    assert lines[-1].startswith("prepares: 10 kB of 10 kB, ") and lines[-1].endswith("/s")
    assert len(lines) <= module.LINES
    status, out, _ = diloco("show", to, "--verify")
    assert status == 0
    assert "every token is as it was written" in out and "text 0" in out
    assert "train" in out and "validation" in out and "200 files, 10000 bytes" in out


def test_what_is_shown_can_be_read_by_a_program(diloco: Diloco, tmp_path: Path) -> None:
    text, to = folder_of(tmp_path / "text", 60), tmp_path / "corpus"
    (text / "x.png").write_bytes(b"\0")
    _, out, _ = diloco("prepare", text, "--to", to, "--json")
    assert json.loads(out)["digest"] == open_corpus(to).digest
    _, out, _ = diloco("show", to, "--json")
    found = json.loads(out)
    assert sum(split["documents"] for split in found["splits"].values()) == 60
    assert (found["vocabulary"], found["skipped_files"], found["faults"]) == (256, 1, [])
    assert found["sample"].startswith("text 0")
    assert "left out    1 files that are not text" in diloco("show", to)[1]


def test_a_text_that_spells_the_end_of_a_document_is_told(diloco: Diloco, tmp_path: Path) -> None:
    text, bpe, to = folder_of(tmp_path / "text", 60), tmp_path / "bpe", tmp_path / "corpus"
    diloco("train-tokenizer", text, "--vocabulary", "300", "--to", bpe)
    (text / "new.txt").write_text("one<|endoftext|>two<|endoftext|>three")
    _, out, _ = diloco("prepare", text, "--to", to, "--tokenizer", bpe)
    says = "ends        2 within documents: their text spells the token"
    assert says in out and says in diloco("show", to)[1]
    assert json.loads(diloco("show", to, "--json")[1])["ends_within"] == 2


def test_from_conversations_to_a_corpus(diloco: Diloco, tmp_path: Path) -> None:
    source = lines_of(tmp_path / "c.jsonl", [{"talk": m} for m in sums(60)])
    (tmp_path / "t.jinja").write_text(LINES)
    options = ("--chat", "--field", "talk", "--chat-template", tmp_path / "t.jinja")
    status, out, _ = diloco("prepare", source, "--to", tmp_path / "corpus", *options)
    corpus = open_corpus(tmp_path / "corpus")
    assert status == 0 and corpus.digest in out and corpus.index is not None
    predicted = corpus.index.splits["train"].predicted
    assert 0 < predicted < len(corpus.train)
    assert "to predict" in out.splitlines()[0] and out.splitlines()[1].endswith(f"{predicted:,}")
    status, out, _ = diloco("show", tmp_path / "corpus", "--verify")
    assert status == 0 and "between « and » is not to be predicted:" in out
    assert "«<|im_start|>user\nWhat is " in out and "assistant\n»It is " in out
    found = json.loads(diloco("show", tmp_path / "corpus", "--json")[1])
    assert found["masked"] and found["splits"]["train"]["predicted"] == predicted
    plain = json.loads(
        diloco("prepare", folder_of(tmp_path / "x", 60), "--to", tmp_path / "y", "--json")[1]
    )
    assert "masked" not in plain and "predicted" not in plain["splits"]["train"]


def test_files_that_hold_no_conversations_are_counted(diloco: Diloco, tmp_path: Path) -> None:
    folder = tmp_path / "talk"
    folder.mkdir()
    pairs = [{"prompt": str(n), "completion": str(n + 1)} for n in range(60)]
    lines_of(folder / "c.jsonl", pairs)
    (folder / "README.md").write_text("what this is")
    status, out, _ = diloco("prepare", folder, "--to", tmp_path / "corpus", "--chat")
    assert status == 0 and "left out    1 files that hold no conversations" in out


def test_tokens_of_somebody_else_are_shown(diloco: Diloco, tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(bytes(4000))
    (tmp_path / "t.json").write_text('{"dtype": "uint16", "vocabulary": 9}')
    status, out, _ = diloco("show", tmp_path / "t.bin")
    assert status == 0 and "1,800" in out and "vocabulary  9 tokens" in out
    out = diloco("show", tmp_path / "t.bin", "--verify")[1]
    assert "not verified: a file of tokens does not say" in out and "every token is" not in out


def test_tokens_of_somebody_else_are_read_for_their_digest_once(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have terabytes, and whoever waits is told for what."""
    (tmp_path / "t.bin").write_bytes(bytes(4000))
    (tmp_path / "t.json").write_text('{"dtype": "uint16", "vocabulary": 9}')
    read, shown = [0], list[str]()
    preadv = os.preadv

    def counted(*what: Any) -> int:
        read[0] += (got := preadv(*what))
        return got

    @contextmanager
    def noted(text: str | Callable[[], str], *, quiet: bool = False) -> Iterator[None]:
        yield
        shown.append("" if quiet else text() if callable(text) else text)

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(module, "meanwhile", noted)
    assert diloco("show", tmp_path / "t.bin")[0] == 0
    assert read[0] == 4000 and shown[-1] == f"reads {tmp_path / 't.bin'} for its digest: 100 %"
    assert diloco("show", tmp_path / "t.bin", "--json")[0] == 0 and shown[-1] == ""


def test_what_is_told_of_tokens_is_what_a_run_accepts(diloco: Diloco, tmp_path: Path) -> None:
    """Their digest depends on what the run holds out, and on its tokenizer where no file says."""
    tokens, text = tmp_path / "t.bin", folder_of(tmp_path / "text", 60)
    tokens.write_bytes(bytes(range(200)) * 20)
    diloco("train-tokenizer", text, "--vocabulary", "70000", "--to", tmp_path / "bpe")
    assert diloco("show", tokens)[0] == FAILED
    options = ("--validation-fraction", "0.1", "--tokenizer", tmp_path / "bpe")
    status, out, _ = diloco("show", tokens, *options)
    assert status == 0 and "held out    0.1 for validation" in out
    told = json.loads(diloco("show", tokens, *options, "--json")[1])
    assert told["digest"] in out and told["validation_fraction"] == 0.1
    given = {"source": str(tokens), "tokenizer": str(tmp_path / "bpe"), "digest": told["digest"]}
    run = Data(validation_fraction=0.1, **given)
    assert digest(load(run)) == told["digest"]
    with pytest.raises(ValueError, match=r"data show --validation-fraction 0\.2' tells it"):
        load(run.model_copy(update={"validation_fraction": 0.2}))


def test_damage_is_told_and_is_a_failure(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diloco("prepare", folder_of(tmp_path / "text", 60), "--to", tmp_path / "corpus")
    shard = tmp_path / "corpus" / "test-00000.bin"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    status, out, _ = diloco("show", tmp_path / "corpus", "--verify")
    assert status == FAILED and "not sound: the test tokens of" in out
    assert diloco("show", tmp_path / "corpus")[0] == 0, "it reads no tokens unless it is told to"
    monkeypatch.setattr(os, "preadv", lambda *what: 0)  # as where nothing can be read
    status, out, _ = diloco("show", tmp_path / "corpus", "--verify")
    assert status == FAILED and out.count("not sound: the ") == 3 and "ends at byte 0" in out


def test_a_bar_is_for_terminals(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = folder_of(tmp_path / "text", 60)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120")):  # or rich takes it for a file
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    status, _, err = diloco("prepare", text, "--to", tmp_path / "corpus")
    assert status == 0 and "prepares: " not in err
    last = re.sub("\x1b\\[[^A-Za-z]*[A-Za-z]", "", err).rpartition("prepares")[2]
    assert "━" in last and "3.0/3.0 kB" in last, "it is drawn, and to its end"


def bad_lines(folder: Path) -> Path:
    (folder / "bad.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    return folder / "bad.jsonl"


def bad_talk(folder: Path) -> Path:
    return lines_of(folder / "talk.jsonl", [{"messages": said("a", *b)} for b in (("b",), ())])


def bad_template(folder: Path) -> tuple[str, Path]:
    (folder / "t.jinja").write_text("{{ bos_token }}\n{% if %}")
    return "--chat-template", folder / "t.jinja"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (lambda t: ("prepare", t / "gone", "--to", t / "c"), "neither a folder nor a file"),
        (lambda t: ("prepare", bad_lines(t), "--to", t / "c"), "bad.jsonl:2: expected"),
        (
            lambda t: ("prepare", "stdlib", "--to", t / "c", "--validation-fraction", "0.7"),
            "a validation fraction of 0.7 is not above 0 and below 0.5",
        ),
        (
            lambda t: ("prepare", "stdlib", "--to", t / "c", "--tokenizer", t / "gone"),
            "neither 'bytes' nor a file or folder",
        ),
        (
            lambda t: ("train-tokenizer", "stdlib", "--to", t / "c", "--vocabulary", "5"),
            "a vocabulary of 5 is not from 258",
        ),
        (lambda t: ("show", t), "it is no prepared corpus"),
        (
            lambda t: ("show", t, "--validation-fraction", "0.05"),
            "--validation-fraction and --tokenizer are for a file of tokens",
        ),
        (lambda t: ("prepare", bad_lines(t), "--to", t / "c", "--chat"), "bad.jsonl:1: expected"),
        (
            lambda t: ("prepare", bad_talk(t), "--to", t / "c", "--chat"),
            'talk.jsonl:2: "messages" has no message of the role "assistant"',
        ),
        (
            lambda t: ("prepare", "stdlib", "--to", t / "c", "--chat-template", t / "x"),
            "--chat-template is for conversations: give --chat as well",
        ),
        (
            lambda t: ("prepare", "stdlib", "--to", t / "c", "--chat", *bad_template(t)),
            "t.jinja is no template of Jinja: line 2: ",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    diloco: Diloco, tmp_path: Path, arguments: Callable[[Path], tuple[str | Path, ...]], says: str
) -> None:
    status, out, err = diloco(*arguments(tmp_path))
    assert status == FAILED and not out
    assert err.startswith("diloco: ") and says in err and err.count("\n") == 1
    assert not (tmp_path / "c").exists() or not any((tmp_path / "c").glob("index.json"))


def test_a_folder_that_cannot_be_written_is_named(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, shut = folder_of(tmp_path / "text", 60), tmp_path / "shut"
    shut.mkdir()
    make = Path.mkdir

    def refused(path: Path, *how: Any, **more: Any) -> None:
        """As the system does it, which root would not see."""
        if shut in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        make(path, *how, **more)

    monkeypatch.setattr(Path, "mkdir", refused)
    status, out, err = diloco("prepare", text, "--to", shut / "c")
    assert status == FAILED and not out
    assert err == f"diloco: {shut / 'c'}: permission denied\n"
