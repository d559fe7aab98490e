"""A hub's folder: its message server's configuration, and who may connect.

    nats-server.conf    the operator's; written once, by `create`
    accounts.conf       who may do what; made anew by every change
    identities.json     what accounts.conf is made from; no secrets
    credentials/NAME    a secret, for the one that it is made for, who takes it away
    authority.pem, authority-key.pem    a hub's own authority, if it has one; the key is a secret
    hub.pem, hub-key.pem    what the message server proves its name with, signed by that authority
    certificates/NAME.pem   certificate and key of an identity, if the hub demands them

Every file is readable by its owner only, and replaced as a whole. A change counts once the server
has read its configuration again, which `reload` tells it to do. Whoever is not in it any more is
cut off then; everybody else's connections stay.
"""

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from diloco_shared.bus.nats.hub_config import ACCOUNTS, PID, accounts_conf, hub_conf
from diloco_shared.bus.nats.keys import Credentials, check_public_key
from diloco_shared.bus.nats.rights import KEYS_MAX, Identity, Role

if TYPE_CHECKING:  # it needs a package that only a hub has
    from diloco_shared.process.certificates import Pair

CONFIG, IDENTITIES, CREDENTIALS, LOCK = (
    "nats-server.conf",
    "identities.json",
    "credentials",
    "lock",
)
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
# Between the two times that the server is told to read its configuration, in seconds: it takes
# milliseconds to do so, and more on a machine that is busy.
BETWEEN_S = 1.0


def create(
    folder: Path,
    *,
    listen: str,
    store: Path,
    certificate: str = "",
    key: str = "",
    hosts: Sequence[str] = (),
    mutual_tls: bool = False,
    monitor: str = "",
    file_bytes_max: int = 0,
) -> list[Path]:
    """Make the folder, with the identities of FIRST; where their credentials are.

    `hosts`: names or addresses of the hub, for which an authority of its own signs a certificate
    where none is given. `mutual_tls`: whoever connects must present one of that authority's.
    `monitor`: where `keep_hub` asks the server how it is. Raises ValueError where there is a hub
    already, and OSError.
    """
    if mutual_tls and not (certificate or hosts):
        raise ValueError(
            "certificates are demanded of sites over TLS only: give the hub's own certificate, or "
            "its name, for which one is made"
        )
    folder = folder.resolve()
    if (folder / IDENTITIES).exists() or (folder / CONFIG).exists():
        raise ValueError(f"{folder} is a hub's folder already: nothing was changed")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(folder):
        if not certificate and hosts:
            certificate, key = str(folder / HUB_CERTIFICATE), str(folder / HUB_KEY)
            _sign_for_hub(folder, hosts)
        if mutual_tls:
            (folder / CERTIFICATES).mkdir(exist_ok=True, mode=0o700)
        text = hub_conf(
            listen=listen,
            store=str(store.resolve()),
            pid_file=str(folder / PID),
            certificate=certificate,
            key=key,
            clients_authority=str(folder / AUTHORITY) if mutual_tls else "",
            monitor=monitor,
            file_bytes_max=file_bytes_max,
        )
        made = [(Credentials.new(name), role) for name, role in FIRST]
        _write_identities(folder, [Identity(c.name, role, (c.public_key,)) for c, role in made])
        _replace(folder / CONFIG, text)
        found = (_hand_out(folder, credentials.name, credentials) for credentials, _ in made)
        return [path for path in found if path is not None]


def certificate_of(folder: Path, name: str) -> Path:
    """Where certificate and key of an identity are, if the hub demands them."""
    return folder / CERTIFICATES / f"{name}.pem"


def renew(folder: Path, hosts: Sequence[str]) -> Path:
    """Another certificate of the message server, by the hub's own authority; where it is.

    Raises ValueError where the hub has no authority, and OSError.
    """
    with _locked(folder):
        if not (folder / AUTHORITY_KEY).exists() or not (folder / HUB_CERTIFICATE).exists():
            raise ValueError(
                f"{folder} has no authority that signed the hub's certificate: renew it where you "
                "had it from"
            )
        _sign_for_hub(folder, hosts)
        return folder / HUB_CERTIFICATE


def identities_of(folder: Path) -> list[Identity]:
    """Who may connect. Raises ValueError naming the file, and what to do."""
    path = folder / IDENTITIES
    try:
        with path.open("rb") as file:
            held = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): make a hub with diloco hub init {folder}"
        ) from None
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
    """A new key beside the present one, which is good until `retire`; where its credentials are.

    None where the identity keeps its secret itself. A key before the present one is good no more.
    """
    credentials = None if public_key else Credentials.new(name)
    key = credentials.public_key if credentials else check_public_key(public_key)
    with _locked(folder):
        _change(folder, name, lambda i: replace(i, keys=(*i.keys, key)[-KEYS_MAX:]))
        return _hand_out(folder, name, credentials)


