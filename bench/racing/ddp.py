"""torch DistributedDataParallel over gloo: the same shape of model, batch and optimizer.

    python bench/racing/ddp.py --rank 0|1 --peer HOST:PORT --seconds S --tokens FILE.npy

Runs in an environment of its own, with torch and numpy and nothing of this project. Without a peer
it steps alone. Prints one JSON line: `steps`, `seconds` after the first ten steps, and `loss`.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from decoder import CONTEXT, Decoder, Shape
from torch import nn

WARM_STEPS = 10
BATCH = 8


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
