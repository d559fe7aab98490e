"""A hub of several message servers: what each finds in its folder, and what makes one a node."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256

from diloco_shared.hub import folder as hub_folder
from diloco_shared.hub.certificates import ends_at
from diloco_shared.hub.nodes import Node, nodes_at, nodes_of, url_of

HOSTS = ("a.example.org", "b.example.org", "c.example.org:4333")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder as `create` leaves it."""
    folder = tmp_path / "hub"
    hub_folder.create(
        folder,
        listen="0.0.0.0:4222",
        store=tmp_path / "store",
        nodes=nodes_at(HOSTS),
        hosts=("hub.example.org",),
        mutual_tls=True,
        monitor="127.0.0.1:8222",
    )
    return folder


def config(hub: Path, node: str) -> str:
    return (hub / node / hub_folder.CONFIG).read_text()


def signed_by(certificate: Path, authority: Path) -> bool:
    one, above = (x509.load_pem_x509_certificate(p.read_bytes()) for p in (certificate, authority))
    key = above.public_key()
    assert isinstance(key, EllipticCurvePublicKey) and one.signature_hash_algorithm is not None
    try:
        key.verify(one.signature, one.tbs_certificate_bytes, ECDSA(SHA256()))
    except Exception:
        return False
    return True


def names_in(certificate: Path) -> list[str]:
    found = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    names = found.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)


def test_each_node_has_a_folder_with_all_that_it_needs(hub: Path) -> None:
    assert [n.name for n in nodes_of(hub)] == ["node-1", "node-2", "node-3"]
    for number, node in enumerate(nodes_of(hub)):
        text = config(hub, node.name)
        files = re.findall(r'"?(?:cert|key|ca)_file"?: "([^"]+)"', text)
        assert len(files) == 6 and all(Path(f).parent == hub / node.name for f in files)
        assert all(Path(f).is_file() for f in files)
        assert (hub / node.name / "accounts.conf").is_file()
        assert f'server_name: "hub-{node.name}"' in text
        assert f'listen: "0.0.0.0:{node.port}"' in text
        assert f'http: "127.0.0.1:{node.port + 4000}"' in text
        assert "sync_interval: always" in text and '"no_advertise": true' in text
        others = [n for n in nodes_of(hub) if n is not nodes_of(hub)[number] and n != node]
        routes = re.findall(r"nats-route://diloco:\w+@([^\"]+)", text)
        assert routes == [f"{n.host}:{n.port + 2000}" for n in others]
        assert names_in(hub / node.name / "hub.pem") == [node.host, "hub.example.org"]
    assert not (hub / hub_folder.CONFIG).exists()
    stores = {m for n in nodes_of(hub) for m in re.findall(r"store_dir: (.*)", config(hub, n.name))}
    assert len(stores) == 3


def test_a_site_cannot_be_taken_for_a_node(hub: Path) -> None:
    """Nodes trust each other wholly: their certificates are of another authority than a site's."""
    hub_folder.add(hub, "rome", "learner")
    site = hub_folder.certificate_of(hub, "rome")
    assert signed_by(site, hub / "authority.pem")
    assert not signed_by(site, hub / "routes.pem")
    assert signed_by(hub / "node-1" / "route.pem", hub / "routes.pem")
    assert not signed_by(hub / "node-1" / "route.pem", hub / "authority.pem")
    routes = config(hub, "node-1").partition("cluster: {")[2].partition("\n}")[0]
    assert '"verify": true' in routes and "routes.pem" in routes and "/authority.pem" not in routes
    password = (hub / "routes-password").read_text().strip()
    holders = {p.name for p in hub.rglob("*") if p.is_file() and password in p.read_text()}
    assert holders == {"routes-password", hub_folder.CONFIG}
    assert {p.stat().st_mode & 0o777 for p in hub.rglob("*") if p.is_file()} == {0o600}


def test_every_node_learns_who_may_connect(hub: Path) -> None:
    def told() -> set[str]:
        return {(hub / n.name / "accounts.conf").read_text() for n in nodes_of(hub)}

    hub_folder.add(hub, "rome", "learner")
    assert told() == {(hub / "accounts.conf").read_text()} and "SITE-rome" in told().pop()
    hub_folder.revoke(hub, "rome")
    assert told() == {(hub / "accounts.conf").read_text()} and "rome" not in told().pop()
    rest = hub_folder.reload(hub, between_s=0)
    assert "node-1" in rest and "node-3" in rest and "accounts.conf of those folders to" in rest
    rest = hub_folder.reload(hub, changed="all files *.pem", between_s=0)
    assert (
        "brought all files *.pem of those folders to that copy" in rest
        and "accounts.conf" not in rest
    )


def test_what_nodes_show_each_other_does_not_end_while_nobody_looks(tmp_path: Path) -> None:
    """No site sees it, so that no `diloco doctor` warns: nodes would lose each other one day."""
    hub = tmp_path / "hub"
    given: dict[str, Any] = {"nodes": nodes_at(HOSTS), "mutual_tls": True, "leaves": "0.0.0.0:7422"}
    hub_folder.create(hub, listen="0.0.0.0:4222", store=tmp_path, **given)
    years = datetime.now(UTC) + timedelta(days=3649)
    for name in ("route.pem", "system.pem"):
        assert ends_at((hub / "node-2" / name).read_text()) > years, name
    assert ends_at((hub / "node-2" / "hub.pem").read_text()) < datetime.now(UTC) + timedelta(400)


