"""Between a `Shape` and the config.json of a Hugging Face checkpoint.

Written are the fields that transformers 4 and 5 both read. Read are those of both, and whatever
would change what the model computes, and is not known here, is refused by name.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from diloco_shared.spec.shapes import Shape, WrongModel, with_fields

Config = Mapping[str, Any]

# What a model is called by `model_type`, and the class that loads it.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
# Models with eyes: the text model is what is read.
WITH_TEXT = {"gemma3": "gemma3_text"}
GEMMAS = ("gemma2", "gemma3_text")
QWEN3 = ("qwen3", "qwen3_moe")
WITH_EXPERTS = ("mixtral", "qwen3_moe")
# Of each expert, where there is an MLP beside them.
_HIDDEN = {"qwen3_moe": "moe_intermediate_size"}
_USUAL: Config = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
_MISTRAL: Config = {
    **_USUAL,
    "vocab_size": 32_000,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "max_position_embeddings": 131_072,
}
_QWEN: Config = {
    **_USUAL,
    "vocab_size": 151_936,
    "num_key_value_heads": 32,
    "intermediate_size": 22_016,
    "use_sliding_window": False,
    "max_position_embeddings": 32_768,
}
_GEMMA: Config = {
    **_USUAL,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# What a config.json that says nothing of a field means by that: files of transformers leave out
# what their class has by default. `make interop` compares them with the classes.
DEFAULTS: Mapping[str, Config] = {
    "llama": {
        **_USUAL,
        "vocab_size": 32_000,
        "intermediate_size": 11_008,
        "max_position_embeddings": 2048,
    },
    "mistral": {**_MISTRAL, "sliding_window": 4096},
    "mixtral": {
        **_MISTRAL,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    "gemma2": {
        **_GEMMA,
        "vocab_size": 256_000,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
    },
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        # Its local layers have a base of their own.
        "rope_local_base_freq": 10_000.0,
    },
}
# Of layers, one in so many attends to all.
_GLOBAL_EVERY = {"gemma2": 2, "gemma3_text": 6}
# Experts of a layer, which have one of two names: neither may hide the other.
_EXPERTS = {"mixtral": 8, "qwen3_moe": 128}


def family(shape: Shape) -> str | None:
    """The `model_type` that computes what this shape does; none: no known one."""
    s = shape
    if s.experts:
        dense = family(replace(s, experts=0, experts_per_token=0))
        return {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}.get(dense or "")
    if s.norm_offset:
        gemma = s.post_norms and s.embed_scale and s.activation == "gelu" and not s.qkv_bias
        # It is a whole number there.
        if not gemma or s.query_scale != int(s.query_scale):
            return None
        if s.qk_norm:
            # Layers with a window are never scaled there.
            whole = all(s.attends_to_all(layer) for layer in range(s.layers))
            scaled = s.rope_scaling != "none" and not s.local_rope_base and not whole
            return None if s.attention_cap or s.logit_cap or scaled else "gemma3_text"
        return None if s.local_rope_base else "gemma2"
    known = s.activation == "silu" and not (s.post_norms or s.attention_cap or s.logit_cap)
    if not known or s.query_scale not in (0.0, float(s.head_width)):
        return None
    if s.window and (s.global_every or s.qk_norm or s.qkv_bias or s.local_rope_base):
        return None
    if s.qk_norm or s.qkv_bias:
        return None if s.qk_norm and s.qkv_bias else "qwen3" if s.qk_norm else "qwen2"
    return "mistral" if s.window else "llama"


def folds_scale(shape: Shape) -> bool:
    """Whether the family has no factor for embeddings: they are written multiplied by it."""
    return shape.embed_scale and not shape.norm_offset


def writes_head(shape: Shape) -> bool:
    """Whether the output matrix is written: a scaled embedding is none."""
    return not shape.tied or folds_scale(shape)


def hf_config(
    shape: Shape, *, context: int, dtype: str = "float32", **tokens: int | list[int] | None
) -> dict[str, Any] | None:
    """A config.json; none where no known architecture computes what the shape does.

    `context`: tokens per sequence for which it is made. `dtype`: that of the weights beside it, in
    which they are loaded where nobody asks for another. `tokens`: ids such as `bos_token_id`.
    """
    kind, s = family(shape), shape
    if kind is None:
        return None
    config: dict[str, Any] = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": s.vocabulary,
        "hidden_size": s.width,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_width,
        "intermediate_size": s.hidden,
        "max_position_embeddings": context,
        "rms_norm_eps": s.norm_epsilon,
        "rope_theta": s.rope_base,
        "rope_scaling": _rope_scaling(s),
        "tie_word_embeddings": not writes_head(s),
        "attention_bias": s.qkv_bias,
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
        **{name: token for name, token in tokens.items()},
    }
    if kind in GEMMAS:
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": int(s.query_scale or s.head_width),
            # One that covers every context is none.
            "sliding_window": s.window or context,
            "layer_types": _layer_types(s),
            "attn_logit_softcapping": s.attention_cap or None,
            "final_logit_softcapping": s.logit_cap or None,
        }
        if kind == "gemma3_text":
            config["rope_local_base_freq"] = s.local_rope_base or s.rope_base
    else:
        config["hidden_act"] = "silu"
        if kind in ("mistral", "mixtral"):
            config["sliding_window"] = s.window or None
        elif kind.startswith("qwen"):
            config |= {"use_sliding_window": False, "layer_types": _layer_types(s)}
    return config | _expert_config(s, kind)


def _expert_config(shape: Shape, kind: str) -> dict[str, Any]:
    """How many experts have room for is training's own: there they have room for all tokens."""
    s = shape
    if not s.experts:
        return {}
    common = {
        "num_local_experts": s.experts,
        "num_experts_per_tok": s.experts_per_token,
        "router_aux_loss_coef": s.expert_balance,
        "output_router_logits": False,
    }
    if kind == "mixtral":
        return common | {"router_jitter_noise": 0.0}
    return common | {
        "num_experts": s.experts,
        "moe_intermediate_size": s.hidden,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _layer_types(shape: Shape) -> list[str]:
    return [
        "full_attention" if shape.attends_to_all(n) else "sliding_attention"
        for n in range(shape.layers)
    ]


def _rope_scaling(shape: Shape) -> dict[str, Any] | None:
    match shape.rope_scaling:
        case "linear":
            return {"rope_type": "linear", "factor": shape.rope_factor}
        case "llama3":
            return {
                "rope_type": "llama3",
                "factor": shape.rope_factor,
                "low_freq_factor": shape.rope_low,
                "high_freq_factor": shape.rope_high,
                "original_max_position_embeddings": shape.rope_original,
            }
        case _:
            return None


# --------------------------------------------------------------------------------------------------


class WrongConfig(ValueError):
    """A config.json that cannot be read, or that describes a model of another family."""


def shape_of_config(whole: Config) -> Shape:
    """The shape that a config.json describes; WrongConfig names the field at fault."""
    kind, config = _of_text(whole)
    heads = _count(config, "num_attention_heads")
    width = _count(config, "hidden_size")
    gemma = kind in GEMMAS
    fields: dict[str, Any] = {
        "vocabulary": _count(config, "vocab_size"),
        "width": width,
        "layers": _count(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": _count(config, "num_key_value_heads", heads),
        "head_width": _count(config, "head_dim", width // heads),
        "hidden": _count(config, _HIDDEN.get(kind, "intermediate_size")),
        "tied": _flag(config, "tie_word_embeddings", gemma),
        "embed_scale": gemma,
        "activation": "gelu" if gemma else "silu",
        "norm_epsilon": _number(config, "rms_norm_eps", DEFAULTS[kind]["rms_norm_eps"]),
        "norm_offset": gemma,
        "post_norms": gemma,
        "qk_norm": kind in (*QWEN3, "gemma3_text"),
        "qkv_bias": kind == "qwen2",
        **_rope(config, kind),
        **_experts(config, kind),
    }
    _same(config, "hidden_activation" if gemma else "hidden_act", _activations(gemma))
    _same(config, "attention_bias", (kind == "qwen2", False, None))
    _same(config, "mlp_bias", (False, None))
    _same(config, "use_bidirectional_attention", (False, None))
    if gemma:
        fields["query_scale"] = _number(config, "query_pre_attn_scalar", 256.0)
        if kind == "gemma2":
            fields["attention_cap"] = _number(config, "attn_logit_softcapping", 0.0)
            fields["logit_cap"] = _number(config, "final_logit_softcapping", 0.0)
        else:
            _same(config, "attn_logit_softcapping", (None, 0))
            _same(config, "final_logit_softcapping", (None, 0))
    try:
        return with_fields(_plain(fields), fields | _windows(config, kind, fields), "")
    except WrongModel as error:
        raise WrongConfig(f"it describes a model that cannot be: {error}") from None


def context_of_config(whole: Config) -> int:
    """Tokens per sequence for which the model was made; 0: it is not said. Raises WrongConfig for
    another kind of model."""
    said = _of_text(whole)[1].get("max_position_embeddings")
    return max(said, 0) if isinstance(said, int) and not isinstance(said, bool) else 0


def _of_text(whole: Config) -> tuple[str, Config]:
    """The kind of the text model, and its fields with those that are left out."""
    kind, config = whole.get("model_type"), whole
    if kind in WITH_TEXT:
        inner = whole.get("text_config")
        if not isinstance(inner, Mapping):
            raise WrongConfig(f"model_type {kind!r} needs a text_config")
        kind, config = WITH_TEXT[kind], inner
    if kind not in CLASSES:
        raise WrongConfig(f"model_type {kind!r:.60} is not one of {', '.join(CLASSES)}")
    return kind, {**DEFAULTS[kind], **config}


def _experts(config: Config, kind: str) -> dict[str, Any]:
    if kind not in WITH_EXPERTS:
        return {}
    # Version 5 has one name for all families, version 4 has not.
    many = _count(config, "num_local_experts", _EXPERTS[kind])
    if kind == "qwen3_moe":
        many = _count(config, "num_experts", many)
        _same(config, "norm_topk_prob", (True,))
        _same(config, "decoder_sparse_step", (1, None))
        _same(config, "mlp_only_layers", ([], None))
    return {
        "experts": many,
        "experts_per_token": _count(config, "num_experts_per_tok"),
        "expert_balance": _number(config, "router_aux_loss_coef", 0.001),
    }


def _plain(fields: Mapping[str, Any]) -> Shape:
    counts = ("vocabulary", "width", "layers", "heads", "kv_heads", "head_width", "hidden")
    return Shape(**{name: fields[name] for name in counts})


def _activations(gemma: bool) -> tuple[Any, ...]:
    return ("gelu_pytorch_tanh", None) if gemma else ("silu", "swish", None)


def _windows(config: Config, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a window, and how long it is."""
    layers, window = fields["layers"], config.get("sliding_window")
    if kind.startswith("qwen") and not config.get("use_sliding_window"):
        window = None
    if not window:
        return {}
    window = _count(config, "sliding_window")
    if kind in ("mistral", "mixtral"):
        return {"window": window}
    default = _GLOBAL_EVERY.get(kind, 0)
    every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", default))
    types = config.get("layer_types")
    if types is None:
        if kind.startswith("qwen"):
            raise WrongConfig("use_sliding_window needs layer_types, which say where")
        every = _count({"sliding_window_pattern": every}, "sliding_window_pattern")
        return {"window": window, "global_every": every}
    if not isinstance(types, list) or len(types) != layers:
        raise WrongConfig(f"layer_types must be a list of {layers} words")
    if "sliding_attention" not in types:
        return {}
    whole = [n + 1 for n, word in enumerate(types) if word == "full_attention"]
    every = whole[0] if whole else 0
    if whole != (list(range(every, layers + 1, every)) if every else []):
        raise WrongConfig("layer_types have no regular pattern: every n-th attends to all, or none")
    # A first layer further on than the last one would be none at all.
    return {"window": window, "global_every": every}


def _rope(config: Config, kind: str) -> dict[str, Any]:
    """Bases and scaling, as transformers 4 or 5 writes them."""
    scaling: Config = _table(config, "rope_parameters")
    local: Config = {}
    if "full_attention" in scaling:
        local, scaling = _table(scaling, "sliding_attention"), _table(scaling, "full_attention")
    scaling = scaling or _table(config, "rope_scaling")
    usual = _number(config, "rope_theta", DEFAULTS[kind]["rope_theta"])
    found: dict[str, Any] = {"rope_base": _number(scaling, "rope_theta", usual)}
    if kind == "gemma3_text":
        usual = _number(config, "rope_local_base_freq", DEFAULTS[kind]["rope_local_base_freq"])
        found["local_rope_base"] = _number(local, "rope_theta", usual)
        _same(local, "rope_type", ("default", None))
    rope = scaling.get("rope_type", scaling.get("type", "default"))
    if _number(scaling, "partial_rotary_factor", 1.0) != 1.0:
        raise WrongConfig("partial_rotary_factor: only whole heads can be turned")
    match rope:
        case "default" | None:
            return found
        case "linear":
            return found | {"rope_scaling": "linear", "rope_factor": _number(scaling, "factor", 1)}
        case "llama3":
            longest = config.get("max_position_embeddings")
            original = _count(scaling, "original_max_position_embeddings", longest)
            return found | {
                "rope_scaling": "llama3",
                "rope_factor": _number(scaling, "factor", 8.0),
                "rope_low": _number(scaling, "low_freq_factor", 1.0),
                "rope_high": _number(scaling, "high_freq_factor", 4.0),
                "rope_original": original,
            }
        case _:
            raise WrongConfig(f"rope_type {rope!r:.40} is not one of default, linear, llama3")


def _count(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WrongConfig(f"{name} must be a whole number from 1, not {value!r:.40}")
    return value


def _table(config: Config, name: str) -> Config:
    value = config.get(name)
    if not isinstance(value, Mapping | None):
        raise WrongConfig(f"{name} must be an object, not {value!r:.40}")
    return value or {}


def _number(config: Config, name: str, default: float) -> float:
    value = config.get(name)
    value = default if value is None else value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise WrongConfig(f"{name} must be a number, not {value!r:.40}")
    return float(value)


def _flag(config: Config, name: str, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise WrongConfig(f"{name} must be true or false, not {value!r:.40}")
    return value


def _same(config: Config, name: str, allowed: Iterable[Any]) -> None:
    """Refuse what would change what the model computes."""
    if config.get(name) not in allowed:
        raise WrongConfig(f"{name} is {config.get(name)!r:.40}: this cannot be computed here")
