"""Other systems in the same race: the same model, data order, inner optimizer, outer setting.

    python bench/peers.py --python PYTHON [--systems ours ddp torchft hivemind] [--json FILE]

PYTHON is an interpreter that has torch and what of torchft and hivemind there is (the extra
`peers`; docs/results/peers.md); a system whose package it lacks is skipped, and said so. Two
workers of one thread each on this machine, per system three runs: *whole* (a fixed number of
steps), *kill* (one worker is killed by SIGKILL and started again at once) and *hang* (SIGSTOP, 10 s
later SIGCONT).

- val_loss: of the parameters at the end of *whole*, computed by this project's code on the same
  held-out sequences for everybody.
- tokens_per_s: processed by both workers in the second half of *whole*; in *kill* and *hang* in
  the 30 s from the fault on.
- bytes_per_token: at the workers' sockets, sent and received, over the tokens of *whole*. Peers
  exchange with each other: twice what crossed the loopback of a network namespace of their own
  (with IP headers). Ours: what the learners count at their sockets, to and from the hub.
- full_speed_s: from the fault until the survivor's next 10 s hold 90 % of the steps that it took
  in the 10 s before. lost_s: seconds' worth of its steps that it did not take in the 30 s.
- contributes_s: until an exchange had the victim's work in it again, from its start or SIGCONT.
- utilisation: tokens_per_s of *whole* over that of two workers that exchange nothing.

With `--json`, what the file knows of other systems stays.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from racing import job, timeline
from racing.crew import Crew
from racing.network import isolated, loopback_bytes
from racing.ours import Ours, faulted, whole
from racing.told import (
    PATIENCE_S,
    TOKENS,
    WORKERS,
    difference,
    shards_of,
    spec_of,
    val_loss,
    write_job,
)
from runs import surroundings

from diloco_shared.process.stopping import dies_with_parent
from diloco_shared.spec.run import RunSpec

# What each system's workers run, and the packages it needs.
SCRIPTS = {
    "torch alone": ("run_alone.py", ("torch",)),
    "ddp": ("run_ddp.py", ("torch",)),
    "torchft": ("run_torchft.py", ("torch", "torchft")),
    "hivemind": ("run_hivemind.py", ("torch", "hivemind")),
}
# As the preset `long` has it, its outer step settles; everybody else's stays as it is.
SETTLING = "ours settling"
SYSTEMS = ("ours alone", "ours", SETTLING, *SCRIPTS)
SCENARIOS = ("whole", "kill", "hang")
# Chosen after a race at 4e-3, too high for every DiLoCo here and most for ours
# (docs/results/peers.md).
RATE = 2e-3
# Steps of everybody before a fault: starting, compiling, meeting. Speeds are of the second half.
WARM = 96
HANG_S, WATCHED_S = 10.0, 30.0
# Starting torch and meeting takes seconds; steps on a busy machine, exchanges among them.
START_S, STEP_S = 90.0, 0.6
# Linux: orphans of what this process started become its children.
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Run what is asked for; print a table; write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--python", help="an interpreter that has the peers")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--model", default="micro", help="preset: nano or micro")
    parser.add_argument("--steps", type=int, default=3000, help="of each worker in `whole`")
    parser.add_argument("--rate", type=float, default=RATE, help="peak inner rate of everybody")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that nothing is left behind
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    rows: dict[str, dict[str, Any]] = {}
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    for system in args.systems:
        if lacking := missing(system, args.python):
            print(f"{system}: skipped, {lacking}", flush=True)
            continue
        row = rows.setdefault(system, {})
        once = system == SETTLING or system.endswith("alone")
        for scenario in args.scenarios[:1] if once else args.scenarios:
            row[scenario] = measured(system, scenario, args)
            row["command"] = told_about(args.python)["command"]
            print(f"{system} {scenario}: {json.dumps(row[scenario])}", flush=True)
            keep(rows, args)
    table(rows)


def keep(rows: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    """Write what is known so far, with the utilisations that follow from it."""
    for system, row in rows.items():
        base = rows.get("ours alone" if system.startswith("ours") else "torch alone", {})
        if "whole" in row and "whole" in base:
            ratio = row["whole"]["tokens_per_s"] / base["whole"]["tokens_per_s"]
            row["whole"]["utilisation"] = ratio
    if args.json:
        ordered = {system: rows[system] for system in SYSTEMS if system in rows}
        about = told_about(args.python)
        del about["command"]  # each row has its own
        result = {"rows": ordered, "settings": settings_told(args), **about}
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


# --- one run -------------------------------------------------------------------------------------


def missing(system: str, python: str | None) -> str:
    """What it takes that is not there; empty when it can run."""
    if system not in SCRIPTS:
        return ""
    if python is None:
        return "no interpreter: give --python"
    code = f"import {', '.join(SCRIPTS[system][1])}"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def measured(system: str, scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run, in a network of its own where that is allowed."""
    own_network, began, before = isolated(), time.monotonic(), busy_s()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "job"
        if system == "ours alone":
            return alone(args)
        if system in ("ours", SETTLING):
            found = ours(folder, scenario, args, settling=system == SETTLING)
        else:
            write_job(folder, args, args.steps if scenario == "whole" else 0)
            found = peer(system, folder, scenario, args)
            reap()
            if own_network and scenario == "whole":
                found["bytes"] = 2 * loopback_bytes()
    all_s, own_s = (after - b for after, b in zip(busy_s(), before, strict=True))
    # Cores that others on this machine took meanwhile: more than a few hundredths spoil a speed.
    others = (all_s - own_s) / (time.monotonic() - began)
    return figures(found, scenario) | {"others_cores": others}


