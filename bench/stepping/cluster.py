"""A cluster of real processes, each pinned to a core, one of whose learners is measured.

The measured learner is stopped (SIGSTOP) while other loops have their turn on its core; the run's
lease is long enough that nobody gives it up. The other processes go on.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from beside import Processes

from diloco_shared.bus.port import Bus
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Progress
from diloco_shared.protocol.wire import decode
from stepping.sizes import RUN, Size, spec_of
from stepping.turns import Window

# Processes that start, and a model that is compiled, on a machine that does other work as well.
PATIENCE_S = 600.0
MEASURED = "learner-1"
# What is left out of a turn: a learner that stood still for minutes fetches and adopts every
# fragment that was published meanwhile, which takes it some ten steps. And whole steps only.
CATCH_UP_S = 20.0
SETTLING_STEPS = 1
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Report:
    """`at`: when it came, in seconds. `cpu_s`: what the learner's process had used by then."""

    at: float
    cpu_s: float
    told: Progress


@dataclass(frozen=True, slots=True)
class Turn:
    """What the learner did in one turn. `blocked_s`: a step, each; `adopted`: fragments."""

    window: Window
    blocked_s: tuple[float, ...]
    adopted: int


def turn_of(reports: list[Report]) -> Turn:
    """Of the reports that came in a turn, in order. SystemExit where they are too few."""
    told = reports[SETTLING_STEPS:]
    if len(told) < 2:
        raise SystemExit(
            f"the learner took {len(reports)} steps in a turn, too few to measure: give a longer "
            "--window"
        )
    first, last = told[0].told, told[-1].told
    blocked = []
    for before, after in pairwise(report.told for report in told):
        if (steps := after.step - before.step) > 0:
            blocked += [(after.wait_s - before.wait_s) / steps] * steps
    adopted = sum(max(b - a, 0) for a, b in zip(first.adopted, last.adopted, strict=True))
    window = Window(
        "learner",
        last.step - first.step,
        told[-1].at - told[0].at,
        told[-1].cpu_s - told[0].cpu_s,
    )
    return Turn(window, tuple(blocked), adopted)


@dataclass(slots=True)
class Cluster:
    """What is asked of the measured learner, and what it reports."""

    processes: Processes
    reports: list[Report] = field(default_factory=list)

    @property
    def measured(self) -> "subprocess.Popen[bytes]":
        return self.processes.running[MEASURED]

    def halt(self) -> None:
        self.measured.send_signal(signal.SIGSTOP)

    async def turn(self, seconds: float) -> Turn:
        """Let it take steps for so long, once it has caught up, and tell what it did."""
        self.measured.send_signal(signal.SIGCONT)
        await asyncio.sleep(CATCH_UP_S)
        self.reports.clear()
        await asyncio.sleep(seconds)
        self.halt()
        if self.measured.poll() is not None:
            raise SystemExit(f"the learner ended: {self.processes.said(MEASURED)}")
        return turn_of(self.reports)

    def cpu_s(self) -> float:
        """What the measured learner has used of its core."""
        return cpu_s(Path(f"/proc/{self.measured.pid}/stat").read_text())

    def peak_bytes(self) -> int:
        """Most memory that the learner held, without what is mapped from files."""
        return peak_bytes(Path(f"/proc/{self.measured.pid}/status").read_text())

    async def listen(self, bus: Bus) -> None:
        subject = subjects.progress(RUN, MEASURED)
        async with bus.subscribe(subject, limit=65536) as deliveries:
            async for delivery in deliveries:
                told = decode(delivery.payload, Progress)
                # A heartbeat repeats what was told before.
                if not self.reports or told.step > self.reports[-1].told.step:
                    self.reports.append(Report(time.monotonic(), self.cpu_s(), told))


def peak_bytes(status: str) -> int:
    """Of /proc/PID/status: the peak, less the files that are mapped at the end."""
    found = {}
    for line in status.splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            found[name] = int(rest.split()[0]) * 1024
    return found["VmHWM"] - found["RssFile"] - found["RssShmem"]


def cpu_s(stat: str) -> float:
    """Of /proc/PID/stat: seconds of a core, as the process and as the system for it."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@asynccontextmanager
async def training(
    size: Size,
    folder: Path,
    environment: Mapping[str, str],
    *,
    learners: int,
    core: int | None,
    other: int | None,
) -> AsyncIterator[Cluster]:
    """A run in which the measured learner takes part; it is stopped when this begins."""
    processes = Processes(folder, environment, other, PATIENCE_S)
    found = Cluster(processes)

    async with processes.cluster(lambda: processes.start("syncer-1", "diloco_syncer")) as (
        client,
        bus,
    ):
        processes.start(MEASURED, "diloco_learner", core)
        for n in range(2, learners + 1):
            processes.start(f"learner-{n}", "diloco_learner")
        await processes.members(client, 1 + learners)
        listening = asyncio.create_task(found.listen(bus))
        client.create_run(spec_of(size, learners).model_dump(mode="json", exclude={"id"}))
        try:
            await processes.until(
                f"every fragment is adopted by {MEASURED} once more",
                lambda: found.reports and min(found.reports[-1].told.adopted) >= 1,
            )
            found.halt()
            yield found
        finally:
            listening.cancel()


def environment_of(*, threads: int) -> dict[str, str]:
    """Of every process that computes. The flags are those that a learner sets for itself."""
    # Nobody finds programs that were compiled before, but in the cluster's own folder.
    others = ("DILOCO_", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    kept["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if threads:
        kept |= {"DILOCO_THREADS": str(threads), "NPROC": str(threads)}
        kept |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return kept


def loop_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """Of a loop that stands beside a learner: the same flags of XLA."""
    if not threads:
        return dict(environment)
    eigen = "false" if threads == 1 else "true"
    flags = f"--xla_cpu_multi_thread_eigen={eigen} intra_op_parallelism_threads={threads}"
    return {**environment, "XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} {flags}".strip()}
