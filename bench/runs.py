"""What the benchmarks that train have in common: running, remembering, naming the machine."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diloco_simulator.experiments import Experiment, results

FOLDER = Path("diloco-data/experiments")


def results_of(experiments: Sequence[Experiment], workers: int) -> dict[str, dict[str, Any]]:
    """Results by key, told as they come."""
    found = {}
    for experiment, result in results(experiments, FOLDER, workers=workers):
        found[experiment.key()] = result
        a = experiment.spec.algorithm
        print(
            f"{experiment.method:>13}  M={experiment.learners:<3} seed {experiment.spec.seed}  "
            f"rate {result['inner_rate']:.1e}  H={a.sync_every_steps:<3} "
            f"{a.codec_up}/{a.codec_down}  validation {result['val_loss']:.4f}",
            flush=True,
        )
    return found


def surroundings(script: str) -> dict[str, Any]:
    """Command, machine and versions, for the JSON."""
    told = sys.argv[1:]
    if "--json" in told:  # where the output went is nobody's business
        del told[told.index("--json") : told.index("--json") + 2]
    names = ("jax", "numpy", "numba", "optax", "nats-py")
    return {
        "command": shlex.join(["python", f"bench/{Path(script).name}", *told]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()} | {n: version(n) for n in names},
    }
