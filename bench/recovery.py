"""A learner dies: how soon it is merged again, and what the others notice of it.

    python bench/recovery.py [--repeats 3] [--before 20] [--json FILE]

Real processes on one machine: three learners, a message server, a coordinator, a syncer. One
learner is killed by SIGKILL in the middle of a step, and started again at once, as a supervisor
would; the next repeat kills another one.

rounds_to_contribute: closed from the start of the victim's new process (interpreter, libraries and
compilation included) up to the one that merged it; must not exceed H. after_relaunch_s: the same in
seconds. survivor_stall_s: what the train loops of the other two spent on anything but their own
computation, from the kill to that round, the longer of both. moments_equal: 1 if in every repeat
the inner state that came to the newcomer has the digest of what its donor gave (that it holds what
came, tests say). phases_s: as `GET /v1/runs/NAME/recoveries` tells them (docs/how-to/recover.md),
medians.
All figures but the largest ones are medians of the repeats.
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
from pathlib import Path
from typing import Any

from beside import Processes, alone

from diloco_client import Client
from diloco_shared.bus.port import Bus
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Progress
from diloco_shared.protocol.wire import decode

PATIENCE_S = 300.0
RUN = "recovery"
LEARNERS = ("learner-1", "learner-2", "learner-3")


def spec_of(sequences: int) -> dict[str, Any]:
    """Steps of some hundred milliseconds and more: a round, as the reference's, takes seconds."""
    return {
        "name": RUN,
        "algorithm": {"fragments": 6, "quorum": 2},
        "inner": {"batch_sequences": sequences},
        "membership": {"learners_min": 3},
        "evaluation": {"every_steps": 1_000_000, "sequences": 8},
        "keeping": {"checkpoint_every_steps": 1_000_000},
        "budget": {"steps": 10_000_000},
    }


class Seen:
    """Reports of learners with the time they came here."""

    def __init__(self) -> None:
        self.reports: defaultdict[str, list[tuple[float, Progress]]] = defaultdict(list)

    async def progress(self, bus: Bus) -> None:
        async with bus.subscribe(subjects.progress(RUN, "*"), limit=65536) as deliveries:
            async for d in deliveries:
                p = decode(d.payload, Progress)
                self.reports[p.learner].append((time.monotonic(), p))

    def stalled_s(self, learner: str, begin: float, end: float) -> float:
        """Seconds its train loop waited for anything in that time."""
        inside = [p.wait_s for at, p in self.reports[learner] if begin <= at <= end]
        return inside[-1] - inside[0] if inside else 0.0

    def step_s(self, learner: str) -> float:
        return self.reports[learner][-1][1].step_s


