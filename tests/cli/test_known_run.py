"""What `config`, `budget` and `model describe` make of a run that begins from weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from learner.exporting.publishing import kept
from learner.exporting.publishing import spec as published

from diloco_cli.__main__ import main
from diloco_cli.run_file import fill_in
from diloco_cli.words import INVALID

GOLDEN = Path(__file__).parents[1] / "interop" / "golden"
BEGINS = "name = 'r'\n[budget]\nsteps = 9\n[model]\nweights = "
CONFIG, BUDGET, DESCRIBE = ("config",), ("budget",), ("model", "describe")


def typed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["diloco", *words, "run.toml", "--json"])
    status = 0
    try:
        main()
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    return status, *capfd.readouterr()


@pytest.mark.parametrize("weights", ["w", "checkpoint:r.abc123/000001"])
def test_whoever_asks_about_a_file_hears_what_submitting_it_would_send(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    weights: str,
) -> None:
    """They said that the digest was missing, which `submit` fills in."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "llama", tmp_path / "w")
    kept(tmp_path / "diloco-data" / "checkpoints", published())
    wider = {"vocabulary": 256}
    (tmp_path / "run.toml").write_text(f"{BEGINS}'{weights}'\noverrides.vocabulary = 256")
    sent: Any = {"model": {"weights": weights, "overrides": wider}}
    assert fill_in(sent, tmp_path, str(tmp_path / "diloco-data" / "checkpoints")) == []
    found = {words: typed(monkeypatch, capfd, *words) for words in (CONFIG, BUDGET, DESCRIBE)}
    assert [(status, err) for status, _, err in found.values()] == [(0, "")] * 3
    told = {words: json.loads(out) for words, (_, out, _) in found.items()}
    assert told[CONFIG]["model"].items() >= sent["model"].items()
    assert told[DESCRIBE]["weights_digest"] == sent["model"]["weights_digest"]
    assert told[DESCRIBE]["parameters"] == told[BUDGET]["parameters"]


@pytest.mark.parametrize("weights", ["run:other", "run:other@4", "checkpoint:r.abc123/000001"])
def test_weights_that_only_a_cluster_knows_are_said_to_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    weights: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(f"{BEGINS}'{weights}'\noverrides = {{ remat = true }}\n")
    status, out, err = typed(monkeypatch, capfd, *CONFIG)
    model = json.loads(out)["model"]
    assert (status, model["weights"], model["weights_digest"]) == (0, weights, "")
    assert model["overrides"] == {"remat": True}
    assert err.startswith(f"model.weights is {weights}") and err.count("\n") == 1
    for words in (BUDGET, DESCRIBE):
        status, out, said = typed(monkeypatch, capfd, *words)
        assert (status, out, said) == (INVALID, "", f"diloco: {err}")


def test_of_a_model_of_ones_own_the_file_says_how_large_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = f"{BEGINS}'checkpoint:r.abc123/000001'\nfactory = 'm:make'\nparameters = 1000000\n"
    (tmp_path / "run.toml").write_text(own)
    status, out, _ = typed(monkeypatch, capfd, *BUDGET)
    assert status == 0 and json.loads(out)["parameters"] == 1_000_000


@pytest.mark.parametrize(
    ("model", "faults"),
    [
        ("'run:other'\npreset = 3", ["budgte", "model.preset"]),
        ("'run:other'\nfactory = 'm:make'", ["budgte", "model.weights"]),
        ("'run:other'\n[data]\nsource = ''", ["budgte", "data.source"]),
        ("'none'", ["budgte", "model.weights"]),
    ],
)
def test_every_other_fault_of_such_a_file_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    model: str,
    faults: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(f"{BEGINS}{model}\n[budgte]\n")
    for words in (CONFIG, BUDGET, DESCRIBE):
        status, out, err = typed(monkeypatch, capfd, *words)
        assert (status, out) == (INVALID, "")
        paths = [line.partition(":")[0].strip() for line in err.splitlines()[1:]]
        assert sorted(paths) == faults
