"""A process of its own with eight simulated devices: what a step takes of each, and Muon's steps.

    python muon_on_mesh.py --steps     # how far Muon's steps lead from those of one device
    python muon_on_mesh.py --memory    # what a step takes of a device, and what the budget says

The number of devices is told before jax is imported, so that no test of another file can do this.
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
import numpy as np

from diloco_learner.models import to_named
from diloco_learner.training.mesh import mesh_over
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.budget import known
from diloco_shared.budget.memory import device
from diloco_shared.spec.mesh import mesh_of
from diloco_shared.spec.run import RunSpec

SMALL = {"width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_width": 8, "hidden": 64}
SMALL |= {"vocabulary": 640}
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_capacity": 1.25}
LARGE = {"width": 256, "layers": 4, "heads": 4, "kv_heads": 4, "head_width": 64, "hidden": 2048}
LARGE |= {"vocabulary": 2048, "tied": True, "remat": "layer"}
# What a step has no part in.
OTHERS = ("one fragment's work", "evaluation")


def spec(shape: dict[str, Any], optimizer: str, accumulation: int = 1) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "r",
            "seed": 3,
            "algorithm": {"fragments": 3, "sync_every_steps": 6},
            "model": {"context_tokens": 16, "overrides": shape},
            "inner": {
                "batch_sequences": 8,
                "accumulation": accumulation,
                "optimizer": optimizer,
                "warmup_steps": 0,
            },
            "budget": {"steps": 10},
        }
    )


def program(run: RunSpec, mesh: str) -> Program:
    sizes = mesh_of(mesh)
    assert sizes is not None
    return Program.build(run, mesh=mesh_over(sizes, jax.devices()))


def stepped(run: RunSpec, mesh: str) -> dict[str, Any]:
    """Parameters after two steps, by name."""
    trained = Trainer(program(run, mesh))
    tokens = np.random.default_rng(0).integers(0, 640, (8, 17)).astype(np.int32)
    for _ in range(2):
        trained.step(tokens, 0.01)
    return {name: np.asarray(leaf) for name, leaf in to_named(trained.params).items()}


def apart(shape: dict[str, Any], mesh: str) -> None:
    """How far steps lead from where they lead on one device, by optax alone."""
    run = spec(shape, "muon")
    one, many = stepped(run, "fsdp=1"), stepped(run, mesh)
    off = {name: float(np.abs(one[name] - many[name]).max()) for name in one}
    print(json.dumps({"mesh": mesh, "off": off}), flush=True)


def held(optimizer: str, accumulation: int, mesh: str) -> None:
    """What the compiler says that a step takes of a device, and what the budget does."""
    run = spec(LARGE, optimizer, accumulation)
    built = program(run, mesh)
    tokens = jax.ShapeDtypeStruct((8 * accumulation, 17), np.int32)
    state = jax.eval_shape(built.init_state, built.shapes)
    m = built.step.compile(built.shapes, state, tokens, np.float32(0)).memory_analysis()
    sizes = mesh_of(mesh)
    assert sizes is not None
    need = device(known(run, parameters=sum(built.layout.sizes)), on_cpu=True, mesh=sizes)
    budget = sum(term.bytes for term in need.terms if term.name not in OTHERS)
    took = m.argument_size_in_bytes + m.temp_size_in_bytes
    found = {"optimizer": optimizer, "accumulation": accumulation, "mesh": mesh}
    print(json.dumps(found | {"bytes": int(took), "budget": budget}), flush=True)


if __name__ == "__main__":
    if "--steps" in sys.argv:
        apart(SMALL, "fsdp=4,tensor=2")
        apart(SMALL | EXPERTS | {"tied": True}, "fsdp=2,expert=2,tensor=2")
    else:
        held("adamw", 2, "fsdp=8")
        held("muon", 1, "fsdp=4,tensor=2")
