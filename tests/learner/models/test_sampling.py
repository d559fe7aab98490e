"""Text from a folder: the model's own tokenizer, whole characters, and clear refusals."""

import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco_learner.models.decoding import Sampling, Writer, writer
from diloco_shared.corpora.templates import compiled
from diloco_shared.corpora.tokenizers import Bytes, load
from diloco_shared.hf.tokenizer import files_of

pytest.importorskip("tokenizers")
GOLDEN = Path(__file__).parents[2] / "interop" / "golden"


class Said:
    """A sampler that has its tokens from us."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.given = tokens
        self.asked: Any = None

    def tokens(
        self, prompt: Sequence[int], count: int, seed: int, ends: Collection[int] = ()
    ) -> Iterator[int]:
        self.asked = (list(prompt), count, seed, ends)
        return iter(self.given)


def test_a_character_is_shown_when_it_is_whole() -> None:
    said = Said(list("né€!".encode()))
    pieces = list(Writer(said, Bytes()).text("ab", 9, 3))  # type: ignore[arg-type]
    assert pieces == ["n", "é", "€", "!"]
    assert said.asked == (list(b"ab"), 9, 3, (0,))


def test_what_ends_in_the_middle_of_a_character_shows_so() -> None:
    said = Said(list("a€".encode()[:-1]))
    assert "".join(Writer(said, Bytes()).text("", 9, 0)) == "a\ufffd"  # type: ignore[arg-type]
    # An empty prompt begins a document.
    assert said.asked[0] == [0]


def test_an_answer_is_asked_for_and_ended_as_the_template_says() -> None:
    """With the one that is built in for a tokenizer without one: its answers end the document."""
    said = Said(list(b"yes"))
    assert "".join(Writer(said, Bytes()).answer("why?", 9, 3)) == "yes"  # type: ignore[arg-type]
    assert said.asked == (list(b"[user]\nwhy?\n[assistant]\n"), 9, 3, (0,))


MARKED = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)


def test_an_answer_ends_before_the_token_that_ends_a_turn(tmp_path: Path) -> None:
    """Special tokens of the template are tokens, also for the model that reads them."""
    import tokenizers

    texts = ["user\nwhy? yes <|begin|> assistant"]
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|begin|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    trained.train_from_iterator(texts, trainer)
    trained.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": MARKED}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(str(tmp_path))
    said = Said(tokenizer.encode_batch(["yes"])[0].tolist())
    assert "".join(Writer(said, tokenizer).answer("why?", 9, 3)) == "yes"  # type: ignore[arg-type]
    prompt, *_, ends = said.asked
    assert tokenizer.decode(prompt) == "<|begin|>user\nwhy?<|end|>\n<|begin|>assistant\n"
    assert prompt[0] == 1 and ends == (0, 2)
    # A template that closes with plain text ends where the document does.
    plain = compiled("{% for m in messages %}{{ m.content }} (end of it){% endfor %}", "t", {})
    list(Writer(said, tokenizer).answer("why?", 9, 3, plain))  # type: ignore[arg-type]
    assert said.asked[-1] == (0,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 48 tokens with a tokenizer of as many letters."""
    to = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama", to)
    for name, content in files_of(Bytes()).items():
        (to / name).write_bytes(content)
    return to


def test_a_tokenizer_that_is_too_large_is_another_models(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has 256 tokens, and the model 48: they do not belong"):
        writer(folder, Sampling())


def test_a_model_writes_what_it_is_likely_to(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    letters = dict(sorted(raw["model"]["vocab"].items(), key=lambda item: item[1])[:47])
    raw["model"]["vocab"] = letters
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    first = "".join(writer(folder, Sampling(temperature=0)).text("!", 12, 0))
    again = "".join(writer(folder, Sampling(temperature=0)).text("!", 12, 1))
    assert first == again != ""


def test_weights_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        writer(GOLDEN / "llama", Sampling())
