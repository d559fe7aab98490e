"""The project's transformer in torch: the same shapes, the same arithmetic, the same names.

Needs torch and numpy, nothing of this project: peers run in an environment of their own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CONTEXT = 64


@dataclass(frozen=True)
class Shape:
    """As in the project's presets; the defaults are `nano`."""

    vocabulary: int = 256
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    head: int = 16
    hidden: int = 176


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * scale / math.sqrt(rows))


class Block(nn.Module):
    """Attention with RoPE, and a gated MLP."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        out = 1 / math.sqrt(2 * s.layers)
        self.norm, self.mlp_norm = Norm(s.width), Norm(s.width)
        self.query = matrix(s.width, s.heads * s.head)
        self.key, self.value = (matrix(s.width, s.kv_heads * s.head) for _ in range(2))
        self.out = matrix(s.heads * s.head, s.width, out)
        self.gate, self.up = matrix(s.width, s.hidden), matrix(s.width, s.hidden)
        self.down = matrix(s.hidden, s.width, out)

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters of one block under the project's names."""
        return {
            "attention/norm_D": self.norm.scale,
            "attention/query_DxHK": self.query,
            "attention/key_DxGK": self.key,
            "attention/value_DxGK": self.value,
            "attention/out_HKxD": self.out,
            "mlp/norm_D": self.mlp_norm.scale,
            "mlp/gate_DxF": self.gate,
            "mlp/up_DxF": self.up,
            "mlp/down_FxD": self.down,
        }

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.norm(x)
        q, k, v = (
            (h @ m).view(batch, length, -1, self.shape.head).transpose(1, 2)
            for m in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            turn(q, turns), turn(k, turns), v, is_causal=True, enable_gqa=True
        )
        x = x + mixed.transpose(1, 2).reshape(batch, length, -1) @ self.out
        h = self.mlp_norm(x)
        return x + (F.silu(h @ self.gate) * (h @ self.up)) @ self.down


def turn(x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = turns
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Decoder(nn.Module):
    """The loss of predicting each next token."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.embedding = nn.Parameter(torch.randn(s.vocabulary, s.width) / math.sqrt(s.width))
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm, self.head = Norm(s.width), matrix(s.width, s.vocabulary)
        speed = 10_000.0 ** (-torch.arange(s.head // 2) / (s.head // 2))
        angle = torch.arange(CONTEXT)[:, None] * speed
        self.turns = torch.cos(angle), torch.sin(angle)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding[tokens[:, :-1]] * math.sqrt(self.shape.width)
        for block in self.blocks:
            x = block(x, self.turns)
        logits = self.norm(x) @ self.head
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters under the names that the project gives them."""
        found = {
            "embedding/tokens_VxD": self.embedding,
            "final_norm/scale_D": self.norm.scale,
            "output/head_DxV": self.head,
        }
        for n, block in enumerate(self.blocks):
            found |= {f"layer_{n:02d}/{name}": p for name, p in block.named().items()}
        return found

    def fill(self, values: Mapping[str, Any]) -> None:
        """Take parameters (numpy arrays by name); KeyError or RuntimeError when they do not fit."""
        with torch.no_grad():
            for name, parameter in self.named().items():
                parameter.copy_(torch.from_numpy(values[name]))
