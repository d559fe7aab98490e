"""Checkpoints that we write for transformers, with the logits that we compute.

    python tests/interop/write_ours.py FOLDER

One of each family, and of presets whose embeddings are scaled, small and random. What is written is
read by compare.py, in an environment that has transformers. So is defaults.json: what we take a
field for that a config.json leaves out.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from diloco_learner.models import places, to_named, transformer
from diloco_shared.hf.config import DEFAULTS, hf_config
from diloco_shared.hf.names import hf_tensors
from diloco_shared.spec.shapes import SHAPES, Shape

SMALL = {"vocabulary": 96, "width": 32, "layers": 7, "heads": 4, "kv_heads": 2, "head_width": 8}
SMALLER = {**SMALL, "hidden": 40}
OURS = {
    "nano": SHAPES["nano"],
    "micro": SHAPES["micro"],
    "scaled-and-tied": replace(SHAPES["35m"], **SMALLER),
    "llama": replace(SHAPES["1b"], **SMALLER),
    "mistral": replace(SHAPES["150m"], **SMALLER, window=6),
    "qwen2": replace(SHAPES["500m"], **SMALLER),
    "qwen3": replace(SHAPES["5b"], **SMALLER),
    "nano-moe": SHAPES["nano-moe"],
    "mixtral": replace(SHAPES["1b"], **SMALLER, experts=4, experts_per_token=2),
    "qwen3_moe": replace(SHAPES["30b-a3b"], **SMALLER, experts=6, experts_per_token=3),
    "gemma3": replace(SHAPES["12b"], **SMALLER, window=6),
    "gemma2": replace(
        SHAPES["12b"],
        **SMALLER,
        window=6,
        global_every=2,
        qk_norm=False,
        local_rope_base=0.0,
        rope_scaling="none",
        attention_cap=5.0,
        logit_cap=3.0,
    ),
}


def write(shape: Shape, folder: Path) -> None:
    params = jax.jit(partial(transformer.init, shape))(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    # Norms and biases too: what begins as one or zero would hide a name that is wrong.
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params)
    tokens = np.random.default_rng(0).integers(0, shape.vocabulary, (2, 16)).astype(np.int32)
    # Theirs have room for all tokens.
    roomy = replace(shape, expert_capacity=0.0)
    logits = jax.jit(partial(transformer.forward, roomy, jnp.float32))(params, tokens)
    folder.mkdir(parents=True)
    save_file(written(shape, params), folder / "model.safetensors", {"format": "pt"})
    config = hf_config(shape, context=64)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    found = {"tokens": tokens, "logits": np.asarray(logits)}
    save_file(found, folder / "computed.safetensors")


def written(shape: Shape, params: Any) -> dict[str, np.ndarray]:
    leaves = {name: np.asarray(leaf) for name, leaf in to_named(params).items()}
    named = {
        name: leaves[p.leaf] if p.layer is None else leaves[p.leaf][p.layer]
        for name, p in places(leaves, "layers").items()
    }
    return {t.name: np.ascontiguousarray(t.build(named)) for t in hf_tensors(shape)}


if __name__ == "__main__":
    for name, shape in OURS.items():
        write(shape, Path(sys.argv[1]) / name)
    (Path(sys.argv[1]) / "defaults.json").write_text(json.dumps(DEFAULTS, indent=2) + "\n")
