"""Conversations, and templates of four well-known manners, for tests of chat."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_shared.corpora.chat import Chat
from diloco_shared.corpora.templates import compiled

# As Llama's: headers, words without white space around them, and a generation prompt.
HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|header|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|header|>\\n\\n' }}
{%- endif %}
"""
# As ChatML: lines, of which each turn begins and ends one.
LINES = """\
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
# As Gemma's: another name for the assistant, no role of the system, and turns that take turns.
TURNS = """\
{{ bos_token }}{% if messages and messages[0].role == 'system' %}
{{ raise_exception('there is no role system') }}{% endif %}
{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('user and assistant must take turns') }}
{% endif %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
<turn>{{ role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}
<turn>model
{% endif %}
"""
# As Zephyr's: the generation prompt is part of the last turn, so there is none before the first.
LAST_TURNS = """\
{% for message in messages %}
<|{{ message.role }}|>
{{ message.content }}{{ eos_token }}
{% if loop.last and add_generation_prompt %}
<|assistant|>
{% endif %}
{% endfor %}
"""
# Each with what ends a turn of the assistant, and whether it trims what is said.
MANNERS = {
    "headers": (HEADERS, "<|eot|>", True),
    "lines": (LINES, "<|im_end|>", False),
    "turns": (TURNS, "<end_of_turn>", True),
    "last turns": (LAST_TURNS, "</s>", False),
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def chat_of(template: str, **special: str) -> Chat:
    """Conversations written by this template."""
    return Chat(compiled(template, "t", special or SPECIAL))


def said(*words: str, first: str = "user") -> list[dict[str, Any]]:
    """User and assistant in turn."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(words)]


def answers(messages: Sequence[dict[str, Any]]) -> list[str]:
    """What the assistant says."""
    return [m["content"] for m in messages if m["role"] == "assistant"]


def sums(count: int) -> list[list[dict[str, Any]]]:
    """Short conversations that differ."""
    return [said(f"What is {n} and {n}?", f"It is {2 * n}.") for n in range(count)]


def lines_of(file: Path, records: Sequence[Any]) -> Path:
    """A file of JSON lines."""
    file.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    return file
