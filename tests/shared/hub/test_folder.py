"""A hub's folder: what stands in it after every change, and what is refused and changes nothing."""

import errno
import json
import os
import pwd
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from diloco_shared.bus.nats.access import TlsFiles
from diloco_shared.bus.nats.keys import Credentials, read_credentials
from diloco_shared.bus.nats.rights import KEYS_MAX
from diloco_shared.hub import certificates
from diloco_shared.hub import folder as hub_folder


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder as `create` leaves it."""
    hub_folder.create(tmp_path / "hub", listen="127.0.0.1:4222", store=tmp_path / "store")
    return tmp_path / "hub"


def keys_in_accounts(hub: Path) -> set[str]:
    """Whom the server will let in."""
    accounts = json.loads((hub / "accounts.conf").read_text().removeprefix("accounts: "))
    return {user["nkey"] for account in accounts.values() for user in account["users"]}


def key_in(path: Path | None) -> str:
    assert path is not None
    return read_credentials(path).public_key


@pytest.mark.parametrize("name", ["j\u00fcrgen", 'a "b"', "back\\slash"])
def test_its_store_is_found_whatever_its_name(tmp_path: Path, name: str) -> None:
    hub = tmp_path / name
    hub_folder.create(hub, listen="127.0.0.1:4222", store=hub / "store")
    assert hub_folder.stores_of(hub) == {"hub": hub / "store"}
    said = (hub / "nats-server.conf").read_text("utf-8") + (hub / "accounts.conf").read_text(
        "utf-8"
    )
    assert "\\u" not in said, "the server does not know this escape"


def test_a_store_that_an_operator_wrote_in_another_way_is_named(hub: Path) -> None:
    config = hub / "nats-server.conf"
    config.write_text("  store_dir '/disk/a b'\n")
    assert hub_folder.stores_of(hub) == {"hub": Path("/disk/a b")}
    config.write_text('store_dir: "/disk/\\x41"\n')
    with pytest.raises(ValueError, match=re.escape(f'{config}: store_dir "/disk/\\x41" cannot be')):
        hub_folder.stores_of(hub)


def test_a_hub_lets_in_who_it_handed_credentials_to(hub: Path) -> None:
    assert [i.name for i in hub_folder.identities_of(hub)] == [n for n, _ in hub_folder.FIRST]
    handed = {key_in(path) for path in (hub / "credentials").iterdir()}
    assert keys_in_accounts(hub) == handed
    assert len(handed) == len(hub_folder.FIRST)


def test_only_the_owner_reads_it(hub: Path) -> None:
    hub_folder.add(hub, "rome", "learner")
    files = [path for path in hub.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {p.stat().st_mode & 0o777 for p in (hub, hub / "credentials")} == {0o700}
    assert not [path for path in files if path.suffix == ".part"]


def test_secrets_are_nowhere_but_in_the_files_handed_out(hub: Path) -> None:
    path = hub_folder.add(hub, "rome", "learner")
    assert path is not None
    seed = json.loads(path.read_text())["seed"]
    others = [p for p in hub.rglob("*") if p.is_file() and p != path]
    assert not [p for p in others if seed in p.read_text()]


def test_adding_rotating_retiring_and_revoking(hub: Path) -> None:
    first = key_in(hub_folder.add(hub, "rome", "learner", ("rome-1", "rome-2")))
    rome = hub_folder.identities_of(hub)[-1]
    assert (rome.name, rome.role, rome.members) == ("rome", "learner", ("rome-1", "rome-2"))
    second = key_in(hub_folder.rotate(hub, "rome"))
    assert {first, second} <= keys_in_accounts(hub)
    third = key_in(hub_folder.rotate(hub, "rome"))
    assert {first, second, third} <= keys_in_accounts(hub)
    hub_folder.retire(hub, "rome")
    assert hub_folder.identities_of(hub)[-1].keys == (third,)
    others = keys_in_accounts(hub) - {third}
    hub_folder.revoke(hub, "rome")
    assert keys_in_accounts(hub) == others
    assert not (hub / "credentials" / "rome").exists()


def test_no_further_key_cuts_off_a_site_that_uses_an_old_one(hub: Path) -> None:
    """Which of them the site uses nobody here knows: a file may be lost, or never taken away."""
    first = key_in(hub_folder.add(hub, "rome", "learner"))
    made = [key_in(hub_folder.rotate(hub, "rome")) for _ in range(KEYS_MAX - 1)]
    secret = (hub / "credentials" / "rome").read_bytes()
    with pytest.raises(ValueError, match=f"rome has 5 keys.*rotate rome --finish --hub {hub}'"):
        hub_folder.rotate(hub, "rome")
    assert {first, *made} <= keys_in_accounts(hub)
    assert (hub / "credentials" / "rome").read_bytes() == secret
    hub_folder.retire(hub, "rome")
    latest = key_in(hub_folder.rotate(hub, "rome"))
    assert hub_folder.identities_of(hub)[-1].keys == (made[-1], latest)


def test_a_site_gets_further_learners_and_keeps_its_key(hub: Path) -> None:
    path = hub_folder.add(hub, "rome", "learner", ("rome-1", "rome-2"))
    secret, key = path.read_bytes() if path else b"", key_in(path)
    before = keys_in_accounts(hub)
    assert hub_folder.learners_of(hub, "rome") == ("rome-1", "rome-2")
    for _ in range(2):  # whoever was interrupted types it again
        hub_folder.change_learners(hub, "rome", added=("rome-3", "rome-2"))
        assert hub_folder.learners_of(hub, "rome") == ("rome-1", "rome-2", "rome-3")
    hub_folder.change_learners(hub, "rome", added=("rome-4",), removed=("rome-1", "rome-3"))
    (rome,) = [i for i in hub_folder.identities_of(hub) if i.name == "rome"]
    assert (rome.members, rome.keys) == (("rome-2", "rome-4"), (key,))
    assert keys_in_accounts(hub) == before and path is not None and path.read_bytes() == secret
    accounts = (hub / "accounts.conf").read_text()
    assert "up.*.rome-4.>" in accounts and "up.*.rome-2.>" in accounts
    assert "rome-1" not in accounts and "rome-3" not in accounts


def test_a_site_may_keep_its_secret_to_itself(hub: Path, tmp_path: Path) -> None:
    mine = Credentials.new("rome")
    hub_folder.write_secret(tmp_path / "mine", mine.document())
    assert read_credentials(tmp_path / "mine") == mine
    assert hub_folder.add(hub, "rome", "learner", public_key=mine.public_key) is None
    assert mine.public_key in keys_in_accounts(hub)
    assert not (hub / "credentials" / "rome").exists()
    with pytest.raises(ValueError, match="there already"):
        hub_folder.write_secret(tmp_path / "mine", Credentials.new("rome").document())
    assert read_credentials(tmp_path / "mine") == mine


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda hub: hub_folder.add(hub, "reader", "reader"), "identity reader already"),
        (
            lambda hub: hub_folder.add(hub, "x", "learner", ("syncer-a",)),
            "syncer-a is the id of a syncer",
        ),
        (lambda hub: hub_folder.add(hub, "../x", "learner"), "not a valid id"),
        (lambda hub: hub_folder.add(hub, "x", "learner", public_key="SU"), "no public key"),
        (lambda hub: hub_folder.revoke(hub, "rome"), "no identity rome; known: coordinator"),
        (lambda hub: hub_folder.rotate(hub, "rome"), "no identity rome"),
        (lambda hub: hub_folder.retire(hub, "rome"), "no identity rome"),
        (
            lambda hub: hub_folder.change_learners(hub, "rome", added=("x",)),
            "no identity rome; known: coordinator",
        ),
        (
            lambda hub: hub_folder.change_learners(hub, "syncer-a", added=("x",)),
            "syncer-a is a syncer: only a site has learners",
        ),
        (
            lambda hub: hub_folder.change_learners(hub, "oslo", removed=("rome-1",)),
            "oslo has no learner rome-1; known: oslo-1, oslo-2",
        ),
        (
            lambda hub: hub_folder.change_learners(hub, "oslo", removed=("oslo-1", "oslo-2")),
            "oslo would have no learner left",
        ),
        (
            lambda hub: hub_folder.change_learners(hub, "oslo", added=("x",), removed=("x",)),
            "x: add it, or remove it, not both",
        ),
        (
            lambda hub: hub_folder.change_learners(hub, "oslo", added=("syncer-a",)),
            "syncer-a is the id of a syncer: give the learner another",
        ),
        (
            lambda hub: hub_folder.add(hub, "rome", "learner", ("rome-1", "oslo-2")),
            "learner oslo-2 is of site oslo: .*'diloco site learners oslo --remove oslo-2 --hub /",
        ),
        (
            lambda hub: hub_folder.add(hub, "oslo-1", "syncer"),
            "member oslo-1 is of both .*: take it out of one of them first",
        ),
        (
            lambda hub: hub_folder.create(hub, listen="h:1", store=hub),
            "a hub's folder already: nothing was changed",
        ),
    ],
)
def test_what_is_refused_changes_nothing(
    hub: Path, change: Callable[[Path], object], text: str
) -> None:
    hub_folder.add(hub, "oslo", "learner", ("oslo-1", "oslo-2"))
    before = {p: p.read_bytes() for p in hub.rglob("*") if p.is_file() and p.name != "lock"}
    with pytest.raises(ValueError, match=text):
        change(hub)
    after = {p: p.read_bytes() for p in hub.rglob("*") if p.is_file() and p.name != "lock"}
    assert after == before


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    how = "is not there: name the hub's folder with --hub"
    with pytest.raises(ValueError, match=f"identities.json {how}"):
        hub_folder.identities_of(tmp_path)
    with pytest.raises(ValueError, match=f"none {how}"):
        hub_folder.add(tmp_path / "none", "rome", "learner")
    with pytest.raises(ValueError, match="folder as in 'diloco hub renew /etc/diloco/hub'"):
        hub_folder.renew(tmp_path / "none")


def test_whose_folder_it_is_is_told_to_who_may_not_open_it(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make another hub, as somebody without rights was once told, is no way out."""
    (hub / "nodes.json").write_text("[]\n")
    me = pwd.getpwuid(os.geteuid()).pw_name
    mine = f"(permission denied): run this as the owner of the folder, {me}"

    def denied(path: object, *_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr(Path, "read_bytes", denied)
    monkeypatch.setattr(Path, "read_text", denied)
    for act in (hub_folder.identities_of, hub_folder.stores_of):
        with pytest.raises(ValueError, match=re.escape(mine)):
            act(hub)
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ValueError, match=re.escape(mine)):
        hub_folder.revoke(hub, "reader")


