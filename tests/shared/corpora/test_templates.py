"""Templates write conversations in a sandbox: what they expect is there, and nothing else."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shared.corpora.conversations import LINES, SPECIAL, said

from diloco_shared.corpora import templates
from diloco_shared.corpora.templates import TemplateFault, compiled, template_of
from diloco_shared.corpora.tokenizers import ByteTokenizer


def written(text: str, *words: str, prompt: bool = False) -> str:
    return compiled(text, "t", SPECIAL).rendered(said(*words), prompt=prompt)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ messages[0].role }}", "<s>hiuser"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hi"}'),
        ("{{ '<é>' | tojson }}", '"<é>"'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "yo"),
        ("{{ nothing }}{{ tools is defined }}", "False"),
        ("{% if strftime_now is defined %}today{% else %}a day{% endif %}", "a day"),
        ("{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}", "2"),
        ("<b>{{ '<' }}\n", "<b><"),
    ],
)
def test_templates_find_what_they_expect(text: str, wanted: str) -> None:
    assert written(text, "hi", "yo") == wanted


def test_a_prompt_is_what_an_answer_follows() -> None:
    assert written(LINES, "hi") == "<|im_start|>user\nhi<|im_end|>\n"
    assert written(LINES, "hi", prompt=True).endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ messages.__class__ }}", "must not use '__class__' of a list"),
        ("{{ messages[0]['content'].__init__.__globals__ }}", "must not use '__init__' of a str"),
        ("{{ messages | attr('__class__') }}", "must not use '__class__' of a list"),
        ("{{ '{0.__class__}'.format(messages) }}", "must not use '__class__' of a list"),
        ("{{ raise_exception.__globals__ }}", "must not use '__globals__' of a function"),
        ("{{ messages.append(1) }}", "must not use 'append' of a list"),
        ("{{ messages[0].update({'role': 'x'}) }}", "must not use 'update' of a dict"),
        ("{% include '/etc/hostname' %}", "no loader"),
        ("{{ raise_exception('no tools here') }}", "conversation: no tools here"),
        ("{{ strftime_now('%Y') }}", r"undefined \(there is no clock"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages.x.y }}", "has no attribute 'x'"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_what_a_template_must_not_do_is_said(text: str, says: str) -> None:
    with pytest.raises(TemplateFault, match=rf"chat template t does not take .*{says}"):
        written(text, "hi")


def test_a_template_that_goes_on_and_on_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "RENDERED_MAX", 1000)
    endless = "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}"
    with pytest.raises(TemplateFault, match="makes more than 1000 characters"):
        written(endless, "hi")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\n{% if x %}", "chat template t is no template of Jinja: line 2: "),
        ("{% nothing %}", "line 1: Encountered unknown tag 'nothing'"),
        ("{% generation %}", "line 1: "),
        ("{{ x | nothing }}", "No filter named 'nothing'"),
        ("x" * (templates.TEMPLATE_BYTES_MAX + 1), "is longer than"),
    ],
)
def test_what_is_no_template_is_refused_at_once(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compiled(text, "t", {})


def test_a_file_goes_before_the_tokenizers_own_and_that_before_the_one_here(
    tmp_path: Path,
) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("file")
    told: Any = SimpleNamespace(chat_template="{{ messages[0].content }}", special={})
    assert template_of(told, "x", file).rendered(said("hi")) == "file"
    assert template_of(told, "x").rendered(said("hi")) == "hi"
    built_in = template_of(ByteTokenizer(), "bytes")
    assert built_in.rendered(said("hi", "yo")) == "[user]\nhi\n[assistant]\nyo\0"
    assert built_in.rendered(said("hi"), prompt=True) == "[user]\nhi\n[assistant]\n"
    assert built_in.rendered([], prompt=True) == "[assistant]\n"


def test_a_file_that_is_no_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.jinja cannot be read"):
        template_of(ByteTokenizer(), "bytes", tmp_path / "gone.jinja")
    (tmp_path / "x.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"x\.jinja is no chat template: it is not text in UTF-8"):
        template_of(ByteTokenizer(), "bytes", tmp_path / "x.jinja")
    (tmp_path / "x.jinja").write_bytes(b"x" * (templates.TEMPLATE_BYTES_MAX + 1))
    with pytest.raises(ValueError, match=r"x\.jinja is longer than"):
        template_of(ByteTokenizer(), "bytes", tmp_path / "x.jinja")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    templates._sandbox.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"not installed: pip install jinja2"):
        compiled("x", "t", {})
