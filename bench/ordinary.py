"""The first model of an ordinary size: 78 million parameters, every other setting left alone.

    python bench/ordinary.py [--steps 400] [--json FILE]

Two learners, a syncer and a standby train it as `diloco up` starts them, with a batch of one
sequence of eight bytes, so that the bytes of the exchange weigh and not the arithmetic. Its streams
would hold many times their limits if nothing were purged in time. Printed are the most that each
stream held and its limit, the longest time in which no round was committed, and how the run ended.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from runs import keep, surroundings
from storms.stack import Stack, until

RUN = "ordinary"
OVER = ("finished", "stopped", "failed")
# A run of some minutes is given this long, in seconds.
PATIENCE_S = 3600.0


def specification(steps: int) -> dict[str, Any]:
    """Only what makes the size, and how long it trains."""
    return {
        "name": RUN,
        "algorithm": {"fragments": 6, "sync_every_steps": 6},
        "model": {
            "preset": "small",
            "context_tokens": 8,
            "overrides": {
                "width": 768,
                "layers": 12,
                "heads": 12,
                "kv_heads": 6,
                "hidden": 2048,
            },
        },
        "inner": {"batch_sequences": 1},
        "membership": {"learners_min": 2},
        "budget": {"steps": steps},
    }


class Looking:
    """What was seen of the run so far."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.streams: dict[str, dict[str, int]] = {}  # by kind: the most that was there, its limit
        self.memory: dict[str, dict[str, int]] = {}
        self.rounds, self.changed_at, self.longest_s = 0, 0.0, 0.0

    def over(self) -> dict[str, Any] | None:
        """The final status; None while it trains."""
        run = self.stack.client.run(RUN)
        status: dict[str, Any] = run["status"] or {}
        self._used(run.get("budget") or {})
        now, rounds = time.monotonic(), status.get("rounds_committed", 0)
        if rounds != self.rounds:
            if self.rounds:
                self.longest_s = max(self.longest_s, now - self.changed_at)
            self.rounds, self.changed_at = rounds, now
        return status if status.get("state") in OVER else None

    def _used(self, budget: dict[str, Any]) -> None:
        for most, seen in (
            (self.streams, budget.get("streams", {})),
            (self.memory, budget.get("memory", {})),
        ):
            for name, of in seen.items():
                before = most.get(name, {}).get("used", 0)
                most[name] = of | {"used": max(before, of["used"] or 0)}


def measure(steps: int, folder: Path) -> dict[str, Any]:
    """The whole run."""
    with Stack(folder, learners=2, syncers=2) as stack:
        client = stack.client
        until("the members", lambda: sum(m["alive"] for m in client.members()) >= 4)
        client.create_run(specification(steps))
        began, looking = time.monotonic(), Looking(stack)
        status = until("the end of the run", looking.over, PATIENCE_S)
        return {
            "state": status["state"],
            "seconds": time.monotonic() - began,
            "rounds_committed": status["rounds_committed"],
            "versions": status["versions"],
            "longest_without_a_round_s": looking.longest_s,
            "streams": looking.streams,
            "memory": looking.memory,
        }


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=400, help="of each learner")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diloco-ordinary-") as folder:
        figures = measure(args.steps, Path(folder))
    print(
        f"{figures['state']} after {figures['seconds']:.0f} s and {figures['rounds_committed']} "
        f"rounds; the longest time without one {figures['longest_without_a_round_s']:.1f} s"
    )
    for name, of in sorted({**figures["streams"], **figures["memory"]}.items()):
        allowed = of.get("limit", of.get("budget"))
        print(f"{name:12} {of['used'] / 1e9:6.2f} GB of {(allowed or 0) / 1e9:6.2f} GB")
    if args.json:
        body = {"figures": figures, "steps": args.steps, "seed": 0, **surroundings(__file__)}
        keep(args.json, body, indent=1)


if __name__ == "__main__":
    main()
