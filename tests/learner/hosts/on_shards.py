"""A process of its own with eight simulated devices: checkpoints that their hosts write.

    python on_shards.py FOLDER [--experts | --few]    # prints a line of JSON

Four devices save; two, eight and one restore (`--few`: eight). All are one process's, which is
host 0 of one.
"""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

# First: behind what has no dashes, as a learner's number of threads, XLA reads no flag.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import jax.numpy as jnp
import numpy as np

from diloco_learner.hosts.keeping_io import HostsCheckpoints, Nobody
from diloco_learner.hosts.sharded_io import Shards
from diloco_learner.models import from_named, to_named
from diloco_learner.recovery.checkpoint_io import sequence_of
from diloco_learner.training.compilation_cache import keep_on_disk
from diloco_learner.training.mesh import mesh_over
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.spec.mesh import mesh_of
from diloco_shared.spec.run import RunSpec

jax.config.update("jax_cpu_enable_async_dispatch", False)  # as a learner's process does
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
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_capacity": 1.25}
PLACE, WITH_EXPERTS = sys.argv[1], "--experts" in sys.argv
MESHES = ("fsdp=2,expert=4" if WITH_EXPERTS else "fsdp=2", "fsdp=8", "fsdp=1")
if "--few" in sys.argv:
    MESHES = ("fsdp=8",)
KEEP = 2


def spec(width: int = 32) -> RunSpec:
    shape = SHAPE | (EXPERTS if WITH_EXPERTS else {}) | {"width": width}
    return RunSpec.model_validate(
        {
            "name": "r",
            "seed": 3,
            "algorithm": {"fragments": 3, "sync_every_steps": 6},
            "model": {"context_tokens": 16, "overrides": shape},
            "inner": {"batch_sequences": 8, "warmup_steps": 0},
            "budget": {"steps": 10},
        }
    )


@cache
def program(mesh: str, width: int) -> Program:
    """Traced once for all trainers of a mesh."""
    sizes = mesh_of(mesh)
    assert sizes is not None
    return Program.build(spec(width), mesh=mesh_over(sizes, jax.devices()))


def trainer(mesh: str, width: int = 32) -> Trainer:
    return Trainer(program(mesh, width))


def tokens(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 640, (8, 17)).astype(np.int32)


def steps(trained: Trainer, first: int, many: int) -> list[float]:
    return [float(trained.step(tokens(n), 0.01)) for n in range(first, first + many)]


def checkpoints(trained: Trainer, incarnation: int = 0) -> HostsCheckpoints:
    return HostsCheckpoints(
        trained, Shards(PLACE), Nobody(), {0: "here"}, "r.0/l-1", incarnation, KEEP
    )


def there() -> list[str]:
    return sorted(path.name for path in Path(PLACE, "r.0/l-1").iterdir())


def saved(four: Trainer) -> list[bytes]:
    """Three of them, a step apart: what each must hold. Steps go on while they are written."""
    kept, found = checkpoints(four), []
    for n in range(3):
        steps(four, n, 1)
        found.append(bytes(four.inner_state()))
        begun = kept.begin(0, n + 1)
        busy = kept.begin(0, n + 1)
        assert busy.left_out, "one at a time"
        steps(four, 10 + n, 2)
        kept.save(sequence_of(0, 0, n + 1), begun)
        assert kept.newest == n + 1 and not kept.room.failed
    return found


def moved(four: Trainer) -> dict[str, Any]:
    """Moments go on where there are more devices, and fewer."""
    kept, last = checkpoints(four), four.inner_state()
    fragments = four.initial_fragments()
    kept.save(4, kept.begin(0, 4, final=True))
    goes_on = steps(four, 30, 3)
    found: dict[str, Any] = {}
    for mesh in MESHES:
        other = trainer(mesh)
        assert checkpoints(other, 1).restore(other) == (True, [])
        equal = bytes(other.inner_state()) == bytes(last)
        for p, values in enumerate(fragments):
            other.adopt(p, values, 0.0)
        lies = [leaf.sharding for leaf in to_named(other.opt_state).values()]
        same = lies == [leaf.sharding for leaf in to_named(trainer(mesh).opt_state).values()]
        found[mesh] = {"equal": equal, "lies": same, "losses": steps(other, 30, 3)}
    return {"four": goes_on, "others": found}


def damaged(wanted: dict[int, bytes]) -> dict[str, Any]:
    """Whatever is wrong with the newest one, the older one is taken, and the reason told."""
    newest, older = sorted(wanted)[::-1]
    folder, found = Path(PLACE, "r.0/l-1", str(newest)), dict[str, Any]()

    def look(what: str) -> None:
        other = trainer("fsdp=8")
        loaded, faults = checkpoints(other, 1).restore(other)
        assert loaded
        state = bytes(other.inner_state())
        found[what] = {"faults": faults, "older": state == wanted[older]}

    files = [path for path in folder.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    named = [path for path in files if "/d/" not in str(path)]  # of each kind, and the values
    for path in (*named, largest):
        before = path.read_bytes()
        where = len(before) // 2
        path.write_bytes(before[:where] + bytes([before[where] ^ 1]) + before[where + 1 :])
        look(f"changed {path.relative_to(folder)}")
        path.write_bytes(before)
    before = largest.read_bytes()
    largest.unlink()
    look("missing")
    largest.write_bytes(before)
    other = trainer("fsdp=8")
    assert checkpoints(other, 1).restore(other) == (True, [])
    assert bytes(other.inner_state()) == wanted[newest], "all is well again"
    return found


def others() -> dict[str, Any]:
    """Of another model, and not finite: neither is taken, and moments begin anew."""
    narrow = trainer("fsdp=2", width=16)
    fresh = bytes(narrow.inner_state())
    loaded, faults = checkpoints(narrow, 1).restore(narrow)
    other: dict[str, Any] = {"faults": faults}
    other["fresh"] = not loaded and bytes(narrow.inner_state()) == fresh
    four = trainer("fsdp=4")
    leaves = to_named(four.opt_state)
    name = max(leaves, key=lambda n: leaves[n].size)
    leaves[name] = jax.device_put(jnp.full(leaves[name].shape, jnp.nan), leaves[name].sharding)
    four.opt_state = from_named(four.opt_state, leaves)
    for step in (8, 9):
        kept = checkpoints(four)
        kept.save(step, kept.begin(0, step, final=True))
    two = trainer("fsdp=2")
    fresh = bytes(two.inner_state())
    loaded, faults = checkpoints(two, 1).restore(two)
    diverged: dict[str, Any] = {"faults": faults}
    diverged["fresh"] = not loaded and bytes(two.inner_state()) == fresh
    return {"other": other, "diverged": diverged}


def main() -> None:
    keep_on_disk(Path(__file__).parents[3] / ".pytest_cache" / "compiled")
    four = trainer("fsdp=4")
    states = saved(four)
    found: dict[str, Any] = {"kept": there()}
    # What lies there is what was there when each was begun, whatever steps came after.
    found["damaged"] = damaged({n: states[n - 1] for n in (2, 3)}) if not WITH_EXPERTS else {}
    found["moved"] = moved(four)
    unfinished = Path(PLACE, "r.0/l-1", str(sequence_of(0, 0, 7)), "moments")
    unfinished.mkdir(parents=True)
    found["newest"] = checkpoints(four).newest
    found["others"] = others()
    found["left"] = there()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
