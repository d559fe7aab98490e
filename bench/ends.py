"""Short runs in a row on one stack: each ends, each is deleted, the next begins.

    python bench/ends.py [--runs 300] [--steps 48] [--seed 1] [--json FILE]

`diloco up` with 3 learners and 2 syncers. Every run has the same name. Of each three runs one ends
by itself, one has its leader killed (SIGKILL) somewhere between the last rounds and the second
after the end, and one is stopped by its user, every other time with its leader killed at that very
moment. Exit status 1 as soon as a run does not end, is not deleted, or does not begin in its time.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from runs import keep, surroundings
from storms.stack import AWAY, Stack, until

from diloco_client import ApiError

RUN = "end"
LEARNERS, SYNCERS = 3, 2
# Patience, in seconds: a busy machine compiles and restarts slowly; a lock would last for ever.
BEGINS_S, ENDS_S, DELETED_S = 240.0, 120.0, 60.0
# Ways in which a run ends, in turn.
WAYS = ("by itself", "leader killed", "stopped")


@dataclass
class Ended:
    """One run; seconds."""

    number: int
    way: str
    state: str
    begin_s: float  # from submission to the first round
    stop_s: float  # from the wish to the end; 0 if it was not stopped
    delete_s: float  # from the end to the deletion


def spec(steps: int) -> dict[str, Any]:
    return {
        "name": RUN,
        "algorithm": {"fragments": 6, "quorum": 1, "overlap_steps": 8},
        "membership": {"learners_min": LEARNERS, "syncers": SYNCERS},
        "evaluation": {"every_steps": 48, "sequences": 8},
        "budget": {"steps": steps},
    }


class Series:
    """Runs one after the other on `stack`."""

    def __init__(self, stack: Stack, steps: int, seed: int) -> None:
        self.stack = stack
        self.steps = steps
        self.rng = random.Random(seed)

    def one(self, number: int) -> Ended:
        """From submission to deletion. SystemExit says what never came."""
        way, began = WAYS[number % len(WAYS)], time.monotonic()
        # What is stopped must not end before; what ends by itself must end soon.
        steps = 100_000 if way == "stopped" else self.steps
        self._until(f"run {number} to be taken", lambda: self._submit(steps), BEGINS_S)
        self._until(f"run {number} to begin", lambda: self._fraction() > 0, BEGINS_S)
        begin_s, stop_s = time.monotonic() - began, 0.0
        if way == "leader killed":
            near = self.rng.uniform(0.6, 1.0)
            self._until(f"run {number} to be near its end", lambda: self._near(near), ENDS_S)
            time.sleep(self.rng.uniform(0.0, 1.5))
            self._kill_leader()
        wished = time.monotonic()
        if way == "stopped":
            if number % 2:
                self._kill_leader()
            self._until("a coordinator that can be told", lambda: self.stack.client.stop(RUN), 60.0)
        state = self._until(f"the end of run {number}", self._over, ENDS_S)
        ended = time.monotonic()
        stop_s = ended - wished if way == "stopped" else 0.0
        self._until(f"run {number} to be deleted", self._delete, DELETED_S)
        return Ended(number, way, state, begin_s, stop_s, time.monotonic() - ended)

    def _until(self, what: str, holds: Callable[[], Any], patience_s: float) -> Any:
        try:
            return until(what, holds, patience_s)
        except SystemExit as error:
            try:
                run = json.dumps(self.stack.client.run(RUN), indent=1)
                members = json.dumps(self.stack.client.members(), indent=1)
            except AWAY as away:
                run, members = str(away), ""
            raise SystemExit(f"{error}\n{run[:4000]}\n{members[:6000]}") from None

    def _submit(self, steps: int) -> bool:
        try:
            self.stack.client.create_run(spec(steps))
        except ApiError as error:
            if error.status != 409:  # an answer that was lost
                raise
        return True

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.stack.client.run(RUN)["status"] or {}
        return status

    def _fraction(self) -> float:
        return float(self._status()["stamp"]["fraction"])

    def _near(self, fraction: float) -> bool:
        return bool(self._over()) or self._fraction() >= fraction

    def _over(self) -> str:
        state = str(self.stack.client.run(RUN)["state"])
        return state if state in ("finished", "stopped") else ""

    def _kill_leader(self) -> None:
        leader = str(self._status().get("leader", ""))
        process = self.stack.members().get(leader)
        if process is not None:
            with suppress(psutil.Error):  # it has just ended
                process.kill()

    def _delete(self) -> bool:
        try:
            self.stack.client.delete_run(RUN)
        except ApiError as error:
            if error.status == 404:  # an answer that was lost
                return True
            if error.status != 409:
                raise
            return False
        return True


def summary(ended: list[Ended]) -> dict[str, Any]:
    """Of each way: how many runs, and the slowest of each part."""
    ways = {}
    for way in WAYS:
        mine = [e for e in ended if e.way == way]
        if mine:
            ways[way] = {"runs": len(mine)} | {
                f"{part}_max": round(max(getattr(e, part) for e in mine), 2)
                for part in ("begin_s", "stop_s", "delete_s")
            }
    return {"runs": len(ended), "ways": ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--steps", type=int, default=48, help="of each run that is not stopped")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ended: list[Ended] = []
    fault = ""
    with (
        tempfile.TemporaryDirectory(prefix="diloco-ends-") as folder,
        Stack(Path(folder) / "data", learners=LEARNERS, syncers=SYNCERS) as stack,
    ):
        series = Series(stack, args.steps, args.seed)
        try:
            for number in range(args.runs):
                ended.append(series.one(number))
                e = ended[-1]
                print(
                    f"run {number:>4} {e.way:>13}: {e.state}, began in {e.begin_s:.1f} s, "
                    f"stopped in {e.stop_s:.1f} s, deleted in {e.delete_s:.1f} s",
                    flush=True,
                )
        except SystemExit as error:
            fault = str(error)
    found = summary(ended) | {"fault": fault}
    for way, figures in found["ways"].items():
        print(f"{way:>13}  " + "  ".join(f"{name} {value}" for name, value in figures.items()))
    print(fault or f"{len(ended)} runs, each ended, was deleted, and the next began")
    keep(args.json, {**surroundings(__file__), **found, "each": [asdict(e) for e in ended]})
    sys.exit(1 if fault else 0)


if __name__ == "__main__":
    main()
