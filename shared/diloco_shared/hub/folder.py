"""A hub's folder: its message server's configuration, and who may connect.

    nats-server.conf    the operator's; written once, by `create`
    accounts.conf       who may do what; made anew by every change
    identities.json     what accounts.conf is made from; no secrets
    credentials/NAME    a secret, for the one that it is made for, who takes it away
    authority.pem, authority-key.pem    a hub's own authority, if it has one; the key is a secret
    hub.pem, hub-key.pem    what the message server proves its name with, signed by that authority
    certificates/NAME.pem   certificate and key of an identity, if the hub demands them
    system-password, system.pem    what ends connections of sites' message servers (leaves.py)

A hub of several message servers has no configuration here, but a folder for each of its nodes, and
in it a copy of accounts.conf (nodes.py).

Every file is readable by its owner only, and replaced as a whole. A change counts once the server
has read its configuration again, which `reload` tells it to do. Whoever is not in it any more is
cut off then; everybody else's connections stay.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from diloco_shared.bus.nats.hub_config import ACCOUNTS, PID, Routes, accounts_conf, hub_conf
from diloco_shared.bus.nats.keys import Credentials, check_public_key
from diloco_shared.bus.nats.rights import KEYS_MAX, Identity, Role
from diloco_shared.durable import give, replace_for_owner
from diloco_shared.hub import leaves as hub_leaves
from diloco_shared.hub import nodes as hub_nodes
from diloco_shared.hub import watch as hub_watch
from diloco_shared.hub.nodes import Node, nodes_of

if TYPE_CHECKING:  # it needs a package that only a hub has
    from diloco_shared.hub.certificates import Pair

CONFIG, IDENTITIES = "nats-server.conf", "identities.json"
CREDENTIALS, LOCK = "credentials", "lock"
NAME = "hub"  # of the server, where it is the only one
AUTHORITY, AUTHORITY_KEY = "authority.pem", "authority-key.pem"
HUB_CERTIFICATE, HUB_KEY = "hub.pem", "hub-key.pem"
# Of identities; the folder is there only where the hub demands certificates.
CERTIFICATES = "certificates"
# Who a hub has from the start. Readers serve exports and the commands that read a tape.
FIRST: tuple[tuple[str, Role], ...] = (
    ("coordinator", "coordinator"),
    ("syncer-a", "syncer"),
    ("syncer-b", "syncer"),
    ("reader", "reader"),
)
# A thousand identities of 64 learners are 5 MB.
_BYTES_MAX = 16 << 20
# The line of a server's configuration that names its store: in either quotes, or in none.
_STORE_DIR = r"""^\s*store_dir\s*[:=]?\s*("(?:[^"\\]|\\.)+"|'[^']+'|[^\s"']+)"""
# Between the two times that the server is told to read its configuration, in seconds: it takes
# milliseconds to do so, and more on a machine that is busy.
BETWEEN_S = 1.0