def test_the_hubs_own_processes_are_no_sites(hub: Path) -> None:
    hub_folder.add(hub, "syncer-c", "syncer")
    hub_folder.add(hub, "auditor", "reader")
    hub_folder.add(hub, "oslo", "learner")
    known = [i.name for i in hub_folder.identities_of(hub)]
    own = [name for name in known if hub_folder.of_the_hub(hub, name)]
    assert own == ["coordinator", "syncer-a", "syncer-b", "reader", "syncer-c"]


@pytest.mark.parametrize("held", [b"", b"{}x", b"[1]", b'[{"name": "x"}]', b"[" * 100_000])
def test_a_damaged_list_of_identities_is_named(hub: Path, held: bytes) -> None:
    (hub / "identities.json").write_bytes(held)
    with pytest.raises(ValueError, match=r"identities.json is not a list of identities.*backup"):
        hub_folder.identities_of(hub)


def test_a_list_of_identities_that_is_too_long_is_not_read(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = (hub / "identities.json").read_bytes()
    monkeypatch.setattr(hub_folder, "_BYTES_MAX", len(held))
    before = hub_folder.identities_of(hub)
    (hub / "identities.json").write_bytes(held + b" ")
    with pytest.raises(ValueError, match=f"it is longer than {len(held)} bytes"):
        hub_folder.identities_of(hub)
    assert before


# --------------------------------------------------------------------------------------------------
# A hub with an authority of its own.


def tls_line(hub: Path) -> str:
    found = [line for line in (hub / "nats-server.conf").read_text().splitlines() if "tls" in line]
    return "".join(found)


def created(folder: Path, **more: Any) -> Path:
    hub_folder.create(folder, listen="127.0.0.1:4222", store=folder / "store", **more)
    return folder


def test_a_named_hub_has_a_certificate_of_its_own_authority(tmp_path: Path) -> None:
    hub = created(tmp_path / "hub", hosts=("hub.example.org", "10.0.0.1"))
    assert f'cert_file: "{hub}/hub.pem", key_file: "{hub}/hub-key.pem"' in tls_line(hub)
    assert "verify" not in tls_line(hub)
    assert hub_folder.add(hub, "rome", "learner") is not None
    assert not hub_folder.certificate_of(hub, "rome").exists()
    first = (hub / "hub.pem").read_text()
    kept = ["hub.example.org", "10.0.0.1"]
    assert hub_folder.renew(hub) == {hub / "hub.pem": kept}
    assert (hub / "hub.pem").read_text() != first
    # Containers of the hub's own know it by another name than sites: whoever adds one loses none.
    more = [*kept, "nats"]
    assert hub_folder.renew(hub, ("10.0.0.1", "nats")) == {hub / "hub.pem": more}
    assert certificates.names_of((hub / "hub.pem").read_text()) == more
    files = [path for path in hub.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can")
def test_what_root_writes_belongs_to_the_folders_owner(tmp_path: Path) -> None:
    """Else the message server could not read it, and would let in who was revoked."""
    folder = tmp_path / "hub"
    folder.mkdir()
    os.chown(folder, 10001, 10002)
    hub = created(folder, hosts=("hub.example.org",), mutual_tls=True)
    hub_folder.add(hub, "rome", "learner")
    hub_folder.revoke(hub, "rome")
    hub_folder.renew(hub, ("hub.example.org",))
    there = [hub, *hub.rglob("*")]
    assert {(p.stat().st_uid, p.stat().st_gid) for p in there} == {(10001, 10002)}


def test_a_hub_that_demands_certificates_hands_one_to_everybody(tmp_path: Path) -> None:
    hub = created(tmp_path / "hub", hosts=("hub.example.org",), mutual_tls=True)
    assert f'ca_file: "{hub}/authority.pem", verify: true' in tls_line(hub)
    for name, _ in hub_folder.FIRST:
        assert hub_folder.certificate_of(hub, name).exists()
    # One that makes its key itself needs a certificate all the same.
    assert (
        hub_folder.add(hub, "rome", "learner", public_key=Credentials.new("r").public_key) is None
    )
    path = hub_folder.certificate_of(hub, "rome")
    first = path.read_text()
    TlsFiles(hub / "authority.pem", path).context()
    hub_folder.rotate(hub, "rome")
    assert path.read_text() != first
    hub_folder.revoke(hub, "rome")
    assert not path.exists()


def test_a_hub_with_a_certificate_of_its_own_may_demand_them_too(tmp_path: Path) -> None:
    hub = created(tmp_path / "hub", certificate="/c.pem", key="/k.pem", mutual_tls=True)
    assert 'cert_file: "/c.pem"' in tls_line(hub) and "verify: true" in tls_line(hub)
    assert not (hub / "hub.pem").exists() and (hub / "authority.pem").exists()
    with pytest.raises(ValueError, match="renew it where you had it from"):
        hub_folder.renew(hub, ("hub.example.org",))


def test_certificates_are_demanded_over_tls_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="over TLS only"):
        created(tmp_path / "hub", mutual_tls=True)
    assert not (tmp_path / "hub").exists()


def test_a_certificate_that_is_damaged_is_replaced_by_one_for_the_names_given(
    tmp_path: Path,
) -> None:
    hub = created(tmp_path / "hub", hosts=("hub.example.org",))
    (hub / "hub.pem").write_text("damaged")
    with pytest.raises(ValueError, match="give 1 to 32 names"):
        hub_folder.renew(hub)
    assert hub_folder.renew(hub, ("10.0.0.1",)) == {hub / "hub.pem": ["10.0.0.1"]}


def test_without_the_package_it_is_said_which_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diloco_shared.hub.certificates", None)
    monkeypatch.delattr("diloco_shared.hub.certificates", raising=False)
    with pytest.raises(ValueError, match="pip install 'cryptography'"):
        created(tmp_path / "hub", hosts=("h",))


def test_when_a_hub_read_its_configuration_is_asked_where_its_monitoring_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def loaded_at(monitor: tuple[str, int], port: int) -> str:
        asked.append((monitor, port))
        return "today"

    monkeypatch.setattr(hub_folder.hub_watch, "loaded_at", loaded_at)
    config = tmp_path / "nats-server.conf"
    config.write_text("listen: 0.0.0.0:4222\n")
    assert hub_folder._loaded_at(tmp_path) == "", "it has no monitoring"
    config.write_text("listen: 0.0.0.0:4222\nhttp: 127.0.0.1:8222\n")
    assert hub_folder._loaded_at(tmp_path) == "today"
    assert asked == [(("127.0.0.1", 8222), 4222)]
