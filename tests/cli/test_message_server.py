"""How a command reaches the message server: by its options, and else as every service does."""

import os
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.message_server import Login, bus_of
from diloco_cli.up.folder import Folder
from diloco_cli.words import INVALID, NO_CLUSTER, CliError
from diloco_shared.bus.nats.access import Address, TlsFiles
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Unavailable

OPTIONS = Login("tls://user:geheim@hub:4222", "", "")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    """The addresses that were connected to; nobody is there."""
    for name in [name for name in os.environ if name.startswith("DILOCO_NATS_")]:
        monkeypatch.delenv(name)
    found: list[Address] = []

    async def nowhere(address: Address, **more: Any) -> NatsBus:
        found.append(address)
        raise Unavailable("refused")

    monkeypatch.setattr(NatsBus, "to", nowhere)
    return found


async def address_of(asked: list[Address], login: Login, data: Path) -> Address:
    with pytest.raises(CliError) as error:
        await bus_of(login, data)
    assert error.value.status == NO_CLUSTER
    return asked[-1]


async def test_what_the_profile_says_of_tls_and_of_a_token_holds(
    asked: list[Address], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of the file\n")
    monkeypatch.setenv("DILOCO_NATS_CA", "/ca.pem")
    monkeypatch.setenv("DILOCO_NATS_TOKEN_FILE", str(tmp_path / "token"))
    found = await address_of(asked, OPTIONS, tmp_path)
    tls = TlsFiles(Path("/ca.pem"))
    assert found == Address(OPTIONS.url, "of the file", tls=tls)
    found = await address_of(asked, Login("nats://hub", "given", ""), tmp_path)
    assert found == Address("nats://hub", "given", tls=tls), "what is given beats the file"


async def test_the_cluster_of_this_machine_has_its_own_secret_and_no_tls(
    asked: list[Address], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Folder(tmp_path).announce(url="http://127.0.0.1:1", nats="127.0.0.1:7")
    (tmp_path / "nats-token").write_text("its own")
    for name in ("NATS_CA", "NATS_CLIENT_CERT", "NATS_CLIENT_KEY", "NATS_TOKEN_FILE"):
        monkeypatch.setenv(f"DILOCO_{name}", "/of/another/cluster")
    found = await address_of(asked, Login("", "of another", ""), tmp_path)
    assert found == Address("nats://127.0.0.1:7", "its own")


async def test_no_secret_of_the_url_is_told(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"^refused; see --nats-url") as error:
        await bus_of(OPTIONS, tmp_path)
    assert "geheim" not in str(error.value)


async def test_what_is_to_be_changed_are_options_that_these_commands_have(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="no cluster runs in") as none:
        await bus_of(Login("", "", ""), tmp_path)
    Folder(tmp_path).announce(url="http://127.0.0.1:1", nats="10.0.0.1:7")
    with pytest.raises(CliError, match="is not believed") as strange:
        await bus_of(Login("", "", ""), tmp_path)
    for error in (none, strange):
        assert "give --nats-url and --nats-credentials" in str(error.value)
        assert "--url" not in str(error.value) and "--token" not in str(error.value)


async def test_who_named_a_server_is_not_told_to_start_one(tmp_path: Path) -> None:
    """It may be there, and refuse the key."""
    with pytest.raises(CliError) as elsewhere:
        await bus_of(OPTIONS, tmp_path)
    assert "see --nats-url, and --nats-credentials" in str(elsewhere.value)
    assert "diloco up" not in str(elsewhere.value)
    Folder(tmp_path).announce(url="http://127.0.0.1:1", nats="127.0.0.1:7")
    (tmp_path / "nats-token").write_text("its own")
    with pytest.raises(CliError, match="start the cluster with 'diloco up'"):
        await bus_of(Login("", "", ""), tmp_path)


async def test_a_file_that_cannot_be_read_is_named(
    asked: list[Address], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(CliError, match="none cannot be read") as error:
        await bus_of(Login("nats://hub", "", missing), tmp_path)
    assert error.value.status == INVALID
    monkeypatch.setenv("DILOCO_NATS_TOKEN_FILE", missing)
    with pytest.raises(CliError, match="none cannot be read") as error:
        await bus_of(Login("nats://hub", "", ""), tmp_path)
    assert error.value.status == INVALID and not asked
