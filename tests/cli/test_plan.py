"""`diloco plan`, which needs no cluster, and the models of `diloco sim`."""

import json
import sys

import pytest

from diloco_cli.__main__ import main
from diloco_cli.words import INVALID
from diloco_shared.spec.run import RunSpec


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["diloco", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_a_plan_is_shown_and_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("plan", "--params", "5e9", "--chips", "4096")
    assert run(monkeypatch, *words) == 0
    text = capsys.readouterr().out
    assert "sync_every_steps" in text
    assert "years between failures x 0.1" in text
    assert "stream DN, what syncers publish" in text and "memory of a syncer" in text
    assert run(monkeypatch, *words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["settings"]["quorum"] == 1


def test_wishes_that_cannot_be_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", "--params", "5e9", "--chips", "0") == INVALID
    assert "--chips" in capsys.readouterr().err
    given = ("--params", "5e9", "--chips", "64", "--link-gbit-per-s", "1e-6")
    assert run(monkeypatch, "plan", *given) == INVALID
    assert "no settings do" in capsys.readouterr().err


def test_models_answer_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "sim", "bandwidth", "--method", "dp", "--json") == 0
    assert json.loads(capsys.readouterr().out)["gbit_per_s"] > 100
    assert run(monkeypatch, "sim", "bandwidth", "--link-gbit-per-s", "11", "--json") == 0
    said = capsys.readouterr().out
    assert json.loads(said)["keeps_up"] is True
    # A figure for more fragments than a run has is too small.
    run_of = RunSpec.model_validate({"name": "x", "budget": {"steps": 24}}).algorithm
    given = json.loads(said)["settings"]
    for setting in ("sync_every_steps", "fragments", "overlap_steps", "keyframe_every"):
        assert given[setting] == getattr(run_of, setting)
    few = ("--chips", "1000", "--learners", "2", "--seeds", "2", "--json")
    assert run(monkeypatch, "sim", "goodput", *few) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goodput"] > 0.999
    assert len(found["goodput_ci"]) == len(found["uptime_ci"]) == 2
    assert run(monkeypatch, "sim", "goodput", "--learners", "0") == 2
