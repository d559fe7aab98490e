"""A hub's folder: its message server's configuration, and who may connect.

    nats-server.conf    the operator's; written once, by `create`
    accounts.conf       who may do what; made anew by every change
    identities.json     what accounts.conf is made from; no secrets
    credentials/NAME    a secret, for the one that it is made for, who takes it away

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
from pathlib import Path

from diloco_shared.bus.nats.hub_config import ACCOUNTS, PID, accounts_conf, hub_conf
from diloco_shared.bus.nats.keys import Credentials, check_public_key
from diloco_shared.bus.nats.rights import KEYS_MAX, Identity, Role

CONFIG, IDENTITIES, CREDENTIALS, LOCK = (
    "nats-server.conf",
    "identities.json",
    "credentials",
    "lock",
)
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
    file_bytes_max: int = 0,
) -> list[Path]:
    """Make the folder, with the identities of FIRST; where their credentials are.

    Raises ValueError where there is a hub already, and OSError.
    """
    folder = folder.resolve()
    if (folder / IDENTITIES).exists() or (folder / CONFIG).exists():
        raise ValueError(f"{folder} is a hub's folder already: nothing was changed")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = hub_conf(
        listen=listen,
        store=str(store.resolve()),
        pid_file=str(folder / PID),
        certificate=certificate,
        key=key,
        file_bytes_max=file_bytes_max,
    )
    with _locked(folder):
        made = [(Credentials.new(name), role) for name, role in FIRST]
        _write_identities(folder, [Identity(c.name, role, (c.public_key,)) for c, role in made])
        _replace(folder / CONFIG, text)
        return [_hand_out(folder, credentials) for credentials, _ in made]


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
        return _hand_out(folder, credentials) if credentials else None


def revoke(folder: Path, name: str) -> None:
    """Let an identity in no more. Raises ValueError."""
    with _locked(folder):
        identities = identities_of(folder)
        _one(identities, name)
        _write_identities(folder, [i for i in identities if i.name != name])
        (folder / CREDENTIALS / name).unlink(missing_ok=True)


def rotate(folder: Path, name: str, *, public_key: str = "") -> Path | None:
    """A new key beside the present one, which is good until `retire`; where its credentials are.

    None where the identity keeps its secret itself. A key before the present one is good no more.
    """
    credentials = None if public_key else Credentials.new(name)
    key = credentials.public_key if credentials else check_public_key(public_key)
    with _locked(folder):
        _change(folder, name, lambda i: replace(i, keys=(*i.keys, key)[-KEYS_MAX:]))
        return _hand_out(folder, credentials) if credentials else None


def retire(folder: Path, name: str) -> None:
    """Only the newest key of an identity is good from now on. Raises ValueError."""
    with _locked(folder):
        _change(folder, name, lambda i: replace(i, keys=i.keys[-1:]))


def reload(folder: Path, *, between_s: float = BETWEEN_S) -> str:
    """Have the running server read its configuration again: what else is to be done, "" if nothing.

    Twice, since nats-server 2.15.1 leads an account that it meets for the first time nowhere until
    it reads the configuration once more. Waits `between_s` seconds.
    """
    folder = folder.resolve()
    pid = _server(folder)
    if not pid:
        return (
            f"no message server of {folder} runs on this machine: where one does, tell it with "
            "'nats-server --signal reload=PID', wait a second, and tell it once more"
        )
    try:
        os.kill(pid, signal.SIGHUP)
        time.sleep(between_s)
        os.kill(pid, signal.SIGHUP)
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


def _hand_out(folder: Path, credentials: Credentials) -> Path:
    there = folder / CREDENTIALS
    there.mkdir(exist_ok=True, mode=0o700)
    _replace(there / credentials.name, credentials.document())
    return there / credentials.name


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
