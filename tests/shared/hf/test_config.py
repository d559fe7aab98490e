"""A config.json that leaves out what its class has by default is read as that class reads it."""

from dataclasses import replace
from typing import Any

import pytest

from diloco_shared.hf.config import CLASSES, DEFAULTS, context_of_config, shape_of_config
from diloco_shared.spec.shapes import SHAPES

# As google/gemma-3-12b-it publishes it, but for what is of images.
GEMMA_3_12B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
# And google/gemma-3-4b-it.
GEMMA_3_4B_TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def test_gemma_3_as_it_is_published_is_the_preset() -> None:
    assert shape_of_config(GEMMA_3_12B) == replace(SHAPES["12b"], remat="none")
    smaller = shape_of_config({"model_type": "gemma3", "text_config": GEMMA_3_4B_TEXT})
    heads = (smaller.heads, smaller.kv_heads, smaller.head_width)
    assert (smaller.vocabulary, *heads) == (262_208, 8, 4, 256)
    assert (smaller.rope_base, smaller.local_rope_base) == (1e6, 10_000.0)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("llama", {"window": 0, "kv_heads": 32, "head_width": 128, "rope_base": 1e4}),
        ("mistral", {"window": 4096, "global_every": 0, "kv_heads": 8, "vocabulary": 32_000}),
        ("mixtral", {"window": 0, "rope_base": 1e6, "kv_heads": 8, "experts": 8}),
        ("qwen2", {"window": 0, "vocabulary": 151_936, "hidden": 22_016}),
        ("qwen3", {"window": 0, "head_width": 128, "qk_norm": True}),
        ("qwen3_moe", {"experts": 128, "experts_per_token": 8, "hidden": 768, "head_width": 64}),
        ("gemma2", {"window": 4096, "global_every": 2, "attention_cap": 50.0, "logit_cap": 30.0}),
        ("gemma3_text", {"window": 4096, "global_every": 6, "local_rope_base": 1e4}),
    ],
)
def test_what_a_config_leaves_out_is_what_its_class_has(kind: str, wanted: dict[str, Any]) -> None:
    # What its class has by default there cannot be computed here, and is refused.
    more = {"norm_topk_prob": True} if kind == "qwen3_moe" else {}
    found = shape_of_config({"model_type": kind, **more})
    assert {name: getattr(found, name) for name in wanted} == wanted


def test_what_a_config_says_is_nothing_is_nothing() -> None:
    capless = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    found = shape_of_config({"model_type": "gemma2", "sliding_window": None, **capless})
    assert (found.window, found.attention_cap, found.logit_cap) == (0, 0.0, 0.0)
    mistral = {"model_type": "mistral", "num_attention_heads": 16, "num_key_value_heads": None}
    assert shape_of_config(mistral | {"sliding_window": None}).window == 0
    assert shape_of_config(mistral).kv_heads == 16


@pytest.mark.parametrize(
    ("parameters", "base"),
    [({"rope_type": "default"}, 1e6), ({"rope_type": "default", "rope_theta": 5.0}, 5.0)],
)
def test_a_rope_without_a_base_has_that_of_the_class(
    parameters: dict[str, Any], base: float
) -> None:
    assert shape_of_config({"model_type": "mixtral", "rope_parameters": parameters}).rope_base == (
        base
    )
    both = {"full_attention": parameters, "sliding_attention": None}
    found = shape_of_config({"model_type": "gemma3_text", "rope_parameters": both})
    assert (found.rope_base, found.local_rope_base) == (base, 10_000.0)


def test_a_rope_that_does_not_say_where_it_begins_begins_at_the_context() -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": None}
    config = {"model_type": "llama", "max_position_embeddings": 2048, "rope_scaling": rope}
    assert shape_of_config(config).rope_original == 2048


def test_every_family_has_its_defaults() -> None:
    assert DEFAULTS.keys() == CLASSES.keys()


@pytest.mark.parametrize(
    ("said", "context"),
    [({}, 131_072), (dict(max_position_embeddings=512), 512)]
    + [(dict(max_position_embeddings=wrong), 0) for wrong in (None, "many", True, -1)],
)
def test_a_config_tells_for_how_long_sequences_it_is(said: dict[str, Any], context: int) -> None:
    """Nothing is computed with it, so that whatever stands there is no reason to refuse."""
    for config in (
        {"model_type": "mistral", **said},
        {"model_type": "gemma3", "text_config": {**GEMMA_3_4B_TEXT, **said}},
    ):
        assert context_of_config(config) == context
