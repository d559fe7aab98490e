"""What a process is told of TLS, as files: what is used of it, and what is said of bad ones."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as s11n

from diloco_shared.bus.nats.access import Address, TlsFiles
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Unavailable
from diloco_shared.hub.certificates import for_site, new_authority
from diloco_shared.process.settings import ProcessSettings


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    """ca.pem, and site.pem with site-key.pem and both in both.pem."""
    authority = new_authority(datetime.now(UTC))
    site = for_site(authority, "rome", datetime.now(UTC))
    for name, text in (
        ("ca.pem", authority.certificate),
        ("site.pem", site.certificate),
        ("site-key.pem", site.key),
        ("both.pem", site.document),
        ("empty.pem", ""),
    ):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_an_authority_of_ones_own_is_the_only_one_that_is_trusted(pem: Path) -> None:
    context = TlsFiles(pem / "ca.pem").context()
    assert [c["subject"] for c in context.get_ca_certs()] == [
        ((("commonName", "diloco hub authority"),),)
    ]
    assert context.check_hostname


def test_a_certificate_may_have_its_key_beside_it_or_in_it(pem: Path) -> None:
    TlsFiles(None, pem / "both.pem").context()
    TlsFiles(pem / "ca.pem", pem / "site.pem", pem / "site-key.pem").context()


def test_files_that_cannot_be_used_are_named_with_the_setting(pem: Path) -> None:
    for files, text in (
        (TlsFiles(pem / "none.pem"), "none.pem cannot be read .*DILOCO_NATS_CA"),
        (TlsFiles(pem / "empty.pem"), "empty.pem cannot be used: DILOCO_NATS_CA"),
        (TlsFiles(None, pem / "none.pem"), "none.pem cannot be read .*DILOCO_NATS_CLIENT_CERT"),
        (TlsFiles(None, pem / "site.pem"), "site.pem cannot be used"),
        (TlsFiles(None, pem / "site.pem", pem / "ca.pem"), "with the key .*ca.pem cannot be used"),
    ):
        with pytest.raises(ValueError, match=text):
            files.context()


def test_nobody_is_asked_for_a_keys_password(pem: Path) -> None:
    """A service has no terminal; with one it would wait there."""
    key = s11n.load_pem_private_key((pem / "site-key.pem").read_bytes(), password=None)
    locked = key.private_bytes(
        s11n.Encoding.PEM, s11n.PrivateFormat.PKCS8, s11n.BestAvailableEncryption(b"x")
    )
    (pem / "locked.pem").write_bytes(locked)
    with pytest.raises(ValueError, match="without a password"):
        TlsFiles(None, pem / "site.pem", pem / "locked.pem").context()


def test_who_names_a_file_wants_tls_whatever_the_server_says(pem: Path) -> None:
    assert Address("nats://h", tls=TlsFiles(pem / "ca.pem")).context(False) is not None
    assert Address("tls://h").wants_tls
    plain = Address("nats://h")
    assert plain.context(False) is None and plain.context(True) is not None
    assert not plain.wants_tls


def test_settings_name_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProcessSettings().nats_tls is None
    monkeypatch.setenv("DILOCO_NATS_CA", "/ca.pem")
    monkeypatch.setenv("DILOCO_NATS_CLIENT_CERT", "")  # as Compose passes what is not set
    assert ProcessSettings().nats_tls == TlsFiles(Path("/ca.pem"))
    monkeypatch.setenv("DILOCO_NATS_CLIENT_CERT", "/c.pem")
    monkeypatch.setenv("DILOCO_NATS_CLIENT_KEY", "/k.pem")
    found = ProcessSettings().nats_tls
    assert found == TlsFiles(Path("/ca.pem"), Path("/c.pem"), Path("/k.pem"))


# --------------------------------------------------------------------------------------------------
# Several servers.


def test_nodes_of_a_hub_are_named_in_one_setting_and_used_in_that_order() -> None:
    address = Address("tls://a.example.org, tls://b.example.org:4333,c.example.org,")
    assert address.endpoints() == (
        ("a.example.org", 4222),
        ("b.example.org", 4333),
        ("c.example.org", 4222),
    )
    assert address.urls() == [
        "tls://a.example.org:4222",
        "tls://b.example.org:4333",
        "tls://c.example.org:4222",
    ]
    assert address.wants_tls


def test_what_one_of_them_says_of_who_we_are_holds_for_all_and_is_shown_nowhere() -> None:
    for url, login in (
        ("nats://me:geheim@a:1,b:2", {"user": "me", "pass": "geheim"}),
        ("a:1,nats://geheim@b:2", {"auth_token": "geheim"}),
    ):
        address = Address(url)
        assert address.login({}) == login
        assert all("geheim@" in each for each in address.urls())
        assert address.shown == "a:1, b:2"
    assert Address("nats://[fd00::1]:5,nats://[fd00::2]").urls() == [
        "nats://[fd00::1]:5",
        "nats://[fd00::2]:4222",
    ]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "names 0 servers"),
        (" , ", "names 0 servers"),
        (",".join(["nats://h"] * 17), "names 17 servers"),
        ("nats://a,nats://b:port", "give nats://HOST:PORT"),
        ("nats://user:geheim/x@hub:4222", "of a password as %2F"),
        ("nats://[fd00::1", "cannot be read"),
    ],
)
def test_what_names_no_servers_is_refused(url: str, text: str) -> None:
    with pytest.raises(ValueError, match=text) as told:
        Address(url).endpoints()
    assert "geheim" not in str(told.value)


def test_signs_of_a_password_are_escaped() -> None:
    address = Address("nats://me:a%2Fb%40c@hub:4222")
    assert address.login({}) == {"user": "me", "pass": "a/b@c"}
    assert address.endpoints() == (("hub", 4222),)
    assert Address("nats://a%25b@hub").secrets() == {"auth_token": "a%b"}


async def test_and_a_connection_says_so(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="names 0 servers"):
        await NatsBus.connect("", name="t", timeout_s=1)
