"""The message server itself, for what REST does not have."""

import os
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.cluster import endpoint_of
from diloco_cli.words import INVALID, NO_CLUSTER, CliError, why
from diloco_shared.bus.nats.access import TlsFiles
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.nats.keys import read_credentials
from diloco_shared.bus.port import Unavailable

# For a server that is there; a command should not hang on one that is not.
CONNECT_S = 5.0
# As every process of the cluster is told; no options, since people have them in their profile.
_TLS = ("CA", "CLIENT_CERT", "CLIENT_KEY")


@dataclass(frozen=True, slots=True)
class Login:
    """As the options say; no `url`: that of the cluster of this machine, with its token."""

    url: str
    token: str
    credentials: str


async def bus_of(login: Login, data: Path) -> NatsBus:
    """A connection, which the caller closes; CliError says what is missing."""
    where, key = login.url, login.token or None
    file = Path(login.credentials) if login.credentials else None
    told = [os.environ.get(f"DILOCO_NATS_{of}", "") for of in _TLS]
    try:
        tls = TlsFiles.named(*told) if where else None
        if file is not None:
            read_credentials(file)
    except ValueError as error:
        raise CliError(str(error), INVALID) from None
    if not login.url:
        where = f"nats://{endpoint_of(data)['nats']}"
        try:
            key = (data / "nats-token").read_text(encoding="ascii").strip()
        except OSError as error:
            raise CliError(
                f"the token of the message server cannot be read: {why(error)}"
            ) from None
    try:
        return await NatsBus.connect(
            where, name="diloco", token=key, credentials=file, tls=tls, timeout_s=CONNECT_S
        )
    except Unavailable as error:
        raise CliError(
            f"no message server answers at {where.rpartition('@')[2]} ({error}): start the "
            "cluster with 'diloco up', or name another with --nats-url",
            NO_CLUSTER,
        ) from None
