"""What a run's [model] table gains from the folder of a checkpoint."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from diloco_shared.hf.resolving import differing, nearest, resolved
from diloco_shared.hf.weights import WrongCheckpoint, digest_of, open_weights
from diloco_shared.spec.run import Model
from diloco_shared.spec.shapes import SHAPES, shape_of

GOLDEN = Path(__file__).parents[2] / "interop" / "golden"


@pytest.mark.parametrize("name", sorted(folder.name for folder in GOLDEN.iterdir()))
def test_shape_and_digest_are_filled_in(name: str) -> None:
    table = resolved({"weights": name, "context_tokens": 32}, GOLDEN)
    weights = open_weights(GOLDEN / name)
    model = Model.model_validate(table)
    # What is recomputed is no part of a checkpoint.
    assert replace(shape_of(model), remat="none") == weights.shape
    assert model.weights_digest == digest_of(weights)
    assert (model.weights, model.context_tokens) == (name, 32)


def test_what_the_table_says_stays() -> None:
    table = resolved({"weights": "llama", "overrides": {"remat": "layer"}}, GOLDEN)
    assert shape_of(Model.model_validate(table)).remat == "layer"
    assert resolved({"preset": "nano"}, GOLDEN) == {"preset": "nano"}
    known = {"weights": "nowhere", "weights_digest": "0" * 32}
    assert resolved(known, GOLDEN) == known


def test_weights_keep_the_context_for_which_they_were_made() -> None:
    """It is said where the run's own is shorter, so that an export can say it, too."""
    for context, gained in ((32, {"weights_context": 64}), (64, {}), (2048, {})):
        table = resolved({"weights": "llama", "context_tokens": context}, GOLDEN)
        assert {n: v for n, v in table.items() if n == "weights_context"} == gained
    said = resolved({"weights": "llama", "context_tokens": 8, "weights_context": 16}, GOLDEN)
    assert said["weights_context"] == 16, "what is said stays"
    table = {"weights": "llama", "context_tokens": 8, "weights_context": 0}
    assert resolved(table, GOLDEN)["weights_context"] == 64, "0 is written where nothing is known"
    assert "weights_context" not in resolved({"weights": "llama"}, GOLDEN), "64 is usual"


@pytest.mark.parametrize("preset", SHAPES)
def test_a_published_shape_is_its_preset(preset: str) -> None:
    assert nearest(SHAPES[preset]) == (preset, {})


def test_a_folder_that_holds_none_is_said() -> None:
    with pytest.raises(WrongCheckpoint, match="no such folder"):
        resolved({"weights": "nowhere"}, GOLDEN)


def test_what_is_trainings_own_is_no_other_shape() -> None:
    """Weights do not say how many tokens an expert may take, or how work is shared out."""
    there = asdict(SHAPES["nano-moe"])
    wanted = there | {"expert_capacity": 1.25, "expert_balance": 0.5, "remat": "layer"}
    assert differing(there, wanted) == ""
    assert differing(there, wanted | {"layers": 7}) == (
        f"layers is {there['layers']} there, and 7 in the run"
    )
