"""`diloco doctor` at a site of a real hub with TLS and credentials: well, and in every trouble."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from live.test_nats_rights import PAYLOAD
from live.tls_hub import TlsHub, a_tls_hub
from waiting import until

from diloco_cli.__main__ import main
from diloco_cli.doctor import judging, machine_io
from diloco_cli.doctor.judging import CHECKS
from diloco_shared.bus.blobs import put_blob
from diloco_shared.bus.port import Unavailable
from diloco_shared.hub import certificates
from diloco_shared.hub import folder as hub_folder
from diloco_shared.hub.certificates import Pair
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.protocol import subjects as s
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import encode

pytestmark = pytest.mark.live

Doctor = Callable[..., Any]


@pytest.fixture
def doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Doctor:
    """Findings by name at a site with the environment of an identity, some of it changed."""
    monkeypatch.setattr(machine_io, "devices", lambda: judging.devices(None, ""))

    async def run(hub: TlsHub | None, identity: str, **more: str) -> dict[str, Any]:
        environment = {"DILOCO_DATA": str(tmp_path)}
        environment |= hub.environment(identity) if hub is not None else {}
        for name in [name for name in os.environ if name.startswith("DILOCO_")]:
            monkeypatch.delenv(name)
        for name, value in (environment | more).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.argv", ["diloco", "doctor", "--json", "--probe-mb", "2"])

        def command() -> None:
            with pytest.raises(SystemExit):
                main()

        await asyncio.to_thread(command)
        said = capfd.readouterr()
        assert said.err == ""
        for file in (hub.folder / hub_folder.CREDENTIALS).iterdir() if hub is not None else ():
            assert json.loads(file.read_text())["seed"] not in said.out
        assert "geheim" not in said.out
        found = json.loads(said.out.splitlines()[-1])
        named = {each["name"]: each for each in found["checks"]}
        assert found["ok"] == (not failed(named))
        return named

    return run


def failed(found: dict[str, Any]) -> list[str]:
    return [name for name, each in found.items() if each["verdict"] == "FAIL"]


async def streams_of(hub: TlsHub) -> dict[str, int]:
    """Messages in each stream of the run."""
    async with hub.bus("coordinator") as bus:
        kept = {name: await bus.stream_info(name) for name in (*s.run_streams("r"), "EVENTS")}
    return {name: info.messages for name, info in kept.items()}


async def test_a_site_where_all_is_well_and_nothing_is_left_behind_at_the_hub(
    doctor: Doctor, tmp_path: Path
) -> None:
    async with a_tls_hub(tmp_path / "hub", "oslo") as hub:
        record = RunRecord(name="r", spec={}, desired="running", quorum=1, created_at=0.0)
        async with hub.bus("coordinator") as bus:
            await bus.kv_put(s.RUNS, "r", encode(record))
        async with hub.bus("syncer-a") as bus:
            await put_blob(bus, s.publication("r", 0, 0, 0, 0), PAYLOAD, chunk_bytes=256 << 10)
        before = await streams_of(hub)
        found = await doctor(hub, "oslo", DILOCO_ID="oslo", DILOCO_HOSTS_CHECKPOINTS=str(tmp_path))
        assert {name: each for name, each in found.items() if each["verdict"] == "FAIL"} == {}
        assert set(found) == set(CHECKS)
        verdicts = {name: each["verdict"] for name, each in found.items()}
        well = set(CHECKS) - {"disk", "round trip"}  # those depend on the machine
        assert {verdicts[name] for name in well} == {"ok"}
        assert "those of a learner" in found["rights"]["text"]
        assert found["TLS"]["figures"]["days_left"] == pytest.approx(certificates.DAYS, abs=1)
        clock = found["clock"]["figures"]
        assert abs(clock["offset_s"]) <= clock["precision_s"] + 0.001
        for way in ("up", "down"):
            assert found[f"bandwidth {way}"]["figures"]["bytes"] >= 1_000_000
        assert await streams_of(hub) == before


@pytest.mark.parametrize("role", ["syncer-a", "coordinator", "reader"])
async def test_the_hubs_own_processes_are_known_by_their_rights(
    role: str, doctor: Doctor, tmp_path: Path
) -> None:
    async with a_tls_hub(tmp_path / "hub", mutual=True) as hub:
        found = await doctor(hub, role)
        assert failed(found) == []
        assert f"those of a {role.removesuffix('-a')}" in found["rights"]["text"]
        up = "skipped" if role == "reader" else "ok"
        assert found["bandwidth up"]["verdict"] == up
        assert found["bandwidth down"]["verdict"] == "skipped"  # nothing is published yet
        own = found["TLS"]["figures"]["own_days_left"]
        assert own == pytest.approx(certificates.DAYS, abs=1)


async def test_a_hub_whose_processes_never_began_is_no_fault_of_the_site(
    doctor: Doctor, tmp_path: Path
) -> None:
    async with a_tls_hub(tmp_path / "hub", "oslo") as hub:
        async with hub.bus("coordinator") as bus:
            for name in s.BUCKETS:
                await bus.delete_stream(f"KV_{name}")
        found = await doctor(hub, "oslo")
        assert failed(found) == []
        assert found["clock"]["verdict"] == "warn"
        assert "start the hub's coordinator" in found["clock"]["remedy"]
        assert found["bandwidth down"]["verdict"] == "skipped"


async def test_a_site_whose_account_leads_nowhere_is_told_whom_to_ask(
    doctor: Doctor, tmp_path: Path
) -> None:
    """The server met the account, and has read its configuration only once since."""
    async with a_tls_hub(tmp_path / "hub") as hub:
        hub_folder.add(hub.folder, "oslo", "learner")
        os.kill(hub.pid, signal.SIGHUP)

        async def known() -> bool:
            async with hub.bus("oslo"):
                return True

        async def served() -> bool:
            async with hub.bus("oslo") as bus:
                return (await bus.stream_info("KV_members")).last_seq >= 0

        await until(known, "that it is let in", tolerated=(Unavailable,))
        found = await doctor(hub, "oslo")
        assert failed(found) == ["clock", "versions", "bandwidth down"]
        assert "configuration once more" in found["clock"]["remedy"]
        await hub.reload()
        await until(served, "that it is led on", tolerated=(Unavailable,))
        found = await doctor(hub, "oslo")
        assert failed(found) == []


async def test_one_secret_for_all_is_warned_of(doctor: Doctor, tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", token="geheim")
    await server.start()
    try:
        url = f"nats://{server.address}"
        for more in ({"DILOCO_NATS_TOKEN": "geheim"}, {"DILOCO_NATS_URL": server.url}):
            found = await doctor(None, "", **({"DILOCO_NATS_URL": url} | more))
            assert failed(found) == []
            assert found["credentials"]["verdict"] == "warn"
            assert "let in with a token" in found["credentials"]["text"]
            assert found["rights"]["verdict"] == "skipped"
            assert found["TLS"]["verdict"] == "ok"  # on one machine
            assert found["bandwidth up"]["verdict"] == "ok"
        found = await doctor(None, "", DILOCO_NATS_URL=url, DILOCO_NATS_TOKEN="wrong")
        assert failed(found) == ["credentials"]
        found = await doctor(None, "", DILOCO_NATS_URL=f"tls://geheim@{server.address}")
        assert failed(found) == ["TLS"] and "offers none" in found["TLS"]["text"]
    finally:
        await server.stop()


async def test_troubles_of_a_site_are_told_apart(doctor: Doctor, tmp_path: Path) -> None:
    async with a_tls_hub(tmp_path / "hub", "oslo", "rome", mutual=True) as hub:
        stranger = certificates.new_authority(datetime.now(UTC))
        (tmp_path / "ca.pem").write_text(stranger.certificate)
        (tmp_path / "x.pem").write_text(
            certificates.for_site(stranger, "oslo", datetime.now(UTC)).document
        )

        found = await doctor(hub, "oslo", DILOCO_NATS_CA=str(tmp_path / "ca.pem"))
        assert failed(found) == ["TLS"] and "not trusted" in found["TLS"]["text"]
        assert found["credentials"]["verdict"] == "skipped"

        found = await doctor(hub, "oslo", DILOCO_NATS_CLIENT_CERT="")
        assert failed(found) == ["TLS"]
        assert "demands a certificate of this site" in found["TLS"]["text"]

        found = await doctor(hub, "oslo", DILOCO_NATS_CLIENT_CERT=str(tmp_path / "x.pem"))
        assert failed(found) == ["TLS"]
        assert "does not take this site's certificate" in found["TLS"]["text"]

        # An address of this machine where the hub does not listen.
        url = hub.url.replace("127.0.0.1", "127.0.0.2")
        found = await doctor(hub, "oslo", DILOCO_NATS_URL=url)
        assert failed(found) == ["port"]

        found = await doctor(hub, "oslo", DILOCO_ID="rome")
        assert failed(found) == ["rights"]
        assert "oslo may not speak for rome" in found["rights"]["text"]

        hub_folder.revoke(hub.folder, "rome")
        await hub.reload()
        hub_folder.add(hub.folder, "rome", "learner")  # another key, and the server not told
        found = await doctor(hub, "rome")
        assert failed(found) == ["credentials"]
        assert "does not let in rome" in found["credentials"]["text"]

        port = hub.url.rpartition(":")[2]
        found = await doctor(hub, "oslo", DILOCO_NATS_URL=f"nats://token@127.0.0.1:{port}",
                             DILOCO_NATS_CREDENTIALS="")  # fmt: skip
        assert failed(found) == ["credentials"]
        assert "does not let in a token" in found["credentials"]["text"]
        assert "token@" not in json.dumps(found)


async def test_certificates_that_have_ended_or_are_for_another_name(
    doctor: Doctor, tmp_path: Path
) -> None:
    async with a_tls_hub(tmp_path / "hub", "oslo") as hub:
        for hosts, days, text in (
            (("127.0.0.1",), certificates.DAYS + 1, "is not valid now"),
            (("hub.example.org",), 0, "is for another name"),
            (("127.0.0.1",), certificates.DAYS - 5, ""),
        ):
            pair = Pair(
                hub.authority.read_text(), (hub.folder / hub_folder.AUTHORITY_KEY).read_text()
            )
            made = certificates.for_hub(pair, hosts, datetime.now(UTC) - timedelta(days=days))
            (hub.folder / hub_folder.HUB_CERTIFICATE).write_text(made.certificate)
            (hub.folder / hub_folder.HUB_KEY).write_text(made.key)
            await hub.reload()
            found = await doctor(hub, "oslo")
            assert failed(found) == (["TLS"] if text else [])
            assert text in found["TLS"]["text"]
        assert found["TLS"]["verdict"] == "warn" and "renewed" in found["TLS"]["remedy"]
