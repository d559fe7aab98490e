"""Which tensors a Hugging Face checkpoint has, and how each is made of ours.

Theirs multiply from the left: a matrix of ours, (in, out), is theirs transposed. Nothing else is
changed but an embedding whose factor their architecture does not have.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_shared.hf.config import family, folds_scale, writes_head
from diloco_shared.spec.shapes import Shape, tensors

Named = Mapping[str, NDArray[Any]]

_EMBEDDING = "embedding/tokens_VxD"
_LAYER = {
    "attention/query_DxHK": "self_attn.q_proj.weight",
    "attention/key_DxGK": "self_attn.k_proj.weight",
    "attention/value_DxGK": "self_attn.v_proj.weight",
    "attention/out_HKxD": "self_attn.o_proj.weight",
    "attention/query_bias_HK": "self_attn.q_proj.bias",
    "attention/key_bias_GK": "self_attn.k_proj.bias",
    "attention/value_bias_GK": "self_attn.v_proj.bias",
    "attention/query_norm_K": "self_attn.q_norm.weight",
    "attention/key_norm_K": "self_attn.k_norm.weight",
    "attention/norm_D": "input_layernorm.weight",
    "mlp/gate_DxF": "mlp.gate_proj.weight",
    "mlp/up_DxF": "mlp.up_proj.weight",
    "mlp/down_FxD": "mlp.down_proj.weight",
}
# The norm before the MLP is called after what it follows, but where attention has one of its own.
_NORMS = {"mlp/norm_D": "post_attention_layernorm.weight"}
_POST_NORMS = {
    "attention/post_norm_D": "post_attention_layernorm.weight",
    "mlp/norm_D": "pre_feedforward_layernorm.weight",
    "mlp/post_norm_D": "post_feedforward_layernorm.weight",
}


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of the checkpoint, of `shape`; `build` makes it of our tensors named `sources`."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    build: Callable[[Named], NDArray[Any]]


def hf_tensors(shape: Shape) -> Iterator[HfTensor]:
    """Every tensor of the checkpoint, in the order of ours.

    A shape that no family computes (`config.family`) keeps its own names and values.
    """
    if family(shape) is None:
        yield from (itself(spec.name, spec.shape) for spec in tensors(shape))
        return
    factor = np.float32(math.sqrt(shape.width) if folds_scale(shape) else 1.0)
    for spec in tensors(shape):
        theirs = hf_name(shape, spec.name)
        if spec.name == _EMBEDDING:
            yield HfTensor(theirs, spec.shape, (spec.name,), _times(spec.name, factor))
        elif len(spec.shape) == 2:
            yield HfTensor(theirs, spec.shape[::-1], (spec.name,), _transposed(spec.name))
        else:
            yield HfTensor(theirs, spec.shape, (spec.name,), _times(spec.name, np.float32(1)))
    if shape.tied and writes_head(shape):
        size = (shape.vocabulary, shape.width)
        yield HfTensor("lm_head.weight", size, (_EMBEDDING,), _times(_EMBEDDING, np.float32(1)))


def itself(name: str, shape: tuple[int, ...]) -> HfTensor:
    """A tensor that is as the run has it."""
    return HfTensor(name, shape, (name,), _times(name, np.float32(1)))


def hf_name(shape: Shape, name: str) -> str:
    """What the checkpoint calls a tensor of ours."""
    match name:
        case "embedding/tokens_VxD":
            return "model.embed_tokens.weight"
        case "final_norm/scale_D":
            return "model.norm.weight"
        case "output/head_DxV":
            return "lm_head.weight"
    layer, _, rest = name.partition("/")
    known = _LAYER | (_POST_NORMS if shape.post_norms else _NORMS)
    return f"model.layers.{int(layer.removeprefix('layer_'))}.{known[rest]}"


def our_names(shape: Shape) -> dict[str, str]:
    """By the checkpoint's name, ours; a tied model's head is the embedding, and not among them."""
    return {hf_name(shape, spec.name): spec.name for spec in tensors(shape)}


def _times(name: str, factor: np.float32) -> Callable[[Named], NDArray[Any]]:
    return lambda named: named[name] if factor == 1 else named[name] * factor


def _transposed(name: str) -> Callable[[Named], NDArray[Any]]:
    return lambda named: named[name].T
