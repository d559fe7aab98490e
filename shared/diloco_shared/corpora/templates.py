"""Chat templates: how a conversation is written as one text.

A template is a program in Jinja, and it comes with somebody's tokenizer. So it runs in a sandbox:
it reads messages, and gets at nothing else of this process. It finds what templates of Hugging Face
expect: `messages`, `add_generation_prompt`, the special tokens by name, `raise_exception`,
`tojson`, `break` and `continue`, and the tags around what the assistant says (`generation`), which
do nothing here. It finds no clock: a corpus is the same whenever it is prepared.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from diloco_shared.corpora.tokenizers import Tokenizer

Message = Mapping[str, Any]

# Of a template: the longest that tokenizers come with, with tools and all, have some 20 kB.
TEMPLATE_BYTES_MAX = 1 << 20
# Characters that one conversation may become: the encoder holds some hundred bytes for each token,
# and a template that never stops is stopped here.
RENDERED_MAX = 4 << 20
# For tokenizers that come without a template. Each message is its role in brackets on a line of its
# own, and its content; the assistant's ends with the token that ends a document.
BUILT_IN = """\
{%- for message in messages -%}
{{ '' if loop.first else '\\n' }}[{{ message.role }}]
{{ message.content }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '\\n' if messages else '' }}[assistant]{{ '\\n' }}{% endif -%}
"""


# Of Hugging Face: writes today's date. Most templates that know it do without it.
CLOCK = "strftime_now"


class TemplateFault(ValueError):
    """A template cannot write this conversation."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template that is ready to write. `name` is for messages."""

    text: str
    name: str
    special: Mapping[str, str]
    compiled: Any  # jinja2.Template

    def rendered(self, messages: Iterable[Message], *, prompt: bool = False) -> str:
        """The conversation as text; `prompt`: with what stands before an answer behind it.

        Raises TemplateFault.
        """
        given = dict(self.special, messages=list(messages), add_generation_prompt=prompt)
        parts, size = [], 0
        try:
            for part in self.compiled.generate(**given):
                parts.append(part)
                size += len(part)
                if size > RENDERED_MAX:
                    break
        except Exception as error:  # it is a program: it may fail as any program does
            raise TemplateFault(
                f"the chat template {self.name} does not take this conversation: {_said(error)}"
            ) from None
        if size > RENDERED_MAX:
            raise TemplateFault(
                f"the chat template {self.name} makes more than {RENDERED_MAX} characters of this "
                "conversation: cut it into several"
            )
        return "".join(parts)


def template_of(tokenizer: Tokenizer, name: str, file: Path | None = None) -> ChatTemplate:
    """The template in `file`, or else the tokenizer's own, or else `BUILT_IN`.

    `name`: of the tokenizer, for messages. Raises ValueError if there is no such file, or if it is
    no template.
    """
    if file is not None:
        return compiled(_content(file), str(file), tokenizer.special)
    if tokenizer.chat_template is not None:
        return compiled(tokenizer.chat_template, f"of tokenizer {name}", tokenizer.special)
    return compiled(BUILT_IN, "that is built in", tokenizer.special)


def compiled(text: str, name: str, special: Mapping[str, str]) -> ChatTemplate:
    """A template of its text. `special`: texts of special tokens, by the names it knows them by."""
    if len(text) > TEMPLATE_BYTES_MAX:
        raise ValueError(f"the chat template {name} is longer than {TEMPLATE_BYTES_MAX} characters")
    sandbox = _sandbox()
    from jinja2 import TemplateSyntaxError

    try:
        return ChatTemplate(text, name, dict(special), sandbox.from_string(text))
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template {name} is no template of Jinja: line {error.lineno}: "
            f"{error.message}"
        ) from None
    except (RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"the chat template {name} cannot be compiled: {type(error).__name__}"
        ) from None


def _content(file: Path) -> str:
    try:
        if file.stat().st_size > TEMPLATE_BYTES_MAX:
            raise ValueError(f"{file} is longer than {TEMPLATE_BYTES_MAX} bytes: no template is")
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no chat template: it is not text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    said = lines[0] if lines else type(error).__name__
    if CLOCK in said:
        said += " (there is no clock, so that a corpus is the same on every day)"
    return said


@cache
def _sandbox() -> Any:
    """Where templates run: what they are given cannot be changed, and has no inner parts."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.exceptions import SecurityError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError(
            "conversations are written by the package jinja2, which is not installed: pip install "
            "jinja2"
        ) from None

    class Spoken(Extension):
        """{% generation %} … {% endgeneration %} is what stands in it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            found: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return found

    class Sandbox(ImmutableSandboxedEnvironment):
        """Says at once what may not be read, where Jinja would show nothing in its place."""

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise SecurityError(f"it must not use {attribute!r} of a {type(obj).__name__}")

    def refuse(message: str) -> None:
        raise TemplateError(message)

    found = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Spoken, "jinja2.ext.loopcontrols"],
        cache_size=0,
    )
    found.filters["tojson"] = _json
    found.globals["raise_exception"] = refuse
    return found


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own writes for pages of the web, and turns < and > into something else."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
