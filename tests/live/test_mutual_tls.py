"""A hub that demands certificates: who has none is kept out, and who has one trains."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from live.bare_run import Run
from live.processes import services
from live.test_nats_rights import PAYLOAD
from live.tls_hub import TlsHub, a_tls_hub
from pretenders import peer
from waiting import until

from diloco_shared.bus.blobs import GaveUp, get_blob, put_blob
from diloco_shared.bus.nats.access import TlsFiles
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Unavailable
from diloco_shared.hub import certificates
from diloco_shared.hub import folder as hub_folder
from diloco_shared.protocol import subjects as s

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


async def let_in(hub: TlsHub, tls: TlsFiles | None) -> None:
    bus = await NatsBus.connect(
        hub.url, name="x", credentials=hub.file("oslo"), tls=tls, timeout_s=2
    )
    await bus.close()


async def test_who_has_no_certificate_is_kept_out_though_its_credentials_are_right(
    tmp_path: Path,
) -> None:
    async with a_tls_hub(tmp_path / "hub", "oslo", mutual=True) as hub:
        trusting = TlsFiles(hub.authority)
        with pytest.raises(
            Unavailable, match=r"did not let this process in.*_REQUIRED.* demands a"
        ):
            await let_in(hub, trusting)
        stranger = certificates.new_authority(datetime.now(UTC))
        (tmp_path / "x.pem").write_text(
            certificates.for_site(stranger, "oslo", datetime.now(UTC)).document
        )
        with pytest.raises(Unavailable, match=r"did not let this process in.* may not take the"):
            await let_in(hub, replace(trusting, certificate=tmp_path / "x.pem"))
        assert "127.0.0.1" in next(
            line
            for line in (hub.folder / "log").read_text().splitlines()
            if "TLS handshake error" in line
        )
        # The hub's own certificate is of another authority than the one that is trusted.
        (tmp_path / "ca.pem").write_text(stranger.certificate)
        unknown = "is not believed: .*certificate verify failed.* authority in DILOCO_NATS_CA"
        with pytest.raises(Unavailable, match=unknown):
            await let_in(hub, replace(hub.tls("oslo"), authority=tmp_path / "ca.pem"))
        await let_in(hub, hub.tls("oslo"))


async def test_a_certificate_that_has_ended_is_named_and_whose_it_is(tmp_path: Path) -> None:
    """The server is there: nobody is sent to look whether it runs, or at its port."""
    ended = datetime.now(UTC) - timedelta(days=400)
    async with a_tls_hub(tmp_path / "hub", "oslo", mutual=True) as hub:
        files = (hub_folder.AUTHORITY, hub_folder.AUTHORITY_KEY)
        authority = certificates.Pair(*((hub.folder / name).read_text() for name in files))
        mine = hub.tls("oslo")
        (tmp_path / "old.pem").write_text(certificates.for_site(authority, "oslo", ended).document)
        own = "did not let this process in: .*alert certificate expired.*'diloco site rotate NAME'"
        with pytest.raises(Unavailable, match=own):
            await let_in(hub, replace(mine, certificate=tmp_path / "old.pem"))
        await let_in(hub, mine)
        theirs = certificates.for_hub(authority, ["127.0.0.1"], ended)
        (hub.folder / hub_folder.HUB_CERTIFICATE).write_text(theirs.certificate)
        (hub.folder / hub_folder.HUB_KEY).write_text(theirs.key)
        await asyncio.to_thread(hub_folder.reload, hub.folder)
        with pytest.raises(Unavailable, match=r"believed: .*has expired.*'diloco hub renew FOLDER"):
            await let_in(hub, mine)


async def test_lanes_present_it_too_and_a_new_one_is_used_without_a_start(tmp_path: Path) -> None:
    async with a_tls_hub(tmp_path / "hub", "oslo", mutual=True) as hub, AsyncExitStack() as stack:
        mine = tmp_path / "mine.pem"
        mine.write_bytes(hub_folder.certificate_of(hub.folder, "oslo").read_bytes())
        oslo = await NatsBus.connect(
            hub.url, name="o", credentials=hub.file("oslo"), tls=TlsFiles(hub.authority, mine)
        )
        stack.push_async_callback(oslo.close)
        syncer = await stack.enter_async_context(hub.bus("syncer-a"))
        blob = await put_blob(oslo, s.contribution("r", "oslo", 0, 0, 0, 0), PAYLOAD)
        assert bytes(await get_blob(syncer, "UP-r", blob)) == PAYLOAD
        good = mine.read_bytes()
        mine.write_text("")  # as while it is replaced: connections that are open stay
        await oslo.append(s.contribution("r", "oslo", 0, 0, 1, 0), b"")
        oslo._lanes._idle.pop()[1].abort()
        with pytest.raises(GaveUp, match=r"mine.pem cannot be used: DILOCO_NATS_CLIENT_CERT"):
            await put_blob(oslo, s.contribution("r", "oslo", 0, 0, 2, 0), PAYLOAD, deadline_s=1)
        mine.write_bytes(good)
        oslo._link._client.drop_socket()
        await until(lambda: oslo.reconnects == 1, "a connection with its certificate")
        await put_blob(oslo, s.contribution("r", "oslo", 0, 0, 3, 0), PAYLOAD)


@pytest.mark.long
async def test_a_site_with_a_certificate_trains(tmp_path: Path) -> None:
    async with a_tls_hub(tmp_path / "hub", "oslo", "rome", mutual=True) as hub:
        with services(tmp_path, hub.url, DILOCO_DATA_ROOT=str(tmp_path)) as running:
            async with hub.bus("coordinator") as bus:
                run = Run(bus, running)
                await run.prepare()
                for name, module in (
                    ("syncer-a", "diloco_syncer"),
                    ("oslo", "diloco_learner"),
                    ("rome", "diloco_learner"),
                ):
                    await run.assign(name, "r")
                    running.start(module, name, **hub.environment(name))
                for name in ("oslo", "rome"):
                    await run.merged(name, 0)
                bare = running.start(
                    "diloco_learner",
                    "bare",
                    **(hub.environment("oslo") | {"DILOCO_NATS_CLIENT_CERT": ""}),
                )
                assert await asyncio.to_thread(bare.ended) == 1
                assert "did not let this process in" in bare.log.read_text()


async def test_a_server_that_offers_no_tls_is_told_nothing(tmp_path: Path) -> None:
    """Whoever stands between could say so for it, and would hear the token."""
    heard = asyncio.Queue[bytes]()

    async def without_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO " + json.dumps({"server_id": "x", "version": "2.15.1"}).encode())
        writer.write(b"\r\n")
        heard.put_nowait(await reader.read(1000))

    async with peer(without_tls) as port:
        with pytest.raises(Unavailable, match="offers no TLS"):
            await NatsBus.connect(
                f"tls://127.0.0.1:{port}", name="x", token="secret", timeout_s=0.5
            )
        assert await heard.get() == b""
