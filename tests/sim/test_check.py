"""The check: plays seeds and places to die, says what breaks, keeps it, wants enough reached."""

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from diloco_simulator import check, shrink
from diloco_simulator.coverage.required import CHECKED, ENOUGH, LOOKS, REQUIRED, SOON
from diloco_simulator.worlds import constants, crash_points, found
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played
from diloco_syncer.rounds import rounds

SHORT = Options.calm(steps=18, safety_s=25.0, learners=2, quorum=1)


def arguments(monkeypatch: pytest.MonkeyPatch, *said: object) -> None:
    monkeypatch.setattr("sys.argv", ["check", *map(str, said)])


@pytest.mark.whole
def test_what_a_broken_rule_breaks_is_kept_shrunk_and_played_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_by = SHORT.changed(nan=0.3, duplicate=0.05)
    monkeypatch.setattr(Options, "drawn", lambda seed: broken_by)
    monkeypatch.setattr(constants, "drawn", lambda rng: {constants.CHUNKS.path: 64})
    monkeypatch.setattr(shrink, "WORLDS_MAX", 8)
    summary = tmp_path / "sums.json"
    keep = ("--keep", tmp_path, "--shrink", "--json", summary)
    with monkeypatch.context() as broken:
        broken.setattr(rounds, "judge", lambda *args, **kwargs: None)
        arguments(broken, "--seeds", 1, "--from", 2, "--workers", 1, *keep)
        with pytest.raises(SystemExit, match="1"):
            check.main()
        said, file = capsys.readouterr().out, tmp_path / "seed-2.json"
        assert "again: python -m diloco_simulator.check --seeds 1 --workers 1 --from 2\n" in said
        assert found.again(file) in said
        left = found.read(file)
        assert left.options.learners < SHORT.learners
        assert json.loads(file.read_text())["shrunk_from"]["seed"] == 2
        arguments(broken, "--kept", file)
        with pytest.raises(SystemExit, match="1"):
            check.main()
        assert "seed-2  I11 at " in capsys.readouterr().out
    assert json.loads(summary.read_text())["violations"] == 1
    arguments(monkeypatch, "--kept", file)
    with pytest.raises(SystemExit, match="0"):
        check.main()


@pytest.mark.long
@pytest.mark.whole
def test_a_world_is_the_same_in_another_process() -> None:
    task = check.Task(Case.drawn(6, SHORT.changed(overtaken=0.3)), "", "")
    assert list(check.verdicts([task], 2)) == [played(task.case)]


def test_every_seed_is_played_with_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments(monkeypatch, "--seeds", 3, "--from", 40, "--syncers", 2, "--shards", 2)
    tasks = list(check.tasks(check.arguments()))
    assert [task.case.seed for task in tasks] == [40, 41, 42]
    assert {(t.case.options.syncers, t.case.options.shards) for t in tasks} == {(2, 2)}
    assert tasks[0].again.endswith(" --from 40 --syncers 2 --shards 2")
    arguments(monkeypatch, "--seeds", 1, "--from", 40)
    (task,) = check.tasks(check.arguments())
    assert task.case == Case.drawn(40) and "syncers" not in task.again


def test_places_to_die_are_named_as_they_are_played_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm = WorldResult(1)
    calm.passings.update(dict.fromkeys(crash_points.ROLES, 5))
    monkeypatch.setattr(crash_points, "play", lambda: calm)
    arguments(monkeypatch, "--seeds", 0, "--crash-points", 4)
    tasks = list(check.tasks(check.arguments()))
    assert [t.case.options.dies_at for t in tasks[:3]] == [("", 0), ("leader", 1), ("leader", 5)]
    assert len(tasks) == 1 + 2 * len(crash_points.ROLES)
    assert tasks[2].again.endswith("--seeds 0 --workers 1 --dies leader 5")
    arguments(monkeypatch, "--seeds", 0, "--dies", "leader", 5)
    assert list(check.tasks(check.arguments())) == [tasks[2]]


