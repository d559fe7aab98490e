"""A whole stack of real processes, started by the command a user would type."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diloco_client import Client

# Starting jax in several processes on two busy cores takes its time.
PATIENCE_S = 120.0

# One folder of compiled programs for all stacks: compiling is most of what a learner's start takes.
os.environ.setdefault("DILOCO_CACHE", str(Path(__file__).parents[2] / ".pytest_cache" / "compiled"))


def until(condition: Callable[[], Any], what: str, *, patience_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition`; fails naming `what` when patience ends."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            value = condition()
        except Exception as error:
            value, what = None, f"{what} ({error})" if "(" not in what else what
        if value:
            return value
        time.sleep(0.2)
    pytest.fail(f"never came: {what}")


@dataclass
class Cluster:
    """`diloco up` in a folder of its own."""

    folder: Path
    process: subprocess.Popen[bytes]
    client: Client

    def learner(self, run: str, name: str) -> dict[str, Any]:
        status = self.client.run(run)["status"] or {"learners": {}}
        shown: dict[str, Any] = status["learners"].get(name, {})
        return shown

    def pid(self, member: str) -> int:
        return int(self.client.member(member)["pid"])

    def kill(self, member: str) -> None:
        os.kill(self.pid(member), signal.SIGKILL)

    def committed(self, run: str) -> list[dict[str, Any]]:
        return [r for r in self.client.rounds(run) if r["outcome"] == "committed"]

    def logs(self) -> str:
        tails = []
        for path in sorted((self.folder / "logs").glob("*.log")):
            tails.append(f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}")
        return "\n".join(tails)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two learners, chaos allowed; everything is stopped afterwards."""
    folder = tmp_path / "data"
    command = [sys.executable, "-m", "diloco_cli", "up", "--data", str(folder)]
    process = subprocess.Popen(
        [*command, "--learners", "2", "--port", "0", "--chaos"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        endpoint = until(lambda: json.loads((folder / "endpoint.json").read_text()), "endpoint")
        token = until(lambda: Path(endpoint["token_file"]).read_text().strip(), "token")
        with Client(endpoint["url"], token) as client:
            until(client.ready, "the coordinator")
            yield Cluster(folder, process, client)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_spec(name: str, **budget: Any) -> dict[str, Any]:
    """A run of the nano model that two busy cores can follow."""
    return {
        "name": name,
        "seed": 3,
        "algorithm": {"fragments": 6, "quorum": 1, "overlap_steps": 8},
        "membership": {"learners_min": 2},
        "evaluation": {"every_steps": 480, "sequences": 64},
        "keeping": {"snapshot_every_rounds": 12, "checkpoint_every_steps": 200},
        "budget": budget or {"steps": 100_000},
    }


@pytest.fixture
def spec() -> Callable[..., dict[str, Any]]:
    return run_spec


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    return until
