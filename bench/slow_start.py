"""How long a run takes to begin, and a newcomer to recover, where links are slow.

    python bench/slow_start.py [--params 100e6] [--mbit 20] [--json FILE]

A whole stack: message server, coordinator, one syncer, and two learners with real parameters and
moments whose gradients are synthetic (sizes/model.py). Each learner has a link of its own to the
hub, of the given rate each way, on which its control and data connections share the bytes; the
syncer is at the hub.

begin: from the last join until the last learner holds every anchor. One learner sends 4 bytes per
parameter, then, since nothing is published before all of it is on the tape, every learner fetches
as many: 8 bytes per parameter over the link of the slowest.

recover: a learner is killed; from its new process's join until it holds another learner's moments
and every anchor. 12 bytes per parameter over its own link: what its donor sends meanwhile crosses
another one.

The seconds of these bytes at the rate are what is compared with; nothing else is taken off: not the
protocol's overhead, not the run's own traffic, not the loading of the moments.
"""

import argparse
import json
import math
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from runs import surroundings
from sizes.standin import layout_of
from storms.stack import Stack, until

from diloco_shared.config import Model, RunSpec

RUN = "slow-start"
HERE = Path(__file__).resolve().parent
LEARNERS = ("learner-1", "learner-2")
VICTIM = "learner-2"
# Bytes per parameter on the slowest link.
BEGIN_BYTES, RECOVER_BYTES = 8, 12
# Waited for this many times what the bytes take, and this many seconds for processes to start.
PATIENCE, START_S = 4.0, 900.0


def width(args: argparse.Namespace) -> int:
    """Of the model's matrices: a power of two, so that each fragment has some of them."""
    return 1 << int(math.log2(math.sqrt(args.params / (3 * args.fragments))))


def specification(args: argparse.Namespace) -> dict[str, Any]:
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
            "overrides": {"parameters": int(args.params), "width": width(args)},
            "context_tokens": 8,
        },
        "inner": {"batch_sequences": 1, "learning_rate": 1e-4},
        "membership": {"learners_min": len(LEARNERS)},
        "evaluation": {"every_steps": 1_000_000, "sequences": 2},
        "keeping": {"checkpoint_every_steps": 1_000_000},
        "budget": {"steps": 1_000_000},
    }


class SlowStart:
    """One stack with the run on it."""

    def __init__(self, stack: Stack, args: argparse.Namespace) -> None:
        self.stack = stack
        self.args = args
        self.bytes_per_s: float = args.mbit * 1e6 / 8
        spec = RunSpec.model_validate(specification(args))
        self.parameters = sum(layout_of(spec.model, args.fragments).sizes)

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
        client.create_run(specification(self.args))
        patience_s = START_S + PATIENCE * self.bytes_s(BEGIN_BYTES)
        until("the first join", lambda: self.events("join"), patience_s)
        before = self.carried()
        until("the beginning", lambda: len(self.events("began")) == len(LEARNERS), patience_s)
        joined = [e["at"] for e in self.events("join")]
        began = self.events("began")[-1]["at"]
        initializers = len({e["data"].get("learner") for e in self.events("init")})
        # All have joined: from then on the parameters are asked for.
        seconds = began - joined[len(LEARNERS) - 1]
        return self.told("begin", seconds, BEGIN_BYTES, before) | {"initializers": initializers}

    def recover(self) -> dict[str, Any]:
        """Kill a learner; until its next life has recovered."""
        until("both to train", self._both_train, START_S)
        time.sleep(2.0)
        before, killed_at = self.carried(), time.time()
        self.stack.members()[VICTIM].send_signal(signal.SIGKILL)
        patience_s = START_S + PATIENCE * self.bytes_s(RECOVER_BYTES)

        def after(kind: str) -> list[dict[str, Any]]:
            told = (e for e in self.events(kind) if e["at"] > killed_at)
            return [e for e in told if e["data"].get("learner") == VICTIM]

        until("the recovery", lambda: after("recovered"), patience_s)
        joined, recovered = after("join"), after("recovered")[0]
        told = self.told("recover", recovered["at"] - joined[0]["at"], RECOVER_BYTES, before)
        return told | {
            "source": recovered["data"]["source"],
            "attempts": recovered["data"]["attempts"],
        }

    def _both_train(self) -> bool:
        status = self.stack.client.run(RUN)["status"] or {}
        return len(status["participating"]) == len(LEARNERS)

    def carried(self) -> dict[str, dict[str, int]]:
        """Bytes that have crossed each link, by way."""
        assert self.stack.links is not None
        return {name: dict(link.bytes) for name, link in self.stack.links.links.items()}

    def told(
        self, name: str, seconds: float, per_parameter: int, before: dict[str, dict[str, int]]
    ) -> dict[str, Any]:
        """A row of the table."""
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
        }


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole of it."""
    os.environ["PYTHONPATH"] = str(HERE)  # where learners find the model
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
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diloco-slow-start-") as folder:
        figures = measure(args, Path(folder))
    if args.json:
        body = {"figures": figures, "seed": 0, **surroundings(__file__)}
        args.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
