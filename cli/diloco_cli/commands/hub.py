"""Commands about a hub: its message server's configuration, and backups of what it holds."""

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from diloco_cli.cluster import HERE as LOCAL
from diloco_cli.commands.options import Folder, Json, NatsCredentials, NatsToken, NatsUrl, show
from diloco_cli.hub_files import (
    HERE,
    amiss,
    certified,
    counted_here,
    reload,
    room_at,
    to_start,
)
from diloco_cli.lines import say
from diloco_cli.meanwhile import meanwhile
from diloco_cli.message_server import Login, bus_of
from diloco_cli.words import INVALID, CliError, why
from diloco_shared.budget.terms import shown
from diloco_shared.bus.nats.backups import ServerStreams
from diloco_shared.bus.port import BusError
from diloco_shared.hub import backup as hub_backup
from diloco_shared.hub import folder as hub_folder
from diloco_shared.hub.nats_binary import BinaryError
from diloco_shared.hub.nodes import Node, nodes_at, url_of
from diloco_shared.process import logs

T = TypeVar("T")

app = typer.Typer()
hub = typer.Typer(no_args_is_help=True, help="The message server of a hub, and its identities.")
app.add_typer(hub, name="hub")

Leaves = Annotated[
    str,
    typer.Option(
        help="Where it listens to message servers of sites ('diloco site leaf'), as "
        "0.0.0.0:7422; '': nowhere."
    ),
]
_BEGUN = "what was begun is no backup, and no hub: remove it"


@hub.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    listen: Annotated[str, typer.Option(help="Where it listens: ADDRESS:PORT.")] = "0.0.0.0:4222",
    store: Annotated[
        Path | None, typer.Option(help="Folder of its streams; FOLDER/store if left out.")
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(
            help="HOST or HOST:PORT of one of several message servers that are one hub together, "
            "three times, or five times. FOLDER gets a folder for each."
        ),
    ] = None,
    cert: Annotated[str, typer.Option(help="File of its TLS certificate.")] = "",
    key: Annotated[str, typer.Option(help="File of the certificate's key.")] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address under which sites reach it, several times for several: an "
            "authority of its own signs a certificate for it, where you have none. A node has one "
            "for its HOST."
        ),
    ] = None,
    mutual_tls: Annotated[
        bool,
        typer.Option("--mutual-tls", help="Whoever connects must present a certificate too."),
    ] = False,
    monitor: Annotated[
        str,
        typer.Option(
            help="Where it tells this machine how it is, for keep_hub: ADDRESS:PORT; '': nowhere."
        ),
    ] = "127.0.0.1:8222",
    leaf_listen: Leaves = "",
    max_bytes: Annotated[
        int,
        typer.Option(
            min=0, help="What all streams may hold; 0: three quarters of what is free at its store."
        ),
    ] = 0,
) -> None:
    """Write a message server's configuration, with credentials for the hub's own processes."""
    _check_certificates(cert, key, made_for=host or (), mutual=mutual_tls, nodes=node or ())
    store = store or folder / "store"
    room = max_bytes or room_at(store)
    try:
        nodes = nodes_at(node) if node else []
        made = hub_folder.create(
            folder,
            listen=listen,
            store=store,
            nodes=nodes,
            certificate=cert,
            key=key,
            hosts=host or (),
            mutual_tls=mutual_tls,
            monitor=monitor,
            leaves=leaf_listen,
            file_bytes_max=room,
        )
    except (ValueError, OSError) as error:
        raise amiss(folder, error) from None
    to_start(folder.resolve(), nodes, listen=listen, monitor=monitor, certificate=cert)
    if room != max_bytes:
        say(counted_here(room, store))
    _handed_out(folder, made, nodes, certificate=cert, hosts=host or ())


def _handed_out(
    folder: Path,
    made: Sequence[Path],
    nodes: Sequence[Node],
    *,
    certificate: str,
    hosts: Sequence[str],
) -> None:
    """What processes are given, to find the message server, to trust it, and to be let in."""
    if nodes:
        say(f"every process finds them by DILOCO_NATS_URL={url_of(nodes, encrypted=True)}")
    for path in made:
        say(f"credentials of {path.name}: {path}")
        certified(folder, path.name)
    if hosts or (nodes and not certificate):
        say(f"{folder.resolve() / hub_folder.AUTHORITY}: every process trusts it by DILOCO_NATS_CA")
    if not certificate and not hosts and not nodes:
        say("without --host, or --cert and --key, nothing is encrypted: others can read it all")


