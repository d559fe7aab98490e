"""A storm of kills, hangs and cut links: does anything grow, and what does it cost?

    python bench/soak.py [--minutes 60] [--every 20] [--seed 1] [--json FILE] [--compare FILE]

A real stack (`diloco up`: 3 learners, 2 syncers, coordinator, message server) trains nano while a
seeded Poisson process, one fault every 20 s on average, kills (SIGKILL), hangs (SIGSTOP for 0.5 to
8 s) and slows its processes, or cuts a link: nothing passes between the message server and a
learner, or the first syncer, for 1 to 10 s, both ways or one. Every few seconds resident memory,
connections and other open files of each process, bytes of each stream and files on disk are
noted. Then the same run without faults, for comparison.

flat: for every series, Theil-Sen slope over the last two thirds times that time is at most a tenth
of its median, or the slack beside SLACK below (one bucket of a sawtooth), whichever is more. Memory
counts in lives older than 60 s: before, a process is still compiling. The tape may grow by as many
records as it may hold before they are archived. The events are left out, which 64 MiB bound.
ledger_exact: of every fragment, processed = merged + refused + overwritten + lost + in flight.
loss_ratio: validation loss of the parameters published at the end, over that of a run without
faults that has merged as many tokens: useful ones, not steps. Its budget counts tokens processed;
the second half of a pilot, a run of a few per cent of them, says what share is useful.
`tokens_ratio`, storm over calm, says how equal they became. If the storm has merged more, the run
without faults is credited with the power law through it and its pilot: more than it would have
gained, as losses flatten. The learning rate of each falls to the end of its own budget.

What the storm alone says is written to FILE at its end: the comparison takes as long again, and
`--compare FILE` makes it for the storm in FILE, at another time.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from runs import keep, surroundings
from storms.growth import Series, verdicts
from storms.schedule import Fault, storm
from storms.stack import AWAY, Stack, until

RUN = "soak"
LOOK_S = 5.0
# Between two tries of a fault whose target, or whose coordinator, is away just now.
TRY_S, TRIES = 1.0, 10
LOSS_RATIO_MAX = 1.01
# Part of the storm's tokens that the pilot processes: longer than it takes all learners to join.
PILOT = 0.07
LEARNERS, SYNCERS = [f"learner-{n}" for n in (1, 2, 3)], ["syncer-1", "syncer-2"]
# The other syncer's link stays whole: somebody can always lead.
LINKED = [*LEARNERS, SYNCERS[0]]
STREAMS = ("UP", "DN", "STATE", "TAPE")
BUCKETS = ("KV_members", "KV_status", "KV_leases", "KV_shards", "KV_incarnations")


def spec(budget: dict[str, Any]) -> dict[str, Any]:
    """Nano, evaluated often."""
    return {
        "name": RUN,
        "seed": 1,
        "algorithm": {"fragments": 6, "quorum": 1, "overlap_steps": 8},
        "membership": {"learners_min": 3},
        "evaluation": {"every_steps": 96, "sequences": 512},
        "budget": budget,
    }


class Watch:
    """Notes what there is every few seconds, until told to stop."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.began = time.monotonic()
        self.series: defaultdict[str, Series] = defaultdict(list)
        self.status: dict[str, Any] = {}
        self.tokens: list[tuple[int, int]] = []  # processed and useful ones
        self.faults: dict[str, int] = {}  # what was inflicted

    def look(self) -> None:
        now = time.monotonic() - self.began
        for name, process in self.stack.members().items():
            try:
                with process.oneshot():
                    age_s = time.time() - process.create_time()
                    self.series[f"rss {name}"].append((now, process.memory_info().rss, age_s))
                    links = len(process.net_connections("tcp"))
                    self.series[f"connections {name}"].append((now, links, age_s))
                    files = process.num_fds() - links
                    self.series[f"files open {name}"].append((now, files, age_s))
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
        if status:
            self.status = status
            self.tokens.append((status["tokens_processed"], status["tokens_useful"]))

    def useful_share_late(self) -> float:
        """Of the second half of its tokens: at the beginning learners still join."""
        processed, useful = self.tokens[-1]
        before = [t for t in [(0, 0), *self.tokens] if t[0] <= processed / 2][-1]
        return (useful - before[1]) / (processed - before[0])


def last_loss(stack: Stack) -> float:
    """Of the last evaluation: that of the end."""

    def last() -> list[float]:
        made = [e["data"] for e in stack.client.events(RUN) if e["kind"] == "evaluation"]
        return [data["val_loss"] for data in made if data["final"]]

    return float(until("the last evaluation", last)[-1])


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
                if fault.kind == "cut":
                    assert self.stack.links is not None
                    self.stack.links.cut(fault.target, **fault.settings)
                else:
                    self.stack.client.chaos(fault.kind, fault.target, **fault.settings)
                return True
            except AWAY:
                if self.over.wait(TRY_S):
                    return False
        return False


