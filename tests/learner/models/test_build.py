"""Choosing a model: presets, overrides, and one's own factory."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_learner.models import build, from_named, tensor_specs, to_named
from diloco_shared.spec.run import Model

SMALL = {"width": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_width": 4, "hidden": 8}


def test_overrides_change_the_presets_shape() -> None:
    model = build(Model(overrides=SMALL))
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert params["embedding"]["tokens_VxD"].shape == (256, 8)
    assert params["layers"]["attention"]["key_DxGK"].shape == (1, 8, 4)
    assert model.is_embedding("embedding/tokens_VxD")
    assert not model.is_embedding("output/head_DxV")
    loss = jax.eval_shape(model.loss, params, jax.ShapeDtypeStruct((1, 4), jnp.int32))
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"preset": "giant"}, "'giant' is unknown: choose one of nano, micro"),
        ({"overrides": {"widht": 8}}, "did you mean .width."),
        ({"overrides": {"heads": 3, "kv_heads": 2}}, "must divide heads"),
        ({"overrides": {"head_width": 3}}, "must be even"),
    ],
)
def test_a_model_that_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(Model.model_validate(settings))


@pytest.fixture
def own() -> Iterator[ModuleType]:
    module = ModuleType("own_models")
    sys.modules["own_models"] = module
    yield module
    del sys.modules["own_models"]


def line(config: Model) -> SimpleNamespace:
    """A line through the tokens: the smallest model there is."""
    return SimpleNamespace(
        init=lambda key: {"Embedder": jnp.ones(config.context_tokens), "slope": jnp.ones(())},
        loss=lambda params, batch: jnp.mean(params["slope"] * batch),
    )


def test_ones_own_factory_gets_the_configuration(own: ModuleType) -> None:
    own.line = line  # type: ignore[attr-defined]
    model = build(Model(factory="own_models:line", context_tokens=5))
    params = model.init(jax.random.key(0))
    assert params["Embedder"].shape == (5,)
    assert float(model.loss(params, jnp.full((1, 2), 3))) == 3.0
    # Unless it says so itself, whatever is called an embedding is one.
    assert model.is_embedding("Embedder") and not model.is_embedding("slope")


def test_ones_own_model_may_name_its_embeddings(own: ModuleType) -> None:
    own.named = lambda config: SimpleNamespace(  # type: ignore[attr-defined]
        **vars(line(config)), is_embedding=lambda name: name == "slope"
    )
    model = build(Model(factory="own_models:named"))
    assert model.is_embedding("slope") and not model.is_embedding("Embedder")


def test_ones_own_model_says_whether_it_reads_signs(own: ModuleType) -> None:
    for told, wanted in ((True, True), (False, False), ("yes", False)):
        own.signs = lambda config, told=told: SimpleNamespace(  # type: ignore[attr-defined]
            **vars(line(config)), masked_tokens=told
        )
        assert build(Model(factory="own_models:signs")).masked_tokens is wanted
    own.line = line  # type: ignore[attr-defined]
    assert not build(Model(factory="own_models:line")).masked_tokens
    assert build(Model(overrides=SMALL)).masked_tokens


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("own_models", "must read module:factory"),
        (":line", "must read module:factory"),
        ("own_models:", "must read module:factory"),
        ("no_such_module:line", "cannot be loaded: No module named 'no_such_module'"),
        ("own_models:nothing", "cannot be loaded: .*nothing"),
        ("own_models:hollow", r"an object without loss\(\)"),
    ],
)
def test_a_factory_that_does_not_work_is_said(own: ModuleType, factory: str, words: str) -> None:
    own.hollow = lambda config: SimpleNamespace(init=len)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=words):
        build(Model(factory=factory))


def test_trees_and_named_tensors_are_each_others_inverse() -> None:
    tree = {"b": {"x": np.zeros((2, 3)), "w": np.ones(1)}, "a": [np.ones(4), np.ones(())]}
    named = to_named(tree)
    assert list(named) == ["a/0", "a/1", "b/w", "b/x"]
    again = from_named(tree, {name: leaf + 1 for name, leaf in named.items()})
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    np.testing.assert_array_equal(again["b"]["x"], np.ones((2, 3)))
    with pytest.raises(KeyError, match="b/w"):
        from_named(tree, {name: leaf for name, leaf in named.items() if name != "b/w"})


def test_specs_say_name_shape_and_merge_rule() -> None:
    specs = tensor_specs({"x": np.zeros((2, 3)), "y": np.zeros(())}, lambda name: name == "x")
    assert [(s.name, s.shape, s.embedding) for s in specs] == [
        ("x", (2, 3), True),
        ("y", (), False),
    ]
