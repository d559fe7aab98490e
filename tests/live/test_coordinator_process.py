"""A real coordinator on a real nats-server: killed, started again, nothing lost."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diloco_client import ApiError, Client
from diloco_shared.edges.nats_bus import NatsBus
from diloco_shared.edges.nats_server import NatsServer
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import MemberRecord
from diloco_shared.protocol.wire import encode

pytestmark = pytest.mark.live

PATIENCE_S = 60.0


class Coordinator:
    """`diloco-coordinator` in a folder of its own, on a free port."""

    def __init__(self, data: Path, nats: str) -> None:
        self.data, self.nats = data, nats

    def start(self) -> Client:
        url = self.data / "coordinator" / "url"
        url.unlink(missing_ok=True)
        chosen = {"DILOCO_NATS_URL": self.nats, "DILOCO_DATA": str(self.data), "DILOCO_PORT": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "diloco_coordinator"], env={**os.environ, **chosen}
        )
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if url.exists() and (text := url.read_text().strip()):
                client = Client(text, (self.data / "admin-token").read_text().strip())
                if client.ready():
                    return client
                client.close()
            time.sleep(0.1)
        pytest.fail("the coordinator never came")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


def member(name: str, role: str) -> MemberRecord:
    shown = {"id": name, "role": role, "boot": "1", "host": "h", "pid": 1, "lock": "l"}
    return MemberRecord.model_validate({**shown, "started_at": 1.0})


def until(holds: Any) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if value := holds():
            return value
        time.sleep(0.1)
    pytest.fail("never held")


async def _join(url: str, *members: MemberRecord) -> None:
    bus = await NatsBus.connect(url, name="world")
    for each in members:
        await bus.kv_put(subjects.MEMBERS, each.id, encode(each))
    await bus.close()


def test_a_killed_coordinator_comes_back_with_everything(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    coordinator = Coordinator(tmp_path / "data", nats_server.url)
    try:
        with coordinator.start() as client:
            client.create_run({"name": "demo", "budget": {"steps": 8}})
            asyncio.run(_join(nats_server.url, member("a", "learner"), member("s", "syncer")))
            until(lambda: client.run("demo")["members"] == ["a", "s"])
            client.drain("a")
            until(lambda: client.run("demo")["members"] == ["s"])
            client.pause("demo")
            changed = client.set_quorum("demo", 2)
            assert client.rounds("demo") == []
            token = client.make_token("eve", "viewer")
            before = client.run("demo")
            events = client.events("demo")
        coordinator.kill()
        with coordinator.start() as client:
            after = client.run("demo")
            assert after["revision"] == before["revision"] == changed["revision"]
            assert (after["desired"], after["quorum"]) == ("paused", 2)
            assert after["members"] == ["s"]
            assert client.events("demo")[: len(events)] == events
            assert client.member("a")["draining"]
            client.undrain("a")
            until(lambda: client.run("demo")["members"] == ["a", "s"])
            with pytest.raises(ApiError) as caught:
                client.set_quorum("demo", 1, revision=1)
            assert caught.value.status == 412
            with Client(client.url, token) as viewer:
                assert viewer.access()["role"] == "viewer"
                first = next(iter(viewer.stream_status("demo")))
                assert first["name"] == "demo"
                told = viewer.stream_events("demo")
                assert next(iter(told))["kind"] == events[0]["kind"]
    finally:
        coordinator.kill()
