"""Tutorials, typed as they stand, from their first command to their last."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import RUN, blocks, pages

BIN = str(Path(sys.executable).parent)
# One command: a run of a tutorial trains for two minutes on two idle cores.
LIMIT_S = 600
TUTORIALS = [p for p in pages("tutorials") if any(b.language == RUN for b in blocks(p))]


@pytest.mark.live
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_command_of_a_tutorial_does_what_it_says(page: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    script = ["set -e", "trap 'diloco down >/dev/null 2>&1 || true' EXIT"]
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.body, encoding="utf-8")
        if block.language == RUN:
            script += ["set -x", block.body]
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stdout + done.stderr
