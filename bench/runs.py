"""What the benchmarks that train have in common: running, remembering, naming the machine.

python bench/runs.py        # make what was found here part of the repository
"""

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diloco_simulator.experiments.bulk import Experiment, results

FOLDER = Path("diloco-data/experiments")
# Results that came with the repository, a line each: hours of training need not be repeated.
KEPT = Path(__file__).resolve().parents[1] / "docs" / "results" / "experiments.jsonl"


def unpack() -> None:
    """Put what `KEPT` holds into `FOLDER`, where that has nothing newer."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for line in KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else ():
        body = json.loads(line)
        file = FOLDER / f"{body['key']}.json"
        if not file.exists():
            file.write_text(line, encoding="utf-8")


def pack() -> None:
    """Write all of `FOLDER` to `KEPT`; of the specification only what names the run."""
    lines = []
    for file in sorted(FOLDER.glob("*.json")):
        body = json.loads(file.read_text(encoding="utf-8"))
        if body["method"] == "idle":
            continue  # seconds to compute again
        if spec := body.pop("spec", None):
            shown = ("algorithm", "inner", "budget")
            body |= {"seed": spec["seed"]} | {name: spec[name] for name in shown}
        lines.append(json.dumps(body | {"key": file.stem}, sort_keys=True))
    KEPT.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def results_of(
    experiments: Sequence[Experiment], workers: int, *, any_sources: bool = False
) -> dict[str, dict[str, Any]]:
    """Results by key, told as they come; those in `KEPT` are known."""
    found = {}
    unpack()
    for experiment, result in results(
        experiments, FOLDER, workers=workers, any_sources=any_sources
    ):
        found[experiment.key()] = result
        if experiment.method == "idle":
            continue
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
    names = ("jax", "jaxlib", "numpy", "numba", "optax", "nats-py")
    where = Path(script).resolve().relative_to(Path(__file__).resolve().parents[1])
    return {
        "command": shlex.join(["python", where.as_posix(), *told]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()} | {n: version(n) for n in names},
    }


def keep(file: Path | None, body: Any, indent: int = 2) -> None:
    """What came out, as JSON, where a file is asked for."""
    if file is not None:
        file.write_text(json.dumps(body, indent=indent) + "\n", encoding="utf-8")


if __name__ == "__main__":
    pack()
