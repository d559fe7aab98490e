"""The decoder family computes what other people's code computes of the same checkpoints.

Compared with are tiny checkpoints of `transformers`, with its logits and gradients
(tests/interop/make_golden.py).
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diloco_learner.models import filled, transformer
from diloco_shared.hf.config import WITH_EXPERTS, family, hf_config, shape_of_config
from diloco_shared.hf.names import hf_tensors
from diloco_shared.hf.weights import HfWeights, digest_of, open_weights
from diloco_shared.spec.shapes import Shape

GOLDEN = Path(__file__).parents[2] / "interop" / "golden"
FAMILIES = sorted(folder.name for folder in GOLDEN.iterdir())
# Of fp32 sums in another order; logits are of the size of one.
NEAR = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=FAMILIES)
def weights(request: pytest.FixtureRequest) -> HfWeights:
    return open_weights(GOLDEN / request.param)


def parameters(weights: HfWeights) -> Any:
    shapes = jax.eval_shape(partial(transformer.init, weights.shape), jax.random.key(0))
    return filled(shapes, "layers", weights.read)


def computed(weights: HfWeights) -> dict[str, np.ndarray]:
    return load_file(weights.folder / "computed.safetensors")


def by_their_names(shape: Shape, tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    from diloco_learner.models import places, to_named

    leaves = {name: np.asarray(leaf) for name, leaf in to_named(tree).items()}
    named = {
        name: leaves[p.leaf] if p.layer is None else leaves[p.leaf][p.layer]
        for name, p in places(leaves, "layers").items()
    }
    for tensor in hf_tensors(shape):
        yield tensor.name, tensor.build(named)


def test_every_family_is_covered() -> None:
    assert FAMILIES == [
        "gemma2",
        "gemma3",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    ]
    shapes = [open_weights(GOLDEN / name).shape for name in FAMILIES]
    # Loops over layers, and unrolled ones; windows in all layers, in some, and in none.
    assert {s.layers > HOWS[0][1] for s in shapes} == {True, False}
    assert {len({s.attends_to_all(n) for n in range(s.layers)}) for s in shapes} == {1, 2}


def test_logits_are_those_of_transformers(
    weights: HfWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "UNROLLED_MAX", HOWS[0][1])
    theirs = computed(weights)
    forward = jax.jit(partial(transformer.forward, weights.shape, jnp.float32))
    logits = forward(parameters(weights), theirs["tokens"][:, :-1].astype(np.int32))
    np.testing.assert_allclose(np.asarray(logits), theirs["logits"], **NEAR)


HOWS = [("none", 4), ("layer", 0), ("products", 9)]
# How experts are computed has nothing to do with how layers are: once is enough. Of the others one
# family, whose layers differ from each other, is computed in every way; `make test-long` does so
# with each.
EVERY_WAY = "gemma3"
CASES = [
    pytest.param(n, *how, marks=[] if how == HOWS[0] or n == EVERY_WAY else [pytest.mark.long])
    for n in FAMILIES
    for how in HOWS
    if n not in WITH_EXPERTS or how == HOWS[0]
]


@pytest.mark.parametrize(("weights", "remat", "unrolled"), CASES, indirect=["weights"])
def test_loss_and_gradients_are_those_of_transformers(
    weights: HfWeights, remat: str, unrolled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "UNROLLED_MAX", unrolled)
    # Some tokens at a time, the last part of which is not full.
    monkeypatch.setattr("diloco_learner.models.cross_entropy.LOGITS_BYTES", 48 * 4 * 5)
    theirs = computed(weights)
    shape = replace(weights.shape, remat=remat)
    step = jax.jit(jax.value_and_grad(partial(transformer.loss, shape, jnp.float32)))
    loss, gradient = step(parameters(weights), theirs["tokens"].astype(np.int32))
    np.testing.assert_allclose(float(loss), float(theirs["loss"][0]), **NEAR)
    # A matrix's gradient is turned as the matrix is.
    ours = dict(by_their_names(shape, gradient))
    wanted = {n.removeprefix("gradient/"): g for n, g in theirs.items() if n[:9] == "gradient/"}
    assert ours.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(ours[name], values, **NEAR, err_msg=name)


def test_what_is_written_is_what_was_read(weights: HfWeights) -> None:
    theirs = load_file(weights.folder / "model.safetensors")
    ours = dict(by_their_names(weights.shape, parameters(weights)))
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values, err_msg=name)
    config = hf_config(weights.shape, context=64)
    assert config is not None and shape_of_config(config) == weights.shape
    given = json.loads((weights.folder / "config.json").read_text())
    assert config["model_type"] == given["model_type"] == family(weights.shape)
    assert config["architectures"] == given["architectures"]


def test_a_sharded_checkpoint_in_bf16_is_read_like_a_whole_one(tmp_path: Path) -> None:
    whole = open_weights(GOLDEN / "llama")
    theirs = load_file(whole.folder / "model.safetensors")
    halves: list[dict[str, Any]] = [{}, {}]
    for n, (name, values) in enumerate(theirs.items()):
        halves[n % 2][name] = np.asarray(jnp.asarray(values, jnp.bfloat16))
    index = {}
    for n, half in enumerate(halves, 1):
        file = f"model-0000{n}-of-00002.safetensors"
        save_file(half, tmp_path / file)
        index |= {name: file for name in half}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text((whole.folder / "config.json").read_text())
    split = open_weights(tmp_path)
    assert split.shape == whole.shape and set(split) == set(whole)
    for name in whole:
        rounded = np.asarray(jnp.asarray(whole.read(name), jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_array_equal(split.read(name), rounded, err_msg=name)
    assert digest_of(split) != digest_of(whole) == digest_of(open_weights(GOLDEN / "llama"))
