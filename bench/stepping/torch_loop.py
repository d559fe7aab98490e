"""The same model and optimizer in PyTorch: a process that takes steps when it is told to.

    PYTHON torch_loop.py FOLDER

Run by a Python that has torch and numpy, and nothing of this project. FOLDER holds the parameters
and batches of `loops.prepare`, and `torch.json`. What it reads and says is as in `turns.py`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


class Model(torch.nn.Module):
    """The dense shape without windows, biases and caps, from our tensors."""

    def __init__(self, shape: dict[str, Any], folder: Path) -> None:
        super().__init__()
        self.shape = shape
        self.tensors = torch.nn.ParameterDict()
        for file in sorted(folder.glob("*.npy")):
            if file.stem != "tokens":
                values = torch.from_numpy(np.load(file))
                self.tensors[file.stem.replace(".", "/")] = torch.nn.Parameter(values)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.tensors[name], self.shape["norm_epsilon"])

    def turned(self, x_BxHxLxK: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x_BxHxLxK.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def forward(self, tokens_BxL1: torch.Tensor) -> torch.Tensor:
        s, t = self.shape, self.tensors
        inputs, targets = tokens_BxL1[:, :-1], tokens_BxL1[:, 1:]
        batch, length = inputs.shape
        half = s["head_width"] // 2
        speed = s["rope_base"] ** -(torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(length, dtype=torch.float32)[:, None] * speed
        cos, sin = angle.cos(), angle.sin()
        x = F.embedding(inputs, t["embedding/tokens_VxD"])
        if s["embed_scale"]:
            x = x * s["width"] ** 0.5
        for n in range(s["layers"]):
            at = f"layer_{n:02}"
            h = self.norm(x, f"{at}/attention/norm_D")

            def heads(name: str, count: int, h: torch.Tensor = h, at: str = at) -> torch.Tensor:
                flat = h @ t[f"{at}/attention/{name}"]
                return flat.view(batch, length, count, s["head_width"]).transpose(1, 2)

            mixed = F.scaled_dot_product_attention(
                self.turned(heads("query_DxHK", s["heads"]), cos, sin),
                self.turned(heads("key_DxGK", s["kv_heads"]), cos, sin),
                heads("value_DxGK", s["kv_heads"]),
                is_causal=True,
                enable_gqa=s["heads"] != s["kv_heads"],
            )
            flat = mixed.transpose(1, 2).reshape(batch, length, -1)
            x = x + flat @ t[f"{at}/attention/out_HKxD"]
            h = self.norm(x, f"{at}/mlp/norm_D")
            opened = F.silu(h @ t[f"{at}/mlp/gate_DxF"]) * (h @ t[f"{at}/mlp/up_DxF"])
            x = x + opened @ t[f"{at}/mlp/down_FxD"]
        x = self.norm(x, "final_norm/scale_D")
        head = t["embedding/tokens_VxD"].T if s["tied"] else t["output/head_DxV"]
        return F.cross_entropy((x @ head).flatten(0, 1), targets.flatten())


def optimizer_of(model: Model, given: dict[str, float]) -> torch.optim.Optimizer:
    """AdamW that decays matrices only, in the form that torch calls the fastest."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": given["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=given["rate"],
        betas=(given["b1"], given["b2"]),
        fused=True,
    )


def main() -> None:
    """Compile, say so, and take steps whenever a line tells for how many seconds."""
    folder = Path(sys.argv[1])
    given = json.loads((folder / "torch.json").read_text())
    torch.set_num_threads(given["threads"])
    torch.manual_seed(0)
    model = Model(given["shape"], folder)
    optimizer = optimizer_of(model, given)
    tokens_NxBxL1 = torch.from_numpy(np.load(folder / "tokens.npy")).long()
    run: Any = model
    how = "eager"

    def step(n: int) -> float:
        loss = run(tokens_NxBxL1[n % len(tokens_NxBxL1)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), given["clip_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    began = time.perf_counter()
    if given["compile"]:
        try:
            run = torch.compile(model)
            with torch.no_grad():
                run(tokens_NxBxL1[0])
            how = "compiled"
        except Exception as error:  # no compiler on this machine, above all
            print(f"torch.compile does not work here: {error}"[:300], file=sys.stderr)
            run = model
    first = step(0)
    ready = {"first_loss": first, "compile_s": time.perf_counter() - began, "how": how}
    print(json.dumps({**ready, "version": torch.__version__}), flush=True)
    n = 1
    for line in sys.stdin:
        until = time.perf_counter() + float(line)
        began, cpu, steps = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() < until:
            step(n)
            n, steps = n + 1, steps + 1
        used = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        print(json.dumps({"steps": steps, **used}), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