async def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row per repeat."""
    processes, rows = alone(folder, None, PATIENCE_S), []

    def begin() -> None:
        processes.start("syncer-1", "diloco_syncer")
        for name in LEARNERS:
            processes.start(name, "diloco_learner")

    async with processes.cluster(begin) as (client, bus):
        await processes.members(client, 5)
        client.create_run(spec_of(args.sequences))
        await processes.until("the run", lambda: client.run(RUN)["status"])
        seen = Seen()
        async with asyncio.TaskGroup() as tasks:
            look = tasks.create_task(seen.progress(bus))
            for n in range(args.repeats):
                victim = LEARNERS[n % len(LEARNERS)]
                rows.append(await recovery(client, seen, processes, victim, args.before))
                row = rows[-1]
                print(
                    f"repeat {n + 1}: {victim} merged {row['rounds']} rounds and "
                    f"{row['after_relaunch_s']:.1f} s after its relaunch",
                    flush=True,
                )
            look.cancel()
    return rows


async def recovery(
    client: Client, seen: Seen, processes: Processes, victim: str, before_s: float
) -> dict[str, Any]:
    """Kill one once all three are merged again and rounds have gone on for a while."""
    await processes.until(
        "everybody taking part",
        lambda: len(client.run(RUN)["status"]["participating"]) == len(LEARNERS),
    )
    await asyncio.sleep(before_s)
    known = len(client.recoveries(RUN))
    tokens = client.run(RUN)["status"]["tokens"]
    killed_at = time.monotonic()
    processes.kill(victim)
    processes.start(victim, "diloco_learner")

    def back() -> dict[str, Any] | None:
        newer = [r for r in client.recoveries(RUN)[known:] if r["learner"] == victim]
        return next((r for r in newer if r["complete"]), None)

    found = await processes.until(f"{victim} merged again", back)
    back_at = time.monotonic()
    survivors = [name for name in LEARNERS if name != victim]
    given, held = await processes.until("both digests", lambda: digests(client, found))
    after = client.run(RUN)["status"]["tokens"]
    return {
        "victim": victim,
        "rounds": found["rounds"],
        "after_relaunch_s": found["contributed_at"] - found["restarted_at"],
        "stall_s": max(seen.stalled_s(name, killed_at, back_at) for name in survivors),
        "step_s": max(seen.step_s(name) for name in survivors),
        "source": found["source"],
        "donor": found["donor"],
        "moments_equal": int(given == held),
        "moments": held,
        "phases_s": found["phases_s"],
        "tokens_lost": after["lost"] - tokens["lost"],
    }


def digests(client: Client, found: dict[str, Any]) -> tuple[str, str] | None:
    """Of the inner state: what the donor gave, and what came to the newcomer."""
    events = client.events(RUN)
    learner, incarnation = found["learner"], found["incarnation"]
    held = [
        e["data"]["moments"]
        for e in events
        if e["kind"] == "recovered"
        and (e["source"], e["data"].get("incarnation")) == (learner, incarnation)
        and "moments" in e["data"]
    ]
    given = [
        e["data"]["moments"]
        for e in events
        if e["kind"] == "donated"
        and e["source"] == found["donor"]
        and e["data"]["newcomer"] == learner
    ]
    if found["source"] != "donor":
        return "no donor", ""
    return (given[-1], held[-1]) if given and held else None


def phases_of(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Median seconds per phase."""
    found: dict[str, float | None] = {}
    for name in rows[0]["phases_s"]:
        known = [r["phases_s"][name] for r in rows if r["phases_s"][name] is not None]
        found[name] = statistics.median(known) if known else None
    return found


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=float, default=20.0, help="seconds before each kill")
    parser.add_argument("--sequences", type=int, default=128, help="in a batch: sets the step time")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(args, Path(folder)))
    sync_every = 24  # H of the preset that spec_of leaves as it is
    figures: dict[str, Any] = {
        "rounds_to_contribute": statistics.median(r["rounds"] for r in rows),
        "rounds_to_contribute_max": max(r["rounds"] for r in rows),
        "sync_every_steps": sync_every,
        "after_relaunch_s": statistics.median(r["after_relaunch_s"] for r in rows),
        "survivor_stall_s": statistics.median(r["stall_s"] for r in rows),
        "survivor_stall_s_max": max(r["stall_s"] for r in rows),
        "moments_equal": min(r["moments_equal"] for r in rows),
        "step_s": statistics.median(r["step_s"] for r in rows),
        "round_s": statistics.median(r["step_s"] for r in rows) * sync_every / 6,
        "phases_s": phases_of(rows),
    }
    for row in rows:
        print("  ".join(f"{k} {v}" for k, v in row.items() if k not in ("phases_s", "moments")))
    for name, value in figures.items():
        print(f"{name:26} {value if isinstance(value, dict | int) else f'{value:.6g}'}")
    if args.json:
        result = {
            "figures": figures,
            "repeats": rows,
            "seed": 0,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load_average": os.getloadavg()[0],
            "python": platform.python_version(),
            "command": f"python bench/recovery.py --repeats {args.repeats} "
            f"--before {args.before:g} --sequences {args.sequences}",
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
