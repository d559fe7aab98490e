"""The demo: its promises, its report, and whose place it takes."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import diloco_cli.demo
from diloco_cli.demo import REPORTS, Demo, conclude, free_name, run_demo, verdicts
from diloco_cli.seen import Seen
from diloco_cli.up.folder import Folder
from diloco_cli.up.stack import Stack
from diloco_cli.words import FAILED, CliError


def test_a_demo_takes_a_free_name_and_no_learners_from_others(tmp_path: Path) -> None:
    over = {"name": "demo", "state": "finished"}
    assert free_name([], tmp_path) == "demo"
    assert free_name([over, over | {"name": "demo-2"}], tmp_path) == "demo-3"
    with pytest.raises(CliError, match=r"'mine'.*is not over"):
        free_name([over, {"name": "mine", "state": "running"}], tmp_path)


@pytest.mark.parametrize(("loss", "status"), [(1.5, 0), (3.0, FAILED)])
def test_a_demo_is_reported_whether_it_kept_its_promises_or_not(
    tmp_path: Path,
    run: dict[str, Any],
    rounds: list[dict[str, Any]],
    events: list[dict[str, Any]],
    loss: float,
    status: int,
) -> None:
    events[-2]["data"]["val_loss"] = loss
    screen = io.StringIO()
    seen = Seen("demo", run, rounds, events)
    assert conclude(seen, tmp_path / "demo", Console(file=screen), 100.0) == status
    figures = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert figures["kept"] == (status == 0)
    assert {"seed", "machine", "command", "versions", "seconds"} <= figures.keys()
    assert "<title>Run demo" in (tmp_path / "demo" / "report.html").read_text()
    assert screen.getvalue().count("NO ") == (status != 0)


def reported(data: Path) -> None:
    (data / "demo").mkdir()
    for name in REPORTS:
        (data / "demo" / name).write_text("of an earlier demo")


def test_a_demo_that_is_refused_keeps_the_report_of_the_last_one(tmp_path: Path) -> None:
    reported(tmp_path)
    running = Folder(tmp_path)
    running.take()
    with pytest.raises(CliError, match="another instance works in"):
        run_demo(tmp_path, port=0, steps=140, limit_s=60.0, console=Console(file=io.StringIO()))
    running.release()
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == sorted(REPORTS)


async def test_a_demo_that_has_started_has_no_report_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(*_: Any) -> None:
        pass

    reported(tmp_path)
    monkeypatch.setattr(diloco_cli.demo, "started", at_once)
    stack = Stack(tmp_path, learners=3, port=0, chaos=True, threads=1)
    with pytest.raises(CliError, match="no cluster runs"):  # whose API would be asked next
        await Demo(stack, Console(file=io.StringIO()), 140, 0.0)._train()
    assert not [*(tmp_path / "demo").iterdir()]


def test_a_demo_that_trained_nothing_points_at_the_logs(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="logs"):
        conclude(Seen("demo"), tmp_path / "demo", Console(file=io.StringIO()), 1.0)


GOOD: dict[str, Any] = {
    "state": "finished",
    "val_loss_start": 6.2,
    "val_loss_end": 1.7,
    "rounds_committed_while_down": 30,
    "victim_contributions_after_return": 200,
    "seconds_kill_to_contributing": 12.0,
    "survivor_wait_s": 0.03,
}


def test_a_good_demo_keeps_every_promise() -> None:
    assert all(kept for _, kept in verdicts(GOOD))


@pytest.mark.parametrize(
    "broken",
    [
        {"state": "running"},
        {"val_loss_end": 3.0},
        {"val_loss_end": None},
        {"rounds_committed_while_down": 0},
        {"rounds_committed_while_down": None},
        {"victim_contributions_after_return": 0},
        {"victim_contributions_after_return": None, "seconds_kill_to_contributing": None},
        {"survivor_wait_s": 0.11},
        {"survivor_wait_s": None},
    ],
)
def test_each_broken_promise_is_one_that_is_told(broken: dict[str, Any]) -> None:
    told = verdicts(GOOD | broken)
    assert [kept for _, kept in told].count(False) == 1
    assert json.dumps(told)
