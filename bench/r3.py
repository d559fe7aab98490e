"""A hub of three nodes: the one that leads a run's tape is killed, again and again; then two are.

    python bench/r3.py [--kills 10] [--away 40] [--cost 30] [--seed 0] [--json FILE]

Three message servers on this machine are one hub, as `diloco hub init --node` writes them: with TLS
and credentials for everybody, and with TLS of their own between them. Two learners and two syncers
each name the nodes in another order, so that the leader and its standby are connected to different
ones. Everything is kept in three copies.

    kills     in mid-round, the node that leads the stream of the tape is killed with SIGKILL, and
              started again once rounds are merged without it. `gap_s` is the longest time between
              two merged rounds around the kill, as the tape has it
    majority  two of three nodes are killed for `--away` seconds: what the product says of it, and
              how soon rounds are merged when one of them is back
    cost      merged rounds per second, and bytes stored and fetched per second, with one copy and
              with three; 0 leaves it out

Exit status 0 only if rounds went on after each kill without anybody's help, all that was ever seen
as merged is on the tape, the tape gives the same digests when it is executed again, every token is
accounted for, and the loss of the majority was named.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import beside
from runs import keep, surroundings

from diloco_client import Client
from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.nats.access import TlsFiles
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.run_streams import ensure_run_streams
from diloco_shared.hub import folder as hub_folder
from diloco_shared.hub import nodes as hub_nodes
from diloco_shared.hub.nats_binary import find_binary
from diloco_shared.protocol import subjects

RUN = "three"
SITES, SYNCERS = ("oslo", "bergen"), ("syncer-a", "syncer-b")
# Who begins at which node of the hub: the two syncers at different ones.
FIRST = {"coordinator": 0, "syncer-a": 1, "syncer-b": 2, "oslo": 0, "bergen": 2}
SPEC: dict[str, Any] = {
    "name": RUN,
    "algorithm": {"fragments": 6, "quorum": 1},
    "inner": {"batch_sequences": 8},
    "membership": {"learners_min": 2},
    "evaluation": {"every_steps": 100_000, "sequences": 8},
    "keeping": {"contributions": "all", "checkpoint_every_steps": 100_000, "replicas": 3},
    "budget": {"steps": 10_000_000},
}
# Processes start jax and compile meanwhile, on two cores that may be busy.
PATIENCE_S = 300.0
# Rounds after a kill, before the node comes back.
MORE_ROUNDS = 6
# Of one payload in the measurement of cost.
PAYLOAD_BYTES = 32 << 20


until = partial(beside.until, patience_s=PATIENCE_S, look_s=0.05, fails=RuntimeError)


def free_ports() -> list[int]:
    """Of three nodes: with each also those of its routes and monitoring are free."""
    found: list[int] = []
    while len(found) < 3:
        port = random.SystemRandom().randrange(15_000, 28_000)
        wanted = [port, port + hub_nodes.ROUTES_PORT, port + hub_nodes.MONITOR_PORT]
        if all(_is_free(p) for p in wanted) and port not in found:
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class Cluster:
    """The processes of a hub of three nodes and of two sites, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hub = folder, folder / "hub"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes: list[hub_nodes.Node] = []
        self.api_port = 0

    def prepare(self) -> None:
        """What an operator does before anything starts."""
        places = [w for port in free_ports() for w in ("--node", f"127.0.0.1:{port}")]
        listen = ("--listen", "127.0.0.1:4222", "--monitor", "127.0.0.1:8222")
        # Limits are promised, not used: those of a run that keeps all are more than a disk has.
        room = ("--max-bytes", str(1 << 42))
        self.diloco("hub", "init", str(self.hub), *listen, *places, *room, "--mutual-tls")
        for site in SITES:
            self.diloco("site", "add", site, "--hub", str(self.hub))
        self.nodes = hub_nodes.nodes_of(self.hub)

    def diloco(self, *arguments: str, name: str = "", check: bool = True) -> str:
        """A command; of the process `name`, with what that is told."""
        done = subprocess.run(
            [sys.executable, "-m", "diloco_cli", *arguments],
            env=self.told(name) if name else None,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"diloco {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout

    # --- processes -----------------------------------------------------------------------------

    def url(self, first: int) -> str:
        ordered = [*self.nodes[first:], *self.nodes[:first]]
        return hub_nodes.url_of(ordered, encrypted=True)

    def told(self, name: str) -> dict[str, str]:
        """The environment of a process: nothing of ours but what it is told."""
        certificate = str(hub_folder.certificate_of(self.hub, name))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DILOCO_")}
        kept = {k: v for k, v in os.environ.items() if k == "DILOCO_CACHE"}
        own = {
            "DILOCO_ID": name,
            "DILOCO_NATS_URL": self.url(FIRST.get(name, 0)),
            "DILOCO_NATS_CREDENTIALS": str(self.hub / hub_folder.CREDENTIALS / name),
            "DILOCO_NATS_CA": str(self.hub / hub_folder.AUTHORITY),
            "DILOCO_NATS_CLIENT_CERT": certificate,
            "DILOCO_DATA": str(self.folder / "data"),
            "DILOCO_REPLICAS": "3",
            "DILOCO_PORT": str(self.api_port),
            "DILOCO_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        return inherited | kept | own

    def start(self, name: str, *command: str, env: dict[str, str] | None = None) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def start_node(self, node: hub_nodes.Node) -> None:
        config = str(self.hub / node.name / hub_folder.CONFIG)
        self.start(node.name, str(find_binary(None)), "-c", config)

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def start_all(self) -> Client:
        for node in self.nodes:
            self.start_node(node)
        until("the hub's nodes", self.whole)
        for name in ("coordinator", *SYNCERS, *SITES):
            kind = name if name == "coordinator" else "learner" if name in SITES else "syncer"
            module = f"diloco_{kind}"
            self.start(name, sys.executable, "-m", module, env=self.told(name))
        data = self.folder / "data"
        token = until("the token", lambda: (data / "admin-token").read_text().strip())
        url = until("its address", lambda: (data / "coordinator" / "url").read_text().strip())
        client = Client(url, token)
        until("the coordinator", client.ready)
        return client

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def tails(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in logs)

    # --- nodes ---------------------------------------------------------------------------------

    def monitored(self, node: hub_nodes.Node, path: str) -> Any:
        url = f"http://127.0.0.1:{node.monitor_port}{path}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)

    def living(self) -> list[hub_nodes.Node]:
        return [node for node in self.nodes if node.name in self.running]

    def whole(self) -> bool:
        """Whether every node is there, and has all that the others have."""
        said = [self.monitored(node, "/healthz")["status"] for node in self.nodes]
        # Only the node that leads a stream knows of its other copies.
        led = [
            s for n in self.nodes for s in self.streams(n).values() if s["leader"] == n.server_name
        ]
        copies = [copy for stream in led for copy in stream.get("replicas", ())]
        current = all(c["current"] and not c.get("offline") for c in copies)
        return said == ["ok"] * len(self.nodes) and current

    def connected(self, name: str) -> str:
        """The node that a process is connected to."""
        for node in self.living():
            there = self.monitored(node, "/connz?limit=1000")["connections"]
            if any(c.get("name") == f"{name}-control" for c in there):
                return node.name
        raise LookupError(f"{name} is connected to no node")

    def streams(self, node: hub_nodes.Node) -> dict[str, dict[str, Any]]:
        """By name, where each stream's copies are, as a node sees it."""
        found = self.monitored(node, "/jsz?accounts=true&streams=true")
        accounts = [a for a in found.get("account_details", ()) if a["name"] == "HUB"]
        return {s["name"]: s["cluster"] for a in accounts for s in a.get("stream_detail", ())}

    def leader(self, stream: str) -> hub_nodes.Node:
        """The node that leads a stream."""
        said = until(
            f"a leader of {stream}", lambda: self.streams(self.living()[0])[stream]["leader"]
        )
        return next(node for node in self.nodes if node.server_name == said)


class Drill:
    """What is done to the hub under a run that trains, and what is seen of it."""

    def __init__(self, cluster: Cluster, client: Client, seed: int) -> None:
        self.cluster, self.client, self.random = cluster, client, random.Random(seed)
        self.seen: dict[int, str] = {}  # tape sequence -> digest, of what was told as merged
        self.at: list[float] = []  # when each merged round was closed

    def look(self) -> int:
        """Take note of newly merged rounds; how many are known."""
        after = max(self.seen, default=0)
        for r in self.client.rounds(RUN, after):
            if r["outcome"] == "committed":
                self.seen[r["seq"]] = r["anchor_digest"]
                self.at.append(r["at"])
        return len(self.seen)

    def more(self, count: int, what: str, patience_s: float = PATIENCE_S) -> None:
        known = len(self.seen)
        until(what, lambda: self.look() >= known + count, patience_s=patience_s)

    def begin(self) -> float:
        began = time.monotonic()
        alive = lambda: sum(m["alive"] for m in self.client.members()) >= 5  # noqa: E731
        until("all members", alive)
        self.client.create_run(SPEC)
        until("the first rounds", lambda: self.look() >= 2 * MORE_ROUNDS)
        return round(time.monotonic() - began, 1)

    def gap_s(self, around: float, end: float) -> float:
        """The longest time between two merged rounds, of those that a moment lies in or before."""
        closed = [at for at in self.at if at <= end]
        return max(b - a for a, b in pairwise(closed) if b >= around)

    def since(self, moment: float) -> float:
        """When the first round after a moment was merged; 0 if none was."""
        return next((at for at in self.at if at > moment), 0.0)

    def one_kill(self) -> dict[str, Any]:
        """Kill the node that leads the tape, in mid-round; bring it back when rounds go on."""
        node = self.cluster.leader(subjects.tape_stream(RUN))
        terms = self.status()["term"]
        until("the newest rounds", self.look)
        self.more(MORE_ROUNDS, "rounds before the kill")
        mean_s = statistics.median(b - a for a, b in pairwise(self.at[-MORE_ROUNDS:]))
        time.sleep(self.random.uniform(0.2, 0.8) * mean_s)
        killed = time.time()
        self.cluster.kill(node.name)
        until(f"a round without {node.name}", lambda: self.look() and self.since(killed + 0.5))
        self.more(MORE_ROUNDS, f"rounds without {node.name}")
        gap_s = self.gap_s(killed, time.time())
        self.cluster.start_node(node)
        back = time.monotonic()
        until(f"{node.name} as it was", self.cluster.whole)
        return {
            "node": node.name,
            "gap_s": round(gap_s, 2),
            "round_s": round(mean_s, 3),
            "whole_again_s": round(time.monotonic() - back, 1),
            "new_terms": self.status()["term"] - terms,
        }

    def majority(self, away_s: float) -> dict[str, Any]:
        """Two of three nodes are away for a while, and come back one after the other."""
        first = self.cluster.leader(subjects.tape_stream(RUN))
        # Not the one that the coordinator is at, so that somebody is left to ask.
        second = next(n for n in reversed(self.cluster.nodes) if n != first)
        steps = self.steps()
        killed = time.time()
        began = time.monotonic()
        for node in (first, second):
            self.cluster.kill(node.name)
        said = {"readyz": until("the word of the coordinator", self.named)}
        named_s = time.monotonic() - began
        said["members"] = self.members()
        said["run"] = self.client.run(RUN)["reason"]
        # A node that led a stream believes for some seconds that it still does.
        said["doctor"] = until("the word of doctor", self.examined)
        for what, text in said.items():
            if "lost its majority" not in text:
                raise RuntimeError(f"{what} does not name the loss of the majority: {text}")
        time.sleep(max(0.0, away_s - (time.monotonic() - began)))
        self.cluster.start_node(first)
        back = time.time()
        resumed = until(
            "a round with one of the two back", lambda: self.look() and self.since(back)
        )
        self.more(MORE_ROUNDS, "rounds with one of the two back")
        end = time.time()
        self.cluster.start_node(second)
        until("the hub as it was", self.cluster.whole)
        self.more(MORE_ROUNDS, "rounds with all nodes")
        return {
            "away_s": away_s,
            "named_s": round(named_s, 1),
            "said": said,
            "gap_s": round(self.gap_s(killed, end), 1),
            "back_to_merged_s": round(resumed - back, 1),
            "steps_meanwhile": {s: n - steps[s] for s, n in self.steps().items()},
        }

    def members(self) -> str:
        """The first line of `diloco members`."""
        token = str(self.cluster.folder / "data" / "admin-token")
        where = ("--url", self.client.url, "--token-file", token)
        return self.cluster.diloco("members", *where).splitlines()[0]

    def examined(self) -> str:
        told = self.cluster.diloco("doctor", "--json", name="oslo", check=False)
        nodes = next(c for c in json.loads(told)["checks"] if c["name"] == "nodes")
        return f"{nodes['verdict']}: {nodes['text']}" if nodes["verdict"] == "FAIL" else ""

    def named(self) -> str:
        text = self.client.trouble()
        return text if "majority" in text else ""

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = until("the status", lambda: self.client.run(RUN)["status"])
        return status

    def steps(self) -> dict[str, int]:
        return {s: int(self.status()["learners"][s]["step"]) for s in SITES}

    def end(self) -> dict[str, Any]:
        """Stop the run; what its tape and its ledger say. RuntimeError if something is missing."""
        self.client.stop(RUN)
        until("the end of the run", lambda: self.status()["settled"])
        status, tape = self.status(), {r["seq"]: r for r in self.client.rounds(RUN)}
        lost = [s for s, d in self.seen.items() if tape.get(s, {}).get("anchor_digest") != d]
        if lost:
            raise RuntimeError(f"merged rounds are not on the tape any more: records {lost[:9]}")
        if any(sum(f.values()) != status["tokens_processed"] for f in status["tokens_by_fragment"]):
            raise RuntimeError(f"{status['tokens_processed']} tokens, but {status['tokens']}")
        data = ("--data", str(self.cluster.folder / "data"), "--json")
        found = {
            command[-1]: json.loads(self.cluster.diloco(*command, RUN, *data, name="reader"))
            for command in (("tape", "verify"), ("replay",))
        }
        if found["verify"]["faults"] or found["replay"]["fault"]:
            raise RuntimeError(f"the tape is not sound: {found}")
        rounds = [r["outcome"] for r in tape.values()]
        return {
            "rounds_merged": rounds.count("committed"),
            "rounds_skipped": rounds.count("skipped"),
            "rounds_lost": len(lost),
            "records_verified": found["verify"]["records"],
            "rounds_executed_again": found["replay"]["rounds"],
            "terms": status["term"] + 1,
            "lives": {s: status["learners"][s]["incarnation"] + 1 for s in SITES},
            "tokens": status["tokens"],
        }


# --------------------------------------------------------------------------------------------------
# What three copies cost.


def paced(client: Client, seconds: float) -> dict[str, Any]:
    """Merged rounds and bytes of payload per second of one run after the other, 1 and 3 copies."""
    found: dict[str, list[dict[str, float]]] = {"1": [], "3": []}
    for turn in range(2):
        for copies in (1, 3):
            name = f"cost-{copies}-{turn}"
            client.create_run({**SPEC, "name": name,
                               "keeping": {**SPEC["keeping"], "replicas": copies}})  # fmt: skip
            until("rounds", partial(_has_rounds, client, name))
            begin = len(_merged(client, name))
            began = time.monotonic()
            time.sleep(seconds)
            rounds, took = _merged(client, name), time.monotonic() - began
            sync = statistics.median(r["sync_s"] for r in rounds[begin:])
            rate = (len(rounds) - begin) / took
            found[str(copies)].append({"rounds_per_s": round(rate, 2), "sync_s": round(sync, 4)})
            client.stop(name)
            until("its end", partial(_is_settled, client, name))
    return found


def _has_rounds(client: Client, name: str) -> bool:
    return len(_merged(client, name)) >= MORE_ROUNDS


def _is_settled(client: Client, name: str) -> bool:
    return bool(client.run(name)["status"]["settled"])


def _merged(client: Client, run: str) -> list[dict[str, Any]]:
    return [r for r in client.rounds(run) if r["outcome"] == "committed"]


async def moved(cluster: Cluster) -> dict[str, Any]:
    """Bytes per second to and from a stream, and seconds per record of a tape: 1 and 3 copies."""
    found: dict[str, dict[str, list[float]]] = {
        copies: {"put_mb_per_s": [], "get_mb_per_s": [], "append_ms": []} for copies in ("1", "3")
    }
    async with (
        _bus(cluster, "coordinator") as coordinator,
        _bus(cluster, "syncer-a") as syncer,
        _bus(cluster, "oslo") as learner,
    ):
        for copies in (1, 3):
            limits = dict.fromkeys(subjects.STREAM_KINDS, 1 << 30)
            await ensure_run_streams(coordinator, f"bytes-{copies}", limits, replicas=copies)
        for turn in range(3):
            for copies in (1, 3):
                run, row = f"bytes-{copies}", found[str(copies)]
                began = time.monotonic()
                payload = os.urandom(PAYLOAD_BYTES)
                blob = await put_blob(syncer, f"dn.{run}.0.0.{turn}.0", payload)
                row["put_mb_per_s"].append(PAYLOAD_BYTES / 1e6 / (time.monotonic() - began))
                began = time.monotonic()
                await get_blob(learner, subjects.dn_stream(run), blob)
                row["get_mb_per_s"].append(PAYLOAD_BYTES / 1e6 / (time.monotonic() - began))
                began = time.monotonic()
                for _ in range(100):
                    await syncer.append(subjects.tape(run, 0), bytes(500))
                row["append_ms"].append((time.monotonic() - began) * 10)
        for copies in (1, 3):
            for kind in subjects.STREAM_KINDS:
                await coordinator.delete_stream(subjects.run_stream(f"bytes-{copies}", kind))
    return {
        copies: {name: round(statistics.median(values), 2) for name, values in row.items()}
        for copies, row in found.items()
    }


@asynccontextmanager
async def _bus(cluster: Cluster, name: str) -> AsyncIterator[NatsBus]:
    """A connection with the rights of a process."""
    bus = await NatsBus.connect(
        cluster.url(FIRST[name]),
        name=name,
        credentials=cluster.hub / hub_folder.CREDENTIALS / name,
        tls=TlsFiles(
            cluster.hub / hub_folder.AUTHORITY, hub_folder.certificate_of(cluster.hub, name)
        ),
    )
    try:
        yield bus
    finally:
        await bus.close()


# --------------------------------------------------------------------------------------------------


@contextmanager
def started(folder: Path) -> Iterator[tuple[Cluster, Client]]:
    """Everything, until the context ends; on a failure the ends of all logs are printed."""
    cluster = Cluster(folder)
    try:
        cluster.prepare()
        with cluster.start_all() as client:
            yield cluster, client
    except Exception:
        print(cluster.tails(), file=sys.stderr)
        raise
    finally:
        cluster.close()


def drilled(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """From nothing to the end; raises RuntimeError naming what did not happen."""
    with started(folder) as (cluster, client):
        drill = Drill(cluster, client, args.seed)
        found: dict[str, Any] = {"seed": args.seed, "seconds_to_first_rounds": drill.begin()}
        found["connected_to"] = {name: cluster.connected(name) for name in (*SYNCERS, *SITES)}
        if len({found["connected_to"][name] for name in SYNCERS}) != len(SYNCERS):
            raise RuntimeError(f"leader and standby are at one node: {found['connected_to']}")
        found["kills"] = []
        for _ in range(args.kills):
            found["kills"].append(drill.one_kill())
            print(json.dumps(found["kills"][-1]), file=sys.stderr, flush=True)
        if args.away:
            found["majority"] = drill.majority(args.away)
        found["end"] = drill.end()
        gaps = sorted(k["gap_s"] for k in found["kills"])
        if gaps:
            found["gap_s"] = {"median": statistics.median(gaps), "worst": gaps[-1]}
        if args.cost:
            found["cost"] = {
                "rounds": paced(client, args.cost),
                "bytes": asyncio.run(moved(cluster)),
            }
        return found


def lines(found: Any, at: str = "") -> list[str]:
    """One line per figure."""
    if not isinstance(found, dict | list):
        return [f"{at:44} {found}"]
    named = found.items() if isinstance(found, dict) else enumerate(found, 1)
    return [row for k, v in named for row in lines(v, f"{at} {k}".strip().replace("_", " "))]


def main() -> None:
    """Run it; whatever happens, no process is left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--away", type=float, default=40.0, help="seconds without a majority")
    parser.add_argument("--cost", type=float, default=30.0, help="seconds of each measurement")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("r3: told to end"))
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = drilled(Path(folder), args)
        except RuntimeError as error:
            sys.exit(f"r3: {error}")
    print("\n".join(lines(found)))
    keep(args.json, surroundings(__file__) | found)


if __name__ == "__main__":
    main()
