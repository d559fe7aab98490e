"""A storm of kills and hangs for as long as wanted: does anything grow, and what does it cost?

    python bench/soak.py [--minutes 60] [--every 20] [--seed 1] [--json FILE]

A real stack (`diloco up`: 3 learners, 2 syncers, coordinator, message server) trains nano while a
seeded Poisson process, one fault every 20 s on average, kills (SIGKILL), hangs (SIGSTOP for 0.5 to
8 s) and slows its processes. Every few seconds resident memory and open files of each process,
bytes of each stream and files on disk are noted. Then the same run without faults, for comparison.

flat: for every series, Theil-Sen slope over the last two thirds times that time is at most a tenth
of its median, or the slack beside SLACK below (one bucket of a sawtooth), whichever is more. Memory
counts in lives older than 60 s: before, a process is still compiling. The tape and the events are
left out: the tape is the run's own record and grows with its rounds (bytes a round are shown), the
events are bounded by 64 MiB.
ledger_exact: of every fragment, processed = merged + refused + overwritten + lost + in flight.
loss_ratio: validation loss at the end over that of the fault-free run at equal useful tokens. Both
are read off a line through the evaluations (loss over the logarithm of useful tokens) of the last
40 % of the storm: one evaluation is noisier than one per cent. The learning rate stays at its
peak, so that equal tokens are comparable.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from runs import surroundings
from storms.growth import Series, verdicts
from storms.schedule import Fault, storm
from storms.stack import AWAY, Stack, until

RUN = "soak"
LOOK_S = 5.0
# Between two tries of a fault whose target, or whose coordinator, is away just now.
TRY_S, TRIES = 1.0, 10
LOSS_RATIO_MAX = 1.01
STREAMS = ("UP", "DN", "STATE", "TAPE")
BUCKETS = ("KV_members", "KV_status", "KV_leases", "KV_shards", "KV_incarnations")


def spec(budget: dict[str, Any]) -> dict[str, Any]:
    """Nano at its peak rate; evaluated often."""
    return {
        "name": RUN,
        "seed": 1,
        "algorithm": {"fragments": 6, "quorum": 1, "overlap_steps": 8},
        "inner": {"final_fraction": 1.0},
        "membership": {"learners_min": 3},
        "evaluation": {"every_steps": 96, "sequences": 128},
        "budget": budget,
    }


class Watch:
    """Notes what there is every few seconds, until told to stop."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.began = time.monotonic()
        self.series: defaultdict[str, Series] = defaultdict(list)
        self.useful: list[tuple[int, int]] = []  # (steps of the run, useful tokens)
        self.status: dict[str, Any] = {}

    def look(self) -> None:
        now = time.monotonic() - self.began
        for name, process in self.stack.members().items():
            try:
                with process.oneshot():
                    age_s = time.time() - process.create_time()
                    self.series[f"rss {name}"].append((now, process.memory_info().rss, age_s))
                    self.series[f"files open {name}"].append((now, process.num_fds(), age_s))
            except Exception:  # it died in between
                continue
        number, size = self.stack.files()
        self.series["files on disk"].append((now, number, now))
        self.series["bytes on disk"].append((now, size, now))
        names = [f"{kind}-{RUN}" for kind in STREAMS] + [*BUCKETS, "EVENTS"]
        for name, size in asyncio.run(self.stack.streams(names)).items():
            self.series[f"stream {name}"].append((now, size, now))
        try:
            status = self.stack.client.run(RUN)["status"]
        except AWAY:
            return
        if status and status["tokens_useful"] >= self.status.get("tokens_useful", 0):
            self.status = status
            self.useful.append((status["stamp"]["steps"], status["tokens_useful"]))

    def losses(self) -> list[tuple[float, float]]:
        """(useful tokens, validation loss) of every evaluation, from what was seen around it."""
        steps, useful = np.array(sorted(set(self.useful)), dtype=float).T
        found = []
        for event in self.stack.client.events(RUN):
            if event["kind"] == "evaluation" and event["data"]["steps"] >= steps[0]:
                at = float(np.interp(event["data"]["steps"], steps, useful))
                found.append((at, float(event["data"]["val_loss"])))
        return sorted(found)


class Weather(threading.Thread):
    """Inflicts the faults of a schedule of seconds."""

    def __init__(self, stack: Stack, faults: list[Fault]) -> None:
        super().__init__(daemon=True)
        self.stack = stack
        self.faults = faults
        self.done: Counter[str] = Counter()
        self.over = threading.Event()

    def run(self) -> None:
        began = time.monotonic()
        for fault in self.faults:
            if self.over.wait(max(0.0, began + fault.at - time.monotonic())):
                return
            role = fault.target.split("-")[0]
            what = f"{fault.kind} {role}" if self._inflict(fault) else "missed"
            self.done[what] += 1

    def _inflict(self, fault: Fault) -> bool:
        for _ in range(TRIES):
            try:
                self.stack.client.chaos(fault.kind, fault.target, **fault.settings)
                return True
            except AWAY:
                if self.over.wait(TRY_S):
                    return False
        return False


