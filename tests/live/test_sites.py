"""A hub and two sites on networks of their own, with TLS and credentials: `make sites-test`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from live.processes import environment

ROOT = Path(__file__).parents[2]
CUT_S = 12.0


def networks_here() -> bool:
    """Whether this user may make network namespaces on this machine."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("ss") is None:
        return False
    name = f"diloco-probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.returncode == 0


@pytest.mark.live
@pytest.mark.timeout(900)
@pytest.mark.skipif(not networks_here(), reason="needs root, and network namespaces")
def test_a_site_is_cut_off_one_is_exchanged_and_one_revoked(tmp_path: Path) -> None:
    """The script says what did not happen, and ends with 1."""
    found = tmp_path / "sites.json"
    done = subprocess.run(
        [sys.executable, "bench/sites.py", "--cut", str(CUT_S), "--json", str(found)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    report = json.loads(found.read_text())
    assert report["cut"]["rounds_without_it"] > 0
    assert report["cut"]["steps_of_it_until_merged"] > 0
    assert report["tokens"]["merged"] > 0 and report["tokens"]["lost"] > 0
    assert report["tokens"]["in_flight"] == 0
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert "-oslo" not in left.stdout
