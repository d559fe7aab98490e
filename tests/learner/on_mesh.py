"""A process of its own with eight simulated devices: what a learner does on a mesh of them.

    python on_mesh.py MESH ... [--experts] [--few] [--resharded]

A line of JSON for each mesh, and a last one of what is resharded. `--experts`: a model with a
mixture of experts. `--few`: two codecs instead of five.

The number of devices is told before jax is imported, so that no test of another file can do this.
"""

import json
import os
import sys
from dataclasses import replace
from typing import Any

# First: behind what has no dashes, as a learner's number of threads, XLA reads no flag.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import numpy as np

from diloco_learner.models import cross_entropy, to_named
from diloco_learner.training.evaluate import HeldOut
from diloco_learner.training.fragment_ops import PieceRun
from diloco_learner.training.fragments_on_mesh import MeshFragmentOps
from diloco_learner.training.mesh import mesh_over
from diloco_learner.training.trainer import Program, Trainer, assemble
from diloco_shared.numerics import codec
from diloco_shared.spec.mesh import mesh_of
from diloco_shared.spec.run import RunSpec

SHAPE = {
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 8,
    "hidden": 64,
    "vocabulary": 640,
    "tied": True,
}
# So many fragments that the experts of a layer lie in several.
EXPERTS = SHAPE | {"experts": 8, "experts_per_token": 2, "expert_capacity": 1.25}
WITH_EXPERTS, FEW = "--experts" in sys.argv, "--few" in sys.argv
FRAGMENTS = 16 if WITH_EXPERTS else 6
SPEC = RunSpec.model_validate(
    {
        "name": "r",
        "seed": 3,
        "algorithm": {
            "fragments": FRAGMENTS,
            "sync_every_steps": FRAGMENTS,
            "codec_up": "int4",
        },
        "model": {"context_tokens": 16, "overrides": EXPERTS if WITH_EXPERTS else SHAPE},
        "inner": {"batch_sequences": 8, "warmup_steps": 0},
        "budget": {"steps": 10},
    }
)
jax.config.update("jax_cpu_enable_async_dispatch", False)  # as a learner's process does
# The output matrix's gradient is added up in two blocks at least, as that of a large vocabulary is.
cross_entropy.BLOCK_BYTES = 4 * 32 * 640 // 4
STEPS = 20
CODECS = ("fp32", "int4") if FEW else codec.NAMES


def trainer(mesh: str) -> Trainer:
    sizes = mesh_of(mesh)
    assert sizes is not None
    return Trainer(Program.build(SPEC, mesh=mesh_over(sizes, jax.devices())))


def tokens(seed: int, sequences: int = 8) -> Any:
    return np.random.default_rng(seed).integers(0, 640, (sequences, 17)).astype(np.int32)


def steps(trained: Trainer, first: int, many: int) -> list[float]:
    return [float(trained.step(tokens(n), 0.01)) for n in range(first, first + many)]


def anchors(program: Program) -> list[Any]:
    """Some of whose values are zeros with a sign, which adding must not lose."""
    rng, found = np.random.default_rng(7), []
    for size in program.layout.sizes:
        values = rng.standard_normal(size).astype(np.float32)
        values[::5] *= 0.0
        found.append(values)
    return found


def chosen(program: Program) -> list[int]:
    """Fragments that differ in how they are cut: a run of layers, and rows of a tensor."""
    bits = [view.bits for view in program.cuts.cuts]
    run = next(p for p, some in enumerate(bits) if any(isinstance(b, PieceRun) for b in some))
    rows = next(
        p
        for p, some in enumerate(bits)
        if any(not isinstance(b, PieceRun) and not b.whole for b in some)
    )
    return [run, rows]


def mixes(program: Program, given: list[Any]) -> bool:
    """Whether a share of one's own is kept, and of what is not finite none."""
    spoilt = [np.where(np.arange(a.size) % 7, a, np.inf).astype(np.float32) for a in given]
    params, same = assemble(program, spoilt), []
    for p, own in enumerate(spoilt):
        anchor = given[p] + 1.0
        params = program.cuts.adopt(p, params, anchor, 0.25)
        wanted = np.where(np.isfinite(own), 0.25 * own + 0.75 * anchor, anchor)
        same.append(np.allclose(program.cuts.values(p, params), wanted, atol=1e-6))
    return all(same)


