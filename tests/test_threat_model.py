"""The page about threats names a test for each line, and every one that it names is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from diloco_coordinator.app import Settings as CoordinatorSettings
from diloco_learner.settings import Settings as LearnerSettings
from diloco_syncer.app import Settings as SyncerSettings

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "threat-model.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
UNPROTECTED = "**not protected**"
WHO = ("Anonymous", "Reader", "Operator", "A site", "A curious", "A lying", "A poisoned")
MACHINES = ("A syncer's machine", "The hub's machine")


def rows() -> list[tuple[str, str, str]]:
    """Cells of every line of the tables, without their heads."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]
    assert all(len(row) == 3 for row in cells), [row for row in cells if len(row) != 3]
    return [(a, b, c.strip("| ")) for a, b, c in cells if a != "who could"]


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions))


def test_every_test_that_is_named_is_there() -> None:
    named = NAMED.findall(PAGE.read_text("utf-8"))
    assert len(named) >= 40
    missing = [f"{file}::{name}" for file, name in named if name not in names_in(file)]
    assert not missing, f"{PAGE.name} names tests that are gone: {missing}"


def test_every_line_names_a_test_or_says_that_nothing_protects() -> None:
    bare = [
        what for what, can, shown in rows() if not NAMED.search(shown) and UNPROTECTED not in can
    ]
    assert not bare, f"lines without a test: {bare}"


def test_everybody_has_a_table() -> None:
    text = PAGE.read_text("utf-8")
    for who in (*WHO, *MACHINES):
        assert re.search(rf"^## {who}.*\n\n\| who could ", text, re.MULTILINE), who


@pytest.mark.parametrize("kind", [CoordinatorSettings, SyncerSettings, LearnerSettings])
def test_defaults_are_safe(kind: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CHAOS", "HEALTH_HOST", "HOST", "FACTORIES", "DATA_ROOT", "CHECKPOINT_ROOTS"):
        monkeypatch.delenv(f"DILOCO_{name}", raising=False)
    settings = kind(data=tmp_path, id="a")
    assert settings.health_host == "127.0.0.1" and settings.chaos is False
    assert settings.checkpoint_places == (settings.checkpoint_root,)
    if isinstance(settings, CoordinatorSettings):
        assert settings.host == "127.0.0.1"
    if isinstance(settings, LearnerSettings):
        assert (settings.data_root, settings.factories) == (".", "")


def test_containers_allow_no_faults_and_publish_the_api_alone_to_this_machine() -> None:
    text = (ROOT / "compose" / "compose.yaml").read_text("utf-8")
    assert re.findall(r"DILOCO_CHAOS: (.*?) +#", text) == ['"${DILOCO_CHAOS:-0}"']
    services = (ROOT / "compose" / "services.yaml").read_text("utf-8")
    assert re.findall(r"^ *ports: (.*)$", text + services, re.MULTILINE) == [
        '["127.0.0.1:${DILOCO_PORT:-8400}:8400"]'
    ]
