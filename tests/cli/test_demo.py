"""The demo: its promises, its report, and whose place it takes."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import diloco_cli.demo
from diloco_cli.demo import REPORTS, Demo, conclude, free_name, run_demo, said, verdicts
from diloco_cli.seen import Seen
from diloco_cli.up.folder import Folder
from diloco_cli.up.stack import EachLearner, Stack
from diloco_cli.words import FAILED, CliError
from diloco_client import Cursor, Silent, Told


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
    run["status"]["tokens_useful"] = 512 * 260
    screen = io.StringIO()
    seen = Seen("demo", run, rounds, events)
    assert conclude(seen, tmp_path / "demo", Console(file=screen), 100.0) == status
    figures = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert figures["kept"] == (status == 0)
    assert {"seed", "machine", "command", "versions", "seconds"} <= figures.keys()
    assert "<title>Run demo" in (tmp_path / "demo" / "report.html").read_text()
    assert screen.getvalue().count("NO ") == (status != 0)


def test_promises_are_told_although_the_report_cannot_be_written(
    tmp_path: Path,
    run: dict[str, Any],
    rounds: list[dict[str, Any]],
    events: list[dict[str, Any]],
) -> None:
    (tmp_path / "demo").write_text("a file where a folder must be")
    screen = io.StringIO()
    with pytest.raises(CliError, match=f"the report cannot be written to {tmp_path / 'demo'}: "):
        conclude(Seen("demo", run, rounds, events), tmp_path / "demo", Console(file=screen), 1.0)
    assert "the run is over: finished" in screen.getvalue() and "Report" not in screen.getvalue()


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
    stack = Stack(tmp_path, learners=3, port=0, chaos=True, each=EachLearner())
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
    "tokens_processed": 6_567_936,  # of the demo in docs/results/demo.json
    "tokens_useful": 5_751_235,
    "others_asked": 192,
    "others_late": 2,
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
        {"tokens_useful": 4_925_000},  # 74.99 %
        {"tokens_useful": 0, "tokens_processed": 0},
        {"others_late": 20},
        {"others_late": 0, "others_asked": 0},
    ],
)
def test_each_broken_promise_is_one_that_is_told(broken: dict[str, Any]) -> None:
    told = verdicts(GOOD | broken)
    assert [kept for _, kept in told].count(False) == 1
    assert json.dumps(told)


def test_a_promise_is_told_in_good_english() -> None:
    few = {"rounds_committed_while_down": 1, "victim_contributions_after_return": 0}
    told = [text for text, _ in verdicts(GOOD | few | {"others_late": 0})]
    assert "87.6% of the tokens ended up in the model, at least 75%" in told
    assert "none of 192 contributions of the others came late, at most 10%" in told
    assert "1 round was committed while learner-2 was down" in told
    assert told[-1].startswith("no contribution of learner-2 was merged after its return")


class Cluster:
    """Answers as the API does; more happens with each look."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.to_come = [e | {"seq": seq} for seq, e in enumerate(events, 1)]
        self.there: list[dict[str, Any]] = []

    def run(self, name: str) -> dict[str, Any]:
        self.there += [self.to_come.pop(0)] if self.to_come else []
        return {"name": name, "state": "running", "status": None}

    def events_since(self, name: str, cursor: Cursor) -> Told:
        new = [e for e in self.there if e["seq"] > cursor[0]]
        return Told(new, (new[-1]["seq"], "") if new else cursor, again=False)


class Slow(Cluster):
    """It takes the fault, and answers too late."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def run(self, name: str) -> dict[str, Any]:
        learners = {"learner-2": {"state": "stepping", "step": 3}}
        return super().run(name) | {"status": {"learners": learners}}

    def rounds(self, *_: object, **__: object) -> list[dict[str, Any]]:
        return []

    def chaos(self, kind: str, target: str, **_: object) -> None:
        self.asked += 1
        fault = {"id": "f", "kind": kind, "target": target}
        self.to_come.append({"kind": "fault-planned", "data": fault, "seq": 1})
        raise Silent("it has not answered it within 10 s")


def test_the_victim_is_killed_once(tmp_path: Path) -> None:
    """A second fault at a step that is past would come at once, after the victim's return."""
    stack = Stack(tmp_path, learners=3, port=0, chaos=True, each=EachLearner())
    demo, cluster = Demo(stack, Console(file=io.StringIO()), 240, 0.0), Slow()
    with pytest.raises(Silent):
        demo._look(cluster)  # type: ignore[arg-type]
    for _ in range(3):
        demo._look(cluster)  # type: ignore[arg-type]
    assert cluster.asked == 1
    assert [text.split(" ", 1)[1] for text in stack.messages] == [
        "learner-2 will be killed (SIGKILL) at its step 80"
    ]


def test_the_screen_says_in_words_what_happens_and_says_it_once(tmp_path: Path) -> None:
    back = {"learner": "learner-2", "incarnation": 1}
    stack = Stack(tmp_path, learners=3, port=0, chaos=True, each=EachLearner())
    demo = Demo(stack, Console(file=io.StringIO()), 240, 0.0)
    cluster: Any = Cluster(
        {"kind": "recovered", "data": {}},  # of a syncer
        {"kind": "returned", "data": {"learner": "learner-3", "incarnation": 0}},  # it began
        {"kind": "fault-applied", "data": {"id": "f", "kind": "kill", "target": "learner-2"}},
        {"kind": "learner-lost", "data": {"learner": "learner-2"}},
        {"kind": "recovered", "data": back | {"source": "donor", "donor": "learner-3"}},
        {"kind": "returned", "data": back},
    )
    for _ in range(8):
        demo._look(cluster)
    assert [text.split(" ", 1)[1] for text in stack.messages] == [
        "learner-2 was killed; the others go on",
        "learner-2 is back, with the state of its optimizer from learner-3",
        "the work of learner-2 is merged again",
    ]
    assert (
        said({"kind": "recovered", "data": back | {"source": "fresh", "donor": ""}})
        == "learner-2 is back, with an optimizer that begins anew"
    )
