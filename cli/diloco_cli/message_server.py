"""The message server itself, for what REST does not have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.cluster import endpoint_of
from diloco_cli.words import INVALID, NO_CLUSTER, CliError, why
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Unavailable
from diloco_shared.process.connecting import HubSettings, connection
from diloco_shared.process.settings import said_of

# For a server that is there; a command should not hang on one that is not.
CONNECT_S = 5.0
# What names a message server elsewhere, to commands that speak to it.
ELSEWHERE = "--nats-url and --nats-credentials"


@dataclass(frozen=True, slots=True)
class Login:
    """As the options say; no `url`: that of the cluster of this machine, with its token."""

    url: str
    token: str
    credentials: str


async def bus_of(login: Login, data: Path) -> NatsBus:
    """A connection, which the caller closes; CliError says what is missing."""
    given = {"nats_url": login.url, "nats_credentials": login.credentials}
    try:
        settings = HubSettings(**(given | (_token(login) if login.url else _here(data))))
        settings.hub.identity()
    except ValueError as error:
        raise CliError(said_of(error), INVALID) from None
    try:
        return await connection(settings, "diloco", timeout_s=CONNECT_S)
    except Unavailable as error:
        # One that is elsewhere may be there, and refuse the key.
        change = (
            "see --nats-url, and --nats-credentials or the token; 'diloco doctor' tries each step"
            if login.url
            else "start the cluster with 'diloco up', or name another with --nats-url"
        )
        text = f"{error}; {change}"
        raise CliError(text, NO_CLUSTER) from None


def _token(login: Login) -> dict[str, Any]:
    """One that is given beats a file of the profile. TLS: as every process of the cluster is told;
    no options, since people have them in their profile."""
    return {"nats_token": login.token, "nats_token_file": None} if login.token else {}


def _here(data: Path) -> dict[str, Any]:
    """Of the cluster of this machine, which has its own secret, and no TLS; whatever is in the
    profile is for another one."""
    where = f"nats://{endpoint_of(data, ELSEWHERE)['nats']}"
    try:
        key = (data / "nats-token").read_text(encoding="ascii").strip()
    except OSError as error:
        raise CliError(f"the token of the message server cannot be read: {why(error)}") from None
    plain = dict.fromkeys(("nats_ca", "nats_client_cert", "nats_client_key"), "")
    return {"nats_url": where, "nats_token": key, "nats_token_file": None, **plain}
