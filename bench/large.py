"""A run of an ordinary size on real services: who holds how much, and does it survive its deaths?

    python bench/large.py --params 200e6 [--json FILE]
    python bench/large.py --params 1e9 --stand-ins [--json FILE]

The first form starts the whole stack: message server, coordinator, two syncers and two learners
with real parameters and moments, whose gradients are synthetic (sizes/model.py), so that nothing
is spent on a forward pass. Every fragment is merged until it has passed a keyframe; then a learner
is killed and comes back through a donor; then the leading syncer is killed and the standby takes
over. The second form replaces the learners by stand-ins that send and receive the real bytes and
hold one fragment at a time (sizes/standin.py), has one syncer, and kills and restarts it once every
fragment was merged twice.

memory_over_budget: the most that a process held for itself, over what the run's budget says for
it. loop_lag_max_s: the longest that any event loop was held, as the processes say themselves.
Failovers and lost learners that nobody caused count as false ones. Of each stream the most that it
held is told beside its budget, which is for the worst moment and may not come.
"""

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from runs import keep, surroundings
from sizes.model import parameters_of
from sizes.standin import layout_of
from sizes.watching import Watching
from storms.stack import Stack, until

from diloco_shared.budget import assumed
from diloco_shared.budget.memory import device, processes
from diloco_shared.spec.run import RunSpec

RUN = "large"
HERE = Path(__file__).resolve().parent
# A gigabyte through two busy cores takes its time: limits of waits, in seconds.
BEGIN_S, MERGE_S, BACK_S = 1800.0, 3600.0, 1200.0


def even_width(parameters: float, fragments: int) -> int:
    """The widest power of two that gives every fragment some six matrices: as even as real ones."""
    return max(64, 1 << int(math.log2(math.sqrt(parameters / (6 * fragments)))))


def specification(args: argparse.Namespace) -> dict[str, Any]:
    """The run: 24 fragments, four bits both ways."""
    return {
        "name": RUN,
        "algorithm": {
            "fragments": args.fragments,
            "sync_every_steps": args.fragments,
            "overlap_steps": 2,
            "quorum": 1,
            "codec_up": args.codec,
            "codec_down": args.codec,
            "error_feedback": not args.stand_ins,
            "keyframe_every": 2,
        },
        "model": {
            "factory": "sizes.model:make",
            "parameters": parameters_of(int(args.params), args.width),
            "overrides": {"parameters": int(args.params), "width": args.width},
            "context_tokens": 8,
        },
        "inner": {"batch_sequences": 1, "learning_rate": 1e-4},
        "membership": {"learners_min": 2},
        "evaluation": {"every_steps": 1_000_000, "sequences": 2},
        "keeping": {
            "checkpoint_every_steps": 1_000_000,
            "snapshot_every_rounds": args.fragments,
        },
        "budget": {"steps": 1_000_000},
    }


