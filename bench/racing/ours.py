"""This project in the same race: real processes, the same model, data, rates and faults."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

from beside import alone
from recovery import PATIENCE_S, RUN, Seen

from diloco_cli.report import socket_bytes
from diloco_cli.up.stack import LEARNER_NICENESS
from racing.timeline import WINDOW_S

MODULE = "diloco_learner"
# Programs compiled by an earlier run are kept, as torch's kernels are compiled ahead.
COMPILED = Path("diloco-data/compiled").resolve()
# Between two looks at a run that goes on: a view costs its learners some of their processor.
LOOK_S = 1.0


class Ours:
    """A stack in `folder` with `workers` learners, looked at while it runs."""

    def __init__(self, folder: Path, spec: dict[str, Any], workers: int) -> None:
        folder.mkdir(parents=True)
        COMPILED.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.spec = spec | {"name": RUN, "membership": {"learners_min": workers}}
        self.learners = [f"learner-{n + 1}" for n in range(workers)]
        self.seen = Seen()

    def run(self, body: Callable[["Ours"], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
        """`body` once everything runs; what it returns."""
        return asyncio.run(self._run(body))

    async def _run(
        self, body: Callable[["Ours"], Coroutine[Any, Any, dict[str, Any]]]
    ) -> dict[str, Any]:
        self.processes = alone(self.folder, None, PATIENCE_S)
        self.processes.environment["DILOCO_CACHE"] = str(COMPILED)

        def begin() -> None:
            self.processes.start("syncer-1", "diloco_syncer")
            for learner in self.learners:
                self.start(learner)

        async with self.processes.cluster(begin) as (self.client, bus):
            await self.processes.members(self.client, 2 + len(self.learners))
            self.client.create_run(self.spec)
            looking = asyncio.create_task(self.seen.progress(bus))
            found = await body(self)
            looking.cancel()
        return found

    def start(self, learner: str) -> None:
        """As `diloco up` starts it: others have the processor first."""
        self.processes.start(learner, MODULE)
        os.setpriority(os.PRIO_PROCESS, self.processes.running[learner].pid, LEARNER_NICENESS)

    def steps(self, learner: str) -> list[float]:
        """Times of its steps; steps of one report share the time since the one before."""
        times = []
        for (at, p), (later, q) in pairwise(self.seen.reports[learner]):
            new = q.step - (p.step if q.incarnation == p.incarnation else 0)
            times += [at + (later - at) * (n + 1) / new for n in range(new)]
        return times

    def shards(self, learner: str) -> list[int]:
        """Data shards in the order in which it read them."""
        cursors = [p.cursor for _, p in self.seen.reports[learner] if p.cursor is not None]
        return list(dict.fromkeys(cursor.shard for cursor in cursors))

    async def all_stepped(self, steps: int) -> None:
        def enough() -> bool:
            return min(len(self.steps(learner)) for learner in self.learners) >= steps

        await self.processes.until(f"{steps} steps of everybody", enough, look_s=LOOK_S)


async def whole(ours: Ours, limit_s: float) -> dict[str, Any]:
    """Until the run is over: its loss, its bytes at the learners' sockets, its steps."""

    def over() -> dict[str, Any] | None:
        run = ours.client.run(RUN)
        learners = (run["status"] or {"learners": {}})["learners"].values()
        done = run["state"] == "finished" and all(x["state"] == "finished" for x in learners)
        return run if done else None

    run = await ours.processes.until("the end of the run", over, limit_s, look_s=LOOK_S)
    status = run["status"]
    losses = [e["data"]["val_loss"] for e in ours.client.events(RUN) if e["kind"] == "evaluation"]
    return {
        "val_loss": losses[-1],
        "tokens": status["tokens_processed"],
        "tokens_useful": status["tokens_useful"],
        "bytes_by_plane": socket_bytes(status),
        "bytes": sum(socket_bytes(status).values()),
        "steps": {name: ours.steps(name) for name in ours.learners},
        "shards": {name: ours.shards(name) for name in ours.learners},
        "rounds": status["rounds_committed"],
        "rounds_skipped": status["rounds_skipped"],
    }


def faulted(kind: str, warm: int, hang_s: float, watched_s: float) -> Any:
    """The body of a run in which the last learner is killed, or stopped for `hang_s`."""

    async def body(ours: Ours) -> dict[str, Any]:
        victim = ours.learners[-1]
        await ours.all_stepped(warm)
        await asyncio.sleep(WINDOW_S)
        before = len(ours.client.rounds(RUN))
        lives = ours.seen.reports[victim][-1][1].incarnation
        struck, wall = time.monotonic(), time.time()
        if kind == "kill":
            ours.processes.kill(victim)
            ours.start(victim)
            back = 0.0
        else:
            ours.processes.running[victim].send_signal(signal.SIGSTOP)
            await asyncio.sleep(hang_s)
            ours.processes.running[victim].send_signal(signal.SIGCONT)
            back = hang_s
        await asyncio.sleep(struck + watched_s - time.monotonic())
        if kind == "kill":  # what its earlier life had sent may be merged a moment later
            again = [at for at, p in ours.seen.reports[victim] if p.incarnation > lives and p.step]
            returned = wall + (again[0] - struck) if again else float("inf")
        else:
            returned = wall + back
        merged = [
            r["at"]
            for r in ours.client.rounds(RUN)[before:]
            if r["at"] > returned and _of(r, victim)
        ]
        return {
            "struck": struck,
            "contributes_s": merged[0] - wall - back if merged else None,
            "steps": {name: ours.steps(name) for name in ours.learners},
            "notes": [],
        }

    return body


def _of(r: dict[str, Any], learner: str) -> bool:
    return any(v["learner"] == learner and v["outcome"] == "merged" for v in r["verdicts"])
