"""Commands about sites: which may connect to a hub, and with which keys.

They need the hub's folder and no connection, so that no client of NATS is imported: whoever revokes
a site is in a hurry.
"""

import re
from pathlib import Path
from typing import Annotated

import typer

from diloco_cli.commands.options import Json, show
from diloco_cli.hub_files import HERE, amiss, handed_out, reload
from diloco_cli.lines import say
from diloco_cli.words import INVALID, CliError
from diloco_shared.bus.nats.hub_config import leaf_conf
from diloco_shared.bus.nats.keys import Credentials, read_credentials
from diloco_shared.bus.nats.rights import Role
from diloco_shared.hub import folder as hub_folder

app = typer.Typer()
site = typer.Typer(no_args_is_help=True, help="Which sites may connect to a hub.")
app.add_typer(site, name="site")

Name = Annotated[str, typer.Argument(help="Name of the identity: that of a site, mostly.")]
Hub = Annotated[Path, typer.Option("--hub", help="Folder that 'diloco hub init' made.")]
PublicKey = Annotated[
    str, typer.Option(help="Of a key that the site made itself ('diloco site key').")
]


@site.command()
def add(
    name: Name,
    folder: Hub = HERE,
    learner: Annotated[
        list[str] | None,
        typer.Option(help="Id of a learner of the site; several times for several. Else NAME."),
    ] = None,
    role: Annotated[
        str, typer.Option(help="learner; or syncer, reader, supervisor for the hub's own.")
    ] = "learner",
    public_key: PublicKey = "",
) -> None:
    """Let another site in."""
    if role not in ("learner", "syncer", "reader", "supervisor"):
        raise CliError(f"--role {role}: give learner, syncer, reader or supervisor", INVALID)
    kind: Role = role  # type: ignore[assignment]
    try:
        made = hub_folder.add(folder, name, kind, learner or (), public_key=public_key)
    except (ValueError, OSError) as error:
        raise amiss(folder, error) from None
    handed_out(folder, name, made)
    reload(folder)


@site.command()
def revoke(name: Name, folder: Hub = HERE) -> None:
    """Cut a site off, and let it in no more."""
    try:
        hub_folder.revoke(folder, name)
    except (ValueError, OSError) as error:
        raise amiss(folder, error) from None
    reload(folder)


@site.command()
def rotate(
    name: Name,
    folder: Hub = HERE,
    public_key: PublicKey = "",
    finish: Annotated[
        bool, typer.Option("--finish", help="The site has its new key: the old one is good no more")
    ] = False,
) -> None:
    """Give a site a new key; the old one is good until you call this with --finish."""
    if finish and public_key:
        raise CliError("--finish makes no new key: leave --public-key out", INVALID)
    try:
        if finish:
            hub_folder.retire(folder, name)
        else:
            made = hub_folder.rotate(folder, name, public_key=public_key)
            handed_out(folder, name, made)
            (keys,) = (len(i.keys) for i in hub_folder.identities_of(folder) if i.name == name)
            say(f"{name} has {keys} keys, and each is good: --finish drops all but the newest")
    except (ValueError, OSError) as error:
        raise amiss(folder, error) from None
    reload(folder)


@site.command()
def learners(
    name: Name,
    folder: Hub = HERE,
    add: Annotated[
        list[str] | None,
        typer.Option(help="Id of a further learner of the site; several times for several."),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(help="Id of a learner that the site has no more; several times for several."),
    ] = None,
) -> None:
    """Show the learners of a site, let further ones in, or take some out.

    The site's credentials stay as they are.
    """
    change = bool(add or remove)
    try:
        if change:
            hub_folder.change_learners(folder, name, added=add or (), removed=remove or ())
        say(f"{name}: learner of {', '.join(hub_folder.learners_of(folder, name))}")
    except (ValueError, OSError) as error:
        raise amiss(folder, error) from None
    if change:
        reload(folder)


@site.command("list")
def list_(folder: Hub = HERE, as_json: Json = False) -> None:
    """Show who may connect."""
    try:
        found = hub_folder.identities_of(folder)
    except ValueError as error:
        raise amiss(folder, error) from None
    rows = [
        {"name": i.name, "role": i.role, "learners": [*i.members], "keys": [*i.keys]} for i in found
    ]
    show(
        rows,
        as_json,
        lambda: [
            f"{i.name}: {i.role}"
            + (f" of {', '.join(i.members)}" if i.members else "")
            + (f", {len(i.keys)} keys" if len(i.keys) > 1 else "")
            for i in found
        ],
    )


@site.command("key")
def key_(
    name: Name, to: Annotated[Path, typer.Option(help="File to write the secret to.")]
) -> None:
    """At a site: make a key whose secret stays here, and print what the hub needs of it."""
    try:
        credentials = Credentials.new(name)
        hub_folder.write_secret(to, credentials.document())
    except (ValueError, OSError) as error:
        raise amiss(to, error) from None
    print(credentials.public_key)


@site.command()
def leaf(
    credentials: Annotated[
        Path, typer.Option(help="Credentials of the site, as its learners have them.")
    ],
    hub_url: Annotated[
        list[str],
        typer.Option(
            help="Where the hub listens to message servers of sites: tls://HOST:PORT. Several "
            "times for the nodes of one hub."
        ),
    ],
    to: Annotated[Path, typer.Option(help="File to write: it will hold the site's secret.")],
    listen: Annotated[
        str, typer.Option(help="Where the site's processes reach it.")
    ] = "127.0.0.1:4222",
    ca: Annotated[str, typer.Option(help="The hub's authority.pem.")] = "",
    client_cert: Annotated[
        str, typer.Option(help="The site's certificate, if the hub demands one.")
    ] = "",
) -> None:
    """At a site: write the configuration of a message server of its own (a leaf node)."""
    for url in hub_url:
        if not re.fullmatch(r"(tls|nats)://[^\s/@]+:\d+", url):
            raise CliError(f"--hub-url {url}: write it as tls://hub.example.org:7422", INVALID)
    try:
        who = read_credentials(credentials)
        document = leaf_conf(
            who,
            name=f"leaf-{who.name}",
            listen=listen,
            hub=hub_url,
            pid_file=str(to.resolve().with_suffix(".pid")),
            authority=str(Path(ca).resolve()) if ca else "",
            certificate=str(Path(client_cert).resolve()) if client_cert else "",
        )
        hub_folder.write_secret(to, document)
    except (ValueError, OSError) as error:
        raise amiss(to, error) from None
    say(f"{to}: start the site's message server with 'nats-server -c {to}'")
    say(f"the site's processes find it by DILOCO_NATS_URL=nats://{listen}")
    if any(url.startswith("nats:") for url in hub_url):
        say("a hub without tls:// is spoken to in the clear: others can read it all")
