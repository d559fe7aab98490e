"""This release and the next one in one run, exchanged for each other while it trains (I4, I5, I9).

With the last release: `make upgrade-drill`.
"""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from live.processes import COMPILED
from next_release import VERSION as NEXT
from storms.releases import FIRST, Cluster, Release, Upgrading, until

from diloco_cli.up.stack import free_port
from diloco_shared import VERSION
from diloco_shared.process.nats_server import NatsServer

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
THIS = Release("this", ROOT)
LATER = Release("next", ROOT, (str(ROOT / "tests" / "next_release.py"),))
RUN: dict[str, Any] = {
    "name": "r",
    "seed": 5,
    "algorithm": {"fragments": 3, "sync_every_steps": 24, "overlap_steps": 8, "quorum": 1},
    "model": {"overrides": {"width": 16, "layers": 1, "hidden": 16}},
    "inner": {"batch_sequences": 8},
    "membership": {"learners_min": 2, "heartbeat_s": 0.5, "lease_s": 3.0},
    "evaluation": {"every_steps": 100_000, "sequences": 32},
    "keeping": {"contributions": "all"},
    "budget": {"steps": 100_000},
}


@pytest.mark.parametrize(
    ("releases", "order"),
    [((THIS, LATER), FIRST[:4]), ((THIS, LATER), FIRST[4:]), ((LATER, THIS), FIRST[:4])],
    ids=["upgraded", "in another order", "taken back"],
)
def test_a_run_goes_on_while_its_processes_are_exchanged(
    releases: Sequence[Release], order: Sequence[str], nats_server: NatsServer, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    cluster = Cluster(data, nats_server.url, free_port(0), COMPILED)
    try:
        cluster.begin(releases[0])
        client = cluster.client
        until("all members", lambda: sum(m["alive"] for m in client.members()) >= 5)
        client.create_run(RUN)
        until("the first rounds", lambda: len(client.rounds("r")) >= 3)
        upgrading = Upgrading(cluster, "r", releases)
        for n, role in enumerate(order):
            upgrading.exchange(upgrading.state(), role, signal.SIGTERM)
            if n == 1:
                assert {*client.run("r")["releases"]} == {VERSION, NEXT}
        last = {THIS.name: VERSION, LATER.name: NEXT}[releases[1].name]
        until("one release", lambda: {*client.run("r")["releases"]} == {last})
        client.stop("r")
        until("the end", lambda: client.run("r")["status"]["settled"])
        status = client.run("r")["status"]
        assert all(
            sum(f.values()) == status["tokens_processed"] for f in status["tokens_by_fragment"]
        )
        where = ("--data", str(data), "--nats-url", nats_server.url)
        for release in releases:
            for command in (("tape", "verify"), ("replay",)):
                done = cluster.diloco(release, *command, "r", *where)
                assert done.returncode == 0, done.stdout + done.stderr
    finally:
        cluster.close()
