"""`diloco up` and the commands beside it: real processes, and nothing is left of them."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from live.processes import command, diloco, family
from waiting import wait_until

from diloco_cli.words import CONFLICT, INVALID, NO_CLUSTER, REFUSED, UNKNOWN

pytestmark = pytest.mark.live


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A folder whose cluster, if there is one, is stopped afterwards."""
    folder = tmp_path / "data"
    yield folder
    diloco("down", "--data", str(folder))


def up(data: Path, *more: str, learners: int = 0) -> int:
    """Start a cluster in the background; the supervisor's process id."""
    done = diloco("up", "--detach", f"--data={data}", f"--learners={learners}", "--port=0", *more)
    assert done.returncode == 0, done.stderr
    return int(json.loads((data / "endpoint.json").read_text())["pid"])


def living(processes: list[psutil.Process]) -> list[str]:
    return [line for process in processes if (line := command(process))]


def members(data: Path) -> dict[str, dict[str, Any]]:
    done = diloco("members", "--json", "--data", str(data))
    return {m["id"]: m for m in json.loads(done.stdout)} if done.returncode == 0 else {}


def test_a_cluster_answers_until_it_is_stopped_and_nothing_is_left(
    data: Path, tmp_path: Path
) -> None:
    here = ("--data", str(data))
    processes = family(up(data))
    assert len(processes) >= 4, "supervisor, nats-server, coordinator, syncer"
    wait_until(lambda: {"supervisor", "coordinator", "syncer-1"} <= members(data).keys(), "members")

    # A second instance: refused with the process that holds the folder.
    second = diloco("up", "--port=0", *here)
    assert second.returncode == CONFLICT
    assert f"process {processes[0].pid}" in second.stderr
    elsewhere = diloco("up", "--detach", "--port=0", *here)
    assert (elsewhere.returncode, second.stderr) == (CONFLICT, elsewhere.stderr)

    # A port that is taken.
    port = json.loads((data / "endpoint.json").read_text())["url"].rsplit(":", 1)[1]
    taken = diloco("up", f"--port={port}", "--data", str(tmp_path / "other"))
    assert taken.returncode == CONFLICT
    assert f"port {port} is taken" in taken.stderr

    # Runs: a bad one names every fault, a good one waits for learners.
    file = tmp_path / "run.toml"
    file.write_text('name = "r"\nseed = -1\n[algorithm]\nfragments = 5\n[budget]\nyears = 1\n')
    bad = diloco("submit", str(file), *here)
    assert bad.returncode == INVALID
    for path in ("seed", "algorithm.sync_every_steps", "budget.years"):
        assert f"\n  {path}: " in bad.stderr
    file.write_text('name = "r"\n[budget]\nsteps = 10\n')
    assert diloco("status", *here).returncode == UNKNOWN
    assert diloco("submit", str(file), *here).returncode == 0
    assert diloco("submit", str(file), *here).returncode == CONFLICT
    assert diloco("submit", str(file), "--if-absent", *here).returncode == 0
    wait_until(
        lambda: "learners-missing" in diloco("status", "r", "--json", *here).stdout, "its reason"
    )
    assert "known: r" in diloco("status", "nobody", *here).stderr

    # Chaos is off; a wrong token is refused.
    assert diloco("chaos", "kill", "syncer-1", *here).returncode == REFUSED
    assert diloco("runs", "--token", "wrong", *here).returncode == REFUSED

    # The secrets are for their owner only, and in no log.
    for name in ("admin-token", "nats-token"):
        secret = data / name
        assert secret.stat().st_mode & 0o077 == 0
        for log in (data / "logs").glob("*"):
            assert secret.read_text().strip() not in log.read_text(errors="replace")

    assert diloco("down", *here).returncode == 0
    assert living(processes) == []
    assert diloco("status", *here).returncode == NO_CLUSTER

    # What was submitted is there again afterwards.
    up(data)
    assert "run r: queued" in diloco("status", *here).stdout


@pytest.mark.long
def test_whoever_dies_is_started_again(data: Path) -> None:
    up(data, "--chaos")
    wait_until(lambda: {"coordinator", "syncer-1"} <= members(data).keys(), "members")
    old = members(data)

    def again(name: str) -> bool:
        there = members(data)
        return name in there and bool(there[name]["pid"] != old[name]["pid"])

    for name in ("syncer-1", "coordinator"):
        assert diloco("chaos", "kill", name, "--data", str(data)).returncode == 0
        wait_until(partial(again, name), f"another {name}")

    def nats() -> set[int]:
        supervisor = family(json.loads((data / "endpoint.json").read_text())["pid"])
        return {p.pid for p in supervisor if "nats-server" in command(p)}

    before = nats()
    assert len(before) == 1
    assert diloco("chaos", "kill", "nats", "--data", str(data)).returncode == 0
    wait_until(lambda: (now := nats()) and not now & before, "another nats-server")
    wait_until(lambda: diloco("runs", "--data", str(data)).returncode == 0, "the API")
    told = diloco("faults", "--json", "--data", str(data))
    kinds = {f["target"]: "applied_at" in f for f in json.loads(told.stdout)}
    assert kinds == {"syncer-1": True, "coordinator": True, "nats": True}


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent's death signal")
def test_a_supervisor_that_is_killed_takes_everything_with_it(data: Path) -> None:
    processes = family(up(data))
    os.kill(processes[0].pid, signal.SIGKILL)
    wait_until(lambda: living(processes) == [], "the end of its children")
    # The stale announcement is no cluster, and the folder is free for the next.
    assert diloco("down", "--data", str(data)).returncode == NO_CLUSTER
    up(data)


def test_a_second_interrupt_makes_the_end_quicker_and_no_less_clean(data: Path) -> None:
    processes = family(up(data, learners=1))
    # A stopped process hears no signal but two; it ends all the same.
    stubborn = next(p for p in processes if "diloco_syncer" in " ".join(p.cmdline()))
    stubborn.suspend()
    for _ in range(2):
        os.kill(processes[0].pid, signal.SIGINT)
        time.sleep(0.2)
    wait_until(lambda: living(processes) == [], "the end of everything")
    assert not (data / "endpoint.json").exists()
