"""`diloco demo`: three learners train, one is killed, training goes on and it comes back."""

import asyncio
import json
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from diloco_cli.cluster import Where, connect
from diloco_cli.faults import CliError
from diloco_cli.page import page
from diloco_cli.report import report
from diloco_cli.up.stack import Stack, started
from diloco_cli.view import run_lines, screen
from diloco_client import ApiError, Client, Unreachable

# The whole demo must be over by then; it takes about three minutes on two cores.
LIMIT_S = 285.0
# nano begins at ln 256 = 5.5 nats per byte or above; a model that learned nothing but how often
# each byte occurs stands at about 3.3. The demo must be well below.
LOSS_BOUND = 2.3
KILL_STEP = 500
VICTIM = "learner-2"
WAIT_BOUND_S = 0.1

SPEC: dict[str, Any] = {
    "name": "demo",
    "seed": 1,
    "algorithm": {"preset": "long", "fragments": 6, "quorum": 2, "overlap_steps": 8},
    "model": {"preset": "nano"},
    "membership": {"learners_min": 3},
    "evaluation": {"every_steps": 96},
    "budget": {"steps": 2400},
}


@dataclass(slots=True)
class Seen:
    """What the demo has learned from the API so far."""

    run: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def look(self, client: Client) -> None:
        """Fetch what is new."""
        self.run = client.run("demo")
        self.rounds += client.rounds("demo", after=self.rounds[-1]["seq"] if self.rounds else 0)
        after = self.events[-1]["seq"] if self.events else 0
        self.events += client.events("demo", after=after)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [e["data"] for e in self.events if e["kind"] == "evaluation"]

    @property
    def over(self) -> bool:
        final = any(e.get("final") for e in self.evaluations)
        finished: bool = bool(self.run) and self.run["state"] == "finished"
        return finished and final


def verdicts(figures: dict[str, Any]) -> list[tuple[str, bool]]:
    """What the demo promises, and whether it was kept."""
    loss, wait = figures["val_loss_end"], figures["survivor_wait_s"]
    return [
        (f"the run finished ({figures['state']})", figures["state"] == "finished"),
        (f"validation loss {loss} is below {LOSS_BOUND}", loss is not None and loss < LOSS_BOUND),
        (
            f"{figures['rounds_committed_while_down']} rounds committed while {VICTIM} was down",
            bool(figures["rounds_committed_while_down"]),
        ),
        (
            f"survivors waited {wait} s for anything but their own computation "
            f"(at most {WAIT_BOUND_S})",
            wait is not None and wait <= WAIT_BOUND_S,
        ),
        (
            f"{figures['victim_contributions_after_return']} contributions of {VICTIM} were merged "
            "after its return",
            bool(figures["victim_contributions_after_return"]),
        ),
    ]


async def demo(data: Path, *, port: int, console: Console) -> int:
    """Run it; the exit status."""
    began = time.monotonic()
    stack = Stack(data, learners=3, port=port, chaos=True, threads=1)
    running = asyncio.create_task(stack.run())
    seen = Seen()
    try:
        await _or_failure(running, _train(stack, seen, console, began))
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return _conclude(seen, data / "demo", console, time.monotonic() - began)


async def _or_failure(running: asyncio.Task[None], work: Any) -> None:
    """Do `work`, unless the stack fails first."""
    task = asyncio.create_task(work)
    done, _ = await asyncio.wait({running, task}, return_when=asyncio.FIRST_COMPLETED)
    if task not in done:
        task.cancel()
        running.result()
        raise CliError("the stack stopped")
    task.result()


async def _train(stack: Stack, seen: Seen, console: Console, began: float) -> None:
    def ready() -> bool:
        try:
            with connect(Where(data=stack.data)) as probe:
                return probe.ready()
        except CliError:
            return False

    await started(stack, ready)
    console.print(f"Live page: {stack.url}  (token in {stack.data}/admin-token)")
    client = connect(Where(data=stack.data))
    try:
        earlier = {run["name"] for run in await asyncio.to_thread(client.runs)}
        if "demo" in earlier:
            raise CliError(f"{stack.data} holds an earlier demo: remove it, or choose --data")
        await asyncio.to_thread(client.create_run, SPEC)
        await _watch(stack, seen, client, console, began)
    finally:
        client.close()


async def _watch(stack: Stack, seen: Seen, client: Client, console: Console, began: float) -> None:
    """Look on until the run is over; kill the victim once it trains."""
    armed, lines_at = False, 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while not seen.over and time.monotonic() - began < LIMIT_S:
            await asyncio.sleep(0.5)
            try:
                await asyncio.to_thread(seen.look, client)
                if not armed and _trains(seen.run):
                    await asyncio.to_thread(client.chaos, "kill", VICTIM, at_step=KILL_STEP)
                    stack.told(f"{VICTIM} shall be killed at its step {KILL_STEP}")
                    armed = True
            except (ApiError, Unreachable) as error:
                stack.told(str(error))
                continue
            last = seen.rounds[-1] if seen.rounds else None
            if console.is_terminal:
                live.update(screen(seen.run, seen.evaluations, last, stack.messages), refresh=True)
            elif time.monotonic() - lines_at > 10:
                lines_at = time.monotonic()
                console.print(*run_lines(seen.run, seen.evaluations, last)[:5], sep="\n")


def _trains(run: dict[str, Any]) -> bool:
    learner = ((run["status"] or {}).get("learners") or {}).get(VICTIM, {})
    return learner.get("state") == "stepping" and learner.get("step", 0) > 0


def _conclude(seen: Seen, folder: Path, console: Console, took_s: float) -> int:
    if not seen.run or not seen.rounds:
        raise CliError("nothing was trained: see the logs in the data folder")
    figures = report(seen.run, seen.rounds, seen.events)
    figures |= {
        "seconds": round(took_s, 1),
        "machine": f"{platform.machine()}, {_cores()} cores, Python {platform.python_version()}",
        "command": "diloco demo",
    }
    promises = verdicts(figures)
    figures["kept"] = all(kept for _, kept in promises)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(page(figures, seen.rounds, seen.events), encoding="utf-8")
    for text, kept in promises:
        console.print(f"[{'green' if kept else 'red'}]{'yes' if kept else 'NO '}[/] {text}")
    console.print(f"Report: {folder / 'report.html'} ({took_s:.0f} s)")
    return 0 if figures["kept"] else 1


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
