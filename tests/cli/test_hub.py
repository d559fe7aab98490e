"""`diloco hub` and `diloco site`: what they write, say and refuse."""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco_cli import hub_files
from diloco_cli.__main__ import main
from diloco_cli.words import INVALID
from diloco_shared.bus.nats.keys import check_public_key, read_credentials
from diloco_shared.hub import backup as hub_backup
from diloco_shared.hub import folder as hub_folder


def run(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["diloco", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize("nodes", [(), ("--node", "a", "--node", "b", "--node", "c")])
def test_what_a_hub_may_hold_is_counted_once(
    nodes: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server that is not told takes of what its own streams leave, at each start."""
    looked, hub, store = list[Path](), tmp_path / "hub", tmp_path / "not" / "there"
    monkeypatch.setattr(hub_files, "free_bytes", lambda at: looked.append(at) or 4000)
    assert run(monkeypatch, "hub", "init", hub, "--store", store, *nodes) == 0
    assert looked == [store], "it is not there yet"
    said = capsys.readouterr().out
    assert "may hold 3 kB (max_file_store): three quarters of what is free at" in said
    configs = [*hub.rglob("nats-server.conf")]
    assert len(configs) == (len(nodes) // 2 or 1)
    for config in configs:
        assert "  max_file_store: 3000\n" in config.read_text()


def test_a_place_that_cannot_be_looked_at_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that only another user may look into; no system takes a name of 300 characters."""
    hub = tmp_path / ("a" * 300)
    assert run(monkeypatch, "hub", "init", hub) == 1
    assert "cannot be written: file name too long" in capsys.readouterr().err.lower()
    assert run(monkeypatch, "hub", "init", tmp_path / "hub", "--store", hub / "store") == 0
    assert "max_file_store" not in capsys.readouterr().out, "nobody knows what is free there"


@pytest.mark.parametrize(("free", "line"), [(None, ""), (0, ""), (9, "max_file_store: 7\n")])
def test_what_a_hub_may_hold_is_what_its_operator_says(
    free: int | None,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where the file system says nothing, the server is left to its own rule."""
    hub = tmp_path / "hub"
    monkeypatch.setattr(hub_files, "free_bytes", lambda _: free)
    given = ("--max-bytes", "7") if line else ()
    assert run(monkeypatch, "hub", "init", hub, *given) == 0
    said, config = capsys.readouterr().out, (hub / "nats-server.conf").read_text()
    assert "max_file_store" not in said
    assert line in config and ("max_file_store" in config) == bool(line)


def test_a_hub_and_its_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = tmp_path / "hub"
    assert run(monkeypatch, "hub", "init", hub, "--listen", "127.0.0.1:4222") == 0
    said = capsys.readouterr().out
    keeper = "start the message server with: python -m diloco_shared.process.keep_hub"
    assert f"{keeper} {hub / 'store'} nats-server -c {hub / 'nats-server.conf'}\n" in said
    assert f"credentials of syncer-a: {hub / 'credentials' / 'syncer-a'}" in said
    assert "nothing is encrypted" in said

    learners = ("--learner", "rome-1", "--learner", "rome-2")
    assert run(monkeypatch, "site", "add", "rome", "--hub", hub, *learners) == 0
    said = capsys.readouterr().out
    assert f"{hub / 'credentials' / 'rome'}: give it to rome alone" in said
    assert "--signal reload=PID" in said
    assert "in force within 5 s. Where a message server reads a copy (Kubernetes" in said
    assert "is NOT in force until you have brought accounts.conf of that folder to" in said
    first = read_credentials(hub / "credentials" / "rome").public_key

    assert run(monkeypatch, "site", "learners", "rome", "--hub", hub) == 0
    assert capsys.readouterr().out == "rome: learner of rome-1, rome-2\n"
    change = ("--add", "rome-3", "--add", "rome-4", "--remove", "rome-2", "--remove", "rome-3")
    assert run(monkeypatch, "site", "learners", "rome", "--hub", hub, *change) == INVALID
    assert "rome-3: add it, or remove it, not both" in capsys.readouterr().err
    assert run(monkeypatch, "site", "learners", "rome", "--hub", hub, *change[2:6]) == 0
    said = capsys.readouterr().out
    assert "rome: learner of rome-1, rome-4\n" in said and "--signal reload=PID" in said
    assert "give it to" not in said
    back = ("--add", "rome-2", "--remove", "rome-4")
    assert run(monkeypatch, "site", "learners", "rome", "--hub", hub, *back) == 0
    assert run(monkeypatch, "site", "rotate", "rome", "--hub", hub) == 0
    said = capsys.readouterr().out
    assert "rome has 2 keys, and each is good: --finish drops all but the newest\n" in said
    assert run(monkeypatch, "site", "list", "--hub", hub) == 0
    assert "rome: learner of rome-1, rome-2, 2 keys\n" in capsys.readouterr().out
    assert run(monkeypatch, "site", "rotate", "rome", "--finish", "--hub", hub) == 0
    capsys.readouterr()
    assert run(monkeypatch, "site", "list", "--hub", hub, "--json") == 0
    rome = json.loads(capsys.readouterr().out)[-1]
    assert (rome["name"], rome["learners"], len(rome["keys"])) == ("rome", ["rome-1", "rome-2"], 1)
    assert rome["keys"] != [first]
    assert run(monkeypatch, "site", "rotate", "syncer-a", "--hub", hub) == 0
    own = hub / "credentials" / "syncer-a"
    assert f"{own}: keep it for the process of syncer-a\n" in capsys.readouterr().out

    assert run(monkeypatch, "site", "revoke", "rome", "--hub", hub) == 0
    assert "rome" not in [i.name for i in hub_folder.identities_of(hub)]


def test_a_hub_that_demands_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = tmp_path / "hub"
    named = ("--host", "hub.example.org", "--mutual-tls")
    assert run(monkeypatch, "hub", "init", hub, *named) == 0
    said = capsys.readouterr().out
    assert f"{hub / 'authority.pem'}: every process trusts it by DILOCO_NATS_CA" in said
    assert f"{hub / 'certificates' / 'syncer-a.pem'}: keep it for the process of syncer-a" in said
    assert "remove it here" not in said
    assert "nothing is encrypted" not in said
    assert run(monkeypatch, "site", "add", "rome", "--hub", hub) == 0
    said = capsys.readouterr().out
    certificate = hub / "certificates" / "rome.pem"
    assert f"{certificate}: give it to rome alone, as DILOCO_NATS_CLIENT_CERT" in said
    assert run(monkeypatch, "hub", "renew", hub, "--host", "nats") == 0
    said = capsys.readouterr().out
    assert f"{hub / 'hub.pem'}: the message server's certificate is new" in said
    assert "for hub.example.org, nats\n" in said
    for wrong, text in (
        (("--mutual-tls",), "--mutual-tls needs --host"),
        (("--host", "h", "--cert", "c", "--key", "k"), "--host is for a certificate that is made"),
    ):
        assert run(monkeypatch, "hub", "init", tmp_path / "other", *wrong) != 0
        assert text in capsys.readouterr().err


def test_a_hub_of_three_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = tmp_path / "hub"
    nodes = ("--node", "a.example.org", "--node", "b.example.org", "--node", "c.example.org:4333")
    assert run(monkeypatch, "hub", "init", hub, *nodes, "--mutual-tls") == 0
    said = capsys.readouterr().out
    for node, where in (
        ("node-1", ""),
        ("node-2", ""),
        ("node-3", "--at 127.0.0.1:4333 --monitor 127.0.0.1:8333 "),
    ):
        files = f"--reload {hub / node / 'accounts.conf'} --reload {hub / node / 'hub.pem'}"
        server = f"{hub / 'store' / node} nats-server -c {hub / node / 'nats-server.conf'}"
        assert f"keep_hub {where}{files} {server}\n" in said
    url = "tls://a.example.org:4222,tls://b.example.org:4222,tls://c.example.org:4333"
    assert f"DILOCO_NATS_URL={url}" in said
    assert (
        "every process trusts it by DILOCO_NATS_CA" in said and "nothing is encrypted" not in said
    )
    assert run(monkeypatch, "site", "add", "rome", "--hub", hub) == 0
    assert "brought accounts.conf of those folders to" in capsys.readouterr().out
    assert run(monkeypatch, "hub", "renew", hub) == 0
    said = capsys.readouterr().out
    assert "brought all files *.pem of those folders to" in said
    assert f"{hub / 'node-2' / 'hub.pem'}: the message server's certificate is new, for b" in said
    for words, text in (
        (("hub", "init", tmp_path / "two", *nodes[:4]), "2 nodes: a hub of several has 3 or 5"),
    ):
        assert run(monkeypatch, *words) == INVALID
        assert text in capsys.readouterr().err


def test_a_backup_is_put_back_where_the_hub_looks_for_its_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filled: list[tuple[tuple[Path, ...], dict[str, Any]]] = []

    async def put_back(folder: Path, *stores: Path, **how: Any) -> Any:
        filled.append((stores, how))
        raise hub_backup.BackupError("no such backup")

    monkeypatch.setattr(hub_backup, "put_back", put_back)
    hub, elsewhere = tmp_path / "hub", tmp_path / "disk" / "nats"
    hub_folder.create(hub, listen="127.0.0.1:4222", store=elsewhere)
    assert run(monkeypatch, "hub", "restore", "b", "--hub", hub) != 0
    # As a container's configuration names it, it is not to be found here.
    assert run(monkeypatch, "hub", "restore", "b", "--hub", hub, "--store", tmp_path / "seen") != 0
    assert run(monkeypatch, "hub", "restore", "b", "--store", tmp_path / "own") != 0
    assert filled == [
        ((elsewhere,), {"of_hub": True, "names": ["hub"], "owned": True}),
        ((tmp_path / "seen",), {"of_hub": True, "names": ["hub"], "owned": True}),
        ((tmp_path / "own",), {"of_hub": False, "names": [], "owned": True}),
    ]
    capsys.readouterr()

    async def full(folder: Path, *stores: Path, **how: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as on_a_full_disk:
        on_a_full_disk.setattr(hub_backup, "put_back", full)
        assert run(monkeypatch, "hub", "restore", "b", "--hub", hub) != 0
    said = capsys.readouterr().err
    assert f"{elsewhere}: no space left on device; what was begun is no backup" in said
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "nodes.json").write_text("[{")
    for words, text in (
        ((), "give --hub FOLDER"),
        (("--hub", tmp_path / "typo"), "name the hub's folder with --hub"),
        (("--hub", tmp_path / "damaged"), "is not a list of nodes"),
    ):
        assert run(monkeypatch, "hub", "restore", "b", *words) == INVALID
        assert text in capsys.readouterr().err
    assert len(filled) == 3 and not (tmp_path / "typo").exists()


def test_whoever_puts_a_backup_back_is_told_that_it_does_not_say_who_may_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an older copy of the hub's folder, sites are let in again that were revoked since."""

    async def put_back(*_: object, **__: object) -> Any:
        return hub_backup.Backup(version="0.3.0", at=1.0, took_s=1.0, streams=()), ["done"]

    monkeypatch.setattr(hub_backup, "put_back", put_back)
    hub = tmp_path / "hub"
    hub_folder.create(hub, listen="127.0.0.1:4222", store=hub / "store")
    assert run(monkeypatch, "hub", "restore", "b", "--hub", hub) == 0
    said = capsys.readouterr().out
    told = f"if that is an older copy, compare 'diloco site list --hub {hub}' with what was revoked"
    assert told in said
    assert said.index(told) < said.index("start the message server now")
    assert run(monkeypatch, "hub", "restore", "b", "--store", tmp_path / "own") == 0
    assert "site list" not in capsys.readouterr().out, "it has no identities of sites"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (("--listen", "0.0.0.0:4222"), ""),
        (("--listen", "0.0.0.0:4333"), "--at 127.0.0.1:4333 "),
        (("--listen", "10.0.0.1:4222"), "--at 10.0.0.1:4222 "),
        (("--listen", "[::]:4333", "--monitor", ""), "--at 127.0.0.1:4333 --monitor '' "),
        (("--listen", "[fd00::1]:4222"), "--at fd00::1:4222 "),
        (("--monitor", "127.0.0.1:9222", "--store", "/srv/s"), "--monitor 127.0.0.1:9222 "),
    ],
)
def test_what_keeps_the_message_server_is_told_where_it_listens(
    given: tuple[str, ...],
    asked: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without it a server that ran out of disk does not write again."""
    hub = tmp_path / "hub"
    assert run(monkeypatch, "hub", "init", hub, *given) == 0
    store = "/srv/s" if "--store" in given else hub / "store"
    line = f"process.keep_hub {asked}{store} nats-server -c {hub / 'nats-server.conf'}\n"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("nodes", [(), ("--node", "a", "--node", "b", "--node", "c")])
def test_a_certificate_that_the_hub_has_not_made_is_looked_at_by_what_keeps_its_server(
    nodes: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whoever renews it tells nobody, and 'hub renew' is for the hub's own."""
    hub = tmp_path / "hub"
    given = ("--cert", "/live/hub/fullchain.pem", "--key", "/live/hub/privkey.pem")
    assert run(monkeypatch, "hub", "init", hub, *given, *nodes) == 0
    said = capsys.readouterr().out.splitlines()
    started = [line for line in said if "start the message server with:" in line]
    assert len(started) == (len(nodes) // 2 or 1)
    for line in started:
        assert line.count("--reload /live/hub/fullchain.pem ") == 1
        config = Path(line.rpartition(" -c ")[2])
        assert 'cert_file: "/live/hub/fullchain.pem"' in config.read_text()


async def test_a_backup_is_written_into_no_folder_that_holds_anything(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    nobody: Any = None  # is asked anything before the folder is looked at
    for path in (tmp_path / "full", tmp_path / "full" / "mine"):
        with pytest.raises(hub_backup.BackupError, match="is no empty folder"):
            await hub_backup.take(nobody, path)
    assert (tmp_path / "full" / "mine").exists()


def test_a_site_makes_its_key_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub_folder.create(tmp_path / "hub", listen="127.0.0.1:4222", store=tmp_path / "store")
    mine = tmp_path / "mine"
    assert run(monkeypatch, "site", "key", "rome", "--to", mine) == 0
    public = check_public_key(capsys.readouterr().out.strip())
    words = ("site", "add", "rome", "--hub", tmp_path / "hub", "--public-key", public)
    assert run(monkeypatch, *words) == 0
    assert hub_folder.identities_of(tmp_path / "hub")[-1].keys == (public,)
    assert "give it to" not in capsys.readouterr().out
    assert run(monkeypatch, "site", "key", "rome", "--to", mine) == INVALID
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("hub", "init", "HUB"), "a hub's folder already"),
        (("hub", "init", "new", "--host", "tls://hub:4222"), "without tls:// before it"),
        (("hub", "init", "new", "--host", "hub:4222"), "without a port after it"),
        (("hub", "init", "new", "--host", "höst"), "is no name or address of a host"),
        (("hub", "init", "new", "--host", ""), "is no name or address of a host"),
        (("hub", "renew", "HUB", "--host", "tls://hub"), "is no name or address of a host"),
        (("hub", "init", "new", "--cert", "c.pem"), "give --cert and --key together"),
        (("site", "add", "x", "--hub", "none"), "none is not there: name the hub's folder"),
        (("site", "add", "x", "--hub", "HUB", "--role", "coordinator"), "--role coordinator: give"),
        (("site", "add", "X", "--hub", "HUB"), "not a valid id"),
        (("site", "revoke", "x", "--hub", "HUB"), "no identity x; known: coordinator"),
        (("site", "rotate", "reader", "--hub", "HUB", "--finish", "--public-key", "U"), "--finish"),
        (("site", "list", "--hub", "none"), "is not there: name the hub's folder with --hub"),
        (("site", "learners", "x", "--hub", "HUB"), "no identity x; known: coordinator"),
        (("site", "learners", "reader", "--hub", "HUB"), "reader is a reader: only a site has"),
        (("site", "learners", "x", "--hub", "none", "--add", "y"), "name the hub's folder with"),
        (("hub", "renew", "HUB"), "had it from"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    words: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    hub_folder.create(tmp_path / "HUB", listen="127.0.0.1:4222", store=tmp_path / "store")
    assert run(monkeypatch, *words) == INVALID
    said = capsys.readouterr()
    assert text in said.err
    assert len(said.err.splitlines()) == 1
