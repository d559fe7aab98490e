"""Shapes of the decoder family by preset, with their tensors: known before any array is made.

One family covers Llama 2 and 3, Mistral, Qwen 2.5 and 3, and Gemma 2 and 3, and of those with a
mixture of experts Mixtral and Qwen 3: they differ in the fields of a `Shape`. The learner builds
its model of these (`diloco_learner.models`); everybody else counts with them. How a layer's tensors
lie in memory is the learner's: here each has its own.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.faults import did_you_mean
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import Model

# What is recomputed in the backward pass instead of kept. `layer`: all but each layer's input;
# `products`: all but the results of matrix products, which are the dearest to compute again.
REMAT = ("none", "layer", "products")
ACTIVATIONS = ("silu", "gelu")  # of the gate; gelu in its tanh form
ROPE_SCALINGS = ("none", "linear", "llama3")
# The widest head whose gradients cuDNN computes on every data-center GPU since 2020.
CUDNN_HEAD_MAX = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of the decoder family. Widths are counted in values, windows in tokens."""

    vocabulary: int  # V
    width: int  # D
    layers: int  # N
    heads: int  # H
    kv_heads: int  # G, divides H
    head_width: int  # K, even (RoPE turns pairs)
    hidden: int  # F, of each expert where there are some
    rope_base: float = 10_000.0
    tied: bool = False  # the output matrix is the embedding
    remat: str = "none"  # one of REMAT
    embed_scale: bool = True  # embeddings are multiplied by sqrt(D)
    activation: str = "silu"
    # Norms.
    norm_epsilon: float = 1e-6
    norm_offset: bool = False  # a norm scales by 1 + w, not by w (Gemma)
    post_norms: bool = False  # what attention and MLP give is normed as well (Gemma 2 and 3)
    qk_norm: bool = False  # queries and keys are normed, head by head (Qwen 3, Gemma 3)
    # Attention.
    qkv_bias: bool = False  # (Qwen 2.5)
    query_scale: float = 0.0  # logits are divided by its root; 0: head_width
    window: int = 0  # a local layer attends to so many tokens, its own included; 0: to all
    global_every: int = 0  # of layers with a window, each so many-th attends to all; 0: none does
    attention_cap: float = 0.0  # logits are capped softly at this; 0: not at all (Gemma 2)
    logit_cap: float = 0.0  # the same for what the head gives
    # Rotary positions.
    local_rope_base: float = 0.0  # of layers with a window, never scaled; 0: as of the others
    rope_scaling: str = "none"
    rope_factor: float = 1.0  # how many times longer contexts are than trained for
    rope_low: float = 1.0  # llama3: wavelengths above original / low are scaled,
    rope_high: float = 4.0  # those below original / high are not
    rope_original: int = 8192  # context of the first training, in tokens
    # A mixture of experts in place of each layer's MLP (`diloco_learner.models.experts`).
    experts: int = 0  # E; 0: one MLP, through which every token goes
    experts_per_token: int = 0  # k, through which a token goes
    # Tokens of a sequence that an expert has room for, over an even share of them; 0: for all.
    expert_capacity: float = 0.0
    expert_balance: float = 0.01  # what an uneven use of experts adds to what is minimised

    def room(self, tokens: int) -> int:
        """Tokens that each expert has room for, of a sequence of so many."""
        if not self.expert_capacity:
            return tokens
        share = self.expert_capacity * self.experts_per_token * tokens / self.experts
        return min(tokens, max(1, math.ceil(share)))

    def attends_to_all(self, layer: int) -> bool:
        """Whether a layer has no window."""
        every = self.global_every
        return not self.window or bool(every and (layer + 1) % every == 0)


