"""What the coordinator answers to the page, as it was recorded, and the page itself."""

import json
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parents[2] / "cli" / "screens" / "answers.json"


@pytest.fixture
def answers() -> dict[str, Any]:
    return dict(json.loads(RECORDED.read_text("utf-8")))


@pytest.fixture
def run(answers: dict[str, Any]) -> str:
    return str(answers["GET /v1/runs"]["runs"][0]["name"])


@pytest.fixture
def page(answers: dict[str, Any]) -> Any:
    from coordinator.web.browser import Page  # needs an engine that is not everywhere

    return Page(answers)
