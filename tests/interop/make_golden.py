"""Tiny checkpoints of `transformers`, with the logits and gradients that it computes of them.

    python tests/interop/make_golden.py FOLDER [FAMILY ...]

Needs `transformers` and `torch`. Each family of models gets a folder: the checkpoint as
`save_pretrained` writes it, and computed.safetensors with tokens, logits, the mean cross-entropy of
predicting each next token, and its gradient by every parameter. Parameters are random, norms and
biases too. What is committed in golden/ was made by this script with transformers 5.24.0 and torch
2.13.0; our tests compare with it.
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

TINY = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Windows are shorter than the sequences, and where a family has that, layers differ.
FAMILIES = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 2, "rope_parameters": LLAMA3}),
    "mistral": (
        "MistralConfig",
        {"num_hidden_layers": 2, "sliding_window": 5, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2Config", {"num_hidden_layers": 2}),
    "qwen3": ("Qwen3Config", {"num_hidden_layers": 5}),
    "mixtral": (
        "MixtralConfig",
        {"num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 12},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 7,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}


def as_saved(kind: str, name: str, values: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """In memory all experts of a layer share two tensors; files have three of each expert."""
    gate, up, down = ("gate_proj", "up_proj", "down_proj")
    if kind == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
        gate, up, down = ("w1", "w3", "w2")
    stem, _, last = name.rpartition(".")
    if last == "down_proj":
        return [(f"{stem}.{n}.{down}.weight", part) for n, part in enumerate(values)]
    if last == "gate_up_proj":
        return [
            (f"{stem}.{n}.{which}.weight", half)
            for n, part in enumerate(values)
            for which, half in zip((gate, up), part.chunk(2), strict=True)
        ]
    return [(name, values)]


def make(name: str, folder: Path) -> None:
    kind, settings = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**TINY, **settings}, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    tokens = torch.randint(0, TINY["vocab_size"], (2, 13))
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    found = {"tokens": tokens, "logits": logits.detach(), "loss": loss.detach()[None]}
    for theirs, parameter in model.named_parameters():
        found |= {
            f"gradient/{saved}": part.contiguous().clone()
            for saved, part in as_saved(config.model_type, theirs, parameter.grad)
        }
    model.save_pretrained(folder / name)
    (folder / name / "generation_config.json").unlink(missing_ok=True)
    save_file(found, folder / name / "computed.safetensors")


if __name__ == "__main__":
    for family in sys.argv[2:] or FAMILIES:
        make(family, Path(sys.argv[1]))
        print(
            family, sum(f.stat().st_size for f in (Path(sys.argv[1]) / family).iterdir()), "bytes"
        )
