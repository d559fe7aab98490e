"""A process of its own with eight simulated devices: attention's heads on a mesh of them.

    python heads_on_mesh.py MESH HEADS/KEYS ...

A line of JSON for each mesh: how queries, keys, values and what is mixed of them lay where cuDNN
would compute, and how far loss and gradients are from those of one device.

The number of devices is told before jax is imported, so that no test of another file can do this.
"""

import json
import os
import sys
from functools import partial
from typing import Any

# First: behind what has no dashes, as a learner's number of threads, XLA reads no flag.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import numpy as np

from diloco_learner.models import attention, to_named
from diloco_learner.training.mesh import mesh_over
from diloco_learner.training.trainer import Program
from diloco_shared.spec.mesh import mesh_of
from diloco_shared.spec.run import RunSpec

SHAPE = {"width": 32, "layers": 2, "head_width": 8, "hidden": 64, "vocabulary": 320, "tied": True}
WINDOWS = {"window": 4, "global_every": 2}
TOKENS = np.random.default_rng(0).integers(0, 320, (8, 17)).astype(np.int32)
PLAIN, OURS = jax.nn.dot_product_attention, attention.implementation


def spec(heads: int, kv_heads: int) -> RunSpec:
    shape = SHAPE | WINDOWS | {"heads": heads, "kv_heads": kv_heads}
    return RunSpec.model_validate(
        {
            "name": "r",
            "algorithm": {"fragments": 2, "sync_every_steps": 6},
            "model": {"context_tokens": 16, "overrides": shape},
            "inner": {"batch_sequences": 8},
            "budget": {"steps": 6},
        }
    )


class Recorded:
    """In the place of jax's function: XLA computes what cuDNN would."""

    def __init__(self) -> None:
        self.lay: dict[str, set[str]] = {}
        self.looks = True  # an array is looked at where no gradient is wanted

    def __call__(self, *arrays: Any, **options: Any) -> jax.Array:
        assert options["implementation"] == "cudnn"
        mixed: jax.Array = PLAIN(*arrays, **options | {"implementation": "xla"})
        if self.looks:
            for name, array in zip(("q", "k", "v", "mixed"), (*arrays, mixed), strict=True):
                look = partial(self._look, name, array.ndim)
                jax.debug.inspect_array_sharding(array, callback=look)
        return mixed

    def _look(self, name: str, dims: int, lies: Any) -> None:
        spec = (*lies.spec, *[None] * dims)[:dims]
        self.lay.setdefault(name, set()).add(str(spec))


def computed(program: Program, *, gradients: bool) -> dict[str, Any]:
    """The loss, and the gradients by name if they are wanted."""
    loss = jax.value_and_grad(program.model.loss) if gradients else program.model.loss
    with program.scope():
        found = jax.jit(loss)(program.initial(), TOKENS)
    if not gradients:
        return {"loss": np.asarray(found)}
    named = {name: np.asarray(leaf) for name, leaf in to_named(found[1]).items()}
    return named | {"loss": np.asarray(found[0])}


def main() -> None:
    for mesh, both in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        run, sizes = spec(*map(int, both.split("/"))), mesh_of(mesh)
        assert sizes is not None
        attention.implementation = OURS
        wanted = computed(Program.build(run), gradients=True)
        attention.implementation = lambda *_: "cudnn"
        jax.nn.dot_product_attention = recorded = Recorded()
        program = Program.build(run, mesh=mesh_over(sizes, jax.devices()))
        computed(program, gradients=False)
        recorded.looks = False
        found = computed(program, gradients=True)
        off = {name: float(np.abs(found[name] - value).max()) for name, value in wanted.items()}
        lay = {name: sorted(ways) for name, ways in recorded.lay.items()}
        print(json.dumps({"mesh": mesh, "lay": lay, "off": off}), flush=True)


if __name__ == "__main__":
    main()