def reap() -> None:
    """Take what killed workers had started; its processor time is then counted as ours."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def busy_s() -> tuple[float, float]:
    """Processor seconds so far: of the whole machine, and of this process and those it started."""
    machine, own = psutil.cpu_times(), os.times()
    all_s = machine.user + machine.nice + machine.system + machine.irq + machine.softirq
    return all_s, sum(own[:4])


def ours(
    folder: Path, scenario: str, args: argparse.Namespace, *, settling: bool
) -> dict[str, Any]:
    if scenario == "whole":
        body = partial(whole, limit_s=START_S + STEP_S * args.steps)
        told = spec_of(args, args.steps, settling=settling)
        found = Ours(folder, told, WORKERS).run(body)
        read = found.pop("shards")
        spec = RunSpec.model_validate(told)
        planned = shards_of(list(read), spec.data.virtual_shards, spec.seed)
        pairs = zip(read.values(), planned, strict=True)
        return found | {"order_as_planned": all(b[: len(a)] == a for a, b in pairs)}
    struck = faulted(scenario, WARM, HANG_S, WATCHED_S)
    return Ours(folder, spec_of(args, 10**6), WORKERS).run(struck)


def alone(args: argparse.Namespace) -> dict[str, Any]:
    """Two of our workers that exchange nothing."""
    script = Path(__file__).parent / "racing" / "allreduce.py"
    command = [sys.executable, str(script), "--seconds", "15", "--model", args.model]
    ends = dies_with_parent(signal.SIGTERM)
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=ends)
        for _ in range(WORKERS)
    ]
    done = [json.loads(p.communicate(timeout=START_S)[0].splitlines()[-1]) for p in both]
    return {"tokens_per_s": sum(d["steps"] / d["seconds"] for d in done) * TOKENS}


def peer(system: str, folder: Path, scenario: str, args: argparse.Namespace) -> dict[str, Any]:
    victim, began = WORKERS - 1, time.monotonic()
    with Crew(args.python, SCRIPTS[system][0], folder, WORKERS) as crew:
        crew.all_stepped(WARM, START_S)
        if scenario == "whole":
            if not crew.finished(STEP_S * args.steps):
                raise SystemExit(f"{system}: {'; '.join(crew.ended) or 'not done in time'}")
            told = [crew.told(n) for n in crew.workers]
            compared = difference(folder, told[0], args) if system == "torch alone" else None
            return {
                "val_loss": val_loss(np.load(job.final(folder, 0)), args),
                "tokens": sum(line["kind"] == "step" for mine in told for line in mine) * TOKENS,
                "steps": {str(n): crew.steps(n) for n in crew.workers},
                "exchanges": sum(line["kind"] == "exchange" for line in told[0]),
                "first_losses_differ_by": compared,
                "seconds": time.monotonic() - began,
            }
        time.sleep(timeline.WINDOW_S)
        struck = time.monotonic()
        back = struck
        if scenario == "kill":
            crew.kill(victim)
            crew.start(victim)
        else:
            crew.signal(victim, signal.SIGSTOP)
            crew.watch(struck + HANG_S)
            back = time.monotonic()
            crew.signal(victim, signal.SIGCONT)
        crew.watch(struck + WATCHED_S)
        together = [
            line["at"]
            for line in crew.told(victim)
            if line["kind"] == "exchange" and line["at"] > back and line["workers"] == WORKERS
        ]
        failed = [line for line in crew.told(0) if line["kind"] == "failed" and line["at"] > struck]
        return {
            "struck": struck,
            "contributes_s": together[0] - back if together else None,
            "steps": {str(n): crew.steps(n) for n in crew.workers},
            "failed_exchanges": len(failed),
            "notes": crew.ended,
        }


def figures(found: dict[str, Any], scenario: str) -> dict[str, Any]:
    """What is kept of a run: times of steps become rates."""
    steps = list(found.pop("steps").values())
    if scenario == "whole":
        half = min(map(len, steps)) // 2
        rate = timeline.speed({str(n): times for n, times in enumerate(steps)}, half)
        shown = {"tokens_per_s": rate * TOKENS}
        if "bytes" in found:
            shown["bytes_per_token"] = found["bytes"] / found["tokens"]
        return found | shown
    struck, survivor = found.pop("struck"), steps[0]
    end = struck + WATCHED_S
    done = sum(timeline.steps_between(times, struck, end) for times in steps)
    before = sum(timeline.steps_between(t, struck - timeline.WINDOW_S, struck) for t in steps)
    return found | {
        "tokens_per_s": done * TOKENS / WATCHED_S,
        "tokens_per_s_before": before * TOKENS / timeline.WINDOW_S,
        "full_speed_s": timeline.full_speed_after(survivor, struck, end),
        "lost_s": timeline.lost(survivor, struck, end),
        "longest_pause_s": timeline.longest_pause(survivor, struck, end),
    }


# --- telling -------------------------------------------------------------------------------------


def settings_told(args: argparse.Namespace) -> dict[str, Any]:
    spec = spec_of(args, args.steps)
    return {
        "workers": WORKERS,
        "steps": args.steps,
        "spec": {k: spec[k] for k in ("model", "algorithm", "inner", "membership")},
        "patience_s": PATIENCE_S,
        "hang_s": HANG_S,
        "watched_s": WATCHED_S,
    }


def told_about(python: str | None) -> dict[str, Any]:
    """The machine and every version; whose interpreter it was is nobody's business."""
    about = surroundings(__file__)
    if python is None:
        return about
    names = ("torch", "torchft", "hivemind", "numpy")
    code = "import sys, importlib.metadata as m\nfor n in sys.argv[1:]: print(n, m.version(n))"
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=False)
    about["command"] = about["command"].replace(python, "PYTHON")
    about["peers"] = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    return about