SHAPES = {
    # 0.1M parameters: trains visibly in a minute on one core.
    "nano": Shape(256, 64, 2, 4, 4, 16, 176),
    "micro": Shape(256, 128, 4, 4, 2, 32, 352),
    "small": Shape(256, 512, 8, 8, 4, 64, 1408),
    # The smallest of Charles et al. 2025 (arXiv 2503.09799), with a gated MLP of as many values.
    "35m": Shape(32_768, 512, 6, 8, 8, 64, 1365, tied=True),
    # Published models of these sizes, whose checkpoints a run may begin from: SmolLM2 135M,
    "150m": Shape(
        49_152,
        576,
        30,
        9,
        3,
        64,
        1536,
        rope_base=100_000.0,
        tied=True,
        embed_scale=False,
        norm_epsilon=1e-5,
    ),
    # Qwen2.5 0.5B,
    "500m": Shape(
        151_936,
        896,
        24,
        14,
        2,
        64,
        4864,
        rope_base=1e6,
        tied=True,
        embed_scale=False,
        qkv_bias=True,
    ),
    # Llama 3.2 1B,
    "1b": Shape(
        128_256,
        2048,
        16,
        32,
        8,
        64,
        8192,
        rope_base=500_000.0,
        tied=True,
        remat="layer",
        embed_scale=False,
        norm_epsilon=1e-5,
        rope_scaling="llama3",
        rope_factor=32.0,
    ),
    # Qwen3 4B,
    "5b": Shape(
        151_936,
        2560,
        36,
        32,
        8,
        128,
        9728,
        rope_base=1e6,
        tied=True,
        remat="layer",
        embed_scale=False,
        qk_norm=True,
    ),
    # and Gemma 3 12B, its text model.
    "12b": Shape(
        262_208,
        3840,
        48,
        16,
        8,
        256,
        15_360,
        rope_base=1e6,
        tied=True,
        remat="layer",
        activation="gelu",
        norm_offset=True,
        post_norms=True,
        qk_norm=True,
        query_scale=256.0,
        window=1024,
        global_every=6,
        local_rope_base=10_000.0,
        rope_scaling="linear",
        rope_factor=8.0,
    ),
    # Of the size of the paper's largest; plainer than Gemma's own.
    "gemma-12b": Shape(
        262_144, 3840, 48, 16, 8, 256, 15_360, rope_base=1_000_000.0, tied=True, remat="layer"
    ),
    # nano with eight experts, of which a token takes two: 0.3M parameters.
    "nano-moe": Shape(
        256, 64, 2, 4, 4, 16, 88, experts=8, experts_per_token=2, expert_capacity=2.0
    ),
    # Qwen3 30B-A3B: a token takes 3.4 of its 30.5 billion parameters.
    "30b-a3b": Shape(
        151_936,
        2048,
        48,
        32,
        4,
        128,
        768,
        rope_base=1e6,
        remat="layer",
        embed_scale=False,
        qk_norm=True,
        experts=128,
        experts_per_token=8,
        expert_capacity=1.25,
        expert_balance=0.001,
    ),
}
# Tokens that a tokenizer makes: the model's vocabulary must hold them.
TOKENS = {"bytes": 256}
# No dimension of a tensor comes near this in any model known; above it, sums of sizes mean nothing.
DIMENSION_MAX = 1 << 24
# Every tensor is named in messages of at most 1 MiB: some hundred layers.
LAYERS_MAX = 1024
# What else a field may be: words, or numbers in a range. The rest are counts from 1.
_WORDS = {"remat": REMAT, "activation": ACTIVATIONS, "rope_scaling": ROPE_SCALINGS}
_RANGES = {
    "rope_base": (2.0, 1e12),
    "norm_epsilon": (1e-12, 0.1),
    "query_scale": (0.0, 1e6),
    "attention_cap": (0.0, 1e6),
    "logit_cap": (0.0, 1e6),
    "local_rope_base": (0.0, 1e12),
    "rope_factor": (1.0, 1e6),
    "rope_low": (1e-3, 1e6),
    "rope_high": (1e-3, 1e6),
    "expert_capacity": (0.0, 1e6),
    "expert_balance": (0.0, 1e3),
}
_FROM_ZERO = ("window", "global_every", "experts", "experts_per_token")


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
    return with_fields(SHAPES[model.preset], model.overrides, "model.overrides.")


