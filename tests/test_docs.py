"""Pages of the documentation: every file that they show is sound, and README stays short."""

import functools
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from pages import PLACED, RUN, SHOWN, blocks, pages

from diloco_cli.demo import verdicts
from diloco_client import Client
from diloco_shared.checking import Invalid, check

ROOT = Path(__file__).parent.parent
README_LINES, README_WIDTH = 120, 220
GUIDES = pages("tutorials", "how-to")


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_block_is_of_a_kind_that_is_tested_or_only_looked_at(page: Path) -> None:
    known = {RUN, PLACED, *SHOWN, "toml", "yaml", "python", "ini"}
    assert {b.language for b in blocks(page)} <= known


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_run_that_is_shown_would_be_taken(page: Path) -> None:
    for block in blocks(page):
        if block.language != "toml":
            continue
        body = tomllib.loads(block.body)
        # A part of a run is completed, and must not be wrong in what it says.
        body = {"name": "shown", "budget": {"steps": 96}} | body
        if body.get("model", {}).get("weights"):
            # As 'diloco submit' does, which reads it there.
            body["model"].setdefault("weights_digest", "0" * 32)
            if body["model"]["weights"].startswith("run:"):
                body["model"]["weights"] = "from-runs/first-1"
        try:
            check(body)
        except Invalid as error:
            faults = "; ".join(f"{f.path}: {f.message}" for f in error.faults)
            raise AssertionError(f"{page.name}: {faults}\n{block.body}") from None


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_run_that_is_typed_is_there(page: Path) -> None:
    """A page shows what it submits or checks, or writes it with a command of its own."""
    found = blocks(page)
    commands = "\n".join(b.body for b in found if b.language == RUN)
    written = re.findall(r"(?:> ?|--write |cp \S+ )([\w./-]+\.toml)", commands)
    shown = {block.file for block in found} | {*written}
    assert {*re.findall(r"[\w./-]+\.toml", commands)} <= shown


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_program_that_is_shown_is_one(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.body, f"{page.name}:{block.file}", "exec")


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_what_is_packed_with_keys_is_for_its_owner_alone(page: Path) -> None:
    """Everybody on the machine could speak as the site, until the archive is gone."""
    for block in blocks(page):
        for before, what in re.findall(r"((?:.*\n)*?.*)\btar cf (.*)", block.body):
            assert "credentials" not in what or "umask 077" in before, what


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= README_LINES
    assert max(map(len, lines)) <= README_WIDTH


def test_every_page_that_is_linked_is_there() -> None:
    """Of the repository; `make docs` looks at the site, anchors included."""
    link = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
    faults = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for target in link.findall(page.read_text("utf-8"))
        if "://" not in target and not target.startswith("mailto:")
        # Reference pages are generated with the site.
        if "reference/" not in (page.parent / target).as_posix()
        if not (page.parent / target).exists()
    ]
    assert not faults, "\n".join(faults)


@functools.cache
def _reference() -> ModuleType:
    found = importlib.util.spec_from_file_location("reference", ROOT / "site" / "reference.py")
    assert found is not None and found.loader is not None
    reference = importlib.util.module_from_spec(found)
    found.loader.exec_module(reference)
    return reference


@functools.cache
def _made() -> dict[str, str]:
    pages: dict[str, str] = _reference().pages()
    return pages


def test_every_page_of_the_reference_can_be_made() -> None:
    """`make docs` does it; who changes what they describe should see it before."""
    made = _made()
    assert "reference/rest.md" in made and "/v1/runs" in made["reference/rest.md"]
    assert all(len(text.splitlines()) > 10 for text in made.values())


def test_every_field_of_a_message_and_of_the_rest_interface_has_a_meaning() -> None:
    for name in ("messages", "rest"):
        rows = [r for r in _made()[f"reference/{name}.md"].splitlines() if r.startswith("| `")]
        assert len(rows) > 150
        assert not [row for row in rows if row.endswith("|  |") or "see above" in row]


def test_every_method_of_the_client_is_described() -> None:
    """With a script above them, which test_client_example.py runs."""
    page, methods = _made()["reference/client.md"], [n for n in vars(Client) if n[0] != "_"]
    assert len(methods) > 40
    told = page.partition("## Client\n")[2]
    described = r"\n\n```python\n.*\n```\n\n[`\w]"
    assert not [n for n in methods if not re.search(f"### {n}{described}", told)]
    example = (ROOT / "site" / "client_example.py").read_text("utf-8")
    assert f"```python\n{example}```" in page.partition("## Client\n")[0]


def test_the_diagram_of_a_round_shows_every_phase_and_every_move() -> None:
    reference, drawn = _reference(), _made()["reference/round.svg"]
    assert drawn.count('marker-end="url(#tip)"') == len(reference.moves()) > 5
    assert all(f">{text}<" in drawn for move in reference.moves() for text in move)
    with pytest.raises(ValueError, match="leads back"):
        reference.diagram(["a", "b"], [("b", "a", "never")])


def test_readme_shows_what_the_demo_printed_in_the_committed_run() -> None:
    figures = json.loads((ROOT / "docs" / "results" / "demo.json").read_text("utf-8"))
    printed = [f"yes {text}" for text, kept in verdicts(figures) if kept]
    printed.append(f"Report: diloco-data/demo/report.html ({figures['seconds']:.0f} s)")
    assert "\n".join(["```", *printed, "```"]) in (ROOT / "README.md").read_text("utf-8")


# Of the newest release's part: how many lines the summary in front of all headings may have.
IN_SHORT_MAX = 20


def test_every_entry_of_the_newest_release_stands_under_whom_it_concerns() -> None:
    """What somebody must do stands in one list, so nothing is hidden in bold among the rest."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = text.partition("\n## ")[2].partition("\n## ")[0]
    in_short, first, *others = newest.split("\n### ")
    assert first.startswith("What you must do\n")
    assert in_short.count("\n- ") <= IN_SHORT_MAX, "put an entry under a heading"
    assert not [part.splitlines()[0] for part in (first, *others) if "**" in part]
