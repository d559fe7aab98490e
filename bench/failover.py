"""A leader dies: how soon a standby commits the next round, and what learners notice of it.

    python bench/failover.py [--repeats 5] [--before 12] [--json FILE]

Real processes on one machine: two learners share one core, everything else (message server,
coordinator, two syncers, this script) the other one. The leading syncer is killed by SIGKILL; the
standby takes over; the dead one is started again, stands by, and the next repeat kills the other.

failover_s: from the kill to the first committed round of the new term, as read off the tape
(median of the repeats; the worst beside it); took_over_s: to the record of that term.
blocked_s_per_step_p99: of what learners' train loops spent on anything but computation, per step,
from the kill to that round. step_median_ratio: median time of a step in that window over the one
before the kill (median of the repeats).
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from beside import Processes, alone

from diloco_client import Client
from diloco_shared.bus.port import Bus
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Progress, TapeRound, TapeTerm
from diloco_shared.protocol.wire import decode, decode_tape

LEASE_S = 3.0
PATIENCE_S = 180.0
RUN = "failover"
SPEC: dict[str, Any] = {
    "name": RUN,
    "algorithm": {"fragments": 6, "quorum": 1},
    # A step of some tens of milliseconds: each is reported by itself.
    "inner": {"batch_sequences": 8},
    "membership": {"learners_min": 2, "leader_lease_s": LEASE_S},
    "evaluation": {"every_steps": 100_000, "sequences": 8},
    "keeping": {"checkpoint_every_steps": 100_000},
    "budget": {"steps": 10_000_000},
}


class Seen:
    """Reports of learners and rounds of the tape, with the time they came here."""

    def __init__(self) -> None:
        self.reports: defaultdict[str, list[tuple[float, Progress]]] = defaultdict(list)
        self.rounds: list[tuple[float, TapeRound]] = []
        self.terms: dict[int, float] = {}
        self.changed = asyncio.Event()

    async def progress(self, bus: Bus) -> None:
        async with bus.subscribe(subjects.progress(RUN, "*"), limit=65536) as deliveries:
            async for d in deliveries:
                p = decode(d.payload, Progress)
                self.reports[p.learner].append((time.monotonic(), p))

    async def tape(self, bus: Bus) -> None:
        async with bus.read(subjects.tape_stream(RUN), subjects.tape(RUN, 0)) as records:
            async for stored in records:
                record = decode_tape(stored.payload)
                if isinstance(record, TapeTerm):
                    self.terms[record.term] = time.monotonic()
                if isinstance(record, TapeRound) and record.outcome == "committed":
                    self.rounds.append((time.monotonic(), record))
                    self.changed.set()

    async def committed_after(self, term: int) -> float:
        """When the first round of a later term came."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for at, record in self.rounds:
                    if record.term > term:
                        return at
                self.changed.clear()
                await self.changed.wait()

    def steps(self, begin: float, end: float) -> tuple[list[float], list[float]]:
        """(seconds, blocked seconds) of every step that a learner reported in that time.

        Reports are by step, unless one is overtaken: then its steps share their times.
        """
        seconds, blocked = [], []
        for reports in self.reports.values():
            inside = [(at, p) for at, p in reports if begin <= at <= end and p.state == "stepping"]
            for (at, p), (later, q) in pairwise(inside):
                steps = q.step - p.step
                if steps > 0 and q.incarnation == p.incarnation:
                    seconds += [(later - at) / steps] * steps
                    blocked += [(q.wait_s - p.wait_s) / steps] * steps
        return seconds, blocked


async def measure(args: argparse.Namespace, folder: Path, cores: list[int]) -> list[dict[str, Any]]:
    """One row per repeat."""
    os.sched_setaffinity(0, {cores[0]})
    processes, rows = alone(folder, cores[0], PATIENCE_S), []

    def begin() -> None:
        for name in ("syncer-1", "syncer-2"):
            processes.start(name, "diloco_syncer")
        for name in ("learner-1", "learner-2"):
            processes.start(name, "diloco_learner", cores[1])

    async with processes.cluster(begin) as (client, bus):
        await processes.members(client, 5)
        client.create_run(SPEC)
        await processes.until("a leader", lambda: client.run(RUN)["status"])
        seen = Seen()
        async with asyncio.TaskGroup() as tasks:
            looks = [tasks.create_task(seen.progress(bus)), tasks.create_task(seen.tape(bus))]
            for n in range(args.repeats):
                rows.append(await failover(client, seen, processes, args.before))
                print(f"repeat {n + 1}: failover {rows[-1]['failover_s']:.2f} s", flush=True)
            for look in looks:
                look.cancel()
    return rows


def duties(client: Client) -> dict[str, str]:
    """state -> syncer, for those that live."""
    return {s["state"]: s["id"] for s in client.run(RUN)["syncers"]}


async def failover(
    client: Client, seen: Seen, processes: Processes, before_s: float
) -> dict[str, Any]:
    """Kill the leader once both are in place and rounds have gone on for a while."""
    await processes.until(
        "leader and standby", lambda: {"leading", "standby"} <= duties(client).keys()
    )
    count = len(seen.rounds)
    await processes.until("rounds", lambda: len(seen.rounds) > count + 12)
    await asyncio.sleep(before_s)
    victim, term = duties(client)["leading"], seen.rounds[-1][1].term
    killed_at = time.monotonic()
    processes.kill(victim)
    committed_at = await seen.committed_after(term)
    before_steps, before_blocked = seen.steps(killed_at - before_s, killed_at)
    window_steps, window_blocked = seen.steps(killed_at, committed_at)
    processes.start(victim, "diloco_syncer")
    return {
        "failover_s": committed_at - killed_at,
        "took_over_s": seen.terms[term + 1] - killed_at,
        "steps_before": len(before_steps),
        "steps_in_window": len(window_steps),
        "step_s_before": statistics.median(before_steps),
        "step_s_in_window": statistics.median(window_steps),
        "blocked_before": before_blocked,
        "blocked_in_window": window_blocked,
    }


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--before", type=float, default=12.0, help="seconds looked at before")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the learners, one for everything else")
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(args, Path(folder), cores))
    blocked = [b for row in rows for b in row.pop("blocked_in_window")]
    blocked_before = [b for row in rows for b in row.pop("blocked_before")]
    figures = {
        "failover_s": statistics.median(r["failover_s"] for r in rows),
        "took_over_s": statistics.median(r["took_over_s"] for r in rows),
        "failover_s_max": max(r["failover_s"] for r in rows),
        "lease_s": LEASE_S,
        "blocked_s_per_step_p99": p99(blocked),
        "blocked_s_per_step_p99_before": p99(blocked_before),
        "step_median_ratio": statistics.median(
            r["step_s_in_window"] / r["step_s_before"] for r in rows
        ),
    }
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" for k, v in row.items()))
    for name, value in figures.items():
        print(f"{name:32} {value:.6g}")
    if args.json:
        result = {
            "figures": figures,
            "repeats": rows,
            "seed": 0,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load_average": os.getloadavg()[0],
            "python": platform.python_version(),
            "command": f"python bench/failover.py --repeats {args.repeats} --before {args.before}",
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
