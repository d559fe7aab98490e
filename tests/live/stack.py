"""`diloco up` under a test's control: its processes, its rounds, its tape."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from diloco_client import ApiError, Client, Unreachable
from diloco_shared.edges.crash_points import done_in

# Starting jax in several processes on two busy cores takes its time.
PATIENCE_S = 180.0


def until(condition: Callable[[], Any], what: str, *, patience_s: float = PATIENCE_S) -> Any:
    """The first true value; a coordinator that does not answer meanwhile is waited for."""
    deadline, trouble = time.monotonic() + patience_s, ""
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except (ApiError, Unreachable, OSError, LookupError, TypeError, ValueError) as error:
            trouble = f" ({type(error).__name__}: {error})"
        time.sleep(0.1)  # between two looks at what happens by itself
    pytest.fail(f"never came: {what}{trouble}")


class Up:
    """One `diloco up` in `folder`, and the run `r` on it."""

    def __init__(self, folder: Path, *options: str, crash_at: str = "") -> None:
        self.folder = folder
        self.options = options
        self.environment = {**os.environ, "DILOCO_CRASH_AT": crash_at}
        self.process: subprocess.Popen[bytes] | None = None
        self.client: Client

    def start(self) -> None:
        """Start it, and wait until its coordinator answers."""
        command = [sys.executable, "-m", "diloco_cli", "up", "--data", str(self.folder)]
        self.process = subprocess.Popen(
            [*command, "--port", "0", *self.options],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        pid = self.process.pid
        endpoint = until(lambda: (e := self.endpoint())["pid"] == pid and e, "the endpoint")
        token = until(lambda: Path(endpoint["token_file"]).read_text().strip(), "the token")
        self.client = Client(endpoint["url"], token)
        until(self.client.ready, "the coordinator")

    def endpoint(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "endpoint.json").read_text())
        return found

    def stop(self) -> None:
        if self.process is None:
            return
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    # --- processes -----------------------------------------------------------------------------

    def family(self) -> list[psutil.Process]:
        """Supervisor, services, message server."""
        assert self.process is not None
        supervisor = psutil.Process(self.process.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def nats(self) -> psutil.Process:
        """The message server; LookupError while there is none."""
        for process in self.family():
            try:
                if "nats-server" in process.name():
                    return process
            except psutil.Error:
                continue
        raise LookupError("no message server")

    def pid(self, member: str) -> int:
        return int(self.client.member(member)["pid"])

    def crashed(self) -> set[str]:
        """Crash points that were carried out, as `member/point:passage`."""
        members = [p for p in self.folder.iterdir() if p.is_dir()]
        return {entry for folder in members for entry in done_in(folder)}

    # --- the run -------------------------------------------------------------------------------

    def rounds(self) -> list[dict[str, Any]]:
        return list(self.client.rounds("r"))

    def committed(self) -> int:
        return sum(r["outcome"] == "committed" for r in self.rounds())

    def goes_on(self, what: str, more: int = 6) -> None:
        """So many rounds are committed that were not there before."""
        before = until(self.rounds, "rounds")
        last = before[-1]["round"]

        def later() -> bool:
            new = [r for r in self.rounds() if r["round"] > last]
            return sum(r["outcome"] == "committed" for r in new) >= more

        until(later, f"rounds after {what}")

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.client.run("r")["status"]
        return status

    def syncers(self) -> dict[str, str]:
        return {s["id"]: s["state"] for s in self.client.run("r")["syncers"]}

    def leader(self) -> str:
        return next((name for name, state in self.syncers().items() if state == "leading"), "")

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.client.events("r") if e["kind"] == kind]

    def end(self) -> None:
        """Stop the run, and wait until everybody has left it."""
        self.client.stop("r")
        until(lambda: self.client.run("r")["state"] == "stopped", "the end")

    def diloco(self, *arguments: str, status: int = 0) -> Any:
        """What a command prints as JSON."""
        return json.loads(self.run(*arguments, "--json", status=status))

    def run(self, *arguments: str, status: int = 0) -> str:
        """What a command prints."""
        done = subprocess.run(
            [sys.executable, "-m", "diloco_cli", *arguments, "--data", str(self.folder)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == status, done.stderr + done.stdout[-2000:]
        return done.stdout

    def logs(self) -> str:
        """Tails of all logs: what a failure is explained by."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted((self.folder / "logs").glob("*.log"))
        )


@contextmanager
def up(folder: Path, *options: str, crash_at: str = "") -> Iterator[Up]:
    """Running, and stopped afterwards; a failure shows the logs."""
    stack = Up(folder, *options, crash_at=crash_at)
    try:
        stack.start()
        yield stack
    except BaseException:
        print(stack.logs())
        raise
    finally:
        stack.stop()


def spec(**more: Any) -> dict[str, Any]:
    """A run of the nano model that two busy cores can follow; every contribution is kept."""
    return {
        "name": "r",
        "seed": 3,
        "algorithm": {"fragments": 6, "quorum": 1, "overlap_steps": 8},
        "membership": {"learners_min": 2},
        "evaluation": {"every_steps": 480, "sequences": 64},
        "keeping": {
            "contributions": "all",
            "snapshot_every_rounds": 12,
            "checkpoint_every_steps": 40,
        },
        "budget": {"steps": 100_000},
        **more,
    }
