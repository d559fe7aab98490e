"""Build the containers, train in them, kill some, recreate all of them, take the syncers' disks.

Sees a killed learner merged again, a standby lead, and a second run go on when every container is
recreated one by one, when all are at once, and when the syncers' volumes are gone as well:

    python compose/smoke.py [--json FILE]

Needs a Docker engine and Compose. DILOCO_BUILD_NETWORK names the build network where the default
one has no way out. Exit status 0 only if all of that happened, nobody was lost for good, and every
token of the second run is accounted for.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
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

    def containers(self) -> list[str]:
        """Names of those that run services."""
        lines = self.compose("ps").splitlines()
        names = [line.split()[0] for line in lines if PROJECT in line]
        return sorted(n for n in names if "submit" not in n)

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


# Far more than the exercises take: the second run is stopped, not finished.
LONG = {"name": "recreated", "budget": {"steps": 1_000_000}}
# Rounds that show that a run goes on, and not only that it comes to its end.
MORE_ROUNDS = 12


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


def submit_long(client: Client) -> str:
    """End the first run; begin one that lasts. Its name."""
    client.stop("demo")
    until("the end of the first run", lambda: client.run("demo")["status"]["settled"])
    client.delete_run("demo")
    spec = tomllib.loads((ROOT / "compose" / "run.toml").read_text(encoding="utf-8")) | LONG
    client.create_run(spec)
    name = str(spec["name"])
    until("rounds of the second run", lambda: committed(client, name) > MORE_ROUNDS)
    return name


def committed(client: Client, run: str) -> int:
    """Rounds committed so far."""
    return int(client.run(run)["status"]["rounds_committed"])


class Recreating:
    """What an operator does to the second run's containers."""

    def __init__(self, smoke: Smoke, client: Client, run: str) -> None:
        self.smoke = smoke
        self.client = client
        self.run = run

    def goes_on(self, what: str) -> float:
        """Seconds until three learners are merged again and rounds go on."""
        began, before = time.monotonic(), committed(self.client, self.run)

        def on() -> bool:
            status = self.client.run(self.run)["status"]
            return bool(
                status["rounds_committed"] > before + MORE_ROUNDS
                and len(status["alive"]) == len(status["participating"]) == 3
            )

        until(f"the run going on after {what}", on)
        return round(time.monotonic() - began, 1)

    def one_by_one(self) -> dict[str, float]:
        """Every container but the one-time submission is removed and made anew."""
        found: dict[str, float] = {}
        for name in self.smoke.containers():
            subprocess.run(["docker", "rm", "-f", name], check=True, capture_output=True)
            self.smoke.compose("up", "-d", "--no-recreate")
            found[name] = self.goes_on(f"{name} was recreated")
        return found

    def all_at_once(self) -> float:
        self.smoke.compose("up", "-d", "--force-recreate")
        return self.goes_on("all containers were recreated")

    def without_disks(self) -> float:
        """As all at once, and the syncers find empty volumes."""
        epoch = int(self.client.run(self.run)["status"]["epoch"])
        containers = self.smoke.containers()
        subprocess.run(["docker", "rm", "-f", *containers], check=True, capture_output=True)
        volume = f"{PROJECT}_syncer"
        subprocess.run(["docker", "volume", "rm", volume], check=True, capture_output=True)
        self.smoke.compose("up", "-d")
        seconds = self.goes_on("the syncers' volumes were removed")
        now = int(self.client.run(self.run)["status"]["epoch"])
        print(f"epoch {epoch} before the volumes were removed, {now} after", flush=True)
        return seconds

    def ledger(self) -> dict[str, int]:
        """What became of every token; RuntimeError if some are missing."""
        self.client.stop(self.run)
        until("the end of the second run", lambda: self.client.run(self.run)["status"]["settled"])
        status = self.client.run(self.run)["status"]
        tokens: dict[str, int] = dict(status["tokens"])
        if sum(tokens.values()) != status["tokens_processed"]:
            raise RuntimeError(f"{status['tokens_processed']} tokens processed, but {tokens}")
        return tokens


def exercise(smoke: Smoke) -> dict[str, Any]:
    """From nothing to healed five times."""
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
    rounds_committed = len(client.rounds("demo"))
    recreating = Recreating(smoke, client, submit_long(client))
    one_by_one = recreating.one_by_one()
    all_at_once, without_disks = recreating.all_at_once(), recreating.without_disks()
    return {
        "learners": len(learners),
        "seconds_build_and_start": round(built_s, 1),
        "seconds_kill_to_contributing": round(healed_s, 1),
        "seconds_leader_kill_to_round": round(taken_over_s, 1),
        "rounds_committed_before_kill": rounds,
        "rounds_committed": rounds_committed,
        "val_loss_start": evaluations[0]["val_loss"],
        "val_loss_newest": evaluations[-1]["val_loss"],
        "seconds_recreated_to_going_on": one_by_one,
        "seconds_all_recreated_to_going_on": all_at_once,
        "seconds_syncer_disks_gone_to_going_on": without_disks,
        "tokens_of_the_recreated_run": recreating.ledger(),
        "containers": smoke.containers(),
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