def create(
    folder: Path,
    *,
    listen: str,
    store: Path,
    nodes: Sequence[Node] = (),
    certificate: str = "",
    key: str = "",
    hosts: Sequence[str] = (),
    mutual_tls: bool = False,
    monitor: str = "",
    leaves: str = "",
    file_bytes_max: int = 0,
) -> list[Path]:
    """Make the folder, with the identities of FIRST; where their credentials are.

    `nodes`: of a hub of several message servers; each listens at the address of `listen` on a port
    of its own, keeps its streams in a folder of its name in `store`, and has a certificate for its
    name and `hosts` where none is given. `hosts`: names or addresses of the hub, for which an
    authority of its own signs a certificate where none is given. `mutual_tls`: whoever connects
    must present one of that authority's. `monitor`: where `keep_hub` asks the server how it is.
    `leaves`: where it listens to message servers of sites. Raises ValueError where there is a hub
    already, and OSError.
    """
    if mutual_tls and not (certificate or hosts or nodes):
        raise ValueError(
            "certificates are demanded of sites over TLS only: give the hub's own certificate, or "
            "its name, for which one is made"
        )
    for host in hosts:
        hub_nodes.checked_host(host)
    folder = folder.resolve()
    if (folder / IDENTITIES).exists() or (folder / CONFIG).exists():
        raise ValueError(f"{folder} is a hub's folder already: nothing was changed")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(folder):
        if mutual_tls:
            _make(folder / CERTIFICATES)
        own = not certificate and bool(hosts or nodes)
        _sign_for_hub(folder, hosts, nodes, own=own)
        texts = {}
        for server in nodes or (None,):
            at = folder if server is None else folder / server.name
            texts[at / CONFIG] = hub_conf(
                listen=listen if server is None else f"{_address(listen)}:{server.port}",
                store=str((store if server is None else store / server.name).resolve()),
                pid_file=str(at / PID),
                name=NAME if server is None else server.server_name,
                routes=None if server is None else _routes(folder, server, nodes, _address(listen)),
                certificate=str(at / HUB_CERTIFICATE) if own else certificate,
                key=str(at / HUB_KEY) if own else key,
                clients_authority=str(at / AUTHORITY) if mutual_tls else "",
                monitor=_monitor(monitor, server),
                leaves=leaves,
                file_bytes_max=file_bytes_max,
            )
        if leaves:
            _may_end_connections(folder, nodes)
        made = [(Credentials.new(name), role) for name, role in FIRST]
        if nodes:
            _write(folder / hub_nodes.NODES, hub_nodes.listed(nodes))
        _write_identities(folder, [Identity(c.name, role, (c.public_key,)) for c, role in made])
        for path, text in texts.items():
            _write(path, text)
        found = (_hand_out(folder, credentials.name, credentials) for credentials, _ in made)
        return [path for path in found if path is not None]


def certificate_of(folder: Path, name: str) -> Path:
    """Where certificate and key of an identity are, if the hub demands them."""
    return folder / CERTIFICATES / f"{name}.pem"


def stores_of(folder: Path) -> dict[str, Path]:
    """By name of each message server of a hub, where it keeps its streams. Raises ValueError, also
    where one of them runs."""
    found: dict[str, Path] = {}
    for node in nodes_of(folder) or (None,):
        at, name = (folder, NAME) if node is None else (folder / node.name, node.server_name)
        found[name] = _store_of(at / CONFIG)
        if pid := _server(at):
            raise ValueError(f"the message server of {at} runs (process {pid}): stop it first")
    return found