def _check_certificates(
    cert: str, key: str, *, made_for: Sequence[str], mutual: bool, nodes: Sequence[str]
) -> None:
    """Raises CliError for options that do not go together."""
    if bool(cert) != bool(key):
        raise CliError("give --cert and --key together: each is useless alone", INVALID)
    if cert and made_for:
        raise CliError("--host is for a certificate that is made: leave out it, or --cert", INVALID)
    if mutual and not (cert or made_for or nodes):
        raise CliError("--mutual-tls needs --host NAME, or --cert and --key of your own", INVALID)


@hub.command()
def renew(
    folder: Annotated[Path, typer.Argument(help="Folder that 'diloco hub init' made.")] = HERE,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Another name or address under which sites reach the hub, several times for "
            "several. The names in the present certificate stay."
        ),
    ] = None,
) -> None:
    """Have the hub's own authority sign another certificate of the message server."""
    try:
        made = hub_folder.renew(folder, host or ())
    except (ValueError, OSError) as error:
        raise amiss(folder, error) from None
    for path, names in made.items():
        say(f"{path}: the message server's certificate is new, for {', '.join(names)}")
    reload(folder, changed="all files *.pem")


@hub.command()
def backup(
    folder: Annotated[Path, typer.Argument(help="New folder to write it to.")],
    data: Folder = LOCAL,
    nats_url: NatsUrl = "",
    nats_token: NatsToken = "",
    nats_credentials: NatsCredentials = "",
    as_json: Json = False,
) -> None:
    """Write all streams and buckets of a hub to a folder, while its runs go on.

    With credentials, those of the coordinator.
    """

    async def act() -> hub_backup.Backup:
        bus = await bus_of(Login(nats_url, nats_token, nats_credentials), data)
        try:
            return await hub_backup.take(ServerStreams(bus), folder)
        finally:
            await bus.close()

    found = _backed(act(), str(folder))
    lines = [f"{len(found.streams)} streams, {shown(found.bytes)}, in {folder}"]
    show(hub_backup.report(found), as_json, lambda: lines)


@hub.command()
def restore(
    folder: Annotated[Path, typer.Argument(help="What 'diloco hub backup' wrote.")],
    store: Annotated[
        Path | None,
        typer.Option(
            help="Empty store of a message server that does not run. With --hub it is the one that "
            "the hub's configuration names, unless you name another path of it here."
        ),
    ] = None,
    hub_folder_: Annotated[
        Path | None, typer.Option("--hub", help="Folder that 'diloco hub init' made.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Put a backup back into the empty store of a message server, before you start that."""
    stores, names = _stores(store, hub_folder_)
    of_hub = hub_folder_ is not None
    where = " and ".join(map(str, stores))
    work = hub_backup.put_back(folder, *stores, of_hub=of_hub, names=names, owned=True)
    found, done = _backed(work, where)
    lines = [f"{len(found.streams)} streams, {shown(found.bytes)}, are in {where}", *done]
    if len(stores) > 1:
        lines.append("carry each of these folders to the machine of its node, to the same place")
    if hub_folder_ is not None:
        lines.append(
            f"who may connect is said by {hub_folder_}, and not by the backup: if that is an older "
            f"copy, compare 'diloco site list --hub {hub_folder_}' with what was revoked, rotated "
            "or added since, before the message server starts"
        )
    lines.append("start the message server now: everybody goes on by itself")
    lines.append(
        "API tokens are those of the backup: compare 'diloco token list' with 'diloco audit', and "
        "revoke or rotate again what was revoked or rotated since"
    )
    show({**hub_backup.report(found), "done": done}, as_json, lambda: lines)


def _stores(store: Path | None, folder: Path | None) -> tuple[list[Path], list[str]]:
    """(where streams are put back, names of the servers). Raises CliError."""
    if folder is None:
        if store is None:
            raise CliError(
                "give --hub FOLDER, of a hub that 'diloco hub init' made, or else --store FOLDER",
                INVALID,
            )
        return [store], []
    try:
        there = hub_folder.stores_of(folder)
    except ValueError as error:
        raise amiss(folder, error) from None
    if store is not None and len(there) > 1:
        raise CliError("each node of this hub has its own store: leave --store out", INVALID)
    return [*there.values()] if store is None else [store], [*there]


def _backed(work: Coroutine[Any, Any, T], where: str) -> T:
    """What comes of it; CliError says what is amiss. `where`: what is written."""
    logs.configure("warning")
    try:
        with meanwhile("copies streams and buckets"):
            return asyncio.run(work)
    except (hub_backup.BackupError, BinaryError) as error:
        raise CliError(str(error)) from None
    except BusError as error:
        raise CliError(f"{error}; {_BEGUN}") from None
    except OSError as error:
        raise CliError(f"{error.filename or where}: {why(error)}; {_BEGUN}") from None
