"""Experiments are remembered by everything their numbers depend on."""

from pathlib import Path
from typing import Any

import pytest

from diloco_shared.config import RunSpec
from diloco_simulator import experiments
from diloco_simulator.experiments import Experiment, results


def experiment(**algorithm: Any) -> Experiment:
    body = {"name": "x", "algorithm": algorithm, "budget": {"steps": 1}}
    return Experiment(RunSpec.model_validate(body), 2)


def test_a_key_depends_on_everything_and_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        experiment().key(),
        experiment(codec_up="fp32").key(),
        Experiment(experiment().spec, 3).key(),
        Experiment(experiment().spec, 2, "data-parallel").key(),
        Experiment(experiment().spec, 2, speeds=(1.0, 0.5)).key(),
    }
    assert len(keys) == 5
    assert experiment().key() == experiment(codec_up="bf16").key(), "bf16 is the default"
    before = experiment().key()
    monkeypatch.setattr(experiments, "sources", lambda: "other code")
    assert experiment().key() != before


def test_what_is_known_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, other = experiment(), experiment(codec_up="fp32")
    for e, loss in ((known, 1.0), (other, 2.0)):
        experiments._keep(tmp_path / f"{e.key()}.json", e, {"val_loss": loss})
    monkeypatch.setattr(Experiment, "run", None)
    found = dict(
        (e.key(), r["val_loss"]) for e, r in results([known, other, known], tmp_path, workers=1)
    )
    assert found == {known.key(): 1.0, other.key(): 2.0}