def with_fields(shape: Shape, changed: dict[str, Any], where: str) -> Shape:
    """`shape` with some fields changed. `where` stands before a field's name in errors.

    Raises WrongModel.
    """
    known = [f.name for f in fields(shape)]
    for name, value in changed.items():
        if name not in known:
            near = did_you_mean(name, known) or f": it has {', '.join(known)}"
            raise WrongModel(f"{where}{name[:40]}", f"is no field of a shape{near}")
        _check_field(name, value, getattr(shape, name), where)
    shape = replace(shape, **{n: _written(n, v) for n, v in changed.items()})
    if shape.heads % shape.kv_heads:
        text = f"({shape.kv_heads}) must divide heads ({shape.heads})"
        raise WrongModel(f"{where}kv_heads", text)
    if shape.head_width % 2:
        text = f"({shape.head_width}) must be even: rotary positions turn pairs"
        raise WrongModel(f"{where}head_width", text)
    if shape.global_every and not shape.window:
        text = "says which layers have no window: set window, the tokens that the others attend to"
        raise WrongModel(f"{where}global_every", text)
    if shape.rope_scaling == "llama3" and shape.rope_high <= shape.rope_low:
        text = f"({shape.rope_high:g}) must be above rope_low ({shape.rope_low:g})"
        raise WrongModel(f"{where}rope_high", text)
    if not bool(shape.experts) <= shape.experts_per_token <= shape.experts:
        text = f"({shape.experts_per_token}) must be from 1 to experts ({shape.experts}), or both 0"
        raise WrongModel(f"{where}experts_per_token", text)
    return shape


def _written(name: str, value: Any) -> Any:
    # `remat` was true or false in version 0.2.0.
    return ("layer" if value else "none") if name == "remat" and isinstance(value, bool) else value


def _check_field(name: str, value: Any, like: Any, where: str) -> None:
    path, number = f"{where}{name}", isinstance(value, int | float) and not isinstance(value, bool)
    if name in _WORDS:
        if value not in _WORDS[name] and not (name == "remat" and isinstance(value, bool)):
            words = ", ".join(repr(word) for word in _WORDS[name])
            raise WrongModel(path, f"must be one of {words}, not {value!r:.40}")
    elif isinstance(like, bool):
        if not isinstance(value, bool):
            raise WrongModel(path, f"must be true or false, not {value!r:.40}")
    elif name in _RANGES:
        least, most = _RANGES[name]
        if not number or not math.isfinite(value) or not least <= value <= most:
            text = f"must be a number from {least:g} to {most:g}, not {value!r:.40}"
            raise WrongModel(path, text)
    else:
        least = 0 if name in _FROM_ZERO else 1
        most = LAYERS_MAX if name == "layers" else DIMENSION_MAX
        if not number or not isinstance(value, int) or not least <= value <= most:
            text = f"must be a whole number from {least} to {most}, not {value!r:.40}"
            raise WrongModel(path, text)


def fusable(shape: Shape) -> bool:
    """Whether cuDNN's attention, where there is one, takes the heads of this shape: in steps of
    eight, and uncapped. It keeps no weights."""
    narrow = shape.head_width % 8 == 0 and shape.head_width <= CUDNN_HEAD_MAX
    return narrow and not shape.attention_cap


def layer_name(layer: int) -> str:
    """How the tensors of a layer begin."""
    return f"layer_{layer:02d}"


