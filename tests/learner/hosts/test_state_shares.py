"""What hosts keep of moments makes the bytes that one process would send, whatever the mesh.

What needs several devices runs in a process of its own: this file, as a script.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

if __name__ == "__main__":
    # Told before jax is imported, so that no test of another file can do this.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
        "XLA_FLAGS", ""
    )

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diloco_learner.hosts import state_shares
from diloco_learner.hosts.shares import MOMENTS, compose, kept, share_of
from diloco_learner.recovery import moments
from diloco_learner.recovery.moments import Layer
from diloco_learner.training.mesh import Placement, mesh_over
from diloco_shared.protocol.chunks import Buffer, cut
from diloco_shared.spec.mesh import mesh_of

CHUNK_BYTES = 96
MESHES = {
    "fsdp=8": [PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")],
    "data=2,fsdp=4": [PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")],
    "fsdp=4,tensor=2": [PartitionSpec("fsdp", "tensor"), PartitionSpec("tensor", "fsdp")],
}


@pytest.mark.timeout(120)
def test_all_shares_are_what_one_process_would_send() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 3 * 3
    for name, (same, digest, chunks, alone) in found.items():
        assert same, name
        assert digest, name
        assert alone, "the device copies are gone"
        assert all(chunks), f"{name}: every host that carries has chunks of its own"


def main() -> None:
    found = {}
    for mesh, specs in MESHES.items():
        sizes = mesh_of(mesh)
        assert sizes is not None
        over = mesh_over(sizes, jax.devices())
        assert over is not None
        placement = Placement(over, {}, {}, None)
        tensors = _tensors(over, specs)
        for hosts in (1, 2, 4):
            found[f"{mesh} on {hosts}"] = _checked(tensors, placement, hosts)
    print(json.dumps(found))


def _checked(tensors: dict[str, Any], placement: Placement, hosts: int) -> tuple[Any, ...]:
    def told(lies: NamedSharding, shape: tuple[int, ...]) -> dict[int, Any]:
        """As if the devices were those of several hosts, one after the other."""
        order = {device: n for n, device in enumerate(placement.mesh.devices.flat)}
        first: dict[Any, int] = {}
        for device, index in sorted(
            lies.devices_indices_map(shape).items(), key=lambda x: order[x[0]]
        ):
            (part,) = index
            first.setdefault(part.indices(*shape)[:2], order[device] * hosts // 8)
        spans: dict[int, Any] = {}
        for part, host in sorted(first.items()):
            spans.setdefault(host, []).append((part,))
        return spans

    state_shares.told = told  # type: ignore[assignment]
    laid = state_shares.laid_out(tensors, placement, CHUNK_BYTES)
    before = len(jax.live_arrays())
    own = {n: state_shares.own_share(laid, tensors, n) for n in range(hosts)}
    alone = len(jax.live_arrays()) == before
    carriers = [n for n in range(1, hosts) if n != 2]
    answers: dict[int, Buffer] = {}
    for n in range(1, hosts):
        given = own[n]
        if n in carriers:
            given = kept(laid.lying, n, given, CHUNK_BYTES, MOMENTS)[1]
        answers[n] = b"".join(given)
    made = compose("s", laid.lying, laid.header, (0, own[0]), answers, carriers, CHUNK_BYTES)
    data = bytes(moments.pack(tensors))
    pieces = [(0, laid.header)]
    for n in range(hosts):
        pieces += [(at, bytes(part)) for at, part in laid.lying.pieces(n, own[n])]
    same = b"".join(part for _, part in sorted(pieces)) == data
    blob = cut("s", data, chunk_bytes=CHUNK_BYTES).blob
    chunks = [
        len(share_of(laid.lying.stretches(n), laid.lying.size, CHUNK_BYTES).chunks)
        for n in carriers
    ]
    return same, blob == made.outgoing.blob, chunks, alone


def _tensors(mesh: Any, specs: list[PartitionSpec]) -> dict[str, Any]:
    """Dense ones and layers, cut along either dimension, some of odd sizes, with signs of zeros."""
    rng = np.random.default_rng(3)
    dense = rng.standard_normal((24, 40)).astype(np.float32)
    dense[::3] *= np.float32(-0.0)
    dense.view(np.uint32)[1, 2] = 0x7FC12345
    layers = rng.standard_normal((3, 16, 56)).astype(jnp.bfloat16)
    layers[:, ::2] *= jnp.bfloat16(-0.0)
    found: dict[str, Any] = {
        "count": jax.device_put(np.int32(7), NamedSharding(mesh, PartitionSpec())),
        "norm": jax.device_put(dense[0, :5], NamedSharding(mesh, PartitionSpec())),
        "uneven": jax.device_put(dense[:7, :7], NamedSharding(mesh, PartitionSpec())),
    }
    for n, spec in enumerate(specs):
        found[f"dense{n}"] = jax.device_put(dense, NamedSharding(mesh, spec))
        stacked = jax.device_put(layers, NamedSharding(mesh, PartitionSpec(None, *spec)))
        found |= {f"layer{n}.{k}": Layer(stacked, k) for k in range(3)}
    return found


if __name__ == "__main__":
    main()
