"""What an operator does to the containers of one machine, and whether the run goes on.

    make compose-test        (python bench/containers.py [--json FILE])

Two learners are started; one is killed, and is merged again; the syncer that leads is killed, and
the standby leads. A second run goes on with four learners, then with three; when the message server
is started anew; when every container is made anew, one by one and all at once; and when the
syncers' volumes are gone as well. In the end `down` takes everything away.

Needs a Docker engine and Compose. DILOCO_BUILD_NETWORK names the build network where the default
one has no way out. Exit status 0 only if all of that happened, nobody was lost for good, every
token of the second run is accounted for, and nothing is left.
"""

import argparse
import os
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import beside
from runs import keep, surroundings
from site_containers import compose_command, left_of

from diloco_client import Client

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "diloco-drill"
PORT = "8479"
# Building downloads jax once; training and healing take a minute or two.
PATIENCE_S = 420.0


class Stack:
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

    def scale(self, learners: int) -> None:
        """So many learners: the newest go, or more come."""
        self.up("--no-recreate", learners=learners)

    def up(self, how: str, *, learners: int) -> None:
        """All but the submission, which is done once."""
        self.compose("up", "-d", how, "--scale", f"learner={learners}", *SERVICES)

    def client(self) -> Client:
        token = self.compose("exec", "-T", "coordinator", "cat", "/data/admin-token").strip()
        return Client(f"http://127.0.0.1:{PORT}", token)


AWAY = (*beside.AWAY, RuntimeError)
until = partial(beside.until, patience_s=PATIENCE_S, look_s=1.0, away=AWAY, fails=RuntimeError)

# Of compose/run.toml, which the service `submit` begins.
RUN = "laptop"
# Far more than the exercises take: the second run is stopped, not finished.
LONG = {"name": "recreated", "budget": {"steps": 1_000_000}}
SERVICES = ("nats", "coordinator", "syncer", "learner")
# Learners of the second run, one after the other.
FIRST, MORE, FEWER = 2, 4, 3
# Rounds that show that a run goes on, and not only that it comes to its end.
MORE_ROUNDS = 12


