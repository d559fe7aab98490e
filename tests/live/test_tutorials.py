"""Tutorials and how-tos, typed as they stand, from their first command to their last."""

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import RUN, blocks, pages

BIN = str(Path(sys.executable).parent)
# A page: a run of a tutorial trains for two minutes on two idle cores.
LIMIT_S = 900


def typed(*parts: str) -> list[Path]:
    """Pages that have something to type."""
    return [p for p in pages(*parts) if any(b.language == RUN for b in blocks(p))]


def follow(page: Path, folder: Path, *before: str) -> None:
    """All commands of a page in one shell, where every file lies that it shows."""
    script = ["set -e", "trap 'diloco down >/dev/null 2>&1 || true' EXIT"]
    found = blocks(page)
    for block in found:
        if block.file:
            (folder / block.file).write_text(block.body, encoding="utf-8")
    script += [*before, "set -x", *(b.body for b in found if b.language == RUN)]
    with port_of_its_own():
        _typed(script, folder)


@contextlib.contextmanager
def port_of_its_own() -> Iterator[None]:
    """Pages leave the port alone that `diloco up` takes: one cluster of theirs at a time."""
    with (Path(tempfile.gettempdir()) / "diloco-pages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _typed(script: list[str], folder: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.live
@pytest.mark.long
@pytest.mark.timeout(10 * LIMIT_S)  # others may have their turn before
@pytest.mark.parametrize("page", typed("tutorials"), ids=lambda page: page.stem)
def test_every_command_of_a_tutorial_does_what_it_says(page: Path, tmp_path: Path) -> None:
    follow(page, tmp_path)


@pytest.mark.live
@pytest.mark.long
@pytest.mark.timeout(10 * LIMIT_S)  # others may have their turn before
@pytest.mark.parametrize("page", typed("how-to"), ids=lambda page: page.stem)
def test_every_command_of_a_guide_does_what_it_says(page: Path, tmp_path: Path) -> None:
    """On a cluster of this machine, as the page says that there is one."""
    here = 'export PYTHONPATH="$PWD"'
    follow(page, tmp_path, here, "diloco up --detach --learners 3 >/dev/null")
