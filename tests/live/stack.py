"""`diloco up` under a test's control: its processes, its run, its tape."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from live.gate import connected
from live.processes import ENDING_S, Process, diloco_says, family, tails
from live.watched import Watched

from diloco_client import Client
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.process.crash_points import done_in

# `keeping` of a run whose tape nobody executes again from its beginning.
SELDOM = {"snapshot_every_rounds": 12, "checkpoint_every_steps": 200}


class Stack(Watched):
    """One `diloco up` in `folder`, and the run `r` on it."""

    def __init__(self, folder: Path, *options: str, crash_at: str = "", **more: str) -> None:
        self.folder = folder
        self.options = options
        self.environment = {"DILOCO_CRASH_AT": crash_at} | more
        self.opened = ExitStack()
        self.process: Process

    def start(self) -> None:
        """Start it, and wait until its coordinator answers."""
        arguments = ("up", "--data", str(self.folder), "--port", "0", *self.options)
        log = self.folder.with_suffix(".log")
        self.process = Process(log, "diloco_cli", *arguments, **self.environment)
        self.opened.callback(self.process.stop)
        pid = self.process.popen.pid
        url = self.wait_until(lambda: (e := self.endpoint())["pid"] == pid and e["url"], "its URL")
        token = self.wait_until(self.token, "the token")
        self.client = self.opened.enter_context(Client(url, token))
        self.wait_until(self.client.ready, "the coordinator")

    def endpoint(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "endpoint.json").read_text())
        return found

    def token(self) -> str:
        """The API's."""
        return Path(self.endpoint()["token_file"]).read_text().strip()

    def nats_token(self) -> str:
        return (self.folder / "nats-token").read_text().strip()

    def bus(self) -> AbstractAsyncContextManager[NatsBus]:
        """A connection to its message server."""
        return connected(f"nats://{self.endpoint()['nats']}", token=self.nats_token())

    def diloco(self, *arguments: str, status: int = 0) -> Any:
        """What a command prints as JSON."""
        return json.loads(self.run(*arguments, "--json", status=status))

    def run(self, *arguments: str, status: int = 0) -> str:
        """What a command prints."""
        return diloco_says(*arguments, "--data", str(self.folder), status=status)

    def logs(self) -> str:
        return tails([self.folder.with_suffix(".log"), *sorted(self.folder.glob("logs/*.log"))])

    # --- processes -----------------------------------------------------------------------------

    def family(self) -> list[psutil.Process]:
        return family(self.process.popen.pid)

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

    def send(self, number: signal.Signals, *members: str) -> None:
        for member in members:
            os.kill(self.pid(member), number)

    def kill_everybody(self) -> None:
        """The supervisor is stopped first, so that it starts nobody again; the server dies last."""
        supervisor, *children = self.family()
        server = self.nats()
        supervisor.suspend()
        for process in (*(c for c in children if c.pid != server.pid), server, supervisor):
            process.kill()
        _, alive = psutil.wait_procs(children, timeout=ENDING_S)
        assert not alive
        self.process.ended()

    def crashed(self) -> set[str]:
        """Crash points that were carried out, as `member/point:passage`."""
        members = [p for p in self.folder.iterdir() if p.is_dir()]
        return {entry for folder in members for entry in done_in(folder)}


@contextmanager
def up(folder: Path, *options: str, crash_at: str = "", **more: str) -> Iterator[Stack]:
    """Running, and stopped afterwards; a failure shows the logs. `more`: of its environment."""
    stack = Stack(folder, *options, crash_at=crash_at, **more)
    with stack.opened:
        try:
            stack.start()
            yield stack
        except BaseException:
            print(stack.logs())
            raise


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