def trained(stack: Stack, faults: list[Fault], budget: dict[str, Any]) -> Watch:
    """One run on a stack, to its end."""
    until("all members", lambda: sum(m["alive"] for m in stack.client.members()) >= 7)
    stack.client.create_run(spec(budget))
    until("the first round", lambda: stack.client.rounds(RUN))
    watch, weather = Watch(stack), Weather(stack, faults)
    weather.start()
    while watch.status.get("state") not in ("finished", "stopped"):
        looked = time.monotonic()
        watch.look()
        time.sleep(max(0.0, looked + LOOK_S - time.monotonic()))
    weather.over.set()
    weather.join()
    until("the last word", lambda: stack.client.run(RUN)["status"]["settled"])
    watch.status = stack.client.run(RUN)["status"]
    watch.faults = dict(weather.done)
    return watch


def exact(status: dict[str, Any]) -> bool:
    """Every token of every fragment is in one class."""
    by_fragment = status["tokens_by_fragment"]
    return bool(by_fragment) and all(
        sum(f.values()) == status["tokens_processed"] for f in by_fragment
    )


def calm(folder: Path, tokens: int) -> tuple[Watch, float]:
    """A run without faults that processes so many tokens, and its loss at the end."""
    with Stack(folder, learners=3, syncers=2) as stack:
        return trained(stack, [], {"tokens": tokens}), last_loss(stack)


def useful_share(status: dict[str, Any]) -> float:
    return float(status["tokens_useful"] / status["tokens_processed"])


def stormy(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run through the storm: its figures, and what they are made of."""
    faults = storm(
        args.seed,
        mean=args.every,
        end=args.minutes * 60,
        learners=LEARNERS,
        syncers=SYNCERS,
        links=LINKED,
    )
    began = time.monotonic()
    with Stack(folder, learners=3, syncers=2, linked=LINKED) as stack:
        run = trained(stack, faults, {"seconds": args.minutes * 60})
        loss, took_s = last_loss(stack), time.monotonic() - began
        rounds = stack.client.rounds(RUN)
        verified = stack.diloco("tape", "verify", RUN)
        replayed = stack.diloco("replay", RUN)
    rows = verdicts(run.series)
    tape = [size for _, size, _ in run.series[f"stream TAPE-{RUN}"]]
    figures = {
        "minutes": round(took_s / 60, 1),
        "faults": sum(n for what, n in run.faults.items() if what != "missed"),
        "flat": all(row["flat"] for row in rows),
        "ledger_exact": exact(run.status),
        "tape_sound": not verified["faults"] and replayed["fault"] is None,
        "rounds_committed": sum(r["outcome"] == "committed" for r in rounds),
        "rounds_skipped": sum(r["outcome"] == "skipped" for r in rounds),
        "tape_bytes_per_round": round(max(tape, default=0) / max(len(rounds), 1)),
        "useful_tokens": run.status["tokens_useful"],
        "useful_share": useful_share(run.status),
        "val_loss": loss,
    }
    return figures, {"tokens": run.status["tokens"], "faults": run.faults, "series": rows}


def compared(figures: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same run without faults beside it."""
    useful = figures["useful_tokens"]
    pilot, pilot_loss = calm(folder / "pilot", round(PILOT * useful))
    run, loss = calm(folder / "calm", round(useful / pilot.useful_share_late()))
    reached, begun = run.status["tokens_useful"], pilot.status["tokens_useful"]
    fall = math.log(pilot_loss / loss) / math.log(reached / begun)
    credited = loss * max(1.0, useful / reached) ** -fall
    ratio = figures["val_loss"] / credited
    return {
        "useful_share_calm": useful_share(run.status),
        "tokens_ratio": useful / reached,
        "val_loss_calm": loss,
        "val_loss_pilot": pilot_loss,
        "val_loss_credited": credited,
        "loss_ratio": ratio,
        "loss_kept": ratio <= LOSS_RATIO_MAX,
    }


def main() -> None:
    """Print a table; write the figures as JSON; status 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path, help="report of the storm to compare with")
    args = parser.parse_args()
    load = round(os.getloadavg()[0], 1)
    about = {"load_average_before": load, **surroundings(__file__)}

    def write(result: dict[str, Any]) -> None:
        keep(args.json, result)

    with tempfile.TemporaryDirectory() as folder:
        if args.compare:
            result = json.loads(args.compare.read_text(encoding="utf-8")) | {"compared": about}
        else:
            figures, details = stormy(args, Path(folder) / "storm")
            result = {"figures": figures, **details, "seed": args.seed, **about}
            write(result)
        figures = result["figures"]
        figures |= compared(figures, Path(folder))
    for row in result["series"]:
        mark = "flat" if row["flat"] else "GROWS"
        print(
            f"{row['series']:32} median {row['median']:>14,.0f}  grew {row['grew']:>12,.0f}  "
            f"bound {row['bound']:>12,.0f}  {mark}"
        )
    for name, value in figures.items():
        print(f"{name:24} {value}")
    write(result)
    kept = ("flat", "ledger_exact", "tape_sound", "loss_kept")
    sys.exit(0 if all(figures[name] for name in kept) else 1)


if __name__ == "__main__":
    main()
