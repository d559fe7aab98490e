"""Training experiments in bulk: side by side, remembered on disk, resumable.

A result is kept under a key of what was run: the specification, the corpus and the fleet. With it
goes a digest of the source code that computed it and of the versions it computed with: what other
code found counts only where the caller says so. One process an experiment at a time per core, one
thread a process, so that figures do not depend on what else the machine does.
"""

import hashlib
import json
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from diloco_shared.process.stopping import dies_with_parent
from diloco_shared.spec.run import Data, RunSpec
from diloco_simulator.experiments.setting import Interruptions, Loan, Setting

SINGLE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
# Packages whose pure code makes the numbers; what lies in folders or files of these names cannot
# change them. `hub` is named with its package, since the simulator's own package of that name can.
COMPUTING = ("diloco_shared", "diloco_learner", "diloco_syncer", "diloco_simulator")
OTHERS = {"bus", "diloco_shared/hub", "process", "commands", "fleets", "plots", "check", "bulk"}
# Settings of a fleet that an experiment's description names only where they are not the default.
LATER = ("one_way_s", "jitter", "interruptions", "loan", "only_ready", "over_time")
# Likewise settings of a run.
LATER_SETTINGS = (("algorithm", "weighting"), ("data", "digest"), ("data", "mixture"))
LIBRARIES = ("jax", "jaxlib", "numpy", "optax", "ml_dtypes")


@dataclass(frozen=True)
class Experiment:
    """One training run on a virtual clock; for its settings see `Setting`.

    `idle`: Decoupled without computing anything, for when things happen.
    """

    spec: RunSpec
    learners: int
    method: Literal["decoupled", "data-parallel", "idle"] = "decoupled"
    speeds: tuple[float, ...] = (1.0,)
    one_way_s: float = Setting(1).one_way_s
    jitter: float = 0.0
    interruptions: Interruptions | None = None
    loan: Loan | None = None
    only_ready: bool = False
    over_time: bool = False

    def key(self) -> str:
        """Names the result: 32 hex digits."""
        text = json.dumps(self.described(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def described(self) -> dict[str, Any]:
        """What is run, JSON-ready; the corpus by its content, wherever it lies."""
        spec = self.spec.model_dump(mode="json")
        spec["data"]["source"] = Path(self.spec.data.source).name
        spec["data"]["tokenizer"] = Path(self.spec.data.tokenizer).name
        for part in spec["data"]["mixture"]:
            part["source"] = Path(part["source"]).name
        for section, name in LATER_SETTINGS:
            part = getattr(self.spec, section)
            if getattr(part, name) == type(part).model_fields[name].default:
                del spec[section][name]
        given = asdict(self)
        # Named where they are used: results from before a setting existed keep their names.
        plain = {f.name: f.default for f in fields(self)}
        used = {name: given[name] for name in LATER if given[name] != plain[name]}
        return {
            "method": self.method,
            "learners": self.learners,
            "speeds": list(self.speeds),
            "spec": spec,
            "corpus": _corpus(self.spec.data),
            **used,
        }

    def run(self) -> dict[str, Any]:
        """Train; what `diloco sim train --json` prints."""
        if self.method == "data-parallel":
            from diloco_learner.training.data_parallel import train_data_parallel

            return train_data_parallel(self.spec, self.learners, rate=self.spec.inner_rate)
        from diloco_simulator.experiments.train import Fleet, IdleFleet

        fleet = IdleFleet if self.method == "idle" else Fleet
        return fleet(self.spec, self.setting).run()

    @property
    def setting(self) -> Setting:
        """Of the fleet."""
        return Setting(
            self.learners,
            speeds=self.speeds,
            **{name: getattr(self, name) for name in LATER},
        )


def results(
    experiments: Sequence[Experiment], folder: Path, *, workers: int, any_sources: bool = False
) -> Iterator[tuple[Experiment, dict[str, Any]]]:
    """Every experiment with its result, those that are known first, the others as they finish.

    Each new one is in `folder` before it is yielded: what is interrupted goes on where it was.
    What other source code found is computed again unless `any_sources`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for key, experiment in {e.key(): e for e in experiments}.items():
        file = folder / f"{key}.json"
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        if known is not None and (any_sources or known["sources"] == sources()):
            yield experiment, known["result"]
        else:
            missing.append((experiment, file))
    if not missing:
        return
    os.environ["XLA_FLAGS"] = SINGLE_THREAD
    spawn = get_context("spawn")
    # Workers would go on for minutes after a parent that was killed.
    with ProcessPoolExecutor(workers, spawn, initializer=dies_with_parent(signal.SIGTERM)) as pool:
        running = {pool.submit(e.run): (e, file) for e, file in missing}
        try:
            for done in as_completed(running):
                experiment, file = running[done]
                result = done.result()
                _keep(file, experiment, result)
                yield experiment, result
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _keep(file: Path, experiment: Experiment, result: dict[str, Any]) -> None:
    """Whole or not at all: it is written aside and renamed."""
    body = experiment.described() | {"sources": sources(), "result": result}
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(body, indent=1), encoding="utf-8")
    aside.rename(file)


@cache
def _corpus(data: Data) -> str:
    """Digest of what is read: the standard library differs from one Python to the next."""
    from diloco_learner.data.corpus import digest, load

    return digest(load(data))


@cache
def sources() -> str:
    """Digest of the code and the library versions that results depend on."""
    digest = hashlib.blake2b(digest_size=16)
    for package in COMPUTING:
        found = find_spec(package)
        assert found is not None and found.origin is not None
        root = Path(found.origin).parent
        for file in sorted(root.rglob("*.py")):
            path = file.relative_to(root).parts
            parts = {part.removesuffix(".py").split("_")[0] for part in path}
            parts.add(f"{package}/{path[0]}")
            if not parts & OTHERS and not file.stem.endswith("_io"):
                digest.update(f"{package}/{file.relative_to(root)}".encode())
                digest.update(file.read_bytes())
    digest.update(json.dumps({name: version(name) for name in LIBRARIES}).encode())
    return digest.hexdigest()