def exact(program: Program) -> dict[str, bool]:
    """Whether what is adopted is read again, and encoded as the compiled encoder does."""
    given, found = anchors(program), {}
    params = assemble(program, given)
    read = [program.cuts.values(p, params) for p in range(len(given))]
    found["adopted"] = all(a.tobytes() == b.tobytes() for a, b in zip(read, given, strict=True))
    found["mixed"] = mixes(program, given)
    rng, placement = np.random.default_rng(8), program.placement
    assert placement is not None
    for name in CODECS:
        ops = MeshFragmentOps(
            program.layout, program.shapes, name, program.model.stacked, placement
        )
        algorithm = SPEC.algorithm.model_copy(update={"codec_up": name})
        other = replace(program, cuts=ops, spec=SPEC.model_copy(update={"algorithm": algorithm}))
        one = Trainer.__new__(Trainer)  # with these parameters, and nothing initialised for it
        one.program, one.params, one.anchors = other, params, [None] * len(given)
        one.feedback = Trainer.residuals(other)
        for p in chosen(program):
            anchor = given[p] + rng.standard_normal(len(given[p])).astype(np.float32)
            one.anchors[p], owed = anchor, np.zeros_like(anchor)
            for round_ in range(2):  # the second one carries what the first one withheld
                total = (anchor - given[p]) + owed
                sent, wanted = one.contribution(p, round_).fetch(), codec.encode(name, total)
                found[f"{name} of {p} in round {round_}"] = bytes(sent) == bytes(wanted)
                if one.feedback[p] is not None:
                    one.decided(p, round_, merged=True)
                    owed = total - codec.decode(name, wanted, len(total))
    return found


def held(trained: Trainer, anchors_P: list[Any]) -> float:
    """Of five sequences, which eight devices cannot share evenly."""
    small = [0.02 * a for a in anchors_P]
    program = trained.program
    return program.evaluate.losses(assemble(program, small), HeldOut(tokens(99, 5))).overall


def share(trained: Trainer) -> float:
    """Of parameters and moments, what the fullest device holds."""
    leaves = jax.tree.leaves((trained.params, trained.opt_state))
    each = {device: 0 for device in jax.devices()}
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            each[shard.device] += shard.data.nbytes
    return max(each.values()) / sum(leaf.nbytes for leaf in leaves)


def largest(trained: Trainer) -> int:
    """Values of the largest part of a leaf of parameters or moments on a device."""
    leaves = jax.tree.leaves((trained.params, trained.opt_state))
    return max(leaf.addressable_shards[0].data.size for leaf in leaves)


def resharded() -> dict[str, Any]:
    """Moments that four devices keep, in one buffer, go on where there are two, and eight."""
    four = trainer("fsdp=4")
    steps(four, 0, 3)
    kept, fragments = bytes(four.inner_state()), four.initial_fragments()
    goes_on = steps(four, 3, 5)
    found = {}
    for mesh in ("fsdp=2", "fsdp=8"):
        other = trainer(mesh)
        other.load_inner_state(kept)
        for p, values in enumerate(fragments):
            other.adopt(p, values, 0.0)
        equal = bytes(other.inner_state()) == kept
        found[mesh] = {"equal": equal, "losses": steps(other, 3, 5)}
    return {"four": goes_on, "others": found}


def main() -> None:
    meshes = [argument for argument in sys.argv[1:] if "=" in argument]
    one = trainer("fsdp=1")
    begun = {n: np.asarray(leaf) for n, leaf in to_named(one.params).items()} if meshes else {}
    wanted = {"losses": steps(one, 0, STEPS), "held": held(one, anchors(one.program))}
    for mesh in meshes:
        trained = trainer(mesh)
        named = to_named(trained.params)
        found = {
            "mesh": mesh,
            "begins_equal": all(np.array_equal(np.asarray(named[n]), begun[n]) for n in begun),
            "share": share(trained),
            "largest": largest(trained),
            "exact": exact(trained.program),
            "held": [held(trained, anchors(trained.program)), wanted["held"]],
            "losses": [steps(trained, 0, STEPS), wanted["losses"]],
        }
        print(json.dumps(found), flush=True)
    if "--resharded" in sys.argv:
        print(json.dumps(resharded()), flush=True)


if __name__ == "__main__":
    main()
