"""Loops in processes of their own, on one core: each takes steps in its turn, and waits else.

A child says one line of JSON when it is ready: `first_loss`, of the first step, and `compile_s`.
Then for every line with a number of seconds it takes steps for so long, and says how many: `steps`,
`seconds`, and `cpu_s`, what the process used of its core. It ends with its standard input.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepping import loops
from stepping.sizes import SIZES, spec_of

# Compilation and the longest turn, with what a busy machine makes of them.
PATIENCE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Window:
    """What one loop did in one turn."""

    who: str
    steps: int
    seconds: float
    cpu_s: float  # of the whole process

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds

    @property
    def steps_per_cpu_s(self) -> float:
        return self.steps / self.cpu_s


class Turns:
    """One child."""

    def __init__(self, who: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.who = who
        self.process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ready = self._said()

    def _said(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.who} loop ended with status {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def turn(self, seconds: float) -> Window:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        said = self._said()
        return Window(self.who, said["steps"], said["seconds"], said["cpu_s"])

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def asked(command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """The one line of JSON that a child says last."""
    done = subprocess.run(
        command,
        env=dict(environment),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# --------------------------------------------------------------------------------------------------
# In a child.


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def child(what: str, size: str, folder: Path, layers: int | None) -> None:
    """`prepare`, `work`, `compile`, or the loops `ours` and `plain`."""
    now, spec = time.perf_counter, spec_of(SIZES[size], layers=layers)
    match what:
        case "prepare":
            loops.prepare(spec, folder)
            say(prepared=True)
        case "work":
            moved_s, evaluated_s = loops.fragment_work_s(spec, now)
            say(moved_s=moved_s, evaluated_s=evaluated_s)
        case "compile":
            say(compile_s=loops.compile_s(spec, now))
        case "ours":
            take_turns(loops.ours(spec), np.load(folder / "tokens.npy"), now)
        case "plain":
            take_turns(loops.plain(spec, folder), np.load(folder / "tokens.npy"), now)


def take_turns(step: loops.Step, tokens_NxBxL1: Any, now: Callable[[], float]) -> None:
    """Until standard input ends. The loss of a step is read while the next one runs."""
    began = now()
    first = float(step(tokens_NxBxL1[0]))
    say(first_loss=first, compile_s=now() - began)
    n = 1
    for line in sys.stdin:
        began, cpu, steps, previous = now(), time.process_time(), 0, None
        until = began + float(line)
        while now() < until:
            handle = step(tokens_NxBxL1[n % len(tokens_NxBxL1)])
            if previous is not None:
                float(previous)
            previous, n, steps = handle, n + 1, steps + 1
        if previous is not None:
            float(previous)  # all of them are over
        say(steps=steps, seconds=now() - began, cpu_s=time.process_time() - cpu)
