"""One cluster whose processes are of two releases, and a walk that exchanges them for each other.

A cluster's state is which release its four roles are of: coordinator, leading syncer, standby, and
learners. An exchange changes one of them: the leader that is exchanged comes back as the standby,
since the standby has taken over. There are 16 states and 64 exchanges, forth and back; every order
in which a cluster can be upgraded, or taken back, is a path of them. `Walk` goes through all.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import beside

from diloco_client import Client

PACKAGES = (
    *("cli", "client", "shared", "services/coordinator", "services/learner", "services/syncer"),
)
SYNCERS, LEARNERS = ("syncer-1", "syncer-2"), ("learner-1", "learner-2")
# Of a busy machine: everything waits for processes that start and compile, in seconds.
PATIENCE_S = 900.0
# Told to end, a process gives back what it holds and leaves; a learner has its work merged first.
ENDING_S = 60.0


until = partial(beside.until, patience_s=PATIENCE_S)


class Release(NamedTuple):
    """Where a release lies, and what starts its modules: `python <starter> MODULE`."""

    name: str
    root: Path
    starter: tuple[str, ...] = ("-m",)

    @property
    def path(self) -> str:
        return os.pathsep.join(str(self.root / package) for package in PACKAGES)


class Cluster:
    """Two learners, two syncers and a coordinator around a message server that runs already."""

    def __init__(self, folder: Path, nats_url: str, port: int, compiled: Path) -> None:
        self.folder, self.port = folder, port
        self.shared = {
            "DILOCO_NATS_URL": nats_url,
            "DILOCO_DATA": str(folder),
            "DILOCO_DATA_ROOT": str(folder),
            "DILOCO_HOST": "127.0.0.1",
            "DILOCO_CACHE": str(compiled),
            "DILOCO_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.nats_url = nats_url
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.release: dict[str, Release] = {}
        self.client: Client
        self.opened = ExitStack()

    def environment(self, release: Release) -> dict[str, str]:
        return {**os.environ, **self.shared, "PYTHONPATH": release.path}

    def start(self, name: str, release: Release) -> None:
        role = name.partition("-")[0]
        port = str(self.port) if role == "coordinator" else "0"
        with (self.folder / f"{name}.log").open("ab") as log:
            log.write(f"=== {release.name}\n".encode())
            log.flush()
            self.running[name] = subprocess.Popen(
                [sys.executable, *release.starter, f"diloco_{role}"],
                env={**self.environment(release), "DILOCO_ID": name, "DILOCO_PORT": port},
                stdout=log,
                stderr=log,
            )
        self.release[name] = release

    def warm(self, release: Release) -> None:
        """Compile what merges take now, and not in the run: minutes on busy cores."""
        code = "from diloco_shared.numerics.merge import warm; warm()"
        command = [sys.executable, "-c", code]
        subprocess.run(command, env=self.environment(release), check=True)

    def begin(self, release: Release) -> None:
        """All of one release, and a client of the coordinator."""
        for name in ("coordinator", *SYNCERS, *LEARNERS):
            self.start(name, release)
        token = until("the token", lambda: (self.folder / "admin-token").read_text().strip())
        client = Client(f"http://127.0.0.1:{self.port}", token)
        self.client = self.opened.enter_context(client)
        until("the coordinator", self.client.ready)

    def end(self, name: str, how: signal.Signals) -> float:
        """End a process; the seconds that took."""
        process, began = self.running.pop(name), time.monotonic()
        process.send_signal(how)
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise SystemExit(f"{name} did not end within {ENDING_S:g} s") from None
        return time.monotonic() - began

    def close(self) -> None:
        self.opened.close()
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def diloco(self, release: Release, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of a release, against the message server."""
        return subprocess.run(
            [sys.executable, *release.starter, "diloco_cli", *arguments],
            env=self.environment(release),
            capture_output=True,
            text=True,
            check=False,
        )

    # --- looking -------------------------------------------------------------------------------

    def dead(self) -> list[str]:
        """Processes that ended although nobody told them to."""
        return [name for name, process in self.running.items() if process.poll() is not None]

    def led(self, run: str) -> tuple[str, str] | None:
        """(leader, standby), once there are both."""
        found = {s["state"]: s["id"] for s in self.client.run(run)["syncers"]}
        both = found.get("leading"), found.get("standby")
        return (both[0], both[1]) if both[0] and both[1] else None

    def merged(self, run: str, after: int, learners: Collection[str]) -> int:
        """The newest round, if each of these learners was merged in some round later than `after`.

        0 where one was not.
        """
        rounds = [r for r in self.client.rounds(run, after) if r["outcome"] == "committed"]
        seen = {v["learner"] for r in rounds for v in r["verdicts"] if v["outcome"] == "merged"}
        return int(rounds[-1]["seq"]) if rounds and set(learners) <= seen else 0


