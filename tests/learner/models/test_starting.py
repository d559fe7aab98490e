"""A run begins from the weights that it names, and from no others."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.hf.resolving import resolved, weights_of
from diloco_shared.hf.weights import WrongCheckpoint
from diloco_shared.spec.run import Model, RunSpec, config_hash

GOLDEN = Path(__file__).parents[2] / "interop" / "golden"


def spec(table: dict[str, Any]) -> RunSpec:
    algorithm = {"fragments": 3}
    tables = {"name": "own", "algorithm": algorithm, "model": table, "budget": {"steps": 4}}
    return RunSpec.model_validate(tables)


@pytest.mark.whole
def test_every_fragment_begins_with_the_weights() -> None:
    run = spec(resolved({"weights": "qwen3", "context_tokens": 8}, GOLDEN))
    weights = weights_of(run.model, GOLDEN)
    assert weights is not None
    trainer = Trainer(Program.build(run, weights))
    for p, pieces in enumerate(trainer.program.layout.fragments):
        wanted = [weights.read(piece.name)[piece.start : piece.stop].ravel() for piece in pieces]
        np.testing.assert_array_equal(trainer.fragment(p), np.concatenate(wanted))
    loss = trainer.step(np.zeros((8, 9), np.int32), 1e-3)
    assert np.isfinite(float(loss))


def test_without_weights_a_run_begins_from_its_seed() -> None:
    assert weights_of(Model(), GOLDEN) is None


def test_other_weights_of_the_same_shape_are_refused(tmp_path: Path) -> None:
    table = resolved({"weights": "llama"}, GOLDEN)
    shutil.copytree(GOLDEN / "llama", tmp_path / "llama")
    file = tmp_path / "llama" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, file)
    with pytest.raises(WrongCheckpoint, match=r"their digest is [0-9a-f]{32}, and model.weights"):
        weights_of(Model.model_validate(table), tmp_path)


def test_another_shape_is_refused_field_by_field(tmp_path: Path) -> None:
    table = resolved({"weights": "llama"}, GOLDEN)
    shutil.copytree(GOLDEN / "mistral", tmp_path / "llama")
    with pytest.raises(WrongCheckpoint, match="window is 5 there, and 0 in the run"):
        weights_of(Model.model_validate(table), tmp_path)


def test_learners_must_agree_on_the_weights_and_not_on_their_place() -> None:
    table = resolved({"weights": "llama"}, GOLDEN)
    moved = config_hash(spec({**table, "weights": "/elsewhere/llama"}))
    assert config_hash(spec(table)) == moved
    assert config_hash(spec({**table, "weights_digest": "0" * 32})) != moved


def test_the_hash_of_a_run_without_weights_is_what_it_was_in_version_0_2_0() -> None:
    """Learners of both versions work in one run."""
    run = RunSpec.model_validate({"name": "own", "budget": {"steps": 4}})
    assert config_hash(run) == "435b4d7213260e9d3f9dfaacc40c07c8"
