"""A hub loses its disk, and a backup taken in mid-run is put back: the run goes on (I4, I5)."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live.gate import connected
from live.processes import PATIENCE_S, Services, diloco, diloco_says, services
from live.tape_checks import balanced
from live.tiny import tiny
from live.watched import Watched

from diloco_shared.hub.backup import AHEAD, MANIFEST, STREAMS
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.protocol import subjects

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1800)]

LEARNERS, SYNCERS = ("learner-1", "learner-2"), ("syncer-1", "syncer-2")
# Snapshots of after the backup, which the tape that is put back does not have.
KEEPING = {
    "snapshot_every_rounds": 5,
    "checkpoint_every_steps": 100_000,
    "begin_again_after_s": 6.0,
}


class Cluster(Watched):
    """A coordinator, two syncers and two learners around a message server of the test's own."""

    patience_s = 2 * PATIENCE_S

    def __init__(self, running: Services) -> None:
        self.running = running

    def start(self, *names: str) -> None:
        for name in names:
            self.running.start(f"diloco_{name.partition('-')[0]}", name)

    def check(self) -> None:
        self.running.check()

    def goes_on(self, what: str, more: int = 12) -> None:
        """So many rounds more, with contributions of both learners."""
        newest = self.wait_until(self.committed, "rounds")[-1]["seq"]

        def met() -> bool:
            later = [r for r in self.committed() if r["seq"] > newest]
            seen = {v["learner"] for r in later for v in r["verdicts"] if v["outcome"] == "merged"}
            return len(later) >= more and seen == {*LEARNERS}

        self.wait_until(met, f"rounds after {what}")


@contextmanager
def cluster(data: Path, server: NatsServer) -> Iterator[Cluster]:
    data.mkdir()
    with services(data, server.url) as running:
        found = Cluster(running)
        running.coordinator()
        found.start(*SYNCERS, *LEARNERS)
        with running.client() as found.client:
            yield found


def told(*arguments: str) -> Any:
    return json.loads(diloco_says("hub", *arguments, "--json"))


def refused(*arguments: str) -> str:
    done = diloco("hub", *arguments)
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_a_run_goes_on_from_a_backup(nats_server: NatsServer, tmp_path: Path) -> None:
    server, folder = nats_server, tmp_path / "backup"
    with cluster(tmp_path / "data", server) as c:
        c.wait_until(lambda: len([m for m in c.client.members() if m["alive"]]) == 5, "all members")
        c.client.create_run(tiny(inner={"batch_sequences": 8}, keeping=KEEPING))
        c.goes_on("the start")
        before = c.committed()

        taken = told("backup", str(folder), "--nats-url", server.url)
        assert {"TAPE-r", "UP-r", "DN-r", "KV_runs", "EVENTS"} <= {*taken["streams"]}
        kept = c.committed()
        # Whatever comes now is lost: rounds, snapshots on the syncers' disks, a term.
        c.goes_on("the backup")
        first = c.wait_until(lambda: c.standby() and c.leader(), "a leader and a standby")
        c.running.newest[first].kill()
        c.goes_on("another leader", 6)
        lost = c.committed()[-1]
        status = c.status()

        asyncio.run(server.kill())
        shutil.move(server.store_dir, tmp_path / "lost")
        assert "holds streams" in refused("restore", str(folder), "--store", str(tmp_path / "lost"))
        done = told("restore", str(folder), "--store", str(server.store_dir))
        assert done["done"]
        asyncio.run(server.start())
        c.start(first)

        c.wait_until(lambda: c.status()["epoch"] >= status["epoch"] + AHEAD, "the new epoch")
        c.goes_on("the restore")
        rounds = c.committed()
        # What had been there when it was taken is there again.
        assert rounds[: len(before)] == before
        assert kept[-1]["seq"] <= rounds[-1]["seq"]
        assert lost["anchor_digest"] not in {r["anchor_digest"] for r in rounds}
        # No learner has ended over it; each goes on in its life.
        assert all(c.running.newest[name].popen.poll() is None for name in LEARNERS)
        c.running.check()
        c.end()
        c.wait_until(lambda: c.status()["settled"], "everybody to leave")
        assert balanced(c.status())
        where = ("--nats-url", server.url, "--data", str(c.running.data))
        for command in (("tape", "verify", "r"), ("replay", "r")):
            diloco_says(*command, *where)


async def with_a_bucket(url: str) -> None:
    async with connected(url) as bus:
        await bus.ensure_bucket(subjects.RUNS)
        await bus.kv_put(subjects.RUNS, "r", b"x")


def test_a_damaged_backup_is_not_put_back(nats_server: NatsServer, tmp_path: Path) -> None:
    folder, store = tmp_path / "backup", tmp_path / "store"
    asyncio.run(with_a_bucket(nats_server.url))
    told("backup", str(folder), "--nats-url", nats_server.url)
    assert "no empty folder" in refused("backup", str(folder), "--nats-url", nats_server.url)
    stream = folder / STREAMS / "KV_runs"
    body = stream.read_bytes()
    stream.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    assert "is not what was taken" in refused("restore", str(folder), "--store", str(store))
    stream.write_bytes(body)
    (folder / MANIFEST).write_text("{}")
    assert "damaged, or of a later form" in refused("restore", str(folder), "--store", str(store))
    assert not store.exists()
