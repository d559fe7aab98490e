"""A stack of real processes for a test that wants nothing special."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live.stack import Stack, up


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Two learners and a syncer, chaos allowed."""
    with up(tmp_path / "data", "--learners", "2", "--chaos") as stack:
        yield stack
