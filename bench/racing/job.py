"""What one worker is told and what it tells: files that need numpy only.

A job is a folder: `job.json` (settings) and `arrays.npz` (initial parameters, the batches of every
worker, the inner rate of every step). A worker writes `worker-N.jsonl`, a line per step and per
exchange with the machine's monotonic clock, and at the end of a whole run its parameters.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Settings:
    """Of the run; what a peer has no use for it ignores."""

    shape: tuple[int, ...]  # decoder.Shape
    workers: int
    steps: int  # of each worker; 0: until killed
    sync_every: int  # H
    outer_rate: float
    outer_momentum: float
    b1: float
    b2: float
    weight_decay: float
    clip_norm: float
    # Silence after which a member counts as gone, in seconds: the same for everybody.
    lease_s: float
    # No exchange takes longer, in seconds.
    patience_s: float
    port: int  # the first of a few free ones


class Job:
    """Reads a job's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        body = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        self.settings = Settings(**body | {"shape": tuple(body["shape"])})
        arrays = np.load(folder / "arrays.npz")
        self.rates = arrays["rates"]
        self.initial = {k[2:]: arrays[k] for k in arrays.files if k.startswith("p:")}
        self._batches = [arrays[f"batches-{n}"] for n in range(self.settings.workers)]

    def batch(self, worker: int, step: int) -> NDArray[np.int64]:
        """Shape (B, L + 1); from the beginning again when there are no more."""
        batches = self._batches[worker]
        batch: NDArray[np.int64] = batches[step % len(batches)].astype(np.int64)
        return batch

    def rate(self, step: int) -> float:
        """Inner rate at a step of the run."""
        return float(self.rates[min(step, len(self.rates) - 1)])

    @property
    def steps(self) -> int:
        """Of each worker; beyond any reach when the run goes on until it is killed."""
        return self.settings.steps or 10**9


def write(
    folder: Path,
    settings: Settings,
    rates: NDArray[np.float64],
    initial: Mapping[str, Any],
    batches: list[NDArray[np.uint8]],
) -> None:
    """Batches have shape (steps, B, L + 1), an array per worker."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(asdict(settings)), encoding="utf-8")
    arrays: dict[str, Any] = {f"p:{name}": np.asarray(value) for name, value in initial.items()}
    arrays |= {f"batches-{n}": taken for n, taken in enumerate(batches)}
    np.savez(folder / "arrays.npz", rates=rates, **arrays)


class Diary:
    """What one worker tells; a relaunched one goes on in the same file."""

    def __init__(self, folder: Path, worker: int) -> None:
        self.file = diary(folder, worker).open("a", encoding="utf-8", buffering=1)
        self.tell("started")

    def tell(self, kind: str, **told: Any) -> None:
        self.file.write(json.dumps({"at": time.monotonic(), "kind": kind, **told}) + "\n")


def diary(folder: Path, worker: int) -> Path:
    return folder / f"worker-{worker}.jsonl"


def read(folder: Path, worker: int) -> list[dict[str, Any]]:
    """What it has told so far; the line that it is writing is left out."""
    file = diary(folder, worker)
    if not file.exists():
        return []
    whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def final(folder: Path, worker: int) -> Path:
    """Where a worker leaves its parameters."""
    return folder / f"worker-{worker}.npz"