def merged_lives(client: Client, learner: str) -> set[int]:
    """Incarnations of a learner that were merged."""
    return {
        v["incarnation"]
        for r in client.rounds(RUN)
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
    until("a standby", lambda: "standby" in [x["state"] for x in client.run(RUN)["syncers"]])
    status = client.run(RUN)["status"]
    killed = kill_container(client, status["leader"])
    until("a round of a later term", lambda: client.rounds(RUN)[-1]["term"] > status["term"])
    return time.monotonic() - killed


def submit_long(stack: Stack, client: Client) -> str:
    """End the first run; begin one that lasts, with fewer learners. Its name."""
    client.stop(RUN)
    until("the end of the first run", lambda: client.run(RUN)["status"]["settled"])
    client.delete_run(RUN)
    stack.scale(FIRST)
    until("fewer learners", lambda: len(learners_of(client)) == FIRST)
    spec = tomllib.loads((ROOT / "compose" / "run.toml").read_text(encoding="utf-8")) | LONG
    spec["membership"] = {"learners_min": FIRST}
    client.create_run(spec)
    name = str(spec["name"])
    until("rounds of the second run", lambda: committed(client, name) > MORE_ROUNDS)
    return name


def learners_of(client: Client) -> list[str]:
    """Those that live."""
    return [m["id"] for m in client.members() if m["role"] == "learner" and m["alive"]]


def committed(client: Client, run: str) -> int:
    """Rounds committed so far."""
    return int(client.run(run)["status"]["rounds_committed"])


class Operator:
    """What an operator does to the second run's containers."""

    def __init__(self, stack: Stack, client: Client, run: str) -> None:
        self.stack = stack
        self.client = client
        self.run = run
        self.learners = FIRST

    def goes_on(self, what: str) -> float:
        """Seconds until every learner takes part again, and rounds go on."""
        began = time.monotonic()
        # The coordinator may be what was made anew: it answers when it listens again.
        before = until("an answer", lambda: committed(self.client, self.run) + 1) - 1

        def on() -> bool:
            status = self.client.run(self.run)["status"]
            return bool(
                status["rounds_committed"] > before + MORE_ROUNDS
                and len(status["alive"]) == len(status["participating"]) == self.learners
            )

        until(f"the run going on after {what}", on)
        return round(time.monotonic() - began, 1)

    def scaled(self, learners: int) -> float:
        self.learners = learners
        self.stack.scale(learners)
        return self.goes_on(f"{learners} learners were asked for")

    def message_server(self) -> float:
        (name,) = (n for n in self.stack.containers() if "nats" in n)
        subprocess.run(["docker", "restart", name], check=True, capture_output=True)
        return self.goes_on("the message server was started anew")

    def one_by_one(self) -> dict[str, float]:
        """Every container but the one-time submission is removed and made anew."""
        found: dict[str, float] = {}
        for name in self.stack.containers():
            subprocess.run(["docker", "rm", "-f", name], check=True, capture_output=True)
            self.stack.scale(self.learners)
            found[name] = self.goes_on(f"{name} was recreated")
        return found

    def all_at_once(self) -> float:
        self.stack.up("--force-recreate", learners=self.learners)
        return self.goes_on("all containers were recreated")

    def without_disks(self) -> float:
        """As all at once, and the syncers find empty volumes."""
        epoch = int(self.client.run(self.run)["status"]["epoch"])
        containers = self.stack.containers()
        subprocess.run(["docker", "rm", "-f", *containers], check=True, capture_output=True)
        volume = f"{PROJECT}_syncer"
        subprocess.run(["docker", "volume", "rm", volume], check=True, capture_output=True)
        self.stack.scale(self.learners)
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


def exercise(stack: Stack) -> dict[str, Any]:
    """From nothing to healed after everything that the module names."""
    began = time.monotonic()
    stack.compose("up", "--build", "-d")
    built_s = time.monotonic() - began
    client = until("the coordinator", stack.client)
    until("ready", client.ready)
    until("the first rounds", lambda: len(client.rounds(RUN)) > 12)
    learners = sorted(client.run(RUN)["status"]["learners"])
    victim = learners[0]
    until("a contribution of the victim", lambda: merged_lives(client, victim))
    rounds = len(client.rounds(RUN))
    killed = kill_container(client, victim)
    until("the victim merged again", lambda: len(merged_lives(client, victim)) > 1)
    healed_s = time.monotonic() - killed
    taken_over_s = kill_leader(client)
    evaluations = client.metrics(RUN)["evaluations"]
    rounds_committed = len(client.rounds(RUN))
    operator = Operator(stack, client, submit_long(stack, client))
    more, fewer = operator.scaled(MORE), operator.scaled(FEWER)
    message_server = operator.message_server()
    one_by_one = operator.one_by_one()
    all_at_once, without_disks = operator.all_at_once(), operator.without_disks()
    return {
        "learners": len(learners),
        "seconds_build_and_start": round(built_s, 1),
        "seconds_kill_to_contributing": round(healed_s, 1),
        "seconds_leader_kill_to_round": round(taken_over_s, 1),
        "rounds_committed_before_kill": rounds,
        "rounds_committed": rounds_committed,
        "val_loss_start": evaluations[0]["val_loss"],
        "val_loss_newest": evaluations[-1]["val_loss"],
        f"seconds_{FIRST}_to_{MORE}_learners": more,
        f"seconds_{MORE}_to_{FEWER}_learners": fewer,
        "seconds_message_server_restarted_to_going_on": message_server,
        "seconds_recreated_to_going_on": one_by_one,
        "seconds_all_recreated_to_going_on": all_at_once,
        "seconds_syncer_disks_gone_to_going_on": without_disks,
        "tokens_of_the_recreated_run": operator.ledger(),
        "containers": stack.containers(),
        "command": "make compose-test",
    }


def main() -> None:
    """Run it; always take everything down."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    stack = Stack()
    try:
        summary = surroundings("containers.py") | exercise(stack)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(stack.compose("logs", "--tail", "30"), file=sys.stderr)
        sys.exit(f"compose-test: {error}")
    finally:
        stack.compose("down", "-v", "--remove-orphans")
    if left := left_of(PROJECT):
        sys.exit(f"compose-test: down has left {', '.join(left)}")
    print("\n".join(f"{key}: {value}" for key, value in summary.items()))
    keep(args.json, summary)


if __name__ == "__main__":
    main()
