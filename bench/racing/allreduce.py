"""Synchronous data-parallel training of two ranks: our model, our inner step, one exchange a step.

    python bench/racing/allreduce.py --rank 0|1 --peer HOST:PORT --seconds S

Each step both ranks send their whole gradient in bf16, which for two ranks is what a ring
all-reduce sends, average, and step. Rank 0 listens. Without a peer it steps alone: what the
computation allows. Prints one JSON line: `steps`, `seconds` after the first ten steps, and `loss`.
"""

import argparse
import json
import os
import socket
import threading
import time
from typing import Any

WARM_STEPS = 10
# Beyond these the other rank is gone.
CONNECT_S, SILENCE_S = 60.0, 120.0


def main() -> None:
    """Step until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--peer", default="", help="HOST:PORT that rank 0 listens on")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--model", default="nano", help="preset")
    args = parser.parse_args()
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    )
    print(json.dumps(train(args)), flush=True)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Every rank stops after the same step: rank 0 says which is the last."""
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np
    from jax.flatten_util import ravel_pytree

    from diloco_learner.data.corpus import load
    from diloco_learner.data.shards import cut_of
    from diloco_learner.models import build
    from diloco_learner.training.data_parallel import LearnerStream
    from diloco_learner.training.inner import optimizer
    from diloco_shared.spec.run import RunSpec

    body = {"name": "allreduce", "model": {"preset": args.model}, "budget": {"steps": 1}}
    spec = RunSpec.model_validate(body)
    model = build(spec.model)
    transform = optimizer(spec.inner, model.is_embedding, model.stacked)
    params = jax.jit(model.init)(jax.random.key(spec.seed))
    _, unravel = ravel_pytree(params)
    state = transform.init(params)

    @jax.jit
    def gradients(params: Any, tokens: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(model.loss)(params, tokens)
        return loss, ravel_pytree(grads)[0].astype(jnp.bfloat16)

    @jax.jit
    def update(params: Any, state: Any, mean: Any, rate: float) -> tuple[Any, Any]:
        updates, state = transform.update(unravel(mean.astype(jnp.float32)), state, params)
        return jax.tree.map(lambda p, u: p + rate * u, params, updates), state

    cut = cut_of(
        load(spec.data).train, spec.data.virtual_shards, spec.model.context_tokens, spec.seed
    )
    stream = LearnerStream(cut, args.rank, 2)
    link = Link(args.rank, args.peer) if args.peer else None
    steps, began, loss, last = 0, 0.0, 0.0, False
    while not last:
        if steps == WARM_STEPS:
            began = time.monotonic()
        loss, grad = gradients(params, stream.take(spec.inner.batch_sequences))
        mine = np.asarray(grad)
        last = bool(began) and time.monotonic() - began >= args.seconds
        if link is not None:
            payload, last = link.exchange(mine.tobytes(), last)
            theirs = np.frombuffer(payload, ml_dtypes.bfloat16)
            mine = ((mine.astype(np.float32) + theirs.astype(np.float32)) / 2).astype(mine.dtype)
        params, state = update(params, state, mine, 1e-3)
        steps += 1
    jax.block_until_ready(params)
    return {
        "steps": steps - WARM_STEPS,
        "seconds": time.monotonic() - began,
        "loss": float(loss),
        "parameters": int(mine.size),
    }


class Link:
    """Both ranks send at once; one byte in front says whether this step is the last."""

    def __init__(self, rank: int, peer: str) -> None:
        host, port = peer.rsplit(":", 1)
        if rank == 0:
            with socket.create_server((host, int(port))) as server:
                server.settimeout(CONNECT_S)
                self.socket, _ = server.accept()
        else:
            self.socket = _connected(host, int(port))
        self.rank = rank
        self.socket.settimeout(SILENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, payload: bytes, last: bool) -> tuple[bytes, bool]:
        """The other rank's payload, and whether rank 0 said that it is the last."""
        sending = threading.Thread(
            target=self.socket.sendall, args=(bytes([last]) + payload,), daemon=True
        )
        sending.start()
        got = bytearray()
        while len(got) < len(payload) + 1:
            part = self.socket.recv(len(payload) + 1 - len(got))
            if not part:
                raise ConnectionError("the other rank is gone")
            got += part
        sending.join(SILENCE_S)
        return bytes(got[1:]), last if self.rank == 0 else bool(got[0])


def _connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main()
