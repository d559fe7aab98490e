"""What pages show of what commands print is what the code makes of the same figures."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cli.staged import doctors_findings
from docs.shown import DOCS, PAGES, of_commands
from pages import Block, blocks

from diloco_cli.commands.check import lines_of
from diloco_cli.commands.doctor import line_of
from diloco_cli.doctor import judging
from diloco_coordinator.api.samples_io import _told
from diloco_learner.preflight.checks import REMEDIES
from diloco_learner.preflight.findings import Finding as OfRun
from diloco_learner.preflight.findings import skipped
from diloco_shared.corpora.templates import BUILT_IN, compiled
from diloco_shared.protocol.samples import SampleDone, SampleText

HOW_TO = DOCS / "how-to"


def looked_at(page: str) -> list[str]:
    """The blocks of a page that are no commands, no files and no programs."""
    return [block.body for block in of_no_commands(HOW_TO / f"{page}.md")]


def of_no_commands(page: Path) -> list[Block]:
    return [b for b in blocks(page) if b.language in ("text", "") and not of_commands(b)]


def test_the_page_about_doctor_shows_what_it_prints() -> None:
    found = doctors_findings()
    (shown,) = looked_at("doctor")
    assert shown.splitlines() == [*map(line_of, found), judging.summary(found)]


def test_the_page_about_nodes_shows_what_doctor_prints() -> None:
    names = [f"hub-{letter}.example.org" for letter in "abc"]
    (shown,) = looked_at("three-nodes")
    assert shown == line_of(judging.nodes(names, {}, several=True, ails="")) + "\n"


def test_the_page_about_models_shows_what_check_prints() -> None:
    """The line that it names is the one of the page's own model in which the name stands."""
    (shown,) = [text for text in looked_at("models") if "WRONG" in text]
    place = re.search(r"name '(\w+)' is not defined \(raised at \S+/(\w+\.py):(\d+)\)", shown)
    assert place is not None
    (model,) = [b for b in blocks(HOW_TO / "models.md") if b.file == place[2]]
    assert re.search(rf"\b{place[1]}s\b", model.body.splitlines()[int(place[3]) - 1])
    said = f"NameError: {place[0]}"
    found = [
        OfRun("devices", True, "1 x cpu"),
        OfRun("model", False, said, REMEDIES["model"]),
        skipped("device memory", ["model"]),
    ]
    assert shown.splitlines() == [line for finding in found for line in lines_of(finding)]


def test_the_page_about_models_shows_how_a_conversation_is_written() -> None:
    (shown,) = [text for text in looked_at("models") if "[assistant]" in text]
    said = {"system": "You add numbers.", "user": "What is 1 and 2?", "assistant": "1 and 2 are 3."}
    template = compiled(BUILT_IN, "that is built in", {"eos_token": "</s>"})
    written = template.rendered([{"role": role, "content": text} for role, text in said.items()])
    assert shown.strip() == written.strip()


async def test_the_page_about_exports_shows_what_a_sample_sends() -> None:
    async def lines() -> AsyncIterator[Any]:
        for text in ("def ", "main"):
            yield SampleText(text=text)
        yield SampleDone(pieces=2)

    export: Any = SimpleNamespace(id="3fa2c1d0", steps=4800)
    sample: Any = SimpleNamespace(lines=lines)
    (shown,) = looked_at("export")
    assert [f"{line}\n\n" for line in shown.splitlines()] == [
        event async for event in _told(export, sample)
    ]


# Drawings, formulas and options of a script; and README's block, which test_docs.py holds.
NOT_PRINTED = {"ARCHITECTURE", "algorithm", "deploy", "quality", "README"}
HELD = {"doctor", "three-nodes", "models", "export"}


def test_no_page_shows_what_a_command_prints_unless_it_is_held_here() -> None:
    """Who shows some on another page adds a test of it."""
    assert {page.stem for page in PAGES if of_no_commands(page)} == NOT_PRINTED | HELD
    assert [len(looked_at(page)) for page in sorted(HELD)] == [1, 1, 2, 1]