def _store_of(config: Path) -> Path:
    """As a server's configuration says, which its operator may have changed. Raises ValueError."""
    try:
        text = config.read_text("utf-8")
    except OSError as error:
        raise ValueError(hub_nodes.shut(config, error)) from None
    found = re.search(_STORE_DIR, text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{config} has no line store_dir: add it to the part jetstream")
    if not found[1].startswith('"'):
        return Path(found[1].strip("'"))
    try:
        return Path(json.loads(found[1]))
    except ValueError:
        raise ValueError(f"{config}: store_dir {found[1]} cannot be read") from None


def renew(folder: Path, hosts: Sequence[str] = ()) -> dict[Path, list[str]]:
    """Another certificate of the message server, by the hub's own authority, for the names in the
    present one and for `hosts`: the names by where it is.

    Of a hub of several message servers, each node's. Raises ValueError where the hub has no
    authority, and OSError.
    """
    for host in hosts:
        hub_nodes.checked_host(host)
    with _locked(folder, "as in 'diloco hub renew /etc/diloco/hub'"):
        nodes = nodes_of(folder)
        places = [folder / node.name / HUB_CERTIFICATE for node in nodes]
        places = places or [folder / HUB_CERTIFICATE]
        if not (folder / AUTHORITY_KEY).exists() or not places[0].exists():
            raise ValueError(
                f"{folder} has no authority that signed the hub's certificate: renew it where you "
                "had it from"
            )
        _sign_for_hub(folder, hosts, nodes, own=True, again=True)
        return {place: _names_in(place) for place in places}


def identities_of(folder: Path) -> list[Identity]:
    """Who may connect. Raises ValueError naming the file, and what to do."""
    path = folder / IDENTITIES
    try:
        with path.open("rb") as file:
            held = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise ValueError(hub_nodes.shut(path, error)) from None
    try:
        if len(held) > _BYTES_MAX:
            raise ValueError(f"it is longer than {_BYTES_MAX} bytes")
        return [
            Identity(i["name"], i["role"], tuple(i["keys"]), tuple(i["members"]))
            for i in json.loads(held)
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a list of identities ({error}): take it from a backup of the folder"
        ) from None


def add(
    folder: Path, name: str, role: Role, members: Sequence[str] = (), *, public_key: str = ""
) -> Path | None:
    """Another identity; where its credentials are, or None where it keeps its secret itself.

    `members` of a learner's: the ids of its learners; none: one of its own name. Raises ValueError.
    """
    if role == "learner" and not members:
        members = (name,)
    with _locked(folder):
        identities = identities_of(folder)
        if name in (i.name for i in identities):
            raise ValueError(f"there is an identity {name} already: rotate its key, or revoke it")
        _check_free(folder, identities, name, members)
        credentials = None if public_key else Credentials.new(name)
        key = credentials.public_key if credentials else check_public_key(public_key)
        _write_identities(folder, [*identities, Identity(name, role, (key,), tuple(members))])
        return _hand_out(folder, name, credentials)


def revoke(folder: Path, name: str) -> None:
    """Let an identity in no more. Raises ValueError."""
    with _locked(folder):
        identities = identities_of(folder)
        _one(identities, name)
        _write_identities(folder, [i for i in identities if i.name != name])
        (folder / CREDENTIALS / name).unlink(missing_ok=True)
        certificate_of(folder, name).unlink(missing_ok=True)


def rotate(folder: Path, name: str, *, public_key: str = "") -> Path | None:
    """A new key beside those that are good, until `retire`; where its credentials are.

    None where the identity keeps its secret itself. All keys before it stay good, since nobody here
    knows which of them the site uses. Raises ValueError, also where there are KEYS_MAX already.
    """
    credentials = None if public_key else Credentials.new(name)
    key = credentials.public_key if credentials else check_public_key(public_key)

    def changed(identity: Identity) -> Identity:
        if len(identity.keys) >= KEYS_MAX:
            raise ValueError(
                f"{name} has {KEYS_MAX} keys already, and may use any of them: bring the newest to "
                f"it, then drop the others with 'diloco site rotate {name} --finish --hub {folder}'"
            )
        return replace(identity, keys=(*identity.keys, key))

    with _locked(folder):
        _change(folder, name, changed)
        return _hand_out(folder, name, credentials)


def retire(folder: Path, name: str) -> None:
    """Only the newest key of an identity is good from now on. Raises ValueError."""
    with _locked(folder):
        _change(folder, name, lambda i: replace(i, keys=i.keys[-1:]))


def of_the_hub(folder: Path, name: str) -> bool:
    """Whether it is one of the hub's own processes, and no site. Raises ValueError."""
    found = _one(identities_of(folder), name)
    return name in (first for first, _ in FIRST) or found.role not in ("learner", "reader")


def learners_of(folder: Path, name: str) -> tuple[str, ...]:
    """The ids of a site's learners. Raises ValueError."""
    return _learners(_one(identities_of(folder), name))


def change_learners(
    folder: Path, name: str, *, added: Sequence[str] = (), removed: Sequence[str] = ()
) -> None:
    """Other ids of a site's learners; its keys stay. Raises ValueError.

    To add one that it has already is no error: whoever is interrupted repeats the command.
    """

    def changed(identity: Identity) -> Identity:
        there = _learners(identity)
        if both := [member for member in removed if member in added]:
            raise ValueError(f"{', '.join(both)}: add it, or remove it, not both")
        if unknown := [member for member in removed if member not in there]:
            raise ValueError(f"{name} has no learner {', '.join(unknown)}; known: {_names(there)}")
        left = tuple(m for m in dict.fromkeys((*there, *added)) if m not in removed)
        if not left:
            raise ValueError(f"{name} would have no learner left: 'diloco site revoke' it instead")
        return replace(identity, members=left)

    with _locked(folder):
        _check_free(folder, identities_of(folder), name, added)
        _change(folder, name, changed)


def reload(folder: Path, *, changed: str = ACCOUNTS, between_s: float = BETWEEN_S) -> str:
    """Have the running server read its configuration again: what else is to be done, "" if nothing.

    `changed`: what has to be copied to a node on another machine.

    Twice, since nats-server 2.15.1 leads an account that it meets for the first time nowhere until
    it reads the configuration once more. Waits `between_s` seconds, and a quarter of that.
    """
    folder = folder.resolve()
    nodes = nodes_of(folder)
    places = [folder / node.name for node in nodes] or [folder]
    pids = {at: _server(at) for at in places}
    running = {at: pid for at, pid in pids.items() if pid}
    amiss = _told(running, between_s) if running else []
    if away := [str(at) for at, pid in pids.items() if not pid]:
        amiss.append(_away(away, changed))
    return ". And ".join(amiss)


def _away(places: Sequence[str], changed: str) -> str:
    """What is to be done where no server of these folders runs on this machine."""
    there = "those folders" if len(places) > 1 else "that folder"
    return (
        f"no message server of {' and '.join(places)} runs on this machine. Where keep_hub watches "
        f"{there} with --reload, as in Compose, the change is in force within 5 s. Where a message "
        "server reads a copy (Kubernetes, another machine), the change is NOT in force until you "
        f"have brought {changed} of {there} to that copy. Tell a server without --reload to read "
        "it with 'nats-server --signal reload=PID', wait a second, and tell it once more"
    )


def _told(running: Mapping[Path, int], between_s: float) -> list[str]:
    """Have these servers read it, by their folders: what is amiss with some of them."""
    before = {at: _loaded_at(at) for at in running}
    amiss: dict[Path, str] = {}
    for wait_s in (between_s, between_s / 4):  # what is done next finds that it has taken effect
        for at, pid in running.items():
            try:
                os.kill(pid, signal.SIGHUP)
            except OSError as error:
                amiss[at] = (
                    f"the message server of {at} (process {pid}) cannot be told to reload: "
                    f"{error.strerror}"
                )
        time.sleep(wait_s)
    for at in running.keys() - amiss.keys():
        if before[at] and before[at] == _loaded_at(at):
            amiss[at] = (
                f"the message server of {at} goes on with what it knew before, and lets in whoever "
                "it let in: its log says why, mostly a mistake in its configuration or a file that "
                "its user may not read"
            )
            continue
        try:
            hub_leaves.cut(at, at / CONFIG)
        except (OSError, ValueError) as error:
            amiss[at] = (
                f"the message server of {at} knows it, but sites' own message servers stay as they "
                f"are, with the rights that they had ({error}): start it anew to cut off who may "
                "be in no more"
            )
    return [amiss[at] for at in running if at in amiss]


def _loaded_at(at: Path) -> str:
    """When the server of that folder has last read its configuration; "" where it does not tell."""
    try:
        _, port = hub_leaves.place(at / CONFIG)
        return hub_watch.loaded_at(hub_leaves.place(at / CONFIG, "http"), port)
    except (OSError, ValueError):
        return ""


def write_secret(path: Path, document: str) -> None:
    """A file with a secret; raises ValueError where there is a file already, and OSError."""
    if path.exists():
        raise ValueError(f"{path} is there already, and may be a secret in use: name another file")
    replace_for_owner(path, document)


# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(folder: Path, how: str = "with --hub") -> Iterator[None]:
    """One change at a time: of two, one would undo the other. `how`: whoever errs names another."""
    try:
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ValueError(hub_nodes.shut(folder, error, how)) from None
    try:
        give(fd, folder)
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _write(path: Path, text: str) -> None:
    """For whoever owns the folder: a command that root types must not lock the server out, which
    would go on with what it has, and let in who was revoked."""
    replace_for_owner(path, text, like=path.parent)


def _make(folder: Path) -> None:
    """A folder, likewise."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700)
        give(folder, folder.parent)


def _one(identities: Sequence[Identity], name: str) -> Identity:
    for identity in identities:
        if identity.name == name:
            return identity
    raise ValueError(f"there is no identity {name}; known: {_names(i.name for i in identities)}")


def _learners(identity: Identity) -> tuple[str, ...]:
    """Raises ValueError for an identity that is no site's."""
    if identity.role != "learner":
        raise ValueError(f"{identity.name} is a {identity.role}: only a site has learners")
    return identity.members


def _check_free(
    folder: Path, identities: Sequence[Identity], name: str, members: Sequence[str]
) -> None:
    """Raises ValueError where one of `members`, who are to be of `name`, is of another identity."""
    for other in identities:
        for member in members if other.name != name else ():
            if member not in other.spoken_for:
                continue
            if other.role != "learner":
                raise ValueError(f"{member} is the id of a {other.role}: give the learner another")
            raise ValueError(
                f"learner {member} is of site {other.name}: take it out there first with 'diloco "
                f"site learners {other.name} --remove {member} --hub {folder}', or revoke "
                f"{other.name}"
            )


def _names(known: Iterable[str]) -> str:
    return ", ".join(known) or "none"


def _change(folder: Path, name: str, how: Callable[[Identity], Identity]) -> None:
    identities = identities_of(folder)
    changed = how(_one(identities, name))
    _write_identities(folder, [changed if i.name == name else i for i in identities])


def _write_identities(folder: Path, identities: Sequence[Identity]) -> None:
    """The list last: whoever is interrupted before repeats the command."""
    kept = folder / hub_leaves.PASSWORD
    text = accounts_conf(identities, kept.read_text("ascii").strip() if kept.exists() else "")
    body = json.dumps([asdict(identity) for identity in identities], indent=1)
    for place in (folder, *(folder / node.name for node in nodes_of(folder))):
        _make(place)
        _write(place / ACCOUNTS, text)
    _write(folder / IDENTITIES, body + "\n")


def _may_end_connections(folder: Path, nodes: Sequence[Node]) -> None:
    """What cuts off sites' message servers (leaves.py), at every node."""
    password = hub_nodes.new_password()
    for place in (folder, *(folder / node.name for node in nodes)):
        _write(place / hub_leaves.PASSWORD, password + "\n")
        if (folder / CERTIFICATES).is_dir():
            authority, days = _authority(folder), _signing().AUTHORITY_DAYS
            signed = _signing().for_site(authority, "system", datetime.now(UTC), days)
            _write(place / hub_leaves.CERTIFICATE, signed.document)


def _hand_out(folder: Path, name: str, credentials: Credentials | None) -> Path | None:
    """What an identity takes away; where its credentials are, if it has not made them itself."""
    if (folder / CERTIFICATES).is_dir():
        signed = _signing().for_site(_authority(folder), name, datetime.now(UTC))
        _write(certificate_of(folder, name), signed.document)
    if credentials is None:
        return None
    there = folder / CREDENTIALS
    _make(there)
    _write(there / name, credentials.document())
    return there / name


def _signing() -> ModuleType:
    try:
        from diloco_shared.hub import certificates
    except ImportError:
        raise ValueError(
            "certificates are made with the package cryptography: pip install 'cryptography', or "
            "this software with the extra [nats]"
        ) from None
    return certificates


def _address(listen: str) -> str:
    return listen.rpartition(":")[0] or "0.0.0.0"


def _monitor(given: str, node: Node | None) -> str:
    return f"{_address(given)}:{node.monitor_port}" if given and node is not None else given


def _routes(folder: Path, node: Node, nodes: Sequence[Node], address: str) -> Routes:
    """Raises OSError."""
    kept = folder / hub_nodes.ROUTES_PASSWORD
    if not kept.exists():
        _write(kept, hub_nodes.new_password() + "\n")
    encrypted = (folder / hub_nodes.ROUTES_AUTHORITY).exists()
    password = kept.read_text("ascii").strip()
    at = folder / node.name
    return hub_nodes.routes_of(node, nodes, at, address, password, encrypted=encrypted)


def _sign_for_hub(
    folder: Path, hosts: Sequence[str], nodes: Sequence[Node], *, own: bool, again: bool = False
) -> None:
    """For what is reached under `hosts`, or for each node; `own`: sites know its authority.

    `again`: for the names in the present certificates as well. Nodes get certificates for each
    other whatever certificate they show to sites.
    """
    if own and not nodes:
        kept = _names_in(folder / HUB_CERTIFICATE) if again else []
        named = list(dict.fromkeys((*kept, *hosts)))
        _write_signed(_authority(folder), named, folder / HUB_CERTIFICATE, folder / HUB_KEY)
    for node in nodes:
        at = folder / node.name
        _make(at)
        kept = _names_in(at / HUB_CERTIFICATE) if again else []
        named = list(dict.fromkeys((node.host, *kept, *hosts)))
        if own:
            _write_signed(_authority(folder), named, at / HUB_CERTIFICATE, at / HUB_KEY)
        if own or (folder / CERTIFICATES).is_dir():
            _write(at / AUTHORITY, _authority(folder).certificate)
        authority = (folder / hub_nodes.ROUTES_AUTHORITY, folder / hub_nodes.ROUTES_AUTHORITY_KEY)
        among = _authority_in(*authority)
        pair = at / hub_nodes.ROUTE_CERTIFICATE, at / hub_nodes.ROUTE_KEY
        _write_signed(among, [node.host], *pair, days=_signing().AUTHORITY_DAYS)
        _write(at / hub_nodes.ROUTES_AUTHORITY, among.certificate)


def _names_in(certificate: Path) -> list[str]:
    """What a certificate is for; nothing where there is none, or one that cannot be read."""
    try:
        found: list[str] = _signing().names_of(certificate.read_text("ascii"))
    except (OSError, ValueError):
        return []
    return found


def _write_signed(
    authority: "Pair",
    hosts: Sequence[str],
    certificate: Path,
    key: Path,
    days: int | None = None,
) -> None:
    signing = _signing()
    signed = signing.for_hub(authority, hosts, datetime.now(UTC), days or signing.DAYS)
    # A server that reads both in between refuses them, and goes on with those that it has.
    _write(key, signed.key)
    _write(certificate, signed.certificate)


def _authority(folder: Path) -> "Pair":
    """The hub's own; made when it is first needed. Raises ValueError and OSError."""
    return _authority_in(folder / AUTHORITY, folder / AUTHORITY_KEY)


def _authority_in(*kept: Path) -> "Pair":
    if kept[1].exists():
        there: Pair = _signing().Pair(*(path.read_text("ascii") for path in kept))
        return there
    made: Pair = _signing().new_authority(datetime.now(UTC))
    _write(kept[0], made.certificate)
    _write(kept[1], made.key)
    return made


def _server(folder: Path) -> int:
    """The process of the folder's message server; 0 for none."""
    try:
        pid = int((folder / PID).read_text("ascii")[:20])
        said = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return 0
    # A number that was left behind may be another process's by now.
    return pid if b"nats-server" in said else 0