# --------------------------------------------------------------------------------------------------
# The walk.

ROLES = ("coordinator", "leader", "standby", "learners")
# Done first: an upgrade as it is recommended, and the way back in another order. Once the leader is
# exchanged the other syncer leads, so it is exchanged as the leader too.
FIRST = (
    *("coordinator", "standby", "leader", "learners"),
    *("learners", "leader", "leader", "coordinator"),
)
State = tuple[int, int, int, int]  # of each of ROLES: 0 of the last release, 1 of the next one


def exchanged(state: State, role: str) -> State:
    """What comes of a state: the leader comes back as the standby."""
    c, lead, stand, learn = state
    match role:
        case "coordinator":
            return (1 - c, lead, stand, learn)
        case "leader":
            return (c, stand, 1 - lead, learn)
        case "standby":
            return (c, lead, 1 - stand, learn)
    return (c, lead, stand, 1 - learn)


@dataclass(slots=True)
class Walk:
    """Which exchange comes next: FIRST, and then others until each was made in each state."""

    made: set[tuple[State, str]] = field(default_factory=set)
    of: int = 64

    def next(self, state: State) -> str | None:
        """The first step of a shortest way to an exchange that was not made yet; None: all were."""
        if len(self.made) >= self.of:
            return None
        if len(self.made) < len(FIRST):
            return FIRST[len(self.made)]
        waiting: deque[tuple[State, str]] = deque([(state, "")])
        seen = {state}
        while waiting:
            here, first = waiting.popleft()
            for role in ROLES:
                if (here, role) not in self.made:
                    return first or role
            for role in ROLES:
                if (there := exchanged(here, role)) not in seen:
                    seen.add(there)
                    waiting.append((there, first or role))
        return None


@dataclass(slots=True)
class Upgrading:
    """Exchanges the processes of a cluster, and sees each time that the run goes on."""

    cluster: Cluster
    run: str
    releases: Sequence[Release]  # the last one, the next one
    seq: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def state(self) -> State:
        lead, stand = until("a leader and a standby", lambda: self.cluster.led(self.run))
        c, one, two, learn = (
            self.releases.index(self.cluster.release[name])
            for name in ("coordinator", lead, stand, LEARNERS[0])
        )
        return (c, one, two, learn)

    def names(self, role: str) -> Iterator[str]:
        lead, stand = until("a leader and a standby", lambda: self.cluster.led(self.run))
        yield from {"leader": (lead,), "standby": (stand,), "learners": LEARNERS}.get(role, (role,))

    def exchange(self, state: State, role: str, how: signal.Signals) -> dict[str, Any]:
        """One exchange: ended, started anew of the other release, and both learners merged again.

        `gap_s`: from the signal to a committed round that came after the new process was started.
        """
        began = time.monotonic()
        ending_s = 0.0
        for name in list(self.names(role)):
            to = self.releases[1 - self.releases.index(self.cluster.release[name])]
            ending_s += self.cluster.end(name, how)
            self.cluster.start(name, to)
            self.goes_on(name)
        row = {
            "from": dict(zip(ROLES, (self.releases[bit].name for bit in state), strict=True)),
            "exchanged": role,
            "signal": how.name,
            "ending_s": round(ending_s, 2),
            "all_merged_again_s": round(time.monotonic() - began, 2),
        }
        self.rows.append(row)
        return row

    def goes_on(self, name: str) -> None:
        """The process is a member, and after that both learners are merged, and somebody stands by.

        Until its key is its own it may be shown as the process before it was.
        """
        pid = self.cluster.running[name].pid
        until(f"{name} among the members", lambda: self.cluster.client.member(name)["pid"] == pid)
        newest = until("rounds", lambda: self.cluster.client.rounds(self.run)[-1]["seq"])

        def again() -> int:
            if dead := self.cluster.dead():
                raise SystemExit(f"ended by themselves: {', '.join(dead)}")
            return self.cluster.merged(self.run, newest, LEARNERS)

        self.seq = until("rounds with both learners", again)
        until("a leader and a standby", lambda: self.cluster.led(self.run))
