"""Build the containers, train in them, kill a learner's and the leading syncer's container.

Sees the learner merged again and the standby lead, and takes all down:

    python compose/smoke.py [--json FILE]

Needs a Docker engine and Compose. DILOCO_BUILD_NETWORK names the build network where the default
one has no way out. Exit status 0 only if the killed learner was merged again and rounds committed
under the standby.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from diloco_client import ApiError, Client, Unreachable

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "diloco-smoke"
PORT = "8479"
# Building downloads jax once; training and healing take a minute or two.
PATIENCE_S = 420.0


def compose_command() -> list[str]:
    """The Compose that is here; exits with a clear word where there is none."""
    if shutil.which("docker") is None:
        sys.exit("compose-smoke: no docker command here; install a Docker engine to run this")
    engine = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    if engine.returncode:
        sys.exit(f"compose-smoke: no Docker engine answers: {engine.stderr.strip()[:200]}")
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        sys.exit("compose-smoke: neither 'docker compose' nor 'docker-compose' is installed")
    return ["docker-compose"]


class Smoke:
    """One project of containers."""

    def __init__(self) -> None:
        self.command = [*compose_command(), "-p", PROJECT]
        self.environment = {**os.environ, "DILOCO_PORT": PORT}

    def compose(self, *args: str) -> str:
        done = subprocess.run(
            [*self.command, *args],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"compose {' '.join(args)}: {(done.stderr or done.stdout)[-2000:]}")
        return done.stdout

    def client(self) -> Client:
        token = self.compose("exec", "-T", "coordinator", "cat", "/data/admin-token").strip()
        return Client(f"http://127.0.0.1:{PORT}", token)


def until(what: str, look: Any) -> Any:
    """The first true value of `look`; RuntimeError naming `what` when patience ends."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            value = look()
        except (ApiError, Unreachable, RuntimeError, KeyError, TypeError):
            value = None
        if value:
            return value
        time.sleep(1.0)
    raise RuntimeError(f"never came: {what}")


def merged_lives(client: Client, learner: str) -> set[int]:
    """Incarnations of a learner that were merged."""
    return {
        v["incarnation"]
        for r in client.rounds("demo")
        for v in r["verdicts"]
        if v["learner"] == learner and v["outcome"] == "merged"
    }


def kill_container(client: Client, member: str) -> float:
    """SIGKILL its container and start it again; when that was.

    A killed container counts as stopped by hand, so the engine does not restart it, as it does
    after a fault of chaos: started again as an operator would.
    """
    host = client.member(member)["host"]
    subprocess.run(["docker", "kill", "--signal", "KILL", host], check=True, capture_output=True)
    killed = time.monotonic()
    subprocess.run(["docker", "start", host], check=True, capture_output=True)
    return killed


def kill_leader(client: Client) -> float:
    """Seconds from the leader's death to a round of a later term."""
    until("a standby", lambda: "standby" in [x["state"] for x in client.run("demo")["syncers"]])
    status = client.run("demo")["status"]
    killed = kill_container(client, status["leader"])
    until("a round of a later term", lambda: client.rounds("demo")[-1]["term"] > status["term"])
    return time.monotonic() - killed


def exercise(smoke: Smoke) -> dict[str, Any]:
    """From nothing to healed twice."""
    began = time.monotonic()
    smoke.compose("up", "--build", "-d")
    built_s = time.monotonic() - began
    client = until("the coordinator", smoke.client)
    until("ready", client.ready)
    until("the first rounds", lambda: len(client.rounds("demo")) > 12)
    learners = sorted(client.run("demo")["status"]["learners"])
    victim = learners[0]
    until("a contribution of the victim", lambda: merged_lives(client, victim))
    rounds = len(client.rounds("demo"))
    killed = kill_container(client, victim)
    until("the victim merged again", lambda: len(merged_lives(client, victim)) > 1)
    healed_s = time.monotonic() - killed
    taken_over_s = kill_leader(client)
    evaluations = client.metrics("demo")["evaluations"]
    return {
        "learners": len(learners),
        "seconds_build_and_start": round(built_s, 1),
        "seconds_kill_to_contributing": round(healed_s, 1),
        "seconds_leader_kill_to_round": round(taken_over_s, 1),
        "rounds_committed_before_kill": rounds,
        "rounds_committed": len(client.rounds("demo")),
        "val_loss_start": evaluations[0]["val_loss"],
        "val_loss_newest": evaluations[-1]["val_loss"],
        "containers": sorted(
            line.split()[0] for line in smoke.compose("ps").splitlines() if PROJECT in line
        ),
        "command": "make compose-smoke",
    }


def main() -> None:
    """Run it; always take everything down."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    smoke = Smoke()
    try:
        summary = exercise(smoke)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(smoke.compose("logs", "--tail", "30"), file=sys.stderr)
        sys.exit(f"compose-smoke: {error}")
    finally:
        smoke.compose("down", "-v", "--remove-orphans")
    print("\n".join(f"{key}: {value}" for key, value in summary.items()))
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
