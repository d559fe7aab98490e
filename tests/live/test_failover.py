"""A standby takes over from a leader that dies or stands still; nothing is lost or done twice."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live.tape_checks import check_tape

from diloco_client import Client

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


class Pair:
    """`diloco up --syncers 2` and one run on it."""

    def __init__(self, folder: Path, client: Client) -> None:
        self.folder = folder
        self.client = client

    def diloco(self, *arguments: str) -> Any:
        """What a command prints as JSON."""
        command = [sys.executable, "-m", "diloco_cli", *arguments, "--data", str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr + done.stdout[-2000:]
        return json.loads(done.stdout)

    def syncers(self) -> dict[str, str]:
        return {s["id"]: s["state"] for s in self.client.run("r")["syncers"]}

    def leader(self) -> str:
        return next((name for name, state in self.syncers().items() if state == "leading"), "")

    def standby(self) -> str:
        return next((name for name, state in self.syncers().items() if state == "standby"), "")

    def send(self, member: str, number: signal.Signals) -> None:
        os.kill(int(self.client.member(member)["pid"]), number)

    def rounds(self) -> list[dict[str, Any]]:
        return list(self.client.rounds("r"))

    def committed_in(self, term: int) -> int:
        return sum(r["term"] == term and r["outcome"] == "committed" for r in self.rounds())

    def term(self) -> int:
        return int(self.client.run("r")["status"]["term"])

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.client.events("r") if e["kind"] == kind]


@pytest.fixture
def pair(tmp_path: Path, wait_until: Callable[..., Any], spec: Any) -> Iterator[Pair]:
    folder = tmp_path / "data"
    command = [sys.executable, "-m", "diloco_cli", "up", "--data", str(folder), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--learners", "2", "--syncers", "2", "--chaos"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        endpoint = wait_until(lambda: json.loads((folder / "endpoint.json").read_text()), "up")
        token = wait_until(lambda: Path(endpoint["token_file"]).read_text().strip(), "token")
        with Client(endpoint["url"], token) as client:
            wait_until(client.ready, "the coordinator")
            wait_until(lambda: len([m for m in client.members() if m["alive"]]) >= 5, "all")
            client.create_run(spec("r"))
            pair = Pair(folder, client)
            wait_until(lambda: len(pair.rounds()) > 12, "the first rounds")
            wait_until(lambda: pair.leader() and pair.standby(), "a leader and a standby")
            yield pair
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_a_standby_takes_over_from_a_killed_leader_and_the_next_from_it(
    pair: Pair, wait_until: Callable[..., Any]
) -> None:
    for _ in range(2):
        old, new, term = pair.leader(), pair.standby(), pair.term()
        pair.send(old, signal.SIGKILL)
        wait_until(lambda new=new: pair.leader() == new, f"{new} to lead")
        wait_until(lambda term=term: pair.committed_in(term + 1) > 6, "rounds in the new term")
        # Restarted by its supervisor, the old leader executes the tape and stands by: it has
        # compared every digest with those of the other process (I9).
        wait_until(lambda old=old: pair.standby() == old, f"{old} to stand by")
    assert not pair.told("standby-unfit")
    check_tape(pair.rounds())

    # Whoever looks from outside finds the same bytes.
    pair.client.stop("r")
    wait_until(lambda: pair.client.run("r")["state"] == "stopped", "the end")
    verified = pair.diloco("tape", "verify", "r", "--json")
    assert (verified["faults"], verified["records"] > 20) == ([], True)
    replayed = pair.diloco("replay", "r", "--json")
    assert (replayed["fault"], replayed["records"] > 0) == (None, True)
    shown = pair.diloco("tape", "show", "r", "--from", "2", "--json")
    assert [r["seq"] for r in shown] == list(range(2, verified["records"] + 1))


def test_a_leader_that_stood_still_commits_nothing_more_and_stands_by(
    pair: Pair, wait_until: Callable[..., Any]
) -> None:
    old, new, term = pair.leader(), pair.standby(), pair.term()
    pair.send(old, signal.SIGSTOP)
    wait_until(lambda: pair.leader() == new, f"{new} to lead")
    wait_until(lambda: pair.committed_in(term + 1) > 6, "rounds in the new term")
    pair.send(old, signal.SIGCONT)
    wait_until(lambda: pair.standby() == old, f"{old} to stand by")
    before = len(pair.rounds())
    wait_until(lambda: len(pair.rounds()) > before + 6, "rounds after its return")
    assert any(e["source"] == old for e in pair.told("deposed"))
    assert (pair.leader(), pair.term()) == (new, term + 1), "nobody was misled"
    assert all(r["term"] == term + 1 for r in pair.rounds()[before:])
    check_tape(pair.rounds())


def test_no_standby_takes_over_because_the_message_server_was_away(
    pair: Pair, wait_until: Callable[..., Any]
) -> None:
    leader, term = pair.leader(), pair.term()
    before = len(pair.rounds())
    pair.client.chaos("kill", "nats")
    wait_until(lambda: any(e["kind"] == "fault-applied" for e in pair.client.events()), "its death")
    wait_until(lambda: len(pair.rounds()) > before + 12, "rounds after its return")
    assert (pair.leader(), pair.term()) == (leader, term)
    check_tape(pair.rounds())
