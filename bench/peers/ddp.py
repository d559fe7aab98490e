"""torch DistributedDataParallel over gloo: the same shape of model, batch and optimizer.

    python bench/peers/ddp.py --rank 0|1 --peer HOST:PORT --seconds S --tokens FILE.npy

Runs in an environment of its own, with torch and numpy and nothing of this project. Without a peer
it steps alone. Prints one JSON line: `steps`, `seconds` after the first ten steps, and `loss`.
"""

import argparse
import json
import math
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WARM_STEPS = 10
BATCH, CONTEXT = 8, 64


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


def main() -> None:
    """Step until the time is over; both ranks stop after the same step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--peer", default="", help="HOST:PORT of rank 0")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--shape", type=int, nargs="*", default=(), help="see Shape")
    parser.add_argument("--tokens", required=True, help="a .npy file of bytes to train on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = Decoder(Shape(*args.shape))
    parameters = sum(p.numel() for p in model.parameters())
    if args.peer:
        host, port = args.peer.rsplit(":", 1)
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        torch.distributed.init_process_group(
            "gloo", rank=args.rank, world_size=2, timeout=timedelta(seconds=120)
        )
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1)
    tokens = np.load(args.tokens, mmap_mode="r")
    places = np.random.default_rng(args.rank)
    steps, began, last = 0, 0.0, False
    loss = torch.zeros(())
    while not last:
        if steps == WARM_STEPS:
            began = time.monotonic()
        starts = places.integers(0, len(tokens) - CONTEXT - 1, BATCH)
        batch = torch.from_numpy(
            np.stack([tokens[s : s + CONTEXT + 1] for s in starts]).astype(np.int64)
        )
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        last = bool(began) and time.monotonic() - began >= args.seconds
        if args.peer and steps > WARM_STEPS and steps % 5 == 0:  # agree now and then, cheaply
            said = torch.tensor([float(last)])
            torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MAX)
            last = bool(said)
        elif args.peer:
            last = False
    seconds = time.monotonic() - began
    print(
        json.dumps(
            {
                "steps": steps - WARM_STEPS,
                "seconds": seconds,
                "loss": float(loss.detach()),
                "parameters": parameters,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