class Measured:
    """One stack with the run on it."""

    def __init__(self, stack: Stack, args: argparse.Namespace) -> None:
        self.stack = stack
        self.args = args
        self.spec = RunSpec.model_validate(specification(args))
        self.layout = layout_of(self.spec.model, args.fragments)
        self.parameters = sum(self.layout.sizes)
        self.standins: dict[str, subprocess.Popen[bytes]] = {}
        self.killed: list[str] = []
        self.phases: dict[str, float] = {}
        self.watching = Watching(self._members, self._addresses, self._streams, stack.token)

    # --- looking -------------------------------------------------------------------------------

    def _members(self) -> dict[str, int]:
        try:
            return {name: process.pid for name, process in self.stack.members().items()}
        except psutil.Error:
            return {}

    def _addresses(self) -> dict[str, str]:
        try:
            members = self.stack.client.members()
        except Exception:  # the coordinator is starting, or its bus is away
            return {}
        return {m["id"]: m["address"] for m in members if m.get("alive") and m.get("address")}

    def _streams(self) -> dict[str, tuple[int, int]]:
        try:
            streams = (self.stack.client.run(RUN)["budget"] or {})["streams"]
        except Exception:  # the coordinator is starting, or its bus is away
            return {}
        return {kind: (s["used"] or 0, s["needed"]) for kind, s in streams.items()}

    def status(self) -> dict[str, Any]:
        """The leader's newest words."""
        status: dict[str, Any] = self.stack.client.run(RUN)["status"] or {}
        return status

    def versions(self) -> int:
        """How often the fragment that is least merged was merged."""
        versions: list[int] = self.status()["versions"]
        return min(versions)

    def phase(self, name: str, wait: Callable[[], Any], patience_s: float) -> Any:
        """Wait for something, and tell how long it took."""
        began = time.monotonic()
        found = until(name, wait, patience_s)
        self.phases[name] = time.monotonic() - began
        print(f"{name:44} {self.phases[name]:8.1f} s", flush=True)
        return found

    # --- doing ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Submit, and wait until every fragment has a version."""
        client = self.stack.client
        until("the members", lambda: sum(m["alive"] for m in client.members()) >= 3)
        if self.args.stand_ins:
            self._start_standins()
        client.create_run(specification(self.args))
        self.watching.start()
        self.phase("initial parameters are published", lambda: self.versions() >= 0, BEGIN_S)

    def _start_standins(self) -> None:
        url = f"nats://{self.stack.endpoint()['nats']}"
        token = (self.stack.folder / "nats-token").read_text().strip()
        for n in (1, 2):
            name = f"stand-in-{n}"
            command = [sys.executable, "-m", "sizes.standin", name, url, token]
            self.standins[name] = subprocess.Popen(
                [*command, str(self.stack.folder), str(self.args.step_s)],
                env={**os.environ, "PYTHONPATH": str(HERE)},
            )

    def kill(self, name: str) -> None:
        """SIGKILL; the supervisor starts it again."""
        self.killed.append(name)
        self.stack.members()[name].send_signal(signal.SIGKILL)

    def merge(self, versions: int) -> None:
        """Until every fragment was merged that often."""
        text = f"every fragment is merged {versions} times"
        self.phase(text, lambda: self.versions() >= versions, MERGE_S)

    def lose_learner(self) -> dict[str, Any]:
        """Kill one; until it is merged again. How it came back."""
        victim = "learner-2"
        lives = self._lives(victim)
        self.kill(victim)

        def back() -> dict[str, Any] | None:
            recoveries = self.stack.client.recoveries(RUN)
            done = [r for r in recoveries if r["learner"] == victim and r.get("contributed_at")]
            return next((r for r in done if r["incarnation"] > lives), None)

        found: dict[str, Any] = self.phase("a killed learner is merged again", back, BACK_S)
        return found

    def _lives(self, learner: str) -> int:
        shown: dict[str, Any] = self.status()["learners"].get(learner, {})
        return int(shown.get("incarnation", 0))

    def lose_leader(self) -> None:
        """Kill it; until a later term has committed a round."""
        status = self.status()
        before = (status["term"], status["rounds_committed"])
        self.kill(status["leader"])

        def on() -> bool:
            now = self.status()
            return bool(now["term"] > before[0] and now["rounds_committed"] > before[1])

        self.phase("a new term has committed a round", on, BACK_S)

    def end(self) -> None:
        """Stop the run, and wait until it is over."""
        self.stack.client.stop(RUN)
        over = ("finished", "stopped")
        self.phase("the run is over", lambda: self.status()["state"] in over, BACK_S)
        self.watching.stop()
        for process in self.standins.values():
            process.terminate()
            process.wait(30)

    # --- judging -------------------------------------------------------------------------------

    def figures(self, budget_of: Callable[[str], int]) -> dict[str, Any]:
        """What came of it; `budget_of`: bytes by role."""
        events = self.stack.client.events()
        kinds = [e["kind"] for e in events if e["run"] == RUN]
        lost = [
            e["data"].get("learner", "")
            for e in events
            if e["run"] == RUN and e["kind"] == "learner-lost"
        ]
        roles = {n: n.rpartition("-")[0] for n in self.watching.peak if "-" in n}
        roles = {n: role for n, role in roles.items() if role in ("syncer", "learner")}
        memory = {
            name: {
                "peak_bytes": self.watching.peak[name],
                "budget_bytes": budget_of(role),
                "bytes_per_parameter": self.watching.peak[name] / self.parameters,
                "memory_over_budget": self.watching.peak[name] / budget_of(role),
            }
            for name, role in sorted(roles.items())
        }
        killed = [n for n in self.killed if n.startswith("syncer")]
        return {
            "parameters": self.parameters,
            "memory": memory,
            "memory_over_budget": max(m["memory_over_budget"] for m in memory.values()),
            "streams": {
                kind: {"most_bytes": held, "budget_bytes": needed, "share": held / needed}
                for kind, (held, needed) in sorted(self.watching.held.items())
            },
            "loop_lag_max_s": max((s for s, _ in self.watching.lag.values()), default=0.0),
            "loop_lag": {
                name: {"seconds": seconds, "by": by}
                for name, (seconds, by) in sorted(self.watching.lag.items())
            },
            "false_failovers": kinds.count("term") - 1 - len(killed),
            "false_evictions": sum(name not in self.killed for name in lost),
            "versions": self.versions(),
            "rounds_committed": self.status()["rounds_committed"],
            "rounds_skipped": self.status()["rounds_skipped"],
            "phases_s": self.phases,
        }


