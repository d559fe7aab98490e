"""Stacks of real processes for tests that want nothing special."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from live.stack import Stack, up


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Two learners and a syncer, chaos allowed."""
    with up(tmp_path / "data", "--learners", "2", "--chaos") as stack:
        yield stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all that share a stack: two would start one each."""
    for item in items:
        if "lasting" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("lasting"))


@pytest.fixture(scope="session")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two learners and two syncers, chaos allowed, for as many tests as want no more."""
    folder = tmp_path_factory.mktemp("lasting") / "data"
    with up(folder, "--learners", "2", "--syncers", "2", "--chaos") as stack:
        stack.wait_until(lambda: sum(m["alive"] for m in stack.client.members()) >= 5, "all")
        yield stack


@pytest.fixture
def shared(lasting: Stack) -> Iterator[Stack]:
    """The lasting one, without a run. A test's own run is stopped and deleted after it.

    That the next one begins shows that the one before holds nobody.
    """
    yield lasting
    for process in lasting.family():
        with suppress(psutil.NoSuchProcess):  # it ended since it was listed
            process.resume()  # whatever a test that failed has left standing
    lasting.clear()
