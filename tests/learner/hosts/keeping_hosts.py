"""One process of an island of several hosts, without a run: checkpoints that all hosts write.

    python keeping_hosts.py PORT HOSTS INDEX MESH DEVICES PLACE TASK NOTES

Process 0 prints a line of JSON. TASK: `save` keeps three, and leaves in NOTES what they must hold;
`restore` takes the newest sound one; `mended` finds a place that cannot be used, and then can.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[5]} " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import numpy as np

from diloco_learner.hosts import plan
from diloco_learner.hosts.computing_io import followed, gathered
from diloco_learner.hosts.keeping_io import HostsCheckpoints
from diloco_learner.hosts.leading_io import Hosts
from diloco_learner.hosts.place import HostPlace
from diloco_learner.hosts.sharded_io import Shards
from diloco_learner.hosts.trainer import HostsTrainer
from diloco_learner.recovery.checkpoint_io import sequence_of
from diloco_learner.settings import Settings
from diloco_learner.training.mesh import mesh_over
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.process.logs import configure
from diloco_shared.spec.mesh import mesh_of
from diloco_shared.spec.run import RunSpec

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_cpu_enable_async_dispatch", False)  # as a learner's process does
PORT, HOSTS, INDEX, MESH = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
PLACE, TASK, NOTES = sys.argv[6], sys.argv[7], Path(sys.argv[8])
SPEC = RunSpec.model_validate(
    {
        "name": "r",
        "seed": 3,
        "algorithm": {"fragments": 3, "sync_every_steps": 6},
        "model": {
            "context_tokens": 16,
            "overrides": {
                "width": 16,
                "layers": 2,
                "heads": 4,
                "kv_heads": 2,
                "head_width": 8,
                "hidden": 64,
                "vocabulary": 640,
                "tied": True,
            },
        },
        "inner": {"batch_sequences": 8, "warmup_steps": 0},
        "budget": {"steps": 10},
    }
)
NAME = "r.0/l-1"


def tokens(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 640, (8, 17)).astype(np.int32)


def steps(trained: Trainer, first: int, many: int) -> list[float]:
    return [float(trained.step(tokens(n), 0.01)) for n in range(first, first + many)]


def digest(trained: Trainer) -> str:
    return hashlib.blake2b(bytes(trained.inner_state())).hexdigest()


def on_all(hosts: Hosts) -> HostsTrainer:
    sizes = mesh_of(MESH)
    assert sizes is not None
    program = Program.build(SPEC, mesh=mesh_over(sizes, jax.devices()))
    answers = hosts.answers(hosts.tell(plan.Prepare(SPEC.model_dump_json(), MESH, -1)))
    assert not any(len(fault) for fault in answers.values()), answers
    return HostsTrainer(program, hosts)


def checkpoints(trained: HostsTrainer, hosts: Hosts, incarnation: int) -> HostsCheckpoints:
    names = {0: "process 0"} | {n: host.name for n, host in hosts.hosts.items()}
    shards = Shards(PLACE, 0, HOSTS)
    return HostsCheckpoints(trained, shards, hosts, names, NAME, incarnation, 2)


def save(trained: HostsTrainer, kept: HostsCheckpoints) -> dict[str, Any]:
    """Three, of which two stay; steps go on while each is written."""
    digests = []
    for n in range(3):
        steps(trained, n, 2)
        digests.append(digest(trained))
        if n == 2:
            np.savez(NOTES / "fragments.npz", *trained.initial_fragments())
        begun = kept.begin(0, n + 1)
        losses = steps(trained, 20, 3)
        kept.save(sequence_of(0, 0, n + 1), begun)
    (NOTES / "digests.json").write_text(json.dumps(digests))
    return {"digests": digests, "losses": losses, "newest": kept.newest}


def restore(trained: HostsTrainer, kept: HostsCheckpoints) -> dict[str, Any]:
    loaded, faults = kept.restore(trained)
    assert loaded
    found = digest(trained)
    with np.load(NOTES / "fragments.npz") as fragments:
        for p, name in enumerate(fragments.files):
            trained.adopt(p, fragments[name], 0.0)
    return {"faults": faults, "digest": found, "losses": steps(trained, 20, 3)}


def mended(trained: HostsTrainer, kept: HostsCheckpoints) -> dict[str, Any]:
    """Training goes on without any; the place is mended by NOTES/mend, told by NOTES/broken."""
    said: list[str] = []
    for step in range(1, 6):
        steps(trained, step, 2)
        begun = kept.begin(0, step)
        try:
            kept.save(sequence_of(0, 1, step), begun)
        except OSError as error:
            said.append(str(error))
        if step == 2:
            (NOTES / "broken").touch()
            while not (NOTES / "mend").exists():
                time.sleep(0.1)
    return {"fault": kept.fault, "said": said, "newest": kept.newest}


def main() -> None:
    place = HostPlace(HOSTS, INDEX, "127.0.0.1", PORT)
    configure("info")
    jax.config.update("jax_enable_compilation_cache", False)  # as a learner's process of several
    if INDEX:
        followed(place, Settings(hosts_carry="first", hosts_checkpoints=PLACE))
    hosts = gathered(place, 4.0)
    trained = on_all(hosts)
    began = time.monotonic()
    kept = checkpoints(trained, hosts, 0 if TASK == "save" else 1)
    first = kept.fault
    found = {"save": save, "restore": restore, "mended": mended}[TASK](trained, kept)
    seconds = time.monotonic() - began
    print(json.dumps({"first": first, "seconds": seconds} | found), flush=True)
    hosts.close()
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at the end of a process jax would wait for the others
