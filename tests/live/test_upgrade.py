"""This release and the next one in one run, exchanged for each other while it trains (I4, I5, I9).

With the last release: `make upgrade-drill`.
"""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from live.processes import COMPILED
from live.tape_checks import balanced
from live.tiny import tiny
from live.watched import Watched
from next_release import VERSION as NEXT
from storms.releases import FIRST, Cluster, Release, Upgrading

from diloco_cli.up.stack import free_port
from diloco_shared import VERSION
from diloco_shared.hub.nats_server import NatsServer

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
THIS = Release("this", ROOT)
LATER = Release("next", ROOT, (str(ROOT / "tests" / "next_release.py"),))
RUN = tiny(inner={"batch_sequences": 8}, keeping={"contributions": "all"})


class Exchanged(Cluster, Watched):
    """The cluster of the drill with the last release, as tests look at theirs."""

    patience_s = 600.0


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
    cluster = Exchanged(data, nats_server.url, free_port(0), COMPILED)
    try:
        cluster.begin(releases[0])
        client = cluster.client
        cluster.wait_until(lambda: sum(m["alive"] for m in client.members()) >= 5, "all members")
        client.create_run(RUN)
        cluster.wait_until(lambda: len(cluster.rounds()) >= 3, "the first rounds")
        upgrading = Upgrading(cluster, "r", releases)
        for n, role in enumerate(order):
            upgrading.exchange(upgrading.state(), role, signal.SIGTERM)
            if n == 1:
                assert {*client.run("r")["releases"]} == {VERSION, NEXT}
        last = {THIS.name: VERSION, LATER.name: NEXT}[releases[1].name]
        cluster.wait_until(lambda: {*client.run("r")["releases"]} == {last}, "one release")
        client.stop("r")
        cluster.wait_until(lambda: cluster.status()["settled"], "the end")
        assert balanced(cluster.status())
        where = ("--data", str(data), "--nats-url", nats_server.url)
        for release in releases:
            for command in (("tape", "verify"), ("replay",)):
                done = cluster.diloco(release, *command, "r", *where)
                assert done.returncode == 0, done.stdout + done.stderr
    finally:
        cluster.close()
