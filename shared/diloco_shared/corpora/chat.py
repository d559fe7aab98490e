"""Conversations as documents: one text each, and which of its characters are to be predicted.

A record has a list of messages, or a prompt and its completion. A chat template writes it. What is
to be predicted is what the assistant says and what ends its turn; all else is only read. Where that
is, the template itself tells: the text up to an answer is what it writes of the messages before,
with the generation prompt, and the answer ends where the text of the messages up to it ends. Both
must be how the whole text begins. For a template of which that is not so the answer is not found,
and the record is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_shared.corpora.documents import Document, Record, Spans
from diloco_shared.corpora.templates import ChatTemplate, Message, TemplateFault
from diloco_shared.corpora.tokenizers import Tokenizer

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
ASSISTANT = "assistant"
# Of a conversation. For each answer the messages before it are written several times more, so that
# the work grows with the square of their number; more than this is a log, to be cut into several.
MESSAGES_MAX = 1024
# Characters of a text that a message quotes.
QUOTED = 40


@dataclass(frozen=True, slots=True)
class Chat:
    """How records become documents. `field`: which one holds the messages."""

    template: ChatTemplate
    field: str = MESSAGES

    @property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        """Of a table: the first of these sets that it has is read."""
        return (self.field,), (PROMPT, COMPLETION)

    def document(self, record: Record) -> Document:
        """The conversation of a record. ValueError names the record and what is wrong with it."""
        messages = self.messages(record.value, record.where)
        try:
            text, spans = self.written(messages)
        except ValueError as error:
            raise ValueError(f"{record.where}: {error}") from None
        # Half a character, which JSON can write, becomes one other character.
        return Document(text.encode("utf-8", "replace").decode(), record.read, spans)

    def messages(self, value: Any, where: str) -> list[Message]:
        """What a record says, checked: a role and a content for each message."""
        wanted = (
            f'{where}: expected an object with a list "{self.field}" of messages, or with the '
            f'strings "{PROMPT}" and "{COMPLETION}"'
        )
        if not isinstance(value, dict):
            raise ValueError(f"{wanted}, not {type(value).__name__}")
        if value.get(self.field) is not None:
            return _checked(value[self.field], f'{where}: "{self.field}"')
        if value.get(PROMPT) is not None and value.get(COMPLETION) is not None:
            for name in (PROMPT, COMPLETION):
                if not isinstance(value[name], str):
                    kind = type(value[name]).__name__
                    raise ValueError(f'{where}: "{name}" is {kind}, not a string')
            return [
                {"role": "user", "content": value[PROMPT]},
                {"role": ASSISTANT, "content": value[COMPLETION]},
            ]
        has = ", ".join(repr(n) for n, v in list(value.items())[:8] if v is not None)
        raise ValueError(f"{wanted}; it has {has or 'no field'}")

    def written(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        """The text, and from where to where it is to be predicted, in characters.

        Raises ValueError where the template does not say it, or does not take the messages.
        """
        whole = self.template.rendered(messages)
        spans: list[tuple[int, int]] = []
        closing: str | None = None
        for place, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self.template.rendered(messages[:place], prompt=True)
            # Of each answer its own: a template may write a prompt for some, and none for others.
            header = self._header(messages[:place], message, before)
            if closing is None:
                closing = self._closing(messages[:place], message)
            begin = _beginning(whole, before, place) + len(header)
            end = self._end(whole, messages[: place + 1], last=place + 1 == len(messages))
            if closing:
                end = begin + len(whole[begin:end].rstrip())
            if begin < end:
                spans.append((begin, end))
        return whole, tuple(spans)

    def asked(self, messages: Sequence[Message]) -> tuple[str, str]:
        """The text that an answer to these messages follows, and what ends an answer, "" if nothing
        does: what a model reads and stops at that was trained on conversations of this template.

        Raises TemplateFault.
        """
        before, answer = self.template.rendered(messages, prompt=True), {"role": ASSISTANT}
        return before + self._header(messages, answer, before), self._closing(messages, answer)

    def _end(self, whole: str, messages: Sequence[Message], *, last: bool) -> int:
        if last:
            return len(whole)
        through = self.template.rendered(messages)
        end = self.template.special.get("eos_token", "")
        # Some templates close whatever they write with it, if no prompt is to follow.
        if end and through.endswith(end) and not whole.startswith(through):
            through = through.removesuffix(end)
        return _beginning(whole, through, len(messages))

    def _header(self, before: Sequence[Message], message: Message, prompted: str) -> str:
        """The text in front of an answer that is neither its own nor the prompt's, `prompted`."""
        # A template without a generation prompt leaves it to the text of the answer to say whose it
        # is. A message with more than words may have some of it in front of them.
        if not message.keys() <= {"role", "content"} or prompted != self.template.rendered(before):
            return ""
        one, other = self._two(before, message)
        opening = one[: _alike(one, other)]
        if not opening.startswith(prompted):
            return ""
        # A space before the words belongs to the first of them, for most tokenizers.
        header = opening[len(prompted) :].rstrip(" ")
        return header if header.strip() else ""

    def _closing(self, before: Sequence[Message], message: Message) -> str:
        """What ends an answer if it is more than white space, else "". White space behind that end
        is what stands between two turns."""
        one, other = self._two(before, message)
        return one[len(one) - _alike(one[::-1], other[::-1]) :].strip()

    def _two(self, before: Sequence[Message], message: Message) -> tuple[str, str]:
        """The text with two different answers in the place of one: what they have in common is what
        stands around the words of an answer."""
        one, other = (
            self.template.rendered([*before, {**message, "content": words}]) for words in "xy"
        )
        return one, other


