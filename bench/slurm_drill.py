"""Learners as jobs of Slurm: what the files of deploy/slurm do when Slurm stops and moves them.

    make slurm-test                    (python bench/slurm_drill.py [--json FILE])

Needs Slurm's programs and munge (Debian: slurmctld slurmd slurm-client munge), and starts a
controller and two nodes of its own on this machine (slurm_here.py). A hub with TLS and credentials
is set up by `diloco hub init` and `diloco site add`. `deploy/slurm/learner.sbatch` is submitted
twice: `frankfurt-1` is one task on the first node, and `frankfurt-2` an island of two tasks, one on
each node. Then it happens to the island, while the other one trains on:

    time_limit  Slurm sends what it sends before a job's time is over
    preempted   a job of another partition takes the second node away for a while
    killed      one of its two processes dies
    hung        one of its two processes stands still
    requeued    somebody says `scontrol requeue`
    node_down   the second node fails
    cancelled   somebody says `scancel`: it does not come back
    by_hand     it is started by srun alone, as docs/how-to/many-hosts.md says, and told to stop

After each but the last two the same job goes on, and a new life of the same learner is merged. Exit
status 0 only if all of that happened, if the other learner was merged meanwhile as the life that it
was, and if every token is accounted for.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
from runs import keep, surroundings
from site_drill import RUN, SPEC, Drill, until
from sites import lines
from slurm_here import NODES, Slurm, free_port, missing

from diloco_client import Client
from diloco_shared.hub import folder as hub_folder
from diloco_shared.hub.nats_binary import find_binary

ROOT = Path(__file__).resolve().parents[1]
SBATCH = ROOT / "deploy" / "slurm" / "learner.sbatch"
SITE, ALONE, ISLAND = "frankfurt", "frankfurt-1", "frankfurt-2"
# Of one machine, whose two processors all share.
SMALL = ("--cpus-per-task=1", "--mem=1G")
HELD_S = 5  # how long another job has the node


class Hub:
    """Message server, coordinator and a syncer at the loopback, and what a site is given of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hub = folder / "hub"
        self.url = f"tls://127.0.0.1:{free_port()}"
        self.api_port = free_port()
        self.running: list[subprocess.Popen[bytes]] = []

    def prepare(self) -> None:
        """What the operators of hub and site do before anything starts."""
        where = self.url.removeprefix("tls://")
        monitor = f"127.0.0.1:{free_port()}"
        places = ("--listen", where, "--host", "127.0.0.1", "--monitor", monitor)
        self.diloco("hub", "init", str(self.hub), *places)
        ids = ("--learner", ALONE, "--learner", ISLAND)
        self.diloco("site", "add", SITE, *ids, "--hub", str(self.hub))
        told = (ROOT / "deploy" / "site.env").read_text("utf-8").splitlines()
        own = {
            "DILOCO_NATS_URL": self.url,
            "DILOCO_CHECKPOINTS": str(self.folder / "checkpoints"),
            "DILOCO_DATA_ROOT": str(self.folder),
            "DILOCO_NATS_CA": str(self.hub / hub_folder.AUTHORITY),
        }
        changed = [
            f"{n}={own[n]}" if (n := line.partition("=")[0]) in own else line for line in told
        ]
        (self.folder / "site.env").write_text("\n".join(changed) + "\n", encoding="utf-8")

    def diloco(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "diloco_cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"diloco {' '.join(arguments)}: {done.stderr or done.stdout}")

    def learner(self) -> dict[str, str]:
        """What whoever submits a learner has in the environment."""
        return {
            "SITE": SITE,
            "SITE_ENVIRONMENT": str(self.folder / "site.env"),
            "DILOCO_NATS_CREDENTIALS": str(self.hub / hub_folder.CREDENTIALS / SITE),
            "DILOCO_DATA": str(self.folder / "learners"),
            "DILOCO_THREADS": "1",
            "DILOCO_HEALTH_PORT": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def _start(self, name: str, *command: str, **more: str) -> None:
        credentials = self.hub / hub_folder.CREDENTIALS / name
        told = {
            "DILOCO_ID": name,
            "DILOCO_NATS_URL": self.url,
            "DILOCO_NATS_CREDENTIALS": str(credentials),
            "DILOCO_NATS_CA": str(self.hub / hub_folder.AUTHORITY),
            "DILOCO_DATA": str(self.folder / "data"),
            "DILOCO_CHECKPOINTS": str(self.folder / "checkpoints"),
            "DILOCO_HEALTH_PORT": "0",
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running.append(
                subprocess.Popen(command, env=os.environ | told | more, stdout=log, stderr=log)
            )

    def start(self) -> Client:
        self._start("nats", str(find_binary(None)), "-c", str(self.hub / "nats-server.conf"))
        api = {"DILOCO_HOST": "127.0.0.1", "DILOCO_PORT": str(self.api_port)}
        self._start("coordinator", sys.executable, "-m", "diloco_coordinator", **api)
        self._start("syncer-a", sys.executable, "-m", "diloco_syncer")
        token = self.folder / "data" / "admin-token"
        until("the administrator's token", lambda: token.exists() and token.read_text())
        client = Client(f"http://127.0.0.1:{self.api_port}", token.read_text().strip())
        until("the coordinator", client.ready)
        return client

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


class OnSlurm(Drill):
    """What Slurm does to an island, and what is seen of it."""

    def __init__(self, slurm: Slurm, hub: Hub, client: Client) -> None:
        self.slurm, self.hub, self.client = slurm, hub, client
        self.jobs: dict[str, str] = {}

    def submit(self, learner: str, *how: str) -> None:
        number = learner.rpartition("-")[2]
        log = self.hub.folder / f"{learner}.log"
        words = ("--parsable", f"--array={number}", *SMALL, *how, f"--output={log}", str(SBATCH))
        said = self.slurm.run("sbatch", *words, **self.hub.learner())
        self.jobs[learner] = f"{said.strip()}_{number}"

    def begin(self) -> float:
        self.submit(ALONE, f"--nodelist={NODES[0]}")
        self.submit(ISLAND, "--nodes=2")
        self.client.create_run(SPEC)
        return self.go_on("at first", ALONE, ISLAND)

    # --- what happens to it --------------------------------------------------------------------

    def told(self, *command: str) -> Callable[[], object]:
        return lambda: self.slurm.run(*command)

    def preempt(self) -> None:
        wants = ("--partition=urgent", f"--nodelist={NODES[1]}", "--exclusive")
        self.slurm.run("srun", *wants, "sleep", str(HELD_S))

    def process(self, index: int) -> psutil.Process:
        """Of the island, the task of this number."""
        for process in psutil.process_iter():
            try:
                told = process.environ()
                own = told.get("SLURM_CONF") == self.slurm.environment["SLURM_CONF"]
                is_it = told.get("DILOCO_ID") == ISLAND and told.get("SLURM_PROCID") == str(index)
                if own and is_it and "diloco-learner" in " ".join(process.cmdline()):
                    return process
            except psutil.Error:
                continue
        raise RuntimeError(f"no process {index} of the island is there")

    def node_down(self) -> None:
        node = f"nodename={NODES[1]}"
        self.slurm.run("scontrol", "update", node, "state=down", "reason=drill")
        until(
            "the job taken away", lambda: self.slurm.job(self.jobs[ISLAND])["JobState"] != "RUNNING"
        )
        until("the node back", lambda: self._is_back(node))

    def _is_back(self, node: str) -> bool:
        """Slurm takes it back by itself when its daemon is heard of, or is told to."""
        with suppress(RuntimeError):
            self.slurm.run("scontrol", "update", node, "state=resume")
        return not any("down" in state for state in self.slurm.nodes())

    # --- what is seen --------------------------------------------------------------------------

    def comes_back(self, what: str, do: Callable[[], object], *, requeued: bool) -> dict[str, Any]:
        """Do it to the island, and wait until a new life of it is merged."""
        job, newest, life = self.jobs[ISLAND], self.newest(), max(self.merged(ISLAND, -1))
        restarts, other = int(self.slurm.job(job)["Restarts"]), max(self.merged(ALONE, -1))
        began, events = time.monotonic(), len(self.client.events(RUN))
        do()
        if requeued:
            until(f"{what}: queued again", lambda: self._runs_again(job, restarts))
        runs_s = time.monotonic() - began
        until(f"{what}: merged again", lambda: max(self.merged(ISLAND, newest), default=0) > life)
        merged_s = time.monotonic() - began
        if int(self.slurm.job(job)["Restarts"]) != restarts + requeued:
            raise RuntimeError(
                f"{what}: the job was started {self.slurm.job(job)['Restarts']} times"
            )
        if set(self.merged(ALONE, newest)) != {other}:
            raise RuntimeError(f"{what}: {ALONE} did not go on as it was")
        came = [e for e in self.client.events(RUN)[events:] if e["source"] == ISLAND]
        moments = [e["data"].get("source") for e in came if e["kind"] == "recovered"]
        found: dict[str, Any] = {
            "seconds_to_merged": round(merged_s, 1),
            "moments_from": moments[-1] if moments else "nobody",
        }
        return found | ({"seconds_to_run_again": round(runs_s, 1)} if requeued else {})

    def _runs_again(self, job: str, restarts: int) -> bool:
        shown = self.slurm.job(job)
        return shown["JobState"] == "RUNNING" and int(shown["Restarts"]) > restarts

    def cancelled(self) -> dict[str, Any]:
        """It ends in order, and Slurm has nothing of it any more."""
        began, job = time.monotonic(), self.jobs[ISLAND]
        self.slurm.run("scancel", job)
        until("the job's end", lambda: self.slurm.job(job).get("JobState", "") == "CANCELLED")
        until(
            "no step left", lambda: not self.slurm.run("squeue", "--noheader", "--job", job).strip()
        )
        ended_s = round(time.monotonic() - began, 1)
        until(f"{ISLAND} missed", lambda: ISLAND not in self.status()["alive"])
        return {"seconds_to_end": ended_s}

    def faults(self) -> int:
        """How often the script took the island's end for a fault: told to end, it ends with 0."""
        log = (self.hub.folder / f"{ISLAND}.log").read_text("utf-8", errors="replace")
        return log.count("ended with status")

    def waited(self) -> float:
        """Seconds for which the other learner had nothing to compute, in all of its life."""
        return float(self.client.member(ALONE)["learner"]["wait_s"])

    def by_hand(self) -> dict[str, Any]:
        """`srun` alone, as the page on many hosts shows it."""
        newest, life = self.newest(), max(self.merged(ISLAND, -1))
        site = dict(
            line.split("=", 1)
            for line in (self.hub.folder / "site.env").read_text("utf-8").splitlines()
            if line and not line.startswith("#")
        )
        told = self.slurm.environment | self.hub.learner() | site
        told |= {"DILOCO_HOSTS": "slurm", "DILOCO_ID": ISLAND}
        began = time.monotonic()
        with (self.hub.folder / "by-hand.log").open("ab") as log:
            step = subprocess.Popen(
                [
                    "srun",
                    "--job-name=by-hand",
                    "--nodes=2",
                    "--ntasks-per-node=1",
                    "diloco-learner",
                ],
                env=told,
                stdout=log,
                stderr=log,
            )
        try:
            until("merged by hand", lambda: max(self.merged(ISLAND, newest), default=0) > life)
            merged_s = time.monotonic() - began
            self.slurm.run("scancel", "--signal=TERM", "--name=by-hand")
            status = step.wait(60)
        finally:
            step.kill()
        if status:
            raise RuntimeError(f"by hand: srun ended with status {status}, and 0 was to come")
        return {"seconds_to_merged": round(merged_s, 1), "status_of_srun": status}

    def all(self) -> dict[str, Any]:
        """From the first round to the end; raises RuntimeError naming what did not happen."""
        found: dict[str, Any] = {"seconds_to_first_rounds": self.begin()}
        job = self.jobs[ISLAND]
        for what, do, requeued in (
            ("time_limit", self.told("scancel", "--signal=USR1", "--batch", job), True),
            ("preempted", self.preempt, True),
            ("killed", lambda: self.process(1).kill(), False),
            ("hung", lambda: self.process(1).send_signal(signal.SIGSTOP), False),
            ("requeued", self.told("scontrol", "requeue", job), True),
            ("node_down", self.node_down, True),
        ):
            found[what] = self.comes_back(what, do, requeued=requeued)
            print("\n".join(lines(found[what], what)), flush=True)
        found |= {"cancelled": self.cancelled(), "by_hand": self.by_hand()}
        if (faults := self.faults()) != 2:
            raise RuntimeError(f"{faults} ends were taken for faults, and killed and hung are two")
        found["other_steps"] = self.steps(ALONE)
        return found | {"other_waited_s": self.waited(), "tokens": self.ledger()}


def drilled(folder: Path) -> dict[str, Any]:
    """From nothing to the end; raises RuntimeError naming what did not happen."""
    with ExitStack() as closing:
        hub = Hub(folder)
        closing.callback(hub.close)
        hub.prepare()
        client = closing.enter_context(hub.start())
        # Everybody may pass here, and reads nothing: munged wants it.
        folder.chmod(0o711)
        (folder / "slurm").mkdir()
        slurm = closing.enter_context(Slurm(folder / "slurm"))
        version = slurm.run("sinfo", "--version").strip()
        try:
            return {"slurm": version} | OnSlurm(slurm, hub, client).all()
        except Exception:
            logs = sorted(folder.glob("*.log"))
            for log in logs:
                print(f"== {log.name}\n{log.read_text(errors='replace')[-6000:]}", file=sys.stderr)
            print(slurm.tails(), file=sys.stderr)
            raise


def main() -> None:
    """Run it; whatever happens, no process is left."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if lost := missing():
        sys.exit(f"slurm-test: needs Slurm and munge, and there is no {', '.join(lost)}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = drilled(Path(folder).resolve())
        except RuntimeError as error:
            sys.exit(f"slurm-test: {error}")
    print("\n".join(lines(found)))
    keep(args.json, surroundings("slurm_drill.py") | {"command": "make slurm-test"} | found)


if __name__ == "__main__":
    main()
