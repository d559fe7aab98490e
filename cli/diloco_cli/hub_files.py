"""What commands on a hub's folder say of its files."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from diloco_cli.lines import say
from diloco_cli.words import INVALID, CliError, why
from diloco_shared.budget.terms import shown
from diloco_shared.bus.nats.hub_config import ACCOUNTS
from diloco_shared.durable import free_bytes
from diloco_shared.hub import folder as hub_folder
from diloco_shared.hub.nodes import Node

HERE = Path("hub")
KEEPER = ("python", "-m", "diloco_shared.process.keep_hub")
# Where it asks unless it is told another place.
ITS_OWN = {"--at": "127.0.0.1:4222", "--monitor": "127.0.0.1:8222"}
# Addresses at which a server listens on all that its machine has.
EVERYWHERE = ("", "*", "0.0.0.0", "::")
# Of what is free when a hub is made. A server that is told nothing takes as much of what is free
# at each of its starts: its own streams would count against it, and it would promise ever less.
SHARE = 0.75


def room_at(store: Path) -> int:
    """What all streams of a store may hold together, where nobody says; 0: nobody knows.

    Whoever may not look at the store's place learns that from what makes the hub's folder.
    """
    return int(SHARE * (free_bytes(store.absolute()) or 0))


def counted_here(room: int, store: Path) -> str:
    return (
        f"all streams together may hold {shown(room)} (max_file_store): three quarters of what is "
        f"free at {store} on this machine. If the message server runs elsewhere, write the number "
        "for its disk there, or make the folder with --max-bytes"
    )


def to_start(
    folder: Path, nodes: Sequence[Node], *, listen: str, monitor: str, certificate: str = ""
) -> None:
    """How each message server of the hub is started, so that it goes on after a full disk.

    `certificate`: the file of one that the hub has not made, as its configuration names it.
    """
    stores = hub_folder.stores_of(folder).values()
    for node, store in zip(nodes or (None,), stores, strict=True):
        place = folder if node is None else folder / node.name
        config = place / hub_folder.CONFIG
        port = "" if node is None else str(node.port)
        seen = f"{_host(monitor)}:{node.monitor_port}" if monitor and node is not None else monitor
        given = _unless({"--at": _reached(listen, port), "--monitor": seen and _reached(seen)})
        # Its files are copied there from another machine; elsewhere 'diloco site' tells it.
        files = [place / ACCOUNTS, place / hub_folder.HUB_CERTIFICATE] if node is not None else []
        named = [str(file) for file in files if file.exists()]
        # Whoever renews that one tells nobody.
        named += [certificate] if certificate else []
        reread = [word for file in named for word in ("--reload", file)]
        server = ["nats-server", "-c", str(config)]
        command = shlex.join([*KEEPER, *given, *reread, str(store), *server])
        say(f"{config}: start the message server with: {command}")


def _unless(wanted: dict[str, str]) -> list[str]:
    """Options of `keep_hub` that are others than it has by itself."""
    return [word for name, at in wanted.items() if at != ITS_OWN[name] for word in (name, at)]


def _host(place: str) -> str:
    return place.rpartition(":")[0]


def _reached(listen: str, port: str = "") -> str:
    """ADDRESS:PORT as this machine reaches what listens there."""
    host = _host(listen).strip("[]")
    return f"{'127.0.0.1' if host in EVERYWHERE else host}:{port or listen.rpartition(':')[2]}"


def handed_out(folder: Path, name: str, credentials: Path | None) -> None:
    """What is to become of the new secrets of an identity."""
    if credentials is not None:
        _secret(folder, name, credentials, "DILOCO_NATS_CREDENTIALS")
    certified(folder, name)


def certified(folder: Path, name: str) -> None:
    path = hub_folder.certificate_of(folder.resolve(), name)
    if path.exists():
        _secret(folder, name, path, "DILOCO_NATS_CLIENT_CERT")


def _secret(folder: Path, name: str, path: Path, setting: str) -> None:
    if hub_folder.of_the_hub(folder, name):
        say(f"{path}: keep it for the process of {name}")
    else:
        say(f"{path}: give it to {name} alone, as {setting}, and remove it here")


def reload(folder: Path, changed: str = ACCOUNTS) -> None:
    rest = hub_folder.reload(folder, changed=changed)
    say(rest or "the message server knows it")


def amiss(path: Path, error: ValueError | OSError) -> CliError:
    if isinstance(error, OSError):
        return CliError(f"{path} cannot be written: {why(error)}")
    return CliError(str(error), INVALID)
