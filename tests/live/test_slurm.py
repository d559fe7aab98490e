"""Learners as jobs of a real Slurm, which stops and moves them: `make slurm-test`."""

import json
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
from live.processes import environment

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")


@pytest.mark.live
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
    any(which(name, path="/usr/bin:/usr/sbin:/usr/local/bin") is None for name in PROGRAMS),
    reason="needs Slurm and munge",
)
def test_an_island_comes_back_whatever_slurm_does_to_it(tmp_path: Path) -> None:
    """The script says what did not happen, and ends with 1."""
    found = tmp_path / "slurm.json"
    done = subprocess.run(
        [sys.executable, "bench/slurm_drill.py", "--json", str(found)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    report = json.loads(found.read_text())
    told = ("time_limit", "preempted", "requeued", "node_down")
    assert all(report[what]["seconds_to_run_again"] > 0 for what in told)
    assert report["by_hand"]["status_of_srun"] == 0
    assert report["tokens"]["merged"] > 0 and report["tokens"]["in_flight"] == 0
