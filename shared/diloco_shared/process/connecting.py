"""Settings of a connection, and the connection: the one way for services, helpers and commands."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from diloco_shared.bus.nats.access import Address, TlsFiles
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Bus

# Of a file with a secret: longer than any token, and far too short to be a mistaken model.
SECRET_BYTES_MAX = 4096


def secret_in(path: Path) -> str:
    """The one line of a file that holds a secret; ValueError says what is wrong with the file."""
    try:
        with path.open("rb") as file:
            raw = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): see that it is there, and that the user "
            "of this process may read it"
        ) from None
    text = raw.decode("utf-8", errors="replace").strip()
    if len(raw) > SECRET_BYTES_MAX or not text.isprintable() or not text:
        raise ValueError(
            f"{path} holds no secret: it must be one line of text of at most "
            f"{SECRET_BYTES_MAX} bytes"
        )
    return text


class HubSettings(BaseSettings):
    """Where the bus is, and how it lets a process in; every field may be set as DILOCO_<FIELD>."""

    # What is wrong is told without what was given, since that may be a secret.
    model_config = SettingsConfigDict(env_prefix="DILOCO_", frozen=True, hide_input_in_errors=True)

    nats_url: str = Field("nats://127.0.0.1:4222", description="Where the bus is.")
    nats_token: str = Field("", description="Token for the bus, if it wants one.")
    nats_token_file: Path | None = Field(
        None,
        description="File that holds that token, as supervisors hand secrets to a process; give "
        "this or the token itself.",
    )
    nats_credentials: str = Field(
        "",
        description="File of this process's identity, as the hub gave it to its site; beats the "
        "token. Read anew for every connection.",
    )
    nats_ca: str = Field(
        "",
        description="PEM file of the authority that signed the bus's certificate, if it is the "
        "hub's own. Only that one is trusted then; else those of the system, or of SSL_CERT_FILE.",
    )
    nats_client_cert: str = Field(
        "", description="PEM file of this site's certificate, where the bus demands one."
    )
    nats_client_key: str = Field(
        "",
        description="PEM file of its key, without a password; not needed where the key lies in the "
        "file of the certificate.",
    )

    @model_validator(mode="before")
    @classmethod
    def _token_of_file(cls, given: Any) -> Any:
        """The token is read once, here; whoever needs it finds it in `nats_token`."""
        if not isinstance(given, dict) or not (file := given.get("nats_token_file")):
            return given
        token = secret_in(Path(file))
        if given.get("nats_token", "") not in ("", token):
            raise ValueError(
                f"DILOCO_NATS_TOKEN and {file} differ: unset the one that is not to be used"
            )
        return {**given, "nats_token": token}

    @property
    def nats_tls(self) -> TlsFiles | None:
        """None: as the URL and the bus say, with the authorities of the system."""
        return TlsFiles.named(self.nats_ca, self.nats_client_cert, self.nats_client_key)

    @property
    def hub(self) -> Address:
        """All of it, as every kind of connection takes it."""
        credentials = Path(self.nats_credentials) if self.nats_credentials else None
        token = self.nats_token or None
        return Address(self.nats_url, token, tls=self.nats_tls, credentials=credentials)


async def connection(settings: HubSettings, name: str, **more: Any) -> NatsBus:
    """To the bus that the settings name; the caller closes it. Raises Unavailable.

    `name`: what the server shows for it. `more`: how long to try, and what carries payloads, as
    `NatsBus.to` takes it.
    """
    return await NatsBus.to(settings.hub, name=name, **more)


async def closed(buses: Iterable[NatsBus], within_s: float) -> None:
    """Close them side by side: each would wait for a hub that is silent."""
    await asyncio.gather(*(bus.close(within_s) for bus in buses))


@asynccontextmanager
async def connected(settings: HubSettings, name: str, **more: Any) -> AsyncIterator[Bus]:
    """The same, until the context ends."""
    bus = await connection(settings, name, **more)
    try:
        yield bus
    finally:
        await bus.close()
