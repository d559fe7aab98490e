"""Shapes of the transformer by preset, with their tensors: known before any array is made.

The learner builds its model of these (`diloco_learner.models`); everybody else counts with them.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.faults import did_you_mean
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import Model


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of the transformer."""

    vocabulary: int  # V
    width: int  # D
    layers: int  # N
    heads: int  # H
    kv_heads: int  # G, divides H
    head_width: int  # K, even (RoPE turns pairs)
    hidden: int  # F
    rope_base: float = 10_000.0
    tied: bool = False  # the output matrix is the embedding
    remat: bool = False  # recompute activations in the backward pass, to save memory


SHAPES = {
    # 0.1M parameters: trains visibly in a minute on one core.
    "nano": Shape(256, 64, 2, 4, 4, 16, 176),
    "micro": Shape(256, 128, 4, 4, 2, 32, 352),
    "small": Shape(256, 512, 8, 8, 4, 64, 1408),
    "gemma-12b": Shape(
        262_144, 3840, 48, 16, 8, 256, 15_360, rope_base=1_000_000.0, tied=True, remat=True
    ),
}
# Tokens that a tokenizer makes: the model's vocabulary must hold them.
TOKENS = {"bytes": 256}
# No dimension of a tensor comes near this in any model known; above it, sums of sizes mean nothing.
DIMENSION_MAX = 1 << 24
# Every tensor is named in messages of at most 1 MiB: some hundred layers.
LAYERS_MAX = 1024


class WrongModel(ValueError):
    """The model's configuration cannot be; `path` names the value at fault."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path} {text}")
        self.path = path
        self.text = text


def shape_of(model: Model) -> Shape:
    """The preset with its overrides. Raises WrongModel for what no learner could build."""
    if model.preset not in SHAPES:
        near = did_you_mean(model.preset, SHAPES)
        raise WrongModel(
            "model.preset",
            f"{model.preset[:40]!r} is unknown: choose one of {', '.join(SHAPES)}{near}",
        )
    shape = SHAPES[model.preset]
    known = [f.name for f in fields(shape)]
    for name, value in model.overrides.items():
        if name not in known:
            near = did_you_mean(name, known) or f": it has {', '.join(known)}"
            raise WrongModel(f"model.overrides.{name[:40]}", f"is no field of a shape{near}")
        _check_field(name, value, getattr(shape, name))
    shape = replace(shape, **model.overrides)  # type: ignore[arg-type]
    if shape.heads % shape.kv_heads:
        text = f"({shape.kv_heads}) must divide heads ({shape.heads})"
        raise WrongModel("model.overrides.kv_heads", text)
    if shape.head_width % 2:
        text = f"({shape.head_width}) must be even: rotary positions turn pairs"
        raise WrongModel("model.overrides.head_width", text)
    return shape


def _check_field(name: str, value: Any, like: Any) -> None:
    path = f"model.overrides.{name}"
    if isinstance(like, bool):
        if not isinstance(value, bool):
            raise WrongModel(path, f"must be true or false, not {value!r:.40}")
    elif isinstance(like, float):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 1 < value <= 1e12:
            raise WrongModel(path, f"must be a number from above 1 to 1e12, not {value!r:.40}")
    else:
        most = LAYERS_MAX if name == "layers" else DIMENSION_MAX
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not 1 <= value <= most:
            raise WrongModel(path, f"must be a whole number from 1 to {most}, not {value!r:.40}")


def tensors(shape: Shape) -> tuple[TensorSpec, ...]:
    """Every parameter tensor, as the learner's model names them, in order of their names."""
    s = shape
    query, key = s.heads * s.head_width, s.kv_heads * s.head_width
    sizes: dict[str, tuple[int, ...]] = {
        "embedding/tokens_VxD": (s.vocabulary, s.width),
        "final_norm/scale_D": (s.width,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "attention/key_DxGK": (s.width, key),
        "attention/norm_D": (s.width,),
        "attention/out_HKxD": (query, s.width),
        "attention/query_DxHK": (s.width, query),
        "attention/value_DxGK": (s.width, key),
        "mlp/down_FxD": (s.hidden, s.width),
        "mlp/gate_DxF": (s.width, s.hidden),
        "mlp/norm_D": (s.width,),
        "mlp/up_DxF": (s.width, s.hidden),
    }
    for name in sorted(f"layer_{n:02d}" for n in range(s.layers)):
        sizes |= {f"{name}/{tensor}": size for tensor, size in layer.items()}
    if not s.tied:
        sizes["output/head_DxV"] = (s.width, s.vocabulary)
    return tuple(
        TensorSpec(name=name, shape=size, embedding=name.startswith("embedding/"))
        for name, size in sizes.items()
    )


def layout_of(model: Model, fragments: int) -> Layout:
    """How a preset's tensors are cut into so many fragments. Raises WrongModel."""
    return cut(shape_of(model), fragments)


def cut(shape: Shape, fragments: int) -> Layout:
    """The tensors of a shape in so many fragments. Raises WrongModel."""
    try:
        return Layout.build(tensors(shape), fragments)
    except ValueError as error:
        raise WrongModel("algorithm.fragments", f"({fragments}) is too high: {error}") from None
