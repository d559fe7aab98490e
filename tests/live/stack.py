"""`diloco up` under a test's control: its processes, its run, its tape."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from live.gate import connected
from live.processes import ENDING_S, PATIENCE_S, Process, diloco, family, tails
from waiting import wait_until

from diloco_client import ApiError, Client, Unreachable
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.process.crash_points import done_in

# What a question ends with while those who would answer it are away.
AWAY = (ApiError, Unreachable, OSError, LookupError, TypeError, ValueError)
# `keeping` of a run whose tape nobody executes again from its beginning.
SELDOM = {"snapshot_every_rounds": 12, "checkpoint_every_steps": 200}


class Stack:
    """One `diloco up` in `folder`, and the run `r` on it."""

    def __init__(self, folder: Path, *options: str, crash_at: str = "", **more: str) -> None:
        self.folder = folder
        self.options = options
        self.environment = {"DILOCO_CRASH_AT": crash_at} | more
        self.opened = ExitStack()
        self.process: Process
        self.client: Client

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

    def wait_until(
        self, condition: Callable[[], Any], what: str, *, patience_s: float = PATIENCE_S
    ) -> Any:
        """The first true value; whoever does not answer meanwhile is waited for."""
        try:
            return wait_until(condition, what, patience_s=patience_s, every_s=0.1, tolerated=AWAY)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.seen()}") from None

    def seen(self) -> str:
        """Where the run stands, for whoever has to find out why something never came."""
        try:
            view = self.client.run("r")
        except (*AWAY, AttributeError) as error:  # there is no client before it has started
            return f"the run is not shown: {error!r}"
        syncers = {s["id"]: s["state"] for s in view["syncers"]}
        return f"the run is {view['state']}: {view['reason']}; syncers {syncers}"

    def diloco(self, *arguments: str, status: int = 0) -> Any:
        """What a command prints as JSON."""
        return json.loads(self.run(*arguments, "--json", status=status))

    def run(self, *arguments: str, status: int = 0) -> str:
        """What a command prints."""
        done = diloco(*arguments, "--data", str(self.folder))
        assert done.returncode == status, done.stderr + done.stdout[-2000:]
        return done.stdout

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

    # --- the run -------------------------------------------------------------------------------

    def rounds(self) -> list[dict[str, Any]]:
        return list(self.client.rounds("r"))

    def committed(self) -> list[dict[str, Any]]:
        return [r for r in self.rounds() if r["outcome"] == "committed"]

    def goes_on(self, what: str, more: int = 6) -> None:
        """So many rounds are committed that were not there before."""
        last = self.wait_until(self.rounds, "rounds")[-1]["round"]
        self.wait_until(
            lambda: sum(r["round"] > last for r in self.committed()) >= more,
            f"rounds after {what}",
        )

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.client.run("r")["status"]
        return status

    def learner(self, name: str) -> dict[str, Any]:
        """What the run's status shows of it; nothing as long as it shows nothing."""
        shown: dict[str, Any] = (self.status() or {"learners": {}})["learners"].get(name, {})
        return shown

    def syncers(self) -> dict[str, str]:
        return {s["id"]: s["state"] for s in self.client.run("r")["syncers"]}

    def leader(self) -> str:
        return next((name for name, state in self.syncers().items() if state == "leading"), "")

    def standby(self) -> str:
        return next((name for name, state in self.syncers().items() if state == "standby"), "")

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.client.events("r") if e["kind"] == kind]

    def evaluations(self) -> list[dict[str, Any]]:
        return [e["data"] for e in self.told("evaluation")]

    def end(self) -> None:
        """Stop the run, and wait until everybody has left it."""
        self.client.stop("r")
        self.wait_until(lambda: self.client.run("r")["state"] == "stopped", "the end")

    def clear(self) -> None:
        """End the run, if there is one, and delete it once those who worked for it are gone."""

        def gone() -> bool:
            try:
                self.client.delete_run("r")
            except ApiError as error:
                if error.status == 404:
                    return True
                if error.status != 409:
                    raise
                with suppress(ApiError):
                    self.client.stop("r")
            return False

        self.wait_until(gone, "a run that can be deleted")


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
