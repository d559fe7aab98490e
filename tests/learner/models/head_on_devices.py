"""A process of its own with eight simulated devices: the loss of a head, and its gradients, there.

    python head_on_devices.py [--few]

A line of JSON for each case: what it is, and how far it is from the plain formula on one device.
"""

import json
import os
import sys
from typing import Any

# First: behind what has no dashes, as a learner's number of threads, XLA reads no flag.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import jax.numpy as jnp
import numpy as np

from diloco_learner.models import cross_entropy
from diloco_learner.models.head_on_mesh import Meeting
from diloco_learner.training.mesh import mesh_over
from diloco_shared.spec.mesh import mesh_of

WIDTH = 16
# Several parts for each device, of which the last one is not full, and several blocks.
cross_entropy.LOGITS_BYTES = 4 * 256
cross_entropy.BLOCK_BYTES = 4 * 64
# Of each case: the mesh, tokens, the vocabulary, whether a row belongs to a token, and the cap.
FEW = [
    ("data=2,fsdp=4", 72, 64, True, 2.0),
    ("fsdp=4,tensor=2", 104, 96, True, 2.0),
    ("fsdp=2,expert=2,tensor=2", 72, 96, False, 0.0),
]
CASES = [
    *FEW,
    ("fsdp=8", 72, 96, True, 0.0),
    ("fsdp=8", 72, 96, False, 2.0),
    ("fsdp=8", 104, 96, True, 0.0),
    ("data=2,fsdp=4", 144, 64, False, 0.0),
    ("fsdp=2,expert=2,tensor=2", 72, 96, True, 0.0),
    ("tensor=2", 72, 96, True, 0.0),
    ("data=2", 72, 96, False, 0.0),
    # What cannot be shared evenly: the vocabulary, the tokens, the width.
    ("fsdp=8", 72, 94, True, 0.0),
    ("fsdp=8", 61, 96, True, 0.0),
    ("fsdp=3", 60, 96, False, 0.0),
]


def plain(x_TxD: Any, head: Any, targets_T: Any, by_rows: bool, cap: float) -> Any:
    logits_TxV = x_TxD @ (head.T if by_rows else head)
    logits_TxV = cap * jnp.tanh(logits_TxV / cap) if cap else logits_TxV
    nats_TxV = -jax.nn.log_softmax(logits_TxV)
    at_T = jnp.take_along_axis(nats_TxV, jnp.maximum(targets_T, 0)[:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(targets_T >= 0, at_T, 0.0))


def far(found: Any, wanted: Any) -> float:
    return float(np.max(np.abs(np.asarray(found) - np.asarray(wanted))))


def main() -> None:
    for words, tokens, vocabulary, by_rows, cap in FEW if "--few" in sys.argv else CASES:
        rng = np.random.default_rng(tokens + vocabulary)
        x = rng.standard_normal((tokens, WIDTH), np.float32)
        shape = (vocabulary, WIDTH) if by_rows else (WIDTH, vocabulary)
        head = rng.standard_normal(shape, np.float32)
        targets = rng.integers(0, vocabulary, tokens).astype(np.int32)
        targets[::5] = ~targets[::5]  # is read, and not predicted
        wanted = jax.jit(jax.value_and_grad(plain, (0, 1)), static_argnums=(3, 4))(
            x, head, targets, by_rows, cap
        )
        sizes = mesh_of(words)
        assert sizes is not None
        mesh = mesh_over(sizes, jax.devices())
        assert mesh is not None

        def loss(x: Any, head: Any, targets: Any, by_rows: bool = by_rows, cap: float = cap) -> Any:
            return cross_entropy.summed(x, head, targets, by_rows, cap)

        with jax.set_mesh(mesh):
            meeting = Meeting.on(dict(mesh.shape), tokens, WIDTH, vocabulary)
            alone, count = jax.jit(loss)(x, head, targets)
            (value, _), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
                x, head, targets
            )
        case = {
            "case": f"{words}, {tokens} tokens of {vocabulary}",
            "tokens_go": meeting.tokens_go,
            "counted": int(count) == int(np.sum(targets >= 0)),
            "loss": max(far(alone, wanted[0]), far(value, wanted[0])),
            "gradients": max(map(far, grads, wanted[1])),
        }
        print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
