"""Experiments are remembered by everything their numbers depend on."""

from pathlib import Path
from typing import Any

import pytest

from diloco_shared.spec.run import RunSpec
from diloco_simulator.experiments import bulk as experiments
from diloco_simulator.experiments.bulk import Experiment, results
from diloco_simulator.experiments.setting import Interruptions, Loan


def experiment(**algorithm: Any) -> Experiment:
    body = {"name": "x", "algorithm": algorithm, "budget": {"steps": 1}}
    return Experiment(RunSpec.model_validate(body), 2)


def test_a_key_depends_on_what_is_run() -> None:
    keys = {
        experiment().key(),
        experiment(codec_up="fp32").key(),
        experiment(weighting="equal").key(),
        Experiment(experiment().spec, 3).key(),
        Experiment(experiment().spec, 2, "data-parallel").key(),
        Experiment(experiment().spec, 2, speeds=(1.0, 0.5)).key(),
    }
    assert len(keys) == 6
    assert experiment().key() == experiment(codec_up="bf16").key(), "bf16 is the default"


def test_a_setting_that_is_not_used_is_not_part_of_the_description() -> None:
    plain = experiment()
    assert not set(experiments.LATER) & plain.described().keys()
    settings: list[dict[str, Any]] = [
        {"one_way_s": 0.5},
        {"jitter": 0.1},
        {"interruptions": Interruptions(200.0, 10.0)},
        {"loan": Loan(1, 5.0, 9.0)},
        {"loan": Loan(1, 5.0, 9.0, notice=False)},
        {"only_ready": True},
    ]
    others = [Experiment(plain.spec, 2, **s) for s in settings]
    assert len({e.key() for e in [plain, *others]}) == 7
    assert others[2].described()["interruptions"] == {"mtbi_s": 200.0, "away_s": 10.0}


def test_an_idle_experiment_tells_when_and_not_what() -> None:
    body = {"name": "x", "algorithm": {}, "budget": {"steps": 48}}
    found = Experiment(RunSpec.model_validate(body), 2, "idle", over_time=True).run()
    assert found["tokens"] >= 48 * 2 * 512 and "val_loss" not in found
    assert found["useful_over_time"][-1][1] == found["tokens_useful"]


def test_one_corpus_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    keys = set()
    for place, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "book.txt").write_text("".join(f"{text} {n}\n" for n in range(500)))
        body = {"name": "x", "data": {"source": str(tmp_path / place / "book.txt")}}
        e = Experiment(RunSpec.model_validate(body | {"budget": {"steps": 1}}), 2)
        assert str(tmp_path) not in str(e.described())
        keys.add(e.key())
    assert len(keys) == 2


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


def test_what_other_code_found_counts_only_where_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = experiment()
    experiments._keep(tmp_path / f"{e.key()}.json", e, {"val_loss": 1.0})
    monkeypatch.setattr(experiments, "sources", lambda: "other code")
    monkeypatch.setattr(experiments, "ProcessPoolExecutor", None)  # nobody may compute
    assert [r for _, r in results([e], tmp_path, workers=1, any_sources=True)] == [
        {"val_loss": 1.0}
    ]
    with pytest.raises(TypeError, match="not callable"):
        list(results([e], tmp_path, workers=1))
