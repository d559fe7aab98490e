"""Workers of a peer as real processes: started, killed, stopped for a while, ended."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from racing import job

FOLDER = Path(__file__).parent
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
LIGHTHOUSE = -1
LOOK_S = 0.1


class Crew:
    """A context; whatever was started is gone at its end."""

    def __init__(self, python: str, script: str, folder: Path, workers: int) -> None:
        self.command = [python, str(FOLDER / script), "--job", str(folder), "--worker"]
        self.folder = folder
        self.workers = range(workers)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.ended: list[str] = []

    def __enter__(self) -> Self:
        if "torchft" in self.command[1]:
            self.start(LIGHTHOUSE)
        for worker in self.workers:
            self.start(worker)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in list(self.processes):
            self.kill(worker)

    def start(self, worker: int) -> None:
        with self.log(worker).open("ab") as log:
            self.processes[worker] = subprocess.Popen(
                [*self.command, str(worker)],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, worker: int) -> Path:
        return self.folder / f"worker-{worker}.log"

    def signal(self, worker: int, number: int) -> None:
        """To the worker and all that it started: what happens to its machine."""
        with suppress(ProcessLookupError):
            os.killpg(self.processes[worker].pid, number)

    def kill(self, worker: int) -> None:
        self.signal(worker, signal.SIGKILL)
        self.processes.pop(worker).wait()

    def told(self, worker: int) -> list[dict[str, Any]]:
        return job.read(self.folder, worker)

    def steps(self, worker: int) -> list[float]:
        """Times of its steps, those of a relaunched one behind those of the one before."""
        return [line["at"] for line in self.told(worker) if line["kind"] == "step"]

    def all_stepped(self, steps: int, limit_s: float) -> None:
        """Wait for everybody; SystemExit tells what the first that ended said last."""
        deadline = time.monotonic() + limit_s
        while min(len(self.steps(n)) for n in self.workers) < steps:
            self.look()
            if self.ended or time.monotonic() > deadline:
                raise SystemExit(f"{self.command[1]}: " + ("; ".join(self.ended) or "too slow"))
            time.sleep(LOOK_S)

    def finished(self, limit_s: float) -> bool:
        """Wait until everybody has ended well; False when the time was over before."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self.look()
            if self.ended or all(n not in self.processes for n in self.workers):
                return not self.ended
            time.sleep(LOOK_S)
        return False

    def watch(self, until: float) -> None:
        """Note who ends until then."""
        while time.monotonic() < until:
            self.look()
            time.sleep(LOOK_S)

    def look(self) -> None:
        """Take away who has ended; remember those that did not end well."""
        for worker in [n for n in self.workers if n in self.processes]:
            if (status := self.processes[worker].poll()) is not None:
                self.kill(worker)  # what is left of its group
                if status:
                    self.ended.append(f"worker {worker} ended ({status}): {self.last_word(worker)}")

    def last_word(self, worker: int) -> str:
        """The last line of its log that names an error, or the last one."""
        lines = [
            line for line in self.log(worker).read_text("utf-8", "replace").splitlines() if line
        ]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or [""])[-1].strip()[:160]
