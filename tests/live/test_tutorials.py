"""Tutorials and how-tos, typed as they stand, from their first command to their last."""

import contextlib
import fcntl
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from live.processes import COMPILED
from pages import RUN, blocks, pages

BIN = str(Path(sys.executable).parent)
# What readers of a page have of their own: text and tokens.
THEIRS = {
    "models": (
        "mkdir texts",
        """cp "$(python -c 'import pydoc_data.topics as t; print(t.__file__)')" texts/topics.txt""",
        """python -c 'import numpy as n; n.arange(9000, dtype="<u2").tofile("tokens.bin")'""",
    )
}
# Whoever types 'make test' may have a cluster of his own, at the port that 'diloco up' takes.
ANY_PORT = 'diloco() { command diloco "$@" $([ "$1" = up ] && echo --port 0); }'
# A page: a run of a tutorial trains for two minutes on two idle cores.
LIMIT_S = 900


def typed(*parts: str) -> list[Path]:
    """Pages that have something to type."""
    return [p for p in pages(*parts) if any(b.language == RUN for b in blocks(p))]


def follow(page: Path, folder: Path, *before: str, instead: tuple[str, str] = ("", "")) -> None:
    """All commands of a page in one shell, where every file lies that it shows.

    `instead`: what its files have once, and what stands there instead of it.
    """
    script = ["set -e", "trap 'diloco down >/dev/null 2>&1 || true' EXIT"]
    found, (old, new) = blocks(page), instead
    assert not old or [b.body.count(old) for b in found if b.file] == [1]
    for block in found:
        if block.file:
            (folder / block.file).write_text(block.body.replace(old, new), encoding="utf-8")
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
def test_every_command_of_the_first_tutorial_does_what_it_says(tmp_path: Path) -> None:
    """With few steps, for who changes it: each fragment is merged once, not eight times, and
    programs are kept for the next time."""
    (page,) = [page for page in typed("tutorials") if page.stem == "first-run"]
    kept = f"export DILOCO_CACHE={shlex.quote(str(COMPILED))}"
    follow(page, tmp_path, kept, ANY_PORT, instead=("steps = 192 ", "steps = 24 "))


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
    """On a cluster of this machine, as the page says that there is one; or that it starts."""
    before = ['export PYTHONPATH="$PWD"', *THEIRS.get(page.stem, ())]
    if not any(b.language == RUN and "diloco up " in b.body for b in blocks(page)):
        before.append("diloco up --detach --learners 3 >/dev/null")
    follow(page, tmp_path, *before)