def closing_token(tokenizer: Tokenizer, closing: str) -> int | None:
    """The token that `closing`, the end of an answer, is. None: several, as of plain text, or none;
    then an answer ends where the document does."""
    ids = tokenizer.encode_pieces([closing])[0].tolist() if closing else []
    return int(ids[0]) if len(ids) == 1 else None


def _checked(value: Any, where: str) -> list[Message]:
    """Messages as templates take them: fields that have no value are left out."""
    if not isinstance(value, list):
        raise ValueError(f"{where} is {type(value).__name__}, not a list of messages")
    if not value:
        raise ValueError(f"{where} is empty: a conversation has at least one message")
    if len(value) > MESSAGES_MAX:
        raise ValueError(
            f"{where} has {len(value)} messages, and at most {MESSAGES_MAX} are taken: cut the "
            "conversation into several"
        )
    messages: list[Message] = []
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"{where}[{number}] is {type(message).__name__}, not an object")
        for name in ("role", "content"):
            if not isinstance(text := message.get(name), str):
                has = "is missing" if text is None else f"is {type(text).__name__}, not a string"
                raise ValueError(f'{where}[{number}]: "{name}" {has}')
        messages.append({name: v for name, v in message.items() if v is not None})
    if all(message["role"] != ASSISTANT for message in messages):
        roles = ", ".join(sorted({repr(message["role"]) for message in messages}))
        raise ValueError(
            f'{where} has no message of the role "{ASSISTANT}", so nothing of it is to be '
            f"predicted; its roles are {roles}"
        )
    return messages


def _beginning(whole: str, part: str, place: int) -> int:
    """The length of `part`, with which the whole must begin. `place`: of the message behind it."""
    if whole.startswith(part):
        return len(part)
    same = _alike(whole, part)
    raise TemplateFault(
        f"the chat template writes the text before message {place} in another way if the "
        "conversation ends there, so what the assistant says cannot be found: it writes "
        f"{part[same : same + QUOTED]!r} in the place of {whole[same : same + QUOTED]!r}. Give "
        "another template with --chat-template"
    )


def _alike(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    both = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))


def signed(tokenizer: Tokenizer, text: str, spans: Spans) -> NDArray[np.int32]:
    """The tokens of a text, those outside of the spans as their complement (~token), shape (T,).

    No token has characters of both sides: it is cut where a model is asked to go on.
    """
    borders = [0, *(place for span in spans for place in span), len(text)]
    pieces = [text[a:b] for a, b in pairwise(borders)]
    found = []
    for number, ids in enumerate(tokenizer.encode_pieces(pieces)):
        tokens = ids.astype(np.int32)
        found.append(tokens if number % 2 else ~tokens)
    return np.concatenate(found)


def marked(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Signed tokens as text, to look at: what is not to be predicted stands between « and »."""
    return "".join(
        tokenizer.decode(ids) if predicted else f"«{tokenizer.decode(ids)}»"
        for predicted, ids in _runs(tokens)
    )


def _runs(tokens: Sequence[int]) -> Iterator[tuple[bool, list[int]]]:
    run: list[int] = []
    predicted = True
    for token in tokens:
        if run and predicted != (token >= 0):
            yield predicted, run
            run = []
        predicted = token >= 0
        run.append(token if predicted else ~token)
    if run:
        yield predicted, run
