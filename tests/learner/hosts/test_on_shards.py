"""Checkpoints that all hosts write, on simulated devices: what `on_shards.py` finds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Sums of other orders differ in the last bits.
CLOSE = 1e-5
pytestmark = pytest.mark.whole


def on_shards(folder: Path, *more: str) -> dict[str, Any]:
    script = Path(__file__).with_name("on_shards.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), *more],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "orbax" not in done.stderr.lower(), "its own lines are not ours"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_moved(moved: dict[str, Any], meshes: int) -> None:
    assert len(moved["others"]) == meshes
    for found in moved["others"].values():
        assert found["equal"], "the same bits, whoever kept them"
        assert found["lies"], "as a trainer of that mesh has them"
        np.testing.assert_allclose(found["losses"], moved["four"], atol=CLOSE)


def test_what_four_devices_keep_goes_on_on_others_and_what_is_damaged_is_passed_over(
    tmp_path: Path,
) -> None:
    found = on_shards(tmp_path, "--few")
    assert found["kept"] == ["2", "3"], "the last two, and nothing else"
    check_moved(found["moved"], 1)
    assert found["newest"] == 4, "an unfinished one is none"
    damaged = found["damaged"]
    assert any("ocdbt.process_0/d/" in what for what in damaged), list(damaged)
    assert any("whole." in what for what in damaged) and "missing" in damaged
    for what, told in damaged.items():
        assert told["older"], what
        (fault,) = told["faults"]
        assert "checkpoint 3 passed over: here: " in fault, what
        reason = "is missing" if what == "missing" else "is not what was written"
        assert reason in fault, (what, fault)
    for fault in found["others"]["other"]["faults"]:
        assert "an inner state of another model: " in fault and "/mu/" in fault
    assert found["others"]["other"]["fresh"]
    assert [f.split(":")[0] for f in found["others"]["diverged"]["faults"]] == [
        "checkpoint 9 passed over",
        "checkpoint 8 passed over",
    ]
    assert all("not finite" in f for f in found["others"]["diverged"]["faults"])
    assert found["others"]["diverged"]["fresh"]
    assert found["left"] == ["8", "9"]


@pytest.mark.long
@pytest.mark.parametrize("model", [(), ("--experts",)], ids=["dense", "experts"])
def test_it_goes_on_on_any_number_of_devices(tmp_path: Path, model: tuple[str, ...]) -> None:
    check_moved(on_shards(tmp_path, *model)["moved"], 3)
