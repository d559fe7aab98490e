"""`diloco demo` as a user runs it: real text, a real kill, a real return."""

import json
from pathlib import Path

import pytest
from live.processes import ALWAYS, diloco

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

# A busy machine may take several times as long as an idle one, and breaks no promise by that.
LIMIT_S = 800
# These promises hold on a machine that has time for the demo. A test may run beside others.
OF_SPEED = ("ended up in the model", "came late", "survivors waited")


def test_the_demo_keeps_its_promises_and_says_so(tmp_path: Path) -> None:
    data = tmp_path / "data"
    short = ("--steps", "140", "--limit", str(LIMIT_S))  # the user's is longer
    done = diloco("demo", "--data", str(data), *short, patience_s=LIMIT_S + 60, **ALWAYS)
    said = [line for line in done.stdout.splitlines() if line.startswith(("yes ", "NO  "))]
    broken = [line for line in said if line.startswith("NO ")]
    assert len(said) == 7, done.stdout[-4000:] + done.stderr[-4000:]
    assert all(any(of in line for of in OF_SPEED) for line in broken), broken
    figures = json.loads((data / "demo" / "report.json").read_text())
    assert figures["kept"] is (not broken)
    assert figures["kept"] is (done.returncode == 0)
    assert figures["victim"] == "learner-2"
    assert figures["val_loss_end"] < 2.2 < 5.5 < figures["val_loss_start"]
    assert figures["rounds_committed_while_down"] > 0
    assert figures["victim_contributions_after_return"] > 0
    assert 0 < figures["seconds_kill_to_contributing"] < figures["seconds"]
    assert figures["survivor_wait_s"] >= 0
    assert 0 < figures["goodput"] <= 1
    assert 0.5 < figures["tokens_useful"] / figures["tokens_processed"] <= 1
    assert 0 <= figures["others_late"] < figures["others_asked"]
    assert figures["bytes_up"] > 0
    assert figures["bytes_down"] > 0
    assert figures["bytes_data_parallel_equivalent"] > 10 * figures["bytes_up"]
    page = (data / "demo" / "report.html").read_text()
    assert "kill learner-2" in page
    assert done.stdout.count("learner-2 was killed; the others go on") == 1
    assert done.stdout.count("learner-2 is back, with the state of its optimizer from ") == 1