def table(rows: dict[str, dict[str, Any]]) -> None:
    """One line per system: the whole run, then both faults."""

    def shown(row: dict[str, Any], scenario: str, name: str, form: str) -> str:
        if scenario not in row:
            return "-"
        value = row[scenario].get(name)
        return "no" if value is None else format(value, form)

    heads = ("tokens/s", "util", "loss", "B/token")
    after = ("tokens/s", "full s", "lost s", "back s")
    columns = [f"{h:>9}" for h in heads + after + after]
    print(f"{'':>12}{'whole':>36}{'kill':>36}{'hang':>36}\n{'':>12}" + "".join(columns))
    for system, row in rows.items():
        cells = [
            shown(row, "whole", "tokens_per_s", ".0f"),
            shown(row, "whole", "utilisation", ".2f"),
            shown(row, "whole", "val_loss", ".4f"),
            shown(row, "whole", "bytes_per_token", ".1f"),
        ]
        for scenario in ("kill", "hang"):
            cells += [
                shown(row, scenario, name, form)
                for name, form in (
                    ("tokens_per_s", ".0f"),
                    ("full_speed_s", ".1f"),
                    ("lost_s", ".1f"),
                    ("contributes_s", ".1f"),
                )
            ]
        print(f"{system:>12}" + "".join(f"{cell:>9}" for cell in cells))


if __name__ == "__main__":
    main()
