"""How long a run takes to begin, and a newcomer to recover, where links are slow.

    python bench/slow_start.py [--params 100e6] [--mbit 20] [--json FILE]

A whole stack: message server, coordinator, one syncer, and two learners with real parameters and
moments whose gradients are synthetic (sizes/model.py). Each learner has a link of its own to the
hub, of the given rate each way, on which its control and data connections share the bytes; the
syncer is at the hub.

begin: from the last join until the last learner holds every anchor. One learner sends 4 bytes per
parameter; all make the same ones, and need not fetch them. With --differing they do not: then,
since nothing is published before all of it is on the tape, every other learner fetches as many
after that, 8 bytes per parameter in all.

recover: a learner is killed; from its new process's join until it holds another learner's moments
and every anchor. 12 bytes per parameter over its own link: what its donor sends meanwhile crosses
another one. The newcomer's own initial parameters are of no use to it, as in a run whose first
version is long gone.

The seconds of these bytes at the rate are what is compared with. Nothing else is taken off: not the
headers of TCP and IP, which the links count too, nor NATS's, nor the run's own traffic, nor the
loading of the moments.
"""

import argparse
import itertools
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runs import keep, surroundings
from sizes.standin import layout_of
from storms.stack import Stack, until

from diloco_shared.spec.run import Model, RunSpec

RUN = "slow-start"
HERE = Path(__file__).resolve().parent
LEARNERS = ("learner-1", "learner-2")
VICTIM = "learner-2"
# Between two readings of what has crossed the links, in seconds.
READ_S = 1.0
# Bytes per parameter: what a learner sends at the beginning, or fetches, and what a newcomer does.
INITIAL_BYTES, RECOVER_BYTES = 4, 12
# Waited for this many times what the bytes take, and this many seconds for processes to start.
PATIENCE, START_S = 4.0, 900.0


def width(args: argparse.Namespace) -> int:
    """Of the model's matrices: a power of two, so that each fragment has some of them."""
    return 1 << int(math.log2(math.sqrt(args.params / (3 * args.fragments))))


def specification(args: argparse.Namespace, lives: Path) -> dict[str, Any]:
    """Rounds are rare: what is measured is how state travels."""
    return {
        "name": RUN,
        "algorithm": {
            "fragments": args.fragments,
            "sync_every_steps": args.fragments * args.steps_per_round,
            "overlap_steps": 2,
            "quorum": 1,
            "codec_up": "int4",
            "codec_down": "int4",
        },
        "model": {
            "factory": "sizes.model:make",
            **({"parameters": int(args.params)} if "parameters" in Model.model_fields else {}),
            "overrides": {
                "parameters": int(args.params),
                "width": width(args),
                "lives": str(lives),
            },
            "context_tokens": 8,
        },
        "inner": {"batch_sequences": 1, "learning_rate": 1e-4},
        "membership": {"learners_min": len(LEARNERS)},
        "evaluation": {"every_steps": 1_000_000, "sequences": 2},
        "keeping": {"checkpoint_every_steps": 1_000_000},
        "budget": {"steps": 1_000_000},
    }


class Meter:
    """Reads what has crossed each link and way every second, in a thread: where a link idles."""

    def __init__(self, read: Callable[[], dict[str, dict[str, int]]]) -> None:
        self._read = read
        self._readings = [(time.time(), read())]
        threading.Thread(target=self._go_on, daemon=True).start()

    def _go_on(self) -> None:
        while True:
            time.sleep(READ_S)
            self._readings.append((time.time(), self._read()))

    def between(self, start: float, end: float) -> dict[str, Any]:
        """Megabytes per second of each link and way: a number a reading, from `start` on."""
        found = [r for r in self._readings if start - READ_S <= r[0] <= end + READ_S]
        rates: dict[str, list[str]] = {}
        for (before_at, before), (after_at, after) in itertools.pairwise(found):
            for learner, ways in after.items():
                for way, crossed in ways.items():
                    rate = (crossed - before[learner][way]) / (after_at - before_at)
                    rates.setdefault(f"{learner} {way}", []).append(f"{rate / 1e6:.2f}")
        told = {link: " ".join(numbers) for link, numbers in rates.items()}
        return {"start": start, "every_s": READ_S} | told


