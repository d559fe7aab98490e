"""What a page quotes of what programs say is what they say."""

import re
from functools import cache
from pathlib import Path

import pytest
from cli.test_screens import SCREENS
from deploy.test_observability import exported
from docs.shown import DOCS, PAGES, ROOT, codes, is_command
from pages import blocks
from test_tidy import tracked

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
# What the code puts into a sentence is "…" here, as pages write it.
FILLED = "…"
# Said by other programs, or put together in another way than as one sentence.
OF_OTHERS = {
    "the coordinator lacks jax, which lets models write": "jax is the package that is missing",
    "certificate verify failed": "OpenSSL",
    "certificate has expired": "OpenSSL",
    "certificate is not yet valid": "OpenSSL",
    "alert certificate expired": "OpenSSL",
    "alert certificate required": "OpenSSL",
    "Authorization Violation": "nats-server",
    "takes no connection: … (timed out)": "the system's words follow ours",
    "takes no connection: … (connection refused)": "the system's words follow ours",
    "…/manifest.json is damaged: …": "the name of the file is a constant",
}


@cache
def said() -> tuple[str, ...]:
    """Lines of the sources, of which texts over several lines are made one."""
    lines = list[str]()
    for folder in ("shared", "services", "cli", "client", "simulator"):
        for source in (ROOT / folder).rglob("*.py"):
            text = re.sub(r"[\"']\s*\n\s*[rf]?[\"']", "", source.read_text("utf-8"))
            filled = re.sub(r"\{[^{}\n]*\}", FILLED, text)
            lines += [line for line in filled.splitlines() if not line.lstrip().startswith("#")]
    return tuple(lines)


def is_said(quoted: str) -> bool:
    """Whether a source has each part of it, between two semicolons. "…" stands for anything."""
    for part in quoted.strip("().").split("; "):
        pieces = [piece for piece in part.replace("...", FILLED).split(FILLED) if piece.strip()]
        wanted = re.compile(".*".join(re.escape(piece.strip()) for piece in pieces))
        if not any(wanted.search(text) for text in said()):
            return False
    return True


def is_sentence(code: str) -> bool:
    """Of three words or more in lower case, and nothing that is typed or written into a file."""
    words = [word for word in code.split() if re.fullmatch(r"[a-z',;:.]+", word)]
    written = re.match(r"[-\[{$~]|[A-Z]+ /", code) or re.search(r" -\w| [=*] |=\w|\{", code)
    return len(words) >= 3 and not written and not is_command(code)


@every_page
def test_every_message_that_is_quoted_is_one(page: Path) -> None:
    quoted = [code.replace("...", FILLED) for code in codes(page) if is_sentence(code)]
    assert not [text for text in quoted if text not in OF_OTHERS and not is_said(text)]


# Of an event, a metric, a field, an alert: a name of several words.
_NAME = re.compile(r"[a-z]+(?:[_-][a-z0-9]+)+|[A-Z][a-z]+(?:[A-Z][a-z]+)+")
NAMES_OF_OTHERS = {
    "VolumeSnapshot": "Kubernetes",
    "CrashLoopBackOff": "Kubernetes",
    "AutoTokenizer": "transformers",
}


@cache
def names() -> frozenset[str]:
    """All that stand in the repository, besides its pages."""
    found = set(exported())
    for path in tracked():
        if path.suffix not in (".md", ".png", ".svg", ".jsonl"):
            found.update((path.name, path.stem))
            found.update(re.findall(r"[\w-]+", path.read_text("utf-8", errors="replace")))
    return frozenset(found)


@every_page
def test_every_name_that_is_quoted_is_one_of_the_repository(page: Path) -> None:
    """Or one that the page itself gives to something."""
    own = set(re.findall(r"[\w-]+", "\n".join(block.body for block in blocks(page))))
    quoted = {code for code in codes(page) if _NAME.fullmatch(code)}
    assert not quoted - names() - own - NAMES_OF_OTHERS.keys()


# What commands print as names and figures in columns, by the page and the screen.
COLUMNS = {
    "tuning": ("sim-bandwidth", ("Gbit/s shared link", "Gbit/s", "keeps up")),
    "learner-speed": ("members", ("process memory",)),
    "command-line": ("token-list", ("anna: read",)),
    "checkpoints": ("checkpoint-create", ("(as the user asked)",)),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_line_that_is_named_stands_on_the_screen(name: str) -> None:
    screen, lines = COLUMNS[name]
    found = (SCREENS / f"{screen}.txt").read_text("utf-8")
    quoted = codes(DOCS / "how-to" / f"{name}.md")
    for line in lines:
        assert line in quoted and re.search(rf"(?:^ *|\S ){re.escape(line)}", found, re.MULTILINE)


def test_a_message_that_nobody_says_is_found() -> None:
    assert is_said("the hub has lost its majority: half of its nodes or more are away")
    assert is_said("… has … free, and the export takes …")
    assert not is_said("the hub lost its majority")
    assert not is_said("… has … free, and an export takes …")
    assert is_sentence("another living process has this id")
    for text in ("diloco rounds first --newest 3", "overlap_steps = 4", "GET /v1/runs"):
        assert not is_sentence(text)
