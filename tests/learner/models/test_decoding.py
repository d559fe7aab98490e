"""Sampling: the cache changes nothing, and what is drawn is what was asked for."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_learner.models import decoding, filled, transformer
from diloco_learner.models.decoding import Sampler, Sampling, drawn
from diloco_shared.hf.weights import open_weights
from diloco_shared.spec.shapes import Shape

GOLDEN = Path(__file__).parents[2] / "interop" / "golden"


def model(name: str) -> tuple[Shape, Any]:
    weights = open_weights(GOLDEN / name)
    shapes = jax.eval_shape(partial(transformer.init, weights.shape), jax.random.key(0))
    return weights.shape, filled(shapes, "layers", weights.read)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama", "mistral", "qwen2", "qwen3"])
def test_tokens_read_one_by_one_give_the_logits_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts in several parts, the last of which is not full, and windows behind them."""
    monkeypatch.setattr(decoding, "READ_AT_ONCE", 5)
    shape, params = model(name)
    prompt = np.random.default_rng(1).integers(0, shape.vocabulary, 13).tolist()
    sampler = Sampler(shape, params, jnp.float32, Sampling(temperature=0))
    found = [*prompt, *sampler.tokens(prompt, 9, seed=0)]
    assert len(found) == 22
    whole = jax.jit(partial(transformer.forward, shape, jnp.float32))(params, np.array([found]))
    likeliest = np.argmax(np.asarray(whole)[0], axis=-1)
    assert found[13:] == likeliest[12:-1].tolist()


def test_a_seed_decides_what_is_drawn() -> None:
    sampler = Sampler(*model("llama"), jnp.float32, Sampling(temperature=1.0))
    first, again, other = (list(sampler.tokens([1, 2], 30, seed)) for seed in (3, 3, 4))
    assert first == again != other


def test_it_ends_at_the_end_of_a_document() -> None:
    sampler = Sampler(*model("llama"), jnp.float32, Sampling(temperature=0))
    whole = list(sampler.tokens([1, 2], 12, seed=0))
    end = whole[5]
    assert list(sampler.tokens([1, 2], 12, seed=0, ends=[end])) == whole[: whole.index(end)]


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        (Sampling(temperature=0), {2}),
        (Sampling(temperature=1, top_k=2), {2, 0}),
        (Sampling(temperature=1, top_p=0.6), {2, 0}),
        (Sampling(temperature=1, top_p=0.1), {2}),
        (Sampling(temperature=1), {0, 1, 2, 3}),
        (Sampling(temperature=0.01), {2}),
    ],
)
def test_only_likely_tokens_are_drawn(how: Sampling, allowed: set[int]) -> None:
    logits = jnp.log(jnp.array([0.3, 0.1, 0.5, 0.1]))
    draw = jax.jit(jax.vmap(lambda key: drawn(how, 4, key, logits)))
    assert set(np.asarray(draw(jax.random.split(jax.random.key(0), 200))).tolist()) == allowed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_stand_for_no_token_are_never_drawn(temperature: float) -> None:
    """Models have round numbers of rows, and tokenizers as many tokens as they have."""
    logits, how = jnp.array([0.0, 1.0, 50.0, 60.0]), Sampling(temperature=temperature)
    draw = jax.jit(jax.vmap(lambda key: drawn(how, 2, key, logits)))
    found = set(np.asarray(draw(jax.random.split(jax.random.key(0), 200))).tolist())
    assert found == ({0, 1} if temperature else {1})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Sampling(temperature=-1), "temperature"),
        (lambda: Sampling(top_k=-1), "top_k"),
        (lambda: Sampling(top_p=0), "top_p"),
        (lambda: Sampler(*model("llama"), jnp.float32, Sampling()).tokens([], 3, 0), "at least"),
        (
            lambda: Sampler(*model("llama"), jnp.float32, Sampling()).tokens([48], 3, 0),
            "another tokenizer",
        ),
    ],
)
def test_what_cannot_be_sampled_is_said(wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong()