def budget(spec: RunSpec) -> Callable[[str], int]:
    """Bytes that the run's budget grants a process of a role; without an accelerator a learner's
    device is the host's memory too."""
    job = assumed(spec, learners=2)
    needs = processes(job)
    learner = needs["learner"].bytes + device(job, on_cpu=True).bytes
    return {"syncer": needs["syncer"].bytes, "learner": learner}.__getitem__


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole of it."""
    os.environ["PYTHONPATH"] = str(HERE)  # where learners find the model
    learners, syncers = (0, 1) if args.stand_ins else (2, 2)
    with Stack(folder, learners=learners, syncers=syncers) as stack:
        run = Measured(stack, args)
        run.begin()
        run.merge(3)
        recovery = {} if args.stand_ins else run.lose_learner()
        run.lose_leader()
        run.merge(run.versions() + 1)
        run.end()
        return run.figures(budget(run.spec)) | {"recovery": recovery}


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--params", type=float, default=200e6, help="parameters of the model")
    parser.add_argument("--stand-ins", action="store_true", help="learners that hold no model")
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--codec", default="int4", help="both ways")
    parser.add_argument("--width", type=int, default=0, help="of the matrices; 0: what is even")
    parser.add_argument("--step-s", type=float, default=1.0, help="a stand-in's step")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.width = args.width or even_width(args.params, args.fragments)
    with tempfile.TemporaryDirectory(prefix="diloco-large-") as folder:
        figures = measure(args, Path(folder))
    for name, m in figures["memory"].items():
        print(
            f"{name:12} {m['peak_bytes'] / 1e9:6.2f} GB  {m['bytes_per_parameter']:5.1f} B a "
            f"parameter  {m['memory_over_budget']:5.2f} of its budget"
        )
    for kind, s in figures["streams"].items():
        print(f"{kind:12} {s['most_bytes'] / 1e9:6.2f} GB  {s['share']:5.2f} of its budget")
    for name, lag in figures["loop_lag"].items():
        print(f"{name:12} {lag['seconds']:6.3f} s longest hold, by {lag['by'] or 'nothing'}")
    shown = ("memory_over_budget", "loop_lag_max_s", "false_failovers", "false_evictions")
    for name in shown:
        print(f"{name:24} {figures[name]:.3g}")
    keep(args.json, {"figures": figures, "seed": 0, **surroundings(__file__)}, indent=1)


if __name__ == "__main__":
    main()
