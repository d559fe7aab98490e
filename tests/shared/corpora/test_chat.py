"""Which characters, and which tokens, of a conversation are to be predicted: the answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from shared.corpora.conversations import (
    HEADERS,
    LAST_TURNS,
    LINES,
    MANNERS,
    SPECIAL,
    TURNS,
    answers,
    chat_of,
    said,
)

from diloco_shared.corpora.chat import MESSAGES_MAX, Chat, marked, signed
from diloco_shared.corpora.documents import Record
from diloco_shared.corpora.templates import BUILT_IN, template_of
from diloco_shared.corpora.tokenizers import ByteTokenizer, Tokenizer, load

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
CONVERSATIONS = st.lists(TEXT, min_size=2, max_size=7).map(lambda words: said(*words))


def predicted(chat: Chat, messages: Sequence[dict[str, Any]]) -> list[str]:
    text, spans = chat.written(messages)
    return [text[a:b] for a, b in spans]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level pieces that like to join white space and what follows it."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    ends = [end for _, end, _ in MANNERS.values()]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["</s>", "<s>", "<|start|>", "<|header|>", "<|im_start|>", "<turn>", *ends],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["user assistant model the cat\n\n\n  sat 你好 ünï\n"] * 99, trainer)
    folder = tmp_path_factory.mktemp("bpe")
    inner.save(str(folder / "tokenizer.json"))
    return load(str(folder))


@given(messages=CONVERSATIONS)
@pytest.mark.parametrize("manner", MANNERS)
@examples(50)
def test_what_is_predicted_is_the_words_and_the_end_of_the_turn(
    manner: str, messages: list[dict[str, Any]]
) -> None:
    template, end, trims = MANNERS[manner]
    wanted = [(words.strip() if trims else words) + end for words in answers(messages)]
    assert predicted(chat_of(template), messages) == wanted


@given(messages=CONVERSATIONS)
@pytest.mark.parametrize("manner", [*MANNERS, "built in"])
@examples(50)
def test_tokens_of_the_answers_are_those_above_0(
    bpe: Tokenizer, manner: str, messages: list[dict[str, Any]]
) -> None:
    """Of words that hold no special token; those are tokens of their own in any text."""
    template, end, trims = MANNERS.get(manner, (BUILT_IN, "</s>", False))
    chat = chat_of(template, **bpe.special)
    text, spans = chat.written(messages)
    tokens = signed(bpe, text, spans)
    assert tokens.dtype == np.int32
    wanted = "".join((w.strip() if trims else w) + end for w in answers(messages))
    assert bpe.decode(tokens[tokens >= 0].tolist()) == wanted
    assert bpe.decode(np.where(tokens < 0, ~tokens, tokens).tolist()) == text


@given(messages=CONVERSATIONS)
@examples(50)
def test_bytes_are_signed_alike(messages: list[dict[str, Any]]) -> None:
    chat, tokenizer = Chat(template_of(ByteTokenizer(), "bytes")), ByteTokenizer()
    tokens = signed(tokenizer, *chat.written(messages))
    wanted = "".join(f"{words}\0" for words in answers(messages))
    assert bytes(tokens[tokens >= 0].tolist()).decode() == wanted


def test_where_no_token_is_of_both_sides_the_tokens_are_those_of_the_text(bpe: Tokenizer) -> None:
    text, spans = chat_of(HEADERS, **bpe.special).written(said("the cat", "sat", "the", "cat"))
    tokens = signed(bpe, text, spans)
    (wanted,) = bpe.encode_batch([text])
    np.testing.assert_array_equal(np.where(tokens < 0, ~tokens, tokens), wanted)


def test_a_prompt_is_encoded_as_whoever_asks_will_encode_it(bpe: Tokenizer) -> None:
    """Also where the text has a token of both sides: white space before and within the answer."""
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    chat = chat_of(template, **bpe.special)
    messages = said("cat", "the cat")
    text, spans = chat.written(messages)
    tokens = signed(bpe, text, spans)
    prompt = chat.template.rendered(messages[:1], prompt=True)
    asked, whole = bpe.encode_batch([prompt, text])
    assert whole.tolist()[: len(asked)] != asked.tolist(), "the whole text joins the two"
    np.testing.assert_array_equal(~tokens[tokens < 0], asked)
    assert bpe.decode(tokens[tokens >= 0].tolist()) == "the cat</s>"


def test_white_space_that_a_special_token_takes_is_left_to_it(bpe: Tokenizer) -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    inner = bpe.inner  # type: ignore[attr-defined]
    taking = tokenizers.Tokenizer.from_str(inner.to_str())
    taking.add_special_tokens([tokenizers.AddedToken("<|done|>", rstrip=True, special=True)])
    tokenizer = type(bpe)(taking, bpe.vocabulary + 1, 0, "", None, {}, {})  # type: ignore[call-arg]
    pieces = ["cat<|done|>", "\nsat"]
    (whole,) = tokenizer.encode_batch(["".join(pieces)])
    (before,) = tokenizer.encode_batch(pieces[:1])
    np.testing.assert_array_equal(tokenizer.encode_pieces(pieces)[0], before)
    np.testing.assert_array_equal(np.concatenate(tokenizer.encode_pieces(pieces)), whole)


def test_a_sentence_piece_model_knows_its_special_tokens_in_conversations(tmp_path: Path) -> None:
    sentencepiece: Any = pytest.importorskip("sentencepiece")
    (tmp_path / "t.txt").write_text("".join(f"{n} [user] [assistant] the cat\n" for n in range(99)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "t.txt"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=44,
        hard_vocab_limit=False,
        character_coverage=1.0,
        minloglevel=2,
    )
    tokenizer = load(str(tmp_path / "m.model"))
    assert tokenizer.special == {"eos_token": "</s>", "bos_token": "<s>"}
    chat = Chat(template_of(tokenizer, "m"))
    tokens = signed(tokenizer, *chat.written(said("the cat", "the cat", "cat", "the")))
    ends = np.flatnonzero(tokens == tokenizer.end_of_document)
    assert len(ends) == 2 and tokens[-1] == tokenizer.end_of_document
    answers = [tokenizer.decode(part[part >= 0].tolist()) for part in np.split(tokens, ends)[:2]]
    assert [answer.strip() for answer in answers] == ["the cat", "the"]
    # What comes before an answer is what somebody who asks would give to the model.
    prompt = chat.template.rendered(said("the cat"), prompt=True)
    (asked,) = tokenizer.encode_batch([prompt])
    np.testing.assert_array_equal(~tokens[: len(asked)], asked)


def test_a_template_without_a_generation_prompt_has_headers_that_are_not_predicted() -> None:
    template = (
        "{% for m in messages %}{{ '#' + m.role + '\\n' + m.content + '</s>\\n' }}{% endfor %}"
    )
    assert predicted(chat_of(template), said("hi", "yo", "user", "#assistant")) == [
        "yo</s>",
        "#assistant</s>",
    ]
    colons = "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"
    assert predicted(chat_of(colons), said("hi", "yo")) == [" yo</s>"], "a token begins with it"


def test_what_closes_the_whole_text_is_not_between_its_turns() -> None:
    template = (
        LINES.removesuffix("{% endif %}\n") + "{% elif messages %}\n{{ eos_token }}{% endif %}"
    )
    found = predicted(chat_of(template), said("hi", "yo", "so", "what"))
    assert found == ["yo<|im_end|>", "what<|im_end|>\n</s>"]


def test_where_nothing_but_white_space_ends_a_turn_that_is_predicted() -> None:
    template = "{% for m in messages %}{{ m.role + '>' + m.content + '\\n\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant>{% endif %}"
    assert predicted(chat_of(template), said("hi", "yo", "so", "a ")) == ["yo\n\n", "a \n\n"]


def test_an_assistant_may_speak_first_and_twice() -> None:
    assert predicted(chat_of(LINES), said("a", "b", "c", first="assistant")) == [
        "a<|im_end|>",
        "c<|im_end|>",
    ]
    twice = [*said("a", "b"), *said("c", first="assistant")]
    assert predicted(chat_of(LINES), twice) == ["b<|im_end|>", "c<|im_end|>"]


@given(st.lists(TEXT, min_size=1, max_size=5), st.sampled_from(["user", "assistant"]))
@examples(50)
def test_each_answer_begins_where_its_own_header_ends(words: list[str], first: str) -> None:
    """Where the assistant speaks first, this template writes no prompt for that answer alone: what
    stands in front of it is not left out of the others, which are shorter, a second time."""
    messages = said(*words, "", first=first)
    wanted = [text + "</s>" for text in answers(messages)]
    assert predicted(chat_of(LAST_TURNS), messages) == wanted


def test_other_fields_of_a_message_are_for_the_template() -> None:
    template = """\
{%- for m in messages -%}
<{{ m.role }}>{{ m.thought if m.thought is defined }}{{ m.content }}</>
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}"""
    messages = said("hi", "yo")
    messages[1]["thought"] = "hm, "
    record = Record({"messages": [messages[0] | {"thought": None}, messages[1]]}, "f:1", 1)
    document = chat_of(template).document(record)
    assert [document.text[a:b] for a, b in document.spans] == ["hm, yo</>"]


def test_a_prompt_and_its_completion_are_a_conversation() -> None:
    chat = chat_of(LINES)
    record = Record({"messages": None, "prompt": "hi", "completion": "yo", "id": 7}, "f:1", 1)
    assert chat.document(record) == chat.document(Record({"messages": said("hi", "yo")}, "f:1", 1))


def test_half_a_character_becomes_a_whole_one() -> None:
    document = chat_of(LINES).document(Record({"messages": said("hi", "a\ud800b")}, "f:1", 1))
    assert [document.text[a:b] for a, b in document.spans] == ["a?b<|im_end|>"]


THINKS = """\
{% for m in messages %}
{{ m.role + ':' + (m.content if loop.last else m.content.split(';')[-1]) + '.' }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}
"""
MANY = said(*["x"] * (MESSAGES_MAX + 1))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1], 'expected an object with a list "messages" of messages, or .* not list'),
        ({"text": "x", "no": None}, '"prompt" and "completion"; it has \'text\''),
        ({}, "it has no field"),
        ({"messages": "hi"}, '"messages" is str, not a list'),
        ({"messages": []}, '"messages" is empty'),
        ({"messages": MANY}, f"has {len(MANY)} messages, and at most {MESSAGES_MAX} are taken"),
        ({"messages": ["hi"]}, r'"messages"\[0\] is str, not an object'),
        ({"messages": [{"content": "hi"}]}, r'"messages"\[0\]: "role" is missing'),
        (
            {"messages": [*said("hi"), {"role": "assistant", "content": ["x"]}]},
            r'"messages"\[1\]: "content" is list, not a string',
        ),
        ({"messages": said("hi")}, "no message of the role \"assistant\".*its roles are 'user'"),
        ({"prompt": "hi", "completion": 1}, '"completion" is int, not a string'),
        ({"prompt": "hi"}, "it has 'prompt'"),
    ],
)
def test_a_bad_record_is_named(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=rf"^data\.jsonl:3: .*{says}"):
        chat_of(LINES).document(Record(value, "data.jsonl:3", 1))


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (TURNS, [{"role": "system", "content": "be"}, *said("hi", "yo")], "there is no role syst"),
        (TURNS, [*said("hi", "yo"), *said("so", first="assistant")], "must take turns"),
        (
            THINKS,
            said("hi", "let me see;yo", "so", "what"),
            "text before message 2 in another way .* writes 'let me see;yo.*' in the place of 'yo",
        ),
        ("{{ messages[0].role }}{{ messages | length }}", said("hi", "yo"), "in another way"),
        ("{{ messages[5].content.x }}", said("hi", "yo"), "no element 5"),
    ],
)
def test_a_template_that_does_not_take_a_record_is_named_with_it(
    template: str, messages: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=rf"^data\.jsonl:3: the chat template .*{says}"):
        chat_of(template).document(Record({"messages": messages}, "data.jsonl:3", 1))


def test_what_is_only_read_is_shown_between_marks() -> None:
    text, spans = chat_of(LINES, **SPECIAL).written(said("hi", "yo"))
    shown = marked(signed(ByteTokenizer(), text, spans).tolist(), ByteTokenizer())
    assert shown == ("«<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n»yo<|im_end|>«\n»")
    assert marked([], ByteTokenizer()) == ""
