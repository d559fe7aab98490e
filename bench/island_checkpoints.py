"""How long an island of several hosts stands still for a checkpoint of its own.

    python bench/island_checkpoints.py [--models 35m 150m] [--hosts 2] [--times 5] [--json FILE]

The hosts are processes on this machine, with a device each. Both ways take turns in one island, a
few times each, between steps:

first: every tensor is copied to process 0, as without DILOCO_HOSTS_CHECKPOINTS. still_s: until the
next step may begin.

all: each host copies what it holds, and writes it to a folder beside training. still_s: as above.
next_step_s: how much longer than its usual time the step after it takes, which on a processor has
to make room for what is being written. complete_s: until all of it is written, hashed and
complete, while steps go on.

Figures are medians. Between the processes is loopback, which is faster than a network. Where the
link between hosts has B bytes/s, `first` cannot be shorter than (hosts - 1) / hosts of the
moments over B; that is given as link_10gbit_s.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEED, CONTEXT, SEQUENCES = 17, 32, 2
LINK_BYTES_PER_S = 10e9 / 8


def spec_of(model: str) -> dict[str, Any]:
    """A preset whose steps take little of this machine's time."""
    return {
        "name": "r",
        "seed": SEED,
        "algorithm": {"fragments": 24, "sync_every_steps": 24},
        "model": {"preset": model, "context_tokens": CONTEXT},
        "inner": {"batch_sequences": SEQUENCES},
        "budget": {"steps": 100},
    }


# --------------------------------------------------------------------------------------------------
# A process of the island.


def host(
    measured: Callable[[Any, int, str, int, str], dict[str, Any]],
    port: int,
    hosts: int,
    index: int,
    model: str,
    times: int,
    place: str,
) -> None:
    """Process 0 prints what it `measured`; the others follow it."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as a learner's process does
    from diloco_learner.hosts.computing_io import followed, gathered
    from diloco_learner.hosts.place import HostPlace
    from diloco_learner.settings import Settings
    from diloco_learner.training.compilation_cache import keep_for_user

    keep_for_user("")
    where = HostPlace(hosts, index, "127.0.0.1", port)
    if index:
        followed(where, Settings(hosts_carry="first", hosts_checkpoints=place))
    others = gathered(where, 30.0)
    print(json.dumps(measured(others, hosts, model, times, place)), flush=True)
    others.close()
    os._exit(0)


def measured(others: Any, hosts: int, model: str, times: int, place: str) -> dict[str, Any]:
    """Both ways, in turns."""
    from diloco_learner.hosts.keeping_io import HostsCheckpoints
    from diloco_learner.hosts.sharded_io import Shards
    from diloco_learner.recovery.checkpoint_io import sequence_of

    trainer, tokens = trained(others, hosts, model)
    names = {n: f"host {n}" for n in range(hosts)}
    kept = HostsCheckpoints(trainer, Shards(place, 0, hosts), others, names, "r/l", 0, 2)
    assert not kept.fault, kept.fault

    def step() -> float:
        return took(lambda: float(trainer.step(tokens, 1e-4)))

    for _ in range(3):
        step()
    usual = statistics.median(step() for _ in range(5))
    found: dict[str, list[float]] = {"first": [], "all": [], "next": [], "complete": []}
    for n in range(1, times + 1):
        found["first"].append(took(trainer.inner_state))
        step()
        began = time.perf_counter()
        begun = kept.begin(0, n)
        found["all"].append(time.perf_counter() - began)
        saving = threading.Thread(target=kept.save, args=(sequence_of(0, 0, n), begun))
        saving.start()
        found["next"].append(step() - usual)
        while saving.is_alive():
            step()
        found["complete"].append(time.perf_counter() - began)
        assert kept.newest == n
    size = trainer.inner_state_bytes
    median = {name: round(statistics.median(values), 4) for name, values in found.items()}
    return {
        "moments_bytes": size,
        "step_s": round(usual, 4),
        "first": {
            "still_s": median["first"],
            "link_10gbit_s": round(size * (hosts - 1) / hosts / LINK_BYTES_PER_S, 4),
        },
        "all": {
            "still_s": median["all"],
            "next_step_s": median["next"],
            "complete_s": median["complete"],
        },
    }


def trained(others: Any, hosts: int, model: str) -> tuple[Any, Any]:
    """(a trainer on all hosts, a batch for it)."""
    import jax
    import numpy as np

    from diloco_learner.hosts import plan
    from diloco_learner.hosts.trainer import HostsTrainer
    from diloco_learner.training.mesh import mesh_over
    from diloco_learner.training.trainer import Program
    from diloco_shared.spec.mesh import mesh_of
    from diloco_shared.spec.run import RunSpec

    spec, mesh = RunSpec.model_validate(spec_of(model)), f"fsdp={hosts}"
    sizes = mesh_of(mesh)
    assert sizes is not None
    others.answers(others.tell(plan.Prepare(spec.model_dump_json(), mesh, -1)))
    program = Program.build(spec, mesh=mesh_over(sizes, jax.devices()))
    vocabulary = int(spec.model.overrides.get("vocabulary", 32_768))
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(0, vocabulary, (SEQUENCES, CONTEXT + 1)).astype(np.int32)
    return HostsTrainer(program, others), tokens


def took(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# --------------------------------------------------------------------------------------------------


def island(model: str, hosts: int, times: int, script: str) -> dict[str, Any]:
    """What process 0 of one found, of which each process is that script's."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, script, "--host", port, str(hosts)]
        started = [
            subprocess.Popen(
                [*command, str(index), model, str(times), place],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for index in range(hosts)
        ]
        try:
            said, _ = started[0].communicate(timeout=3000)
        finally:
            for process in started:
                process.kill()
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def main() -> None:
    """Measure, print, and write JSON if asked to."""

    def shown(found: dict[str, Any]) -> str:
        first, every = found["first"]["still_s"], found["all"]["still_s"]
        return f"stands still for {first:.3f} s by the first, {every:.3f} s by all: {found}"

    each_model(__doc__, measured, __file__, 5, shown)


def each_model(
    about: str,
    measures: Callable[..., Any],
    script: str,
    times: int,
    shown: Callable[[dict[str, Any]], str] = str,
) -> None:
    """The command line of a bench of islands: `measures` in each host of one, model by model."""
    if sys.argv[1:2] == ["--host"]:
        port, hosts, index, model, many, place = sys.argv[2:]
        host(measures, int(port), int(hosts), int(index), model, int(many), place)
        return
    sys.path.insert(0, str(Path(__file__).parent))
    from runs import keep, surroundings

    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["35m", "150m"])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--times", type=int, default=times)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    report: dict[str, Any] = surroundings(script) | {"seed": SEED, "hosts": given.hosts}
    report["models"] = {}
    for model in given.models:
        report["models"][model] = found = island(model, given.hosts, given.times, script)
        print(f"{model}: {shown(found)}")
        keep(given.json, report)


if __name__ == "__main__":
    main()