def test_where_one_node_does_not_end_connections_the_others_do(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[str] = []

    def fails_once(at: Path, config: Path) -> int:
        cut.append(at.name)
        if at.name == "node-1":
            raise OSError("it hung up")
        return 0

    here = {"node-1": 7, "node-2": 8}  # the third one is on another machine
    monkeypatch.setattr(hub_folder, "_server", lambda folder: here.get(folder.name, 0))
    monkeypatch.setattr(hub_folder.os, "kill", lambda pid, number: None)
    monkeypatch.setattr(hub_folder.hub_leaves, "cut", fails_once)
    rest = hub_folder.reload(hub, between_s=0)
    assert sorted(cut) == ["node-1", "node-2"]
    assert f"the message server of {hub / 'node-1'} knows it" in rest and "it hung up" in rest
    assert f". And no message server of {hub / 'node-3'} runs on this machine. Where" in rest


def test_a_server_that_may_not_be_told_is_named_beside_the_others(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int, number: int) -> None:
        if pid == 7:
            raise PermissionError(1, "Operation not permitted")

    here = {"node-1": 7, "node-2": 8}
    monkeypatch.setattr(hub_folder, "_server", lambda folder: here.get(folder.name, 0))
    monkeypatch.setattr(hub_folder.os, "kill", refused)
    rest = hub_folder.reload(hub, between_s=0)
    assert "node-1 (process 7) cannot be told to reload: Operation not permitted. And no" in rest
    assert "node-2" not in rest and "brought accounts.conf of that folder to that copy" in rest


def test_certificates_of_all_nodes_are_renewed(hub: Path) -> None:
    files = [hub / n.name / f for n in nodes_of(hub) for f in ("hub.pem", "route.pem")]
    before = [path.read_text() for path in files]
    made = hub_folder.renew(hub, ["new.example.org"])
    assert not {path.read_text() for path in files} & {*before}
    assert [*made] == [hub / n.name / "hub.pem" for n in nodes_of(hub)]
    for (path, names), node in zip(made.items(), nodes_of(hub), strict=True):
        assert names_in(path) == names == [node.host, "hub.example.org", "new.example.org"]


def test_sites_are_told_of_all_nodes(hub: Path) -> None:
    url = url_of(nodes_of(hub), encrypted=True)
    assert url == "tls://a.example.org:4222,tls://b.example.org:4222,tls://c.example.org:4333"


def test_a_certificate_of_ones_own_is_for_sites_and_not_between_nodes(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub_folder.create(
        hub,
        listen="0.0.0.0:4222",
        store=tmp_path,
        nodes=nodes_at(HOSTS),
        certificate="/c.pem",
        key="/k.pem",
    )
    text = config(hub, "node-1")
    assert 'tls { cert_file: "/c.pem", key_file: "/k.pem", timeout: 10 }' in text
    assert f'"cert_file": "{hub / "node-1" / "route.pem"}"' in text


def test_where_nodes_keep_their_streams(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = {f"hub-node-{n}": tmp_path / "store" / f"node-{n}" for n in (1, 2, 3)}
    assert hub_folder.stores_of(hub) == stores
    with monkeypatch.context() as running:
        running.setattr(hub_folder, "_server", lambda at: 7 if at.name == "node-3" else 0)
        with pytest.raises(ValueError, match=r"node-3 runs \(process 7\): stop it first"):
            hub_folder.stores_of(hub)
    config = hub / "node-2" / hub_folder.CONFIG
    # Its operator may have changed it: all of these the message server takes.
    for line in ("store_dir: /moved", "store_dir = '/moved'", '  store_dir "/moved"'):
        config.write_text(f"jetstream {{\n# store_dir: /before\n{line}\n}}")
        assert hub_folder.stores_of(hub)["hub-node-2"] == Path("/moved")
    config.write_text("jetstream {}")
    with pytest.raises(ValueError, match="has no line store_dir"):
        hub_folder.stores_of(hub)


def test_where_nodes_are() -> None:
    several = nodes_at(["127.0.0.1:4222", "127.0.0.1:4223", "127.0.0.1:4224"])
    assert [(n.port, n.routes_port, n.monitor_port) for n in several] == [
        (4222, 6222, 8222), (4223, 6223, 8223), (4224, 6224, 8224)
    ]  # fmt: skip
    assert [node.port for node in nodes_at(["a:1", "b:61535", "c"])] == [1, 61535, 4222]
    assert nodes_at(["[fd00::1]:5000", "fd00::2", "h"])[:2] == [
        Node("node-1", "fd00::1", 5000), Node("node-2", "fd00::2", 4222)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("places", "text"),
    [
        (["a", "b"], "2 nodes: a hub of several has 3 or 5"),
        (["a", "b", "c", "d"], "4 nodes"),
        (["a", "b", "a"], "two nodes at a need its port 4222"),
        (["a:4222", "b", "a:6222"], "two nodes at a need its port 6222"),
        (["a", "b", "c:0"], "give a port from 1"),
        (["a", "b", "c:61536"], "give a port from 1 to 61535"),
        (["a", "b", "c:x"], "give HOST or HOST:PORT"),
        (["a", "b", ""], "give HOST or HOST:PORT"),
        (["a", "b", "*.c"], "give HOST or HOST:PORT"),
        (["tls://a:4222", "b", "c"], "'tls://a:4222' is no name or address of a host"),
        (["a b", "b", "c"], "'a b' is no name"),
        (["höst", "b", "c"], "'höst' is no name"),
    ],
)
def test_what_is_no_hub_of_several(places: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        nodes_at(places)


def test_a_damaged_list_of_nodes_is_named(hub: Path) -> None:
    (hub / "nodes.json").write_text(json.dumps([{"name": "node-1"}]))
    with pytest.raises(ValueError, match=r"nodes\.json is not a list of nodes"):
        hub_folder.reload(hub)
