"""The whole way: text, tokenizer, corpus, training with a death in it, weights, text; and on."""

import json
import pydoc_data.topics
import signal
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from live.processes import ALWAYS, diloco_says
from live.stack import Stack, up

from diloco_shared.corpora.prepared import digest_of, open_corpus
from diloco_shared.hf.weights import digest_of as weights_digest
from diloco_shared.hf.weights import open_weights

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

VOCABULARY = 512
TOPICS: dict[str, str] = pydoc_data.topics.topics


def texts(folder: Path) -> Path:
    """A folder of files whose suffix says nothing."""
    folder.mkdir()
    for name, text in TOPICS.items():
        (folder / f"{name}.rst").write_text(text, encoding="utf-8")
    return folder


def others(file: Path) -> Path:
    """Another corpus: conversations about nothing but numbers."""
    lines = [
        f"{a} plus {b} is {a + b}, and {a} times {b} is {a * b}."
        for a in range(60)
        for b in range(60)
    ]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file


def run_file(file: Path, name: str, steps: int, **tables: Any) -> Path:
    run: dict[str, Any] = {
        "name": name,
        "seed": 3,
        "algorithm": {"fragments": 3, "quorum": 1, "sync_every_steps": 12, "overlap_steps": 4},
        "membership": {"learners_min": 2},
        "evaluation": {"every_steps": 24, "sequences": 64},
        "inner": {"warmup_steps": 10, "learning_rate": 8e-3},
        "budget": {"steps": steps},
        **tables,
    }
    file.write_text(tomli_w.dumps(run), encoding="utf-8")
    return file


def losses(stack: Stack, run: str) -> list[float]:
    found = stack.client.metrics(run)["evaluations"]
    return [float(e["val_loss"]) for e in sorted(found, key=lambda e: e["steps"])]


def evaluated_at_its_end(stack: Stack, run: str) -> bool:
    return any(e["final"] for e in stack.client.metrics(run)["evaluations"])


def test_from_a_folder_of_text_to_a_model_and_on_to_a_better_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_DATA_ROOT", f"{tmp_path},.")
    text, numbers = texts(tmp_path / "text"), others(tmp_path / "numbers.jsonl")
    corpus, more = tmp_path / "corpus", tmp_path / "more"
    tokenizer, model = tmp_path / "tokenizer", tmp_path / "model"
    with up(tmp_path / "data", "--learners", "2", **ALWAYS) as stack:
        size = ("--vocabulary", str(VOCABULARY))
        diloco_says("data", "train-tokenizer", str(text), *size, "--to", str(tokenizer))
        prepared = ("--tokenizer", str(tokenizer), "--to")
        diloco_says("data", "prepare", str(text), *prepared, str(corpus))
        diloco_says("data", "prepare", str(numbers), *prepared, str(more))

        first = run_file(
            tmp_path / "first.toml",
            "first",
            96,
            model={"preset": "nano", "overrides": {"vocabulary": VOCABULARY}},
            data={"source": str(corpus)},
        )
        stack.run("submit", str(first))
        assert stack.client.run("first")["spec"]["data"]["digest"] == digest_of(open_corpus(corpus))
        stack.wait_until(lambda: len(losses(stack, "first")) >= 2, "the second evaluation")
        stack.send(signal.SIGKILL, "learner-2")
        stack.wait_until(lambda: stack.client.run("first")["state"] == "finished", "the end")
        stack.wait_until(lambda: evaluated_at_its_end(stack, "first"), "its last evaluation")
        before = losses(stack, "first")
        assert before[-1] < before[0] - 0.5

        stack.run("export", "first", "--to", str(model))
        assert {f.name for f in model.iterdir()} >= {
            "model.safetensors",
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        asked = ("--prompt", "The ", "--tokens", "12", "--json")
        written = stack.diloco("generate", str(model), *asked)
        assert written["text"] and written["prompt"] == "The "
        # A run that is over, or still trains, writes what its export does.
        assert stack.diloco("generate", "first", *asked)["text"] == written["text"]

        second = run_file(
            tmp_path / "second.toml",
            "second",
            36,
            model={"weights": str(model)},
            data={"source": str(more)},
        )
        stack.run("submit", str(second))
        begun = stack.client.run("second")["spec"]["model"]
        assert begun["weights_digest"] == weights_digest(open_weights(model))
        stack.wait_until(lambda: stack.client.run("second")["state"] == "finished", "its end")
        # The state is of the budget: the evaluation of the end follows.
        stack.wait_until(lambda: evaluated_at_its_end(stack, "second"), "the last evaluation")
        after = losses(stack, "second")
        assert after[-1] < after[0] - 0.5
        stack.run("export", "second", "--to", str(tmp_path / "better"))
        assert open_weights(tmp_path / "better").shape == open_weights(model).shape
