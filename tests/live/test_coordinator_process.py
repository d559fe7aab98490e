"""A real coordinator on a real nats-server: killed, started again, nothing lost."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live.gate import connected
from live.processes import Services, services
from waiting import wait_until

from diloco_client import ApiError, Client
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import MemberRecord
from diloco_shared.protocol.wire import encode

pytestmark = pytest.mark.live


@contextmanager
def coordinator(running: Services) -> Iterator[Client]:
    """One life of a `diloco-coordinator` on a free port, which ends by a kill."""
    process = running.coordinator()
    with running.client() as client:
        yield client
    process.kill()


async def _members(url: str) -> set[str]:
    async with connected(url) as bus:
        return set(await bus.kv_all(subjects.MEMBERS))


def test_a_coordinator_that_is_told_to_end_leaves_at_once(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    with services(tmp_path, nats_server.url) as running:
        with coordinator(running) as client:
            assert client.ready()
            wait_until(lambda: "coordinator" in asyncio.run(_members(nats_server.url)))
            assert running.all[-1].stop() == 0
            assert asyncio.run(_members(nats_server.url)) == set()
        log = running.all[-1].log.read_text()
        assert "Traceback" not in log and "error" not in log


def test_a_coordinator_says_in_a_line_that_the_hub_has_too_few_nodes(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    with services(tmp_path, nats_server.url, DILOCO_REPLICAS="3") as running:
        process = running.coordinator()
        process.told = True
        assert process.ended() == 1
        log = process.log.read_text()
    assert "no bus" in log and "set DILOCO_REPLICAS=1" in log
    assert "Traceback" not in log


def member(name: str, role: str) -> MemberRecord:
    shown = {"id": name, "role": role, "boot": "1", "host": "h", "pid": 1, "lock": "l"}
    return MemberRecord.model_validate({**shown, "started_at": 1.0})


async def _join(url: str, *members: MemberRecord) -> None:
    async with connected(url) as bus:
        for each in members:
            await bus.kv_put(subjects.MEMBERS, each.id, encode(each))


def test_a_killed_coordinator_comes_back_with_everything(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    with services(tmp_path, nats_server.url) as running:
        with coordinator(running) as client:
            client.create_run({"name": "demo", "budget": {"steps": 8}})
            asyncio.run(_join(nats_server.url, member("a", "learner"), member("s", "syncer")))
            wait_until(lambda: client.run("demo")["members"] == ["a", "s"])
            client.drain("a")
            wait_until(lambda: client.run("demo")["members"] == ["s"])
            client.pause("demo")
            changed = client.set_quorum("demo", 2)
            assert client.rounds("demo") == []
            token = client.make_token("eve", ["read"])
            before = client.run("demo")
            events = client.events("demo")
        with coordinator(running) as client:
            after = client.run("demo")
            assert after["revision"] == before["revision"] == changed["revision"]
            assert (after["desired"], after["quorum"]) == ("paused", 2)
            assert after["members"] == ["s"]
            assert client.events("demo")[: len(events)] == events
            assert client.member("a")["draining"]
            client.undrain("a")
            wait_until(lambda: client.run("demo")["members"] == ["a", "s"])
            with pytest.raises(ApiError) as caught:
                client.set_quorum("demo", 1, revision=1)
            assert caught.value.status == 412
            with Client(client.url, token) as viewer:
                assert viewer.access()["scopes"] == ["read"]
                first = next(iter(viewer.stream_status("demo")))
                assert first["name"] == "demo"
                told = viewer.stream_events("demo")
                assert next(iter(told))["kind"] == events[0]["kind"]