def test_enough_worlds_that_missed_what_they_must_reach_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = check.Sums(pieces=[[2, 0]])
    sums.add(check.place("leader", 1), WorldResult(1))
    sums.add(check.Task(Case(2, SHORT), "", ""), WorldResult(2, ["I1 at 1.00 s: x"], rounds=3))
    result = sums.result()
    assert (result["seeds"], result["violations"], result["rounds"]) == (1, 1, 3)
    assert result["crash_points"] == {"leader": 1}
    assert set(REQUIRED) < set(result["missing"])
    for few in ((SOON - 1,), (ENOUGH, "--syncers", 2)):
        arguments(monkeypatch, "--seeds", *few)
        assert check.complete(check.arguments(), sums)
    arguments(monkeypatch, "--seeds", ENOUGH)
    assert not check.complete(check.arguments(), sums)
    assert REQUIRED[0] in capsys.readouterr().out


def test_a_promise_that_hardly_any_world_checked_fails_sooner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = check.Sums()
    looks = dict.fromkeys(CHECKED, LOOKS * SOON // ENOUGH)
    sums.states.looks.update(looks)
    arguments(monkeypatch, "--seeds", SOON)
    assert check.complete(check.arguments(), sums)
    for name in ("exports", "samples", "tokens", "commands", "data", "disks", "stops", "deletion"):
        sums.states.looks[name] -= 1
        assert not check.complete(check.arguments(), sums)
        assert f"a check of {name}\n" in capsys.readouterr().out
        sums.states.looks[name] += 1


@pytest.mark.whole
def test_totals_are_there_before_a_world_is_made_smaller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That takes minutes. What is broken off meanwhile counts the world that broke a promise."""
    file = tmp_path / "sums.json"

    def broken_off(*_: object) -> None:
        assert json.loads(file.read_text())["violations"] == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(Options, "drawn", lambda seed: SHORT)
    monkeypatch.setattr(check, "play", lambda task: WorldResult(1, ["I1 at 1.00 s: x"]))
    monkeypatch.setattr(check.shrink, "shrink_kept", broken_off)
    said = ("--seeds", 1, "--workers", 1, "--json", file, "--keep", tmp_path, "--shrink")
    arguments(monkeypatch, *said)
    with pytest.raises(KeyboardInterrupt):
        check.main()


def test_totals_of_several_calls_are_those_of_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was broken off goes on, and another file is not taken for one of totals."""

    def told(name: str, first: int, seeds: int, *more: str) -> dict[str, Any]:
        file = tmp_path / name
        said = ("--seeds", seeds, "--from", first, "--workers", 1, "--json", file, *more)
        arguments(monkeypatch, *said)
        with pytest.raises(SystemExit):
            check.main()
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def play(task: check.Task) -> WorldResult:
        seed, looks = task.case.seed, Counter(I1=task.case.seed, liveness=2)
        return WorldResult(seed, rounds=seed, counts=Counter({f"seed {seed}": 1}), looks=looks)

    monkeypatch.setattr(check, "play", play)
    at_once = told("whole.json", 1, 3)
    told("pieces.json", 1, 2)
    in_pieces = told("pieces.json", 3, 1, "--further")
    assert in_pieces.pop("pieces") == [[1, 2], [3, 1]]
    assert at_once.pop("pieces") == [[1, 3]] and at_once["seeds"] == 3
    told("again.json", 1, 2)
    twice = told("again.json", 1, 1, "--further")
    assert twice.pop("pieces") == [[1, 2], [3, 1]], "no seed is played twice"
    at_once.pop("virtual_s")  # each call rounds its own
    in_pieces.pop("virtual_s")
    twice.pop("virtual_s")
    assert twice == in_pieces == at_once
    (tmp_path / "other.json").write_text("{}")
    arguments(monkeypatch, "--json", tmp_path / "other.json", "--further")
    with pytest.raises(SystemExit, match=r"other.json has no totals of this program"):
        check.main()


@pytest.mark.parametrize(
    "said", [("--shrink",), ("--dies", "nobody-else", 3), ("--workers", 0), ("--further",)]
)
def test_what_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, said: tuple[object, ...]
) -> None:
    arguments(monkeypatch, *said)
    with pytest.raises(SystemExit) as refused:
        check.arguments()
    assert refused.value.code == 2


def test_constants_are_drawn_by_names_that_are_known() -> None:
    for seed in range(20):
        assert set(constants.drawn(Random(seed))) <= set(constants.KNOWN)
