"""Shapes without arrays are those of the real model, and what cannot be is refused by name."""

import jax
import pytest

from diloco_learner.models import build, tensor_specs
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import Model
from diloco_shared.spec.shapes import SHAPES, WrongModel, layout_of, shape_of, tensors

OVERRIDES = [
    {},
    {"layers": 5, "hidden": 300},
    {"width": 96, "heads": 6, "kv_heads": 3, "head_width": 32},
    {"tied": True, "vocabulary": 1000},
    {"tied": False, "remat": False, "layers": 1},
    {"layers": 101, "width": 8, "hidden": 8, "vocabulary": 256},
    {"qkv_bias": True, "qk_norm": True, "post_norms": True, "layers": 3},
]


@pytest.mark.parametrize("preset", SHAPES)
@pytest.mark.parametrize("overrides", OVERRIDES)
def test_tensors_are_those_of_the_real_model(preset: str, overrides: dict[str, int]) -> None:
    config = Model.model_validate({"preset": preset, "overrides": overrides})
    model = build(config)
    real = jax.eval_shape(model.init, jax.random.key(0))
    specs = tensor_specs(real, model.is_embedding, model.stacked)
    assert tensors(shape_of(config)) == specs
    assert layout_of(config, 6).digest() == Layout.build(specs, 6).digest()


@pytest.mark.parametrize(
    ("config", "path", "says"),
    [
        ({"preset": "gpt4"}, "model.preset", "nano, micro, small, 35m, 150m"),
        ({"preset": "smal"}, "model.preset", "did you mean 'small'"),
        ({"overrides": {"widht": 3}}, "model.overrides.widht", "did you mean 'width'"),
        ({"overrides": {"colour": 3}}, "model.overrides.colour", "it has vocabulary, width"),
        ({"overrides": {"layers": 0}}, "model.overrides.layers", "from 1 to 1024"),
        ({"overrides": {"layers": 2.5}}, "model.overrides.layers", "whole number"),
        ({"overrides": {"width": True}}, "model.overrides.width", "whole number"),
        ({"overrides": {"width": 10**30}}, "model.overrides.width", "whole number"),
        ({"overrides": {"tied": 1}}, "model.overrides.tied", "true or false"),
        ({"overrides": {"rope_base": "x"}}, "model.overrides.rope_base", "number"),
        ({"overrides": {"kv_heads": 3}}, "model.overrides.kv_heads", "divide"),
        ({"overrides": {"head_width": 15}}, "model.overrides.head_width", "even"),
        ({"overrides": {"remat": "some"}}, "model.overrides.remat", "'none', 'layer', 'products'"),
        ({"overrides": {"activation": 3}}, "model.overrides.activation", "'silu', 'gelu'"),
        ({"overrides": {"window": -1}}, "model.overrides.window", "from 0 to"),
        ({"overrides": {"global_every": 6}}, "model.overrides.global_every", "set window"),
        ({"overrides": {"experts": 4}}, "model.overrides.experts_per_token", "from 1 to experts"),
        ({"overrides": {"experts_per_token": 2}}, "model.overrides.experts_per_token", "both 0"),
        (
            {"preset": "nano-moe", "overrides": {"experts_per_token": 9}},
            "model.overrides.experts_per_token",
            "(9) must be from 1 to experts (8)",
        ),
        ({"overrides": {"expert_capacity": -1}}, "model.overrides.expert_capacity", "from 0 to"),
        ({"overrides": {"logit_cap": -1.0}}, "model.overrides.logit_cap", "from 0 to"),
        ({"overrides": {"norm_epsilon": 0}}, "model.overrides.norm_epsilon", "1e-12 to 0.1"),
        (
            {"overrides": {"rope_scaling": "llama3", "rope_high": 1}},
            "model.overrides.rope_high",
            "above rope_low",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(
    config: dict[str, object], path: str, says: str
) -> None:
    with pytest.raises(WrongModel) as caught:
        shape_of(Model.model_validate(config))
    assert caught.value.path == path and says in str(caught.value)


def test_what_remat_said_in_version_0_2_0_is_understood() -> None:
    said = [shape_of(Model(overrides={"remat": value})).remat for value in (True, False)]
    assert said == ["layer", "none"]


def test_more_fragments_than_tensors_names_the_setting() -> None:
    small = {"vocabulary": 1, "width": 2, "layers": 1, "heads": 1, "kv_heads": 1, "hidden": 1}
    with pytest.raises(WrongModel) as caught:
        layout_of(Model.model_validate({"overrides": small}), 512)
    assert caught.value.path == "algorithm.fragments"