class SlowStart:
    """One stack with the run on it."""

    def __init__(self, stack: Stack, args: argparse.Namespace) -> None:
        self.stack = stack
        self.bytes_per_s: float = args.mbit * 1e6 / 8
        # There from when on learners begin with parameters of their own.
        self.lives = stack.folder / "lives"
        self.begin_bytes = INITIAL_BYTES
        if args.differing:
            self.lives.touch()
            self.begin_bytes += INITIAL_BYTES
        self.specification = specification(args, self.lives)
        spec = RunSpec.model_validate(self.specification)
        self.parameters = sum(layout_of(spec.model, args.fragments).sizes)
        self.meter = Meter(self.carried)

    def bytes_s(self, bytes_per_parameter: int) -> float:
        """Seconds that so many bytes per parameter take at the rate."""
        return bytes_per_parameter * self.parameters / self.bytes_per_s

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Those of the run, oldest first; all if no kind is named."""
        found = [e for e in self.stack.client.events(RUN) if e["kind"] in kinds or not kinds]
        return sorted(found, key=lambda e: float(e["at"]))

    def begin(self) -> dict[str, Any]:
        """Submit; until every learner has begun."""
        client = self.stack.client
        until("the learners", lambda: sum(m["alive"] for m in client.members()) >= 3)
        client.create_run(self.specification)
        patience_s = START_S + PATIENCE * self.bytes_s(self.begin_bytes)
        until("the first join", lambda: self.events("join"), patience_s)
        before = self.carried()
        until("the beginning", lambda: len(self.events("began")) == len(LEARNERS), patience_s)
        joined = [e["at"] for e in self.events("join")]
        began = self.events("began")[-1]["at"]
        initializers = len({e["data"].get("learner") for e in self.events("init")})
        # All have joined: from then on the parameters are asked for.
        span = (joined[len(LEARNERS) - 1], began)
        return self.told("begin", span, self.begin_bytes, before) | {"initializers": initializers}

    def recover(self) -> dict[str, Any]:
        """Kill a learner; until its next life has recovered."""
        patience_s = START_S + PATIENCE * self.bytes_s(RECOVER_BYTES)
        until("both to train", self._both_train, patience_s)
        self.lives.touch()
        time.sleep(2.0)
        before, killed_at = self.carried(), time.time()
        self.stack.members()[VICTIM].send_signal(signal.SIGKILL)

        def after(kind: str) -> list[dict[str, Any]]:
            told = (e for e in self.events(kind) if e["at"] > killed_at)
            return [e for e in told if e["data"].get("learner") == VICTIM]

        until("the recovery", lambda: after("recovered"), patience_s)
        joined, recovered = after("join"), after("recovered")[0]
        span = (joined[0]["at"], recovered["at"])
        told = self.told("recover", span, RECOVER_BYTES, before)
        return told | {
            "source": recovered["data"]["source"],
            "attempts": recovered["data"]["attempts"],
        }

    def _both_train(self) -> bool:
        """Whether each has taken a step: then either has moments to give."""
        learners = self.stack.client.run(RUN)["status"]["learners"]
        return len([name for name in LEARNERS if learners[name]["step"] > 0]) == len(LEARNERS)

    def carried(self) -> dict[str, dict[str, int]]:
        """Bytes that have crossed each link, by way."""
        assert self.stack.links is not None
        return {name: dict(link.bytes) for name, link in self.stack.links.links.items()}

    def told(
        self,
        name: str,
        span: tuple[float, float],
        per_parameter: int,
        before: dict[str, dict[str, int]],
    ) -> dict[str, Any]:
        """A row of the table."""
        seconds = span[1] - span[0]
        least_s = self.bytes_s(per_parameter)
        crossed = {
            learner: {way: ways[way] - before[learner][way] for way in ways}
            for learner, ways in self.carried().items()
        }
        print(
            f"{name:10}{seconds:10.1f} s{least_s:12.1f} s for the bytes{seconds / least_s:8.2f}",
            flush=True,
        )
        return {
            "seconds": seconds,
            "bytes_seconds": least_s,
            "ratio": seconds / least_s,
            "crossed_bytes": crossed,
            "megabytes_per_s": self.meter.between(*span),
        }


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole of it."""
    os.environ["PYTHONPATH"] = str(HERE)  # where learners find the model, and may import it from
    rate = args.mbit * 1e6 / 8
    with Stack(folder, learners=2, syncers=1, linked=LEARNERS, link_bytes_per_s=rate) as stack:
        run = SlowStart(stack, args)
        print(f"{run.parameters:,} parameters, {args.mbit:g} Mbit/s each way", flush=True)
        begin = run.begin()
        recover = run.recover()
        refused = len(run.events("donor-failed", "upload-abandoned"))
        return {
            "parameters": run.parameters,
            "mbit": args.mbit,
            "differing": args.differing,
            "begin": begin,
            "recover": recover,
            "given_up": refused,
            "timeline": [[e["at"], e["source"], e["kind"], e["text"]] for e in run.events()],
        }


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--params", type=float, default=100e6, help="parameters of the model")
    parser.add_argument("--mbit", type=float, default=20.0, help="rate of each link, each way")
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--steps-per-round", type=int, default=25)
    parser.add_argument(
        "--differing", action="store_true", help="learners make other initial parameters each"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diloco-slow-start-") as folder:
        figures = measure(args, Path(folder))
    keep(args.json, {"figures": figures, "seed": 0, **surroundings(__file__)}, indent=1)


if __name__ == "__main__":
    main()