def layer_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors, by name within the layer, in order of their names."""
    s = shape
    query, key = s.heads * s.head_width, s.kv_heads * s.head_width
    sizes: dict[str, tuple[int, ...]] = {
        "attention/key_DxGK": (s.width, key),
        "attention/norm_D": (s.width,),
        "attention/out_HKxD": (query, s.width),
        "attention/query_DxHK": (s.width, query),
        "attention/value_DxGK": (s.width, key),
        "mlp/norm_D": (s.width,),
    }
    if s.experts:
        sizes |= {
            "mlp/down_ExFxD": (s.experts, s.hidden, s.width),
            "mlp/gate_ExDxF": (s.experts, s.width, s.hidden),
            "mlp/router_DxE": (s.width, s.experts),
            "mlp/up_ExDxF": (s.experts, s.width, s.hidden),
        }
    else:
        sizes |= {
            "mlp/down_FxD": (s.hidden, s.width),
            "mlp/gate_DxF": (s.width, s.hidden),
            "mlp/up_DxF": (s.width, s.hidden),
        }
    if s.qkv_bias:
        sizes["attention/query_bias_HK"] = (query,)
        sizes["attention/key_bias_GK"] = sizes["attention/value_bias_GK"] = (key,)
    if s.qk_norm:
        sizes["attention/query_norm_K"] = sizes["attention/key_norm_K"] = (s.head_width,)
    if s.post_norms:
        sizes["attention/post_norm_D"] = sizes["mlp/post_norm_D"] = (s.width,)
    return dict(sorted(sizes.items()))


def tensors(shape: Shape) -> tuple[TensorSpec, ...]:
    """Every parameter tensor, as the learner's model names them, in order of their names."""
    s = shape
    sizes: dict[str, tuple[int, ...]] = {
        "embedding/tokens_VxD": (s.vocabulary, s.width),
        "final_norm/scale_D": (s.width,),
    }
    layer = layer_tensors(shape)
    for name in sorted(layer_name(n) for n in range(s.layers)):
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


# --------------------------------------------------------------------------------------------------
# Arithmetic: multiplications and additions, each counted as one.
#
# Counted are matrix products, which are nearly all of it: two for each weight and token forward,
# and twice as many backward (Kaplan et al. 2020, arXiv 2001.08361), and those of attention over
# what a token may see: half of the context on average, or the window. Recomputed ones are not
# counted, so that a utilisation made of these is that of the model, not of the hardware.

FORWARD_AND_BACKWARD = 3


def flops_per_token(shape: Shape, context: int) -> float:
    """Operations of training on one token of a sequence of `context`.

    Of experts those that a token goes through are counted.
    """
    return _flops_per_token(shape, context, shape.experts_per_token)


def computed_flops_per_token(shape: Shape, context: int) -> float:
    """The same with what is computed for nothing: experts compute all that they have room for."""
    if not shape.experts:
        return flops_per_token(shape, context)
    return _flops_per_token(shape, context, shape.experts * shape.room(context) / context)


def active_parameters(shape: Shape) -> int:
    """Values that a token goes through: of experts those that it takes, and all others."""
    sizes = layer_tensors(shape).values()
    idle = sum(math.prod(d[1:]) * (d[0] - shape.experts_per_token) for d in sizes if len(d) == 3)
    return sum(math.prod(t.shape) for t in tensors(shape)) - shape.layers * idle


def _flops_per_token(shape: Shape, context: int, experts: float) -> float:
    s, sizes = shape, layer_tensors(shape).values()
    matrices: float = sum(math.prod(d) for d in sizes if len(d) == 2)
    # One matrix of each expert.
    matrices += experts * sum(math.prod(d[1:]) for d in sizes if len(d) == 3)
    weights = s.layers * matrices + s.width * s.vocabulary
    seen = sum(_seen(context, 0 if s.attends_to_all(n) else s.window) for n in range(s.layers))
    # Scores and mixtures: two products of a head's width for each pair of tokens.
    attention = 2 * 2 * s.heads * s.head_width * seen
    return FORWARD_AND_BACKWARD * (2.0 * weights + attention)


def estimated_flops_per_token(parameters: int) -> float:
    """The same of a model of which only the number of parameters is known: 6 N.

    Attention is left out, and an embedding that only looks up is counted as a product.
    """
    return FORWARD_AND_BACKWARD * 2.0 * parameters


def _seen(context: int, window: int) -> float:
    """Tokens that a token attends to on average, its own included."""
    if not window or window >= context:
        return (context + 1) / 2
    return (window * (window + 1) / 2 + (context - window) * window) / context