def trained(stack: Stack, faults: list[Fault], budget: dict[str, Any], enough: float) -> Watch:
    """One run on a stack, to its end, or until so many tokens were useful."""
    until("all members", lambda: sum(m["alive"] for m in stack.client.members()) >= 7)
    stack.client.create_run(spec(budget))
    until("the first round", lambda: stack.client.rounds(RUN))
    watch, weather = Watch(stack), Weather(stack, faults)
    weather.start()
    while True:
        looked = time.monotonic()
        watch.look()
        done = watch.status.get("tokens_useful", 0) >= enough
        try:
            if done or stack.client.run(RUN)["state"] in ("finished", "stopped"):
                break
        except AWAY:
            pass
        time.sleep(max(0.0, looked + LOOK_S - time.monotonic()))
    weather.over.set()
    weather.join()
    if done:
        stack.client.stop(RUN)
    until("the end", lambda: stack.client.run(RUN)["state"] in ("finished", "stopped"))
    until("the last word", lambda: stack.client.run(RUN)["status"]["settled"])
    watch.status = stack.client.run(RUN)["status"]
    watch.useful.append((watch.status["stamp"]["steps"], watch.status["tokens_useful"]))
    watch.faults = dict(weather.done)  # type: ignore[attr-defined]
    return watch


def line(losses: list[tuple[float, float]], begin: float, end: float) -> float:
    """Loss at `end` useful tokens, off a line through the evaluations since `begin`."""
    inside = [(np.log(at), loss) for at, loss in losses if begin <= at <= end * 1.02]
    if len(inside) < 4:
        raise SystemExit(f"only {len(inside)} evaluations: give --minutes more")
    slope, offset = np.polyfit(*np.array(inside).T, 1)
    return float(slope * np.log(end) + offset)


def exact(status: dict[str, Any]) -> bool:
    """Every token of every fragment is in one class."""
    by_fragment = status["tokens_by_fragment"]
    return bool(by_fragment) and all(
        sum(f.values()) == status["tokens_processed"] for f in by_fragment
    )


def figures_of(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    faults = storm(
        args.seed,
        mean=args.every,
        end=args.minutes * 60,
        learners=[f"learner-{n}" for n in (1, 2, 3)],
        syncers=["syncer-1", "syncer-2"],
    )
    began = time.monotonic()
    with Stack(folder / "storm", learners=3, syncers=2) as stack:
        stormy = trained(stack, faults, {"seconds": args.minutes * 60}, float("inf"))
        losses, took_s = stormy.losses(), time.monotonic() - began
        rounds = stack.client.rounds(RUN)
        verified = stack.diloco("tape", "verify", RUN)
        replayed = stack.diloco("replay", RUN)
    end = float(stormy.status["tokens_useful"])
    with Stack(folder / "calm", learners=3, syncers=2) as stack:
        calm = trained(stack, [], {"steps": 10_000_000}, end * 1.03)
        calm_losses = calm.losses()
    at_end, reference = (line(found, end * 0.6, end) for found in (losses, calm_losses))
    rows = verdicts(stormy.series)
    tape = [size for _, size, _ in stormy.series[f"stream TAPE-{RUN}"]]
    return {
        "figures": {
            "minutes": round(took_s / 60, 1),
            "faults": sum(n for what, n in stormy.faults.items() if what != "missed"),  # type: ignore[attr-defined]
            "flat": all(row["flat"] for row in rows),
            "ledger_exact": exact(stormy.status),
            "tape_sound": not verified["faults"] and replayed["fault"] is None,
            "rounds_committed": sum(r["outcome"] == "committed" for r in rounds),
            "rounds_skipped": sum(r["outcome"] == "skipped" for r in rounds),
            "tape_bytes_per_round": round(max(tape, default=0) / max(len(rounds), 1)),
            "useful_tokens": end,
            "useful_share": end / stormy.status["tokens_processed"],
            "useful_share_calm": calm.status["tokens_useful"] / calm.status["tokens_processed"],
            "val_loss": at_end,
            "val_loss_calm": reference,
            "loss_ratio": at_end / reference,
            "loss_kept": at_end / reference <= LOSS_RATIO_MAX,
        },
        "tokens": stormy.status["tokens"],
        "faults": stormy.faults,  # type: ignore[attr-defined]
        "series": rows,
        "evaluations": {"storm": losses, "calm": calm_losses},
    }


def main() -> None:
    """Print a table; write the figures as JSON; status 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = figures_of(args, Path(folder))
    for row in result["series"]:
        mark = "flat" if row["flat"] else "GROWS"
        print(
            f"{row['series']:32} median {row['median']:>14,.0f}  grew {row['grew']:>12,.0f}  "
            f"bound {row['bound']:>12,.0f}  {mark}"
        )
    for name, value in result["figures"].items():
        print(f"{name:24} {value}")
    if args.json:
        about = {"seed": args.seed, "load_average_before": round(load, 1), **surroundings(__file__)}
        args.json.write_text(json.dumps({**result, **about}, indent=2) + "\n", encoding="utf-8")
    kept = ("flat", "ledger_exact", "tape_sound", "loss_kept")
    sys.exit(0 if all(result["figures"][name] for name in kept) else 1)


if __name__ == "__main__":
    main()
