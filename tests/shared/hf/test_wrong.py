"""Checkpoints that no run could begin from: each says what is wrong, and where."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from diloco_shared.hf.config import WrongConfig, hf_config, shape_of_config
from diloco_shared.hf.weights import WrongCheckpoint, open_weights
from diloco_shared.spec.shapes import SHAPES, Shape

GOLDEN = Path(__file__).parents[2] / "interop" / "golden"


def configured(**changed: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return change


def weighted(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return rewrite


def indexed(index: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "an object is expected"),
        (configured(model_type="mamba"), "'mamba' is not one of llama, mistral"),
        (configured(hidden_size="16"), "hidden_size must be a whole number"),
        (configured(num_key_value_heads=3), "must divide heads"),
        (configured(hidden_act="relu"), "hidden_act is 'relu'"),
        (configured(attention_bias=True), "attention_bias is True"),
        (configured(tie_word_embeddings=1), "must be true or false"),
        (configured(rms_norm_eps="small"), "rms_norm_eps must be a number"),
        (configured(rope_parameters={"rope_type": "yarn"}), "'yarn' is not one of default"),
        (configured(rope_parameters="linear"), "rope_parameters must be an object, not 'linear'"),
        (configured(rope_parameters=None, rope_scaling=8), "rope_scaling must be an object, not 8"),
        (
            configured(
                rope_parameters={"rope_type": "llama3", "original_max_position_embeddings": "8k"}
            ),
            "original_max_position_embeddings must be a whole number from 1, not '8k'",
        ),
        (configured(intermediate_size=21), "down_proj.weight is 16 x 20.* says 16 x 21"),
        (configured(num_hidden_layers=3), "there is no tensor model.layers.2."),
        (configured(num_hidden_layers=1), "does not account for: model.layers.1."),
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (cut_off, "not a sound safetensors file"),
        (weighted(lambda t: t.pop(NORM)), f"there is no tensor {NORM}"),
        (weighted(lambda t: t.update({NORM: t[NORM].astype(np.int8)})), "of type I8"),
        (weighted(lambda t: t.update({QUERY: t[QUERY].T.copy()})), "16 x 32.* says 32 x 16"),
        (indexed({"weight_map": 3}), "weight_map must say"),
        (indexed({"weight_map": {NORM: "../x.safetensors"}}), "no file '../x.safetensors'"),
        (indexed({"weight_map": {"other": "model.safetensors"}}), "other is not in model"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said(
    break_it: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(GOLDEN / "llama", folder)
    break_it(folder)
    with pytest.raises(WrongCheckpoint, match=words):
        open_weights(folder)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"layer_types": ["sliding_attention"]}, "a list of 7 words"),
        (
            {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 5},
            "no regular pattern",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"sliding_window": -4}, "sliding_window must be a whole number"),
        ({"sliding_window_pattern": None, "layer_types": None}, "_pattern must be a whole number"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": 1e4}}, "be an object"),
    ],
)
def test_what_gemma_could_say_and_we_cannot_compute_is_refused(
    changed: dict[str, Any], words: str
) -> None:
    config = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    with pytest.raises(WrongConfig, match=words):
        shape_of_config(config | changed)


@pytest.mark.parametrize("preset", SHAPES)
def test_presets_are_written_for_transformers(preset: str) -> None:
    """Read again, a shape is what it was, but for factors that were multiplied in."""
    config = hf_config(SHAPES[preset], context=128, dtype="bfloat16", eos_token_id=3)
    assert config is not None and config["eos_token_id"] == 3
    assert config["torch_dtype"] == "bfloat16"
    again = shape_of_config(json.loads(json.dumps(config)))
    folded = SHAPES[preset].embed_scale and not SHAPES[preset].norm_offset
    assert again.embed_scale == (SHAPES[preset].embed_scale and not folded)
    assert again.tied == (SHAPES[preset].tied and not folded)


def test_a_shape_of_no_family_has_no_config() -> None:
    mixed = Shape(10, 4, 2, 2, 1, 2, 6, qk_norm=True, qkv_bias=True)
    assert hf_config(mixed, context=8) is None
    # Gemma's layers with a window are never scaled.
    scaled = replace(SHAPES["12b"], local_rope_base=0.0)
    assert hf_config(scaled, context=8) is None
    for same in ({"rope_scaling": "none"}, {"window": 0}):
        assert hf_config(replace(scaled, **same), context=8) is not None  # type: ignore[arg-type]