def retire(folder: Path, name: str) -> None:
    """Only the newest key of an identity is good from now on. Raises ValueError."""
    with _locked(folder):
        _change(folder, name, lambda i: replace(i, keys=i.keys[-1:]))


def reload(folder: Path, *, between_s: float = BETWEEN_S) -> str:
    """Have the running server read its configuration again: what else is to be done, "" if nothing.

    Twice, since nats-server 2.15.1 leads an account that it meets for the first time nowhere until
    it reads the configuration once more. Waits `between_s` seconds, and a quarter of that.
    """
    folder = folder.resolve()
    pid = _server(folder)
    if not pid:
        return (
            f"no message server of {folder} runs on this machine: one that keep_hub watches with "
            "--reload, as Compose starts it, sees the change within 5 s; tell another one with "
            "'nats-server --signal reload=PID', wait a second, and tell it once more"
        )
    try:
        os.kill(pid, signal.SIGHUP)
        time.sleep(between_s)
        os.kill(pid, signal.SIGHUP)
        time.sleep(between_s / 4)  # what is done next finds that it has taken effect
    except OSError as error:
        return f"the message server (process {pid}) cannot be told to reload: {error.strerror}"
    return ""


def write_secret(path: Path, credentials: Credentials) -> None:
    """A credentials file; raises ValueError where there is a file already, and OSError."""
    if path.exists():
        raise ValueError(f"{path} is there already, and may be a secret in use: name another file")
    _replace(path, credentials.document())


# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One change at a time: of two, one would undo the other."""
    try:
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ValueError(f"{folder} is no hub's folder to write in: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _one(identities: Sequence[Identity], name: str) -> Identity:
    for identity in identities:
        if identity.name == name:
            return identity
    known = ", ".join(i.name for i in identities) or "none"
    raise ValueError(f"there is no identity {name}; known: {known}")


def _change(folder: Path, name: str, how: Callable[[Identity], Identity]) -> None:
    identities = identities_of(folder)
    changed = how(_one(identities, name))
    _write_identities(folder, [changed if i.name == name else i for i in identities])


def _write_identities(folder: Path, identities: Sequence[Identity]) -> None:
    """The list last: whoever is interrupted before repeats the command."""
    text = accounts_conf(identities)
    body = json.dumps([asdict(identity) for identity in identities], indent=1)
    _replace(folder / ACCOUNTS, text)
    _replace(folder / IDENTITIES, body + "\n")


def _hand_out(folder: Path, name: str, credentials: Credentials | None) -> Path | None:
    """What an identity takes away; where its credentials are, if it has not made them itself."""
    if (folder / CERTIFICATES).is_dir():
        signed = _signing().for_site(_authority(folder), name, datetime.now(UTC))
        _replace(certificate_of(folder, name), signed.document)
    if credentials is None:
        return None
    there = folder / CREDENTIALS
    there.mkdir(exist_ok=True, mode=0o700)
    _replace(there / name, credentials.document())
    return there / name


def _signing() -> ModuleType:
    try:
        from diloco_shared.process import certificates
    except ImportError:
        raise ValueError(
            "certificates are made with the package cryptography: pip install 'cryptography', or "
            "this software with the extra [nats]"
        ) from None
    return certificates


def _sign_for_hub(folder: Path, hosts: Sequence[str]) -> None:
    signed = _signing().for_hub(_authority(folder), hosts, datetime.now(UTC))
    # A server that reads both in between refuses them, and goes on with those that it has.
    _replace(folder / HUB_KEY, signed.key)
    _replace(folder / HUB_CERTIFICATE, signed.certificate)


def _authority(folder: Path) -> "Pair":
    """The hub's own; made when it is first needed. Raises ValueError and OSError."""
    kept = (folder / AUTHORITY, folder / AUTHORITY_KEY)
    if kept[1].exists():
        there: Pair = _signing().Pair(*(path.read_text("ascii") for path in kept))
        return there
    made: Pair = _signing().new_authority(datetime.now(UTC))
    _replace(kept[0], made.certificate)
    _replace(kept[1], made.key)
    return made


def _replace(path: Path, text: str) -> None:
    """All of the new or all of the old, whenever this is interrupted."""
    new = path.with_name(f"{path.name}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _server(folder: Path) -> int:
    """The process of the folder's message server; 0 for none."""
    try:
        pid = int((folder / PID).read_text("ascii")[:20])
        said = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return 0
    # A number that was left behind may be another process's by now.
    return pid if b"nats-server" in said else 0
