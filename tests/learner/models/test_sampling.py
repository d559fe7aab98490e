"""Text from a folder: the model's own tokenizer, whole characters, and clear refusals."""

import codecs
import json
import random
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco_learner.models.decoding import CONTEXT_MAX, Sampling, Writer, pieces, writer
from diloco_shared.corpora.templates import compiled
from diloco_shared.corpora.tokenizers import ByteTokenizer, load
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
    pieces = list(Writer(said, ByteTokenizer()).text("ab", 9, 3))  # type: ignore[arg-type]
    assert pieces == ["n", "é", "€", "!"]
    assert said.asked == (list(b"ab"), 9, 3, (0,))


def test_what_ends_in_the_middle_of_a_character_shows_so() -> None:
    said = Said(list("a€".encode()[:-1]))
    assert "".join(Writer(said, ByteTokenizer()).text("", 9, 0)) == "a\ufffd"  # type: ignore[arg-type]
    # An empty prompt begins a document.
    assert said.asked[0] == [0]


def _bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


WORDS = ("a", "bc", "##d", "▁e", "▁", "")


def _words(ids: Sequence[int]) -> str:
    """As tokenizers of words do it."""
    return " ".join(WORDS[n % 6] for n in ids).replace(" ##", "")


def _marked(ids: Sequence[int]) -> str:
    """As SentencePiece does it: the space before the first is left out."""
    return "".join(WORDS[n % 6] for n in ids).replace("▁", " ").removeprefix(" ")


def _by_byte(ids: Sequence[int]) -> str:
    """As tokenizers do it that spell what they do not know: a mark for each byte."""
    return bytes(ids).decode("utf-8", "by_byte")


codecs.register_error("by_byte", lambda e: ("\ufffd" * (e.end - e.start), e.end))  # type: ignore[attr-defined]
TEXTS = ("a €uro, ä and 𝄞, " * 30).encode()
TOKENS = {
    "text": list(TEXTS),
    "no text": random.Random(1).choices(range(256), k=700),
    "no character": [0x80] * 300 + list("é€".encode()) * 20,
    "nothing at first": [5] * 40 + [3, 0, 3],
}


@pytest.mark.parametrize("decode", [_bytes, _words, _marked, _by_byte])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_pieces_together_are_the_text(
    decode: Callable[[Sequence[int]], str], tokens: list[int]
) -> None:
    assert "".join(pieces(decode, tokens)) == decode(tokens)


@pytest.mark.parametrize("tokens", [*TOKENS.values(), [5] * 3000], ids=[*TOKENS, "nothing"])
@pytest.mark.parametrize("decode", [_bytes, _words, _marked])
def test_a_long_text_takes_no_longer_per_token(
    decode: Callable[[Sequence[int]], str], tokens: list[int]
) -> None:
    decoded = 0

    def counted(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    many = tokens * (6000 // len(tokens))
    for _ in pieces(counted, many):
        pass
    assert decoded <= 2 * CONTEXT_MAX * len(many), "all that were found, for every one of them"


def test_an_answer_is_asked_for_and_ended_as_the_template_says() -> None:
    """With the one that is built in for a tokenizer without one: its answers end the document."""
    said = Said(list(b"yes"))
    assert "".join(Writer(said, ByteTokenizer()).answer("why?", 9, 3)) == "yes"  # type: ignore[arg-type]
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
    for name, content in files_of(ByteTokenizer()).items():
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


def test_a_token_that_no_text_becomes_needs_no_row(folder: Path) -> None:
    """Gemma 3 of a billion parameters has one for images, and no row for it."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    letters = dict(sorted(raw["model"]["vocab"].items(), key=lambda item: item[1])[:48])
    raw["model"]["vocab"] = letters
    raw["added_tokens"].append(raw["added_tokens"][0] | {"id": 48, "content": "<image>"})
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    found = writer(folder, Sampling(temperature=0))
    assert "".join(found.text("!", 12, 0)) != ""
    with pytest.raises(ValueError, match="the prompt has token 48, the model 48 tokens"):
        found.text("<image>", 12, 0)


def test_weights_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        writer(GOLDEN / "llama", Sampling())
