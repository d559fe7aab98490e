"""Which tensors a Hugging Face checkpoint has, and how each is made of ours.

Theirs multiply from the left: a matrix of ours, (in, out), is theirs transposed. A tensor of ours
that holds a matrix of each expert is one tensor for each there. Nothing else is changed but an
embedding whose factor their architecture does not have.
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
# Of a mixture of experts, by family; `{}` is the number of the expert.
_EXPERTS = {
    "mixtral": {
        "mlp/router_DxE": "block_sparse_moe.gate.weight",
        "mlp/gate_ExDxF": "block_sparse_moe.experts.{}.w1.weight",
        "mlp/up_ExDxF": "block_sparse_moe.experts.{}.w3.weight",
        "mlp/down_ExFxD": "block_sparse_moe.experts.{}.w2.weight",
    },
    "qwen3_moe": {
        "mlp/router_DxE": "mlp.gate.weight",
        "mlp/gate_ExDxF": "mlp.experts.{}.gate_proj.weight",
        "mlp/up_ExDxF": "mlp.experts.{}.up_proj.weight",
        "mlp/down_ExFxD": "mlp.experts.{}.down_proj.weight",
    },
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
        if len(spec.shape) == 3:
            for n in range(spec.shape[0]):
                size = spec.shape[:0:-1]
                yield HfTensor(theirs.format(n), size, (spec.name,), _expert(spec.name, n))
        elif spec.name == _EMBEDDING:
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
    """What the checkpoint calls a tensor of ours; with `{}` for the number of an expert."""
    match name:
        case "embedding/tokens_VxD":
            return "model.embed_tokens.weight"
        case "final_norm/scale_D":
            return "model.norm.weight"
        case "output/head_DxV":
            return "lm_head.weight"
    layer, _, rest = name.partition("/")
    experts = _EXPERTS.get(family(shape) or "", {}) if shape.experts else {}
    known = _LAYER | (_POST_NORMS if shape.post_norms else _NORMS) | experts
    return f"model.layers.{int(layer.removeprefix('layer_'))}.{known[rest]}"


def their_names(shape: Shape) -> dict[str, tuple[str, ...]]:
    """By our name, the checkpoint's: several where it has a tensor for each expert.

    A tied model's head is the embedding, and not among them.
    """
    found: dict[str, tuple[str, ...]] = {}
    for spec in tensors(shape):
        name = hf_name(shape, spec.name)
        many = spec.shape[0] if len(spec.shape) == 3 else 1
        found[spec.name] = tuple(name.format(n) for n in range(many))
    return found


def _times(name: str, factor: np.float32) -> Callable[[Named], NDArray[Any]]:
    return lambda named: named[name] if factor == 1 else named[name] * factor


def _transposed(name: str) -> Callable[[Named], NDArray[Any]]:
    return lambda named: named[name].T


def _expert(name: str, number: int) -> Callable[[Named], NDArray[Any]]:
    return lambda named: named[name][number].T
