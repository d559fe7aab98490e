"""A hub loses its disk, and a backup taken in mid-run is put back: the run goes on (I4, I5)."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from live.gate import connected
from live.processes import PATIENCE_S, Process, Services, diloco, services
from waiting import wait_until

from diloco_client import ApiError, Client, Unreachable
from diloco_shared.process.hub_backup import AHEAD, MANIFEST, STREAMS
from diloco_shared.process.nats_server import NatsServer
from diloco_shared.protocol import subjects

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1800)]

AWAY = (ApiError, Unreachable, OSError, LookupError, TypeError)
LEARNERS, SYNCERS = ("learner-1", "learner-2"), ("syncer-1", "syncer-2")


def spec() -> dict[str, Any]:
    return {
        "name": "r",
        "seed": 5,
        "algorithm": {"fragments": 3, "sync_every_steps": 24, "overlap_steps": 8, "quorum": 1},
        "model": {"overrides": {"width": 16, "layers": 1, "hidden": 16}},
        "inner": {"batch_sequences": 8},
        "membership": {"learners_min": 2, "heartbeat_s": 0.5, "lease_s": 3.0},
        "evaluation": {"every_steps": 100_000, "sequences": 32},
        # Snapshots of after the backup, which the tape that is put back does not have.
        "keeping": {
            "snapshot_every_rounds": 5,
            "checkpoint_every_steps": 100_000,
            "begin_again_after_s": 6.0,
        },
        "budget": {"steps": 100_000},
    }


class Cluster:
    """A coordinator, two syncers and two learners around a message server of the test's own."""

    def __init__(self, running: Services, server: NatsServer) -> None:
        self.running, self.server = running, server
        self.processes: dict[str, Process] = {}
        self.client: Client

    def start(self, *names: str) -> None:
        for name in names:
            module = f"diloco_{name.partition('-')[0]}"
            self.processes[name] = self.running.start(module, name, DILOCO_PORT="0")

    def wait(self, condition: Any, what: str) -> Any:
        self.running.check()
        return wait_until(condition, what, patience_s=2 * PATIENCE_S, every_s=0.1, tolerated=AWAY)

    def committed(self) -> list[dict[str, Any]]:
        return [r for r in self.client.rounds("r") if r["outcome"] == "committed"]

    def goes_on(self, what: str, more: int = 12) -> None:
        """So many rounds more, with contributions of both learners."""
        newest = self.wait(self.committed, "rounds")[-1]["seq"]

        def met() -> bool:
            later = [r for r in self.committed() if r["seq"] > newest]
            seen = {v["learner"] for r in later for v in r["verdicts"] if v["outcome"] == "merged"}
            return len(later) >= more and seen == {*LEARNERS}

        self.wait(met, f"rounds after {what}")

    def leader(self) -> str:
        found = {s["state"]: s["id"] for s in self.client.run("r")["syncers"]}
        return str(found["leading"]) if "standby" in found else ""

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.client.run("r")["status"]
        return status


@contextmanager
def cluster(tmp_path: Path, server: NatsServer) -> Iterator[Cluster]:
    with ExitStack() as opened:
        data = tmp_path / "data"
        data.mkdir()
        running = opened.enter_context(services(data, server.url))
        found = Cluster(running, server)
        found.start("coordinator", *SYNCERS, *LEARNERS)
        url = data / "coordinator" / "url"
        address = wait_until(lambda: url.exists() and url.read_text().strip(), "its URL")
        token = (data / "admin-token").read_text().strip()
        found.client = opened.enter_context(Client(address, token))
        yield found


def balanced(status: dict[str, Any]) -> bool:
    return all(
        sum(of.values()) == status["tokens_processed"] for of in status["tokens_by_fragment"]
    )


def told(*arguments: str, status: int = 0) -> Any:
    done = diloco("hub", *arguments, "--json")
    assert done.returncode == status, done.stderr + done.stdout
    return json.loads(done.stdout) if not status else done.stderr


def test_a_run_goes_on_from_a_backup(nats_server: NatsServer, tmp_path: Path) -> None:
    server, folder = nats_server, tmp_path / "backup"
    with cluster(tmp_path, server) as c:
        c.wait(lambda: len([m for m in c.client.members() if m["alive"]]) == 5, "all members")
        c.client.create_run(spec())
        c.goes_on("the start")
        before = c.committed()

        taken = told("backup", str(folder), "--nats-url", server.url)
        assert {"TAPE-r", "UP-r", "DN-r", "KV_runs", "EVENTS"} <= {*taken["streams"]}
        kept = c.committed()
        # Whatever comes now is lost: rounds, snapshots on the syncers' disks, a term.
        c.goes_on("the backup")
        first = c.wait(c.leader, "a leader")
        c.processes[first].kill()
        c.goes_on("another leader", 6)
        lost = c.committed()[-1]
        status = c.status()

        asyncio.run(server.kill())
        shutil.move(server.store_dir, tmp_path / "lost")
        assert "holds streams" in told(
            "restore", str(folder), "--store", str(tmp_path / "lost"), status=1
        )
        done = told("restore", str(folder), "--store", str(server.store_dir))
        assert done["done"]
        asyncio.run(server.start())
        c.start(first)

        c.wait(lambda: c.status()["epoch"] >= status["epoch"] + AHEAD, "the new epoch")
        c.goes_on("the restore")
        rounds = c.committed()
        # What had been there when it was taken is there again.
        assert rounds[: len(before)] == before
        assert kept[-1]["seq"] <= rounds[-1]["seq"]
        assert lost["anchor_digest"] not in {r["anchor_digest"] for r in rounds}
        # No learner has ended over it; each goes on in its life.
        assert all(c.processes[name].popen.poll() is None for name in LEARNERS)
        c.running.check()
        c.client.stop("r")
        c.wait(lambda: c.client.run("r")["state"] == "stopped", "the end")
        c.wait(lambda: c.status()["settled"], "everybody to leave")
        assert balanced(c.status())
        where = ("--nats-url", server.url, "--data", str(c.running.data))
        for command in (("tape", "verify", "r"), ("replay", "r")):
            audit = diloco(*command, *where)
            assert audit.returncode == 0, audit.stdout + audit.stderr


async def with_a_bucket(url: str) -> None:
    async with connected(url) as bus:
        await bus.ensure_bucket(subjects.RUNS)
        await bus.kv_put(subjects.RUNS, "r", b"x")


def test_a_damaged_backup_is_not_put_back(nats_server: NatsServer, tmp_path: Path) -> None:
    folder, store = tmp_path / "backup", tmp_path / "store"
    asyncio.run(with_a_bucket(nats_server.url))
    told("backup", str(folder), "--nats-url", nats_server.url)
    assert "no empty folder" in told("backup", str(folder), "--nats-url", nats_server.url, status=1)
    stream = folder / STREAMS / "KV_runs"
    body = stream.read_bytes()
    stream.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    assert "is not what was taken" in told("restore", str(folder), "--store", str(store), status=1)
    stream.write_bytes(body)
    (folder / MANIFEST).write_text("{}")
    assert "damaged, or of a later form" in told(
        "restore", str(folder), "--store", str(store), status=1
    )
    assert not store.exists()
