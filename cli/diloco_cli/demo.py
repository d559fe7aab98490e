"""`diloco demo`: three learners train, one is killed, training goes on and it comes back."""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from diloco_cli.api import answers, connect
from diloco_cli.cluster import Where
from diloco_cli.lines import columns, shaped
from diloco_cli.live import Screen
from diloco_cli.meanwhile import meanwhile
from diloco_cli.page import page
from diloco_cli.report import report, versions
from diloco_cli.seen import Seen
from diloco_cli.tally import Tally
from diloco_cli.up.stack import EachLearner, Stack, started
from diloco_cli.words import FAILED, INTERRUPTED, CliError, counted, why
from diloco_client import ApiError, Client, Unreachable

LOOK_S = 0.5
REPORTS = ("report.json", "report.html")
# nano begins above ln 256 = 5.5 nats per byte; a model that learned nothing but how often each
# byte occurs stands at about 3.3. The demo must be well below.
LOSS_BOUND = 2.2
# Or after a third of a shorter demo, so that it is back well before the end.
KILL_STEP = 80
VICTIM = "learner-2"
# The victim stays away so long, in seconds: long enough that some rounds are committed meanwhile.
# A round takes two seconds on an idle machine.
AWAY_S = 10.0
# What survivors may spend on anything but their own computation, in seconds over the whole run.
WAIT_S_MAX = 0.1
# Share of the tokens that must end up in the model. The rest is overwritten while a merge is under
# way, or dies with the victim. A fragment is merged every 24 steps, so each step that an answer
# takes costs 4 %: two steps on an idle machine, three or four where others want the cores as well.
USEFUL_MIN = 0.75
# Share of the others' contributions that may come late. Nobody is late by the method itself. But
# the first rounds do not know yet how long a step takes here, and on a machine with fewer cores
# than processes a learner is held up for a step now and then: 1 and 5 of 132 in two runs on two.
LATE_MAX = 0.1
# What a round gives its learners to answer before anybody knows how long that takes, in seconds. On
# a busy machine it is a step of several seconds, and everybody would miss the first rounds.
PULL_S_MIN = 30.0


def spec_of(name: str, steps: int) -> dict[str, Any]:
    """The run: nano on the source code of the running Python's standard library.

    With a batch this large a step lasts longer than a merge takes, as it does for models that are
    worth several islands: little of the work is overwritten, and hardly anybody is late.
    """
    return {
        "name": name,
        "seed": 1,
        "algorithm": {
            "preset": "long",
            "fragments": 6,
            "quorum": 2,
            "overlap_steps": 1,
            "pull_timeout_s_min": PULL_S_MIN,
        },
        "model": {"preset": "nano"},
        "inner": {"batch_sequences": 256},
        "membership": {"learners_min": 3},
        "evaluation": {"every_steps": 48},
        "budget": {"steps": steps},
    }


