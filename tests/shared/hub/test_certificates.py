"""A hub's authority: whom its certificates let in, and what they are good for."""

import socket
import ssl
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from diloco_shared.hub.certificates import (
    DAYS,
    Pair,
    ends_at,
    for_hub,
    for_site,
    names_of,
    new_authority,
)

NOW = datetime.now(UTC)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def handshake(tmp_path: Path, hub: Pair, trusted: Pair, site: Pair | None, name: str) -> str:
    """Both sides of one connection: "" if it works, else what the first to refuse says."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(written(tmp_path / "hub.pem", hub.document))
    server.verify_mode = ssl.CERT_REQUIRED
    server.load_verify_locations(written(tmp_path / "ca.pem", trusted.certificate))
    client = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    if site is not None:
        client.load_cert_chain(written(tmp_path / "site.pem", site.document))
    ours, theirs = socket.socketpair()
    refusals: list[str] = []

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as encrypted:
                encrypted.sendall(b"in")
        except (ssl.SSLError, OSError) as error:
            refusals.append(str(error))
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    said = ""
    try:
        with client.wrap_socket(ours, server_hostname=name) as encrypted:
            said = "" if encrypted.recv(2) == b"in" else "closed"
    except (ssl.SSLError, OSError) as error:
        said = str(error)
    ours.close()
    thread.join()
    return said or "".join(refusals)


def test_hub_and_site_believe_each_other_under_every_name_of_the_hub(tmp_path: Path) -> None:
    authority = new_authority(NOW)
    hub = for_hub(authority, ("hub.example.org", "10.0.0.1", "fd00::1"), NOW)
    site = for_site(authority, "rome", NOW)
    for name in ("hub.example.org", "10.0.0.1", "fd00::1"):
        assert handshake(tmp_path, hub, authority, site, name) == ""
    assert "certificate" in handshake(tmp_path, hub, authority, site, "other.example.org")


def test_who_has_none_one_of_another_authority_or_one_that_has_ended_is_refused(
    tmp_path: Path,
) -> None:
    authority, other = new_authority(NOW), new_authority(NOW)
    hub = for_hub(authority, ("h",), NOW)
    old = for_site(authority, "rome", NOW - timedelta(days=DAYS + 1))
    for site, why in (
        (None, "certificate"),
        (for_site(other, "rome", NOW), "unknown"),
        (old, "expired"),
    ):
        assert why in handshake(tmp_path, hub, authority, site, "h").lower()


def test_a_sites_certificate_is_good_for_no_server(tmp_path: Path) -> None:
    """Else a site could take the hub's place between the hub and others."""
    authority = new_authority(NOW)
    site = for_site(authority, "h", NOW)
    assert "certificate" in handshake(tmp_path, site, authority, site, "h")


def test_what_ends_when() -> None:
    authority = new_authority(NOW)
    left = ends_at(for_site(authority, "rome", NOW).certificate) - NOW
    assert left.days in (DAYS - 1, DAYS)
    assert ends_at(authority.certificate) > NOW + timedelta(days=3649)


def test_what_a_certificate_is_for_stands_in_it() -> None:
    authority, hosts = new_authority(NOW), ["hub.example.org", "10.0.0.1", "fd00::1", "nats"]
    assert names_of(for_hub(authority, hosts, NOW).certificate) == hosts
    assert names_of(for_site(authority, "rome", NOW).certificate) == []
    with pytest.raises(ValueError):
        names_of("no certificate")


def test_a_key_is_in_no_representation_and_a_wrong_one_signs_nothing() -> None:
    authority = new_authority(NOW)
    assert "PRIVATE" not in repr(authority) and "PRIVATE" in authority.document
    for hosts in ((), ("h",) * 33):
        with pytest.raises(ValueError, match="1 to 32 names"):
            for_hub(authority, hosts, NOW)
    with pytest.raises(ValueError):
        for_site(replace(authority, key="x"), "rome", NOW)