def verdicts(figures: dict[str, Any]) -> list[tuple[str, bool]]:
    """What the demo promises, and whether it was kept."""
    loss, start, wait = (figures[k] for k in ("val_loss_end", "val_loss_start", "survivor_wait_s"))
    down, back = (
        figures["rounds_committed_while_down"],
        figures["victim_contributions_after_return"],
    )
    after_s = figures["seconds_kill_to_contributing"]
    useful = figures["tokens_useful"] / max(figures["tokens_processed"], 1)
    asked, late = figures["others_asked"], figures["others_late"]
    return [
        (f"the run is over: {figures['state']}", figures["state"] == "finished"),
        (
            f"validation loss fell from {_number(start)} to {_number(loss)}, below {LOSS_BOUND}",
            loss is not None and loss < LOSS_BOUND,
        ),
        (
            f"{useful:.1%} of the tokens ended up in the model, at least {USEFUL_MIN:.0%}",
            useful >= USEFUL_MIN,
        ),
        (
            f"{late or 'none'} of {counted(asked, 'contribution')} of the others came late, at "
            f"most {LATE_MAX:.0%}",
            asked > 0 and late <= LATE_MAX * asked,
        ),
        (f"{_were(down, 'round')} committed while {VICTIM} was down", bool(down)),
        (
            f"survivors waited {_number(wait)} s for anything but their own computation, at most "
            f"{WAIT_S_MAX}",
            wait is not None and wait <= WAIT_S_MAX,
        ),
        (
            f"{_were(back, f'contribution of {VICTIM}', f'contributions of {VICTIM}')} merged "
            f"after its return, the first {_number(after_s)} s after the kill",
            bool(back),
        ),
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _were(count: int | None, one: str, many: str = "") -> str:
    """no round was, 1 round was, 2 rounds were."""
    if count and count > 1:
        return f"{count} {many or one + 's'} were"
    return f"{count or 'no'} {one} was"


def said(event: dict[str, Any]) -> str:
    """What a watcher should know of an event at once, in words; "" for most events."""
    data = event["data"]
    learner = data.get("learner")
    match event["kind"]:
        case "fault-applied" if data.get("kind") == "kill":
            return f"{data.get('target')} was killed; the others go on"
        case "recovered" if learner and data.get("source") == "donor":
            return f"{learner} is back, with the state of its optimizer from {data.get('donor')}"
        case "recovered" if learner:
            return f"{learner} is back, with an optimizer that begins anew"
        case "returned" if data.get("incarnation"):
            return f"the work of {learner} is merged again"
    return ""


def run_demo(data: Path, *, port: int, steps: int, limit_s: float, console: Console) -> int:
    """Run it, write `<data>/demo/report.json` and `.html`; the exit status."""
    from diloco_shared.process.stopping import until_stopped

    began = time.monotonic()
    stack = Stack(
        data,
        learners=3,
        port=port,
        chaos=True,
        each=EachLearner(),
        throwaway=True,
        pause_s=AWAY_S,
    )
    demo = Demo(stack, console, steps, began + limit_s)
    asyncio.run(until_stopped(demo.run(), ending=lambda: stack.stopping))
    if not demo.watched:
        raise CliError("interrupted before the end: nothing is reported", INTERRUPTED)
    if not demo.over:
        console.print(f"[bold red]The run was not over within {limit_s:.0f} s.[/]")
    return conclude(demo.seen, data / "demo", console, time.monotonic() - began)


class Demo:
    """One demo; `seen` is what came of it."""

    def __init__(self, stack: Stack, console: Console, steps: int, deadline: float) -> None:
        self.stack = stack
        self.console = console
        self.steps = steps
        self.kill_step = min(KILL_STEP, steps // 3)
        self.deadline = deadline
        self.seen = Seen("demo")
        self.watched = False  # to the end, or until time was up
        self._planned = False
        self._read_to = 0  # number of the newest event that was looked at

    async def run(self) -> None:
        """Train until the run is over or time is up; the stack is stopped on the way out."""
        running = asyncio.create_task(self.stack.run())
        training = asyncio.create_task(self._train())
        try:
            await asyncio.wait({running, training}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (training, running):
                task.cancel()
            await asyncio.wait({training})  # two screens would write over each other
            with meanwhile(self.stack.waits_for):
                results = await asyncio.gather(training, running, return_exceptions=True)
        for result in reversed(results):
            if isinstance(result, Exception):
                raise result

    async def _train(self) -> None:
        with meanwhile("starts the message server, the coordinator and three learners"):
            await started(self.stack, lambda: answers(self.stack.data))
        # An earlier demo's would pass for this one's; of a demo that is refused it stays.
        for name in REPORTS:
            (self.stack.data / "demo" / name).unlink(missing_ok=True)
        token_file = self.stack.folder.token_file
        self.stack.told(f"live page: {self.stack.url}  (token in {token_file})")
        with connect(Where(data=self.stack.data)) as client, Screen(self.console) as view:
            self.seen.name = free_name(await asyncio.to_thread(client.runs), self.stack.data)
            await asyncio.to_thread(client.create_run, spec_of(self.seen.name, self.steps))
            while not self.over and time.monotonic() < self.deadline:
                await asyncio.sleep(LOOK_S)
                try:
                    await asyncio.to_thread(self._look, client)
                except (ApiError, Unreachable) as error:
                    self.stack.told(str(error))
                view.show(self.seen, self.stack.messages, self.stack.messages_total)
        self.watched = True

    @property
    def over(self) -> bool:
        """Finished, the published parameters of the end are evaluated, and every round is read."""
        evaluated = any(e.get("final") for e in self.seen.evaluations)
        return self.seen.over and evaluated and not self.seen.unread

    def _look(self, client: Client) -> None:
        self.seen.look(client)
        new = [e for e in self.seen.events if e["seq"] > self._read_to]
        for text in filter(None, map(said, new)):
            self.stack.told(text)
        if new:
            self._read_to = new[-1]["seq"]
        victim = self.seen.status.get("learners", {}).get(VICTIM, {})
        if not self._planned and victim.get("state") == "stepping" and victim.get("step", 0) > 0:
            if not self._was_taken():
                client.chaos("kill", VICTIM, at_step=self.kill_step)
            self._planned = True
            self.stack.told(f"{VICTIM} will be killed (SIGKILL) at its step {self.kill_step}")

    def _was_taken(self) -> bool:
        """Whether the kill was asked for already, and its answer took too long."""
        told = (e for e in self.seen.events if e["kind"] in ("fault-planned", "fault-applied"))
        return any(e["data"]["target"] == VICTIM for e in told)


def free_name(runs: Sequence[dict[str, Any]], data: Path) -> str:
    """`demo`, or `demo-2` and so on after earlier ones; CliError while another run needs them."""
    for run in runs:
        if run["state"] not in ("finished", "stopped"):
            raise CliError(
                f"run {run['name']!r} in {data} is not over and has the learners: choose another "
                "folder with --data, or stop it first"
            )
    taken = {run["name"] for run in runs}
    return next(n for n in ("demo", *(f"demo-{i}" for i in range(2, 1000))) if n not in taken)


def conclude(seen: Seen, folder: Path, console: Console, took_s: float) -> int:
    """Say what became of each promise, write the report; the exit status."""
    if not seen.run or not seen.rounds:
        raise CliError(f"nothing was trained: see the logs in {folder.parent / 'logs'}")
    tally = Tally.of(seen.run, seen.rounds, seen.events)
    figures = report(seen.run, tally, seen.events)
    figures |= {"seconds": round(took_s, 1), "command": "diloco demo", **versions()}
    promises = verdicts(figures)
    figures["kept"] = all(kept for _, kept in promises)
    for text, kept in promises:
        _show(console, f"{'yes' if kept else 'NO '} {text}", "green" if kept else "bold red")
    html = page(figures, seen.run, tally, seen.events, promises)
    texts = (json.dumps(figures, indent=2) + "\n", html)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in zip(REPORTS, texts, strict=True):
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"the report cannot be written to {folder}: {why(error)}") from None
    _show(console, f"Report: {folder / 'report.html'} ({took_s:.0f} s)")
    return 0 if figures["kept"] else FAILED


def _show(console: Console, text: str, style: str = "") -> None:
    """As other commands show their lines; `style`: of the first three letters."""
    for n, line in enumerate(shaped([text], columns(console.file))):
        shown = Text(line)
        if style and not n:
            shown.stylize(style, 0, 3)
        console.print(shown, highlight=False, soft_wrap=True)
