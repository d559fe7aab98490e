"""Where the message server is, and how to be let in: the same for every kind of connection.

The library's connection (client.py) and the lanes (lane_socket.py) both say what an `Address` says.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from diloco_shared.bus.nats.keys import Credentials, read_credentials

# Nodes of one hub: a list that is longer is a mistake.
SERVERS_MAX = 16
# JetStream's questions are asked below this subject by whoever has no identity of its own, ...
API = "$JS.API"
# ... and below this one by whoever has: accounts forward it to the hub's (hub_config.py).
HUB_API = "$JS.hub.API"
# What the server tells whenever a stream's consumer comes or goes: what, of which stream, its name.
CONSUMER_NEWS = "$JS.EVENT.ADVISORY.CONSUMER.*.*.*"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: whom to trust, and who we are to a server that demands a certificate of ours.

    `authority` None: the authorities of the system (or of SSL_CERT_FILE). `key` None: the key lies
    in the file of the certificate. Read anew for every connection, as credentials are.
    """

    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def named(cls, authority: str, certificate: str, key: str) -> "TlsFiles | None":
        """As settings name them; "" is none of that kind. None where no file is named."""
        files = [Path(name) if name else None for name in (authority, certificate, key)]
        return cls(*files) if any(files) else None

    def context(self) -> ssl.SSLContext:
        """How to encrypt. Raises ValueError naming the file and what to do."""
        try:
            context = ssl.create_default_context(cafile=self.authority)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the authority's file {self.authority} {_unusable(error)}: "
                "DILOCO_NATS_CA must name a PEM file with the certificate of the authority that "
                "signed the hub's"
            ) from None
        if self.certificate is None:
            return context
        try:
            # Of a key that a password protects OpenSSL would ask the terminal, and wait.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            beside = f" with the key {self.key}" if self.key else ""
            raise ValueError(
                f"the certificate {self.certificate}{beside} {_unusable(error)}: "
                "DILOCO_NATS_CLIENT_CERT and DILOCO_NATS_CLIENT_KEY must name the PEM files that "
                "the hub gave to this site, the key without a password"
            ) from None
        return context


def _unusable(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        return f"cannot be read ({error.strerror})"
    return "cannot be used"


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is and how to be let in; what is given beats what the URL says.

    `url` names one server, or the nodes of one hub, separated by commas. The first is used while it
    is there, and the others in turn when it is not. What one URL says of who we are and of
    encryption holds for all. `credentials` is the path of a file (keys.py). It is read anew for
    every connection, so that a key that was changed is used without a new start.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | TlsFiles | None = None
    credentials: Path | None = None

    def endpoints(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each server, in the order given. Raises ValueError."""
        return tuple(_endpoint(parts) for parts in self._servers())

    def urls(self) -> list[str]:
        """One for each server, all with the same scheme and login. Raises ValueError."""
        user = self._login_part().netloc.rpartition("@")[0]
        scheme = "tls" if any(p.scheme == "tls" for p in self._servers()) else "nats"
        login = f"{user}@" if user else ""
        return [f"{scheme}://{login}{_bracketed(h)}:{port}" for h, port in self.endpoints()]

    @property
    def shown(self) -> str:
        """For logs and errors: without a login."""
        return ", ".join(each.rpartition("@")[2].rpartition("://")[2] for each in self._each())

    def identity(self) -> Credentials | None:
        """As the file says now; None without one. Raises ValueError."""
        return None if self.credentials is None else read_credentials(self.credentials)

    def login(self, info: Mapping[str, Any]) -> dict[str, str]:
        """The part of CONNECT that says who we are, to a server that says `info` of itself.

        Raises ValueError for a credentials file that cannot be used.
        """
        if (identity := self.identity()) is not None:
            return identity.login(info)
        return self.secrets()

    def secrets(self) -> dict[str, str]:
        """User and password, or a token, or nothing: as given, or else as the URL says."""
        if self.user is not None:
            return {"user": self.user, "pass": self.password or ""}
        if self.token is not None:
            return {"auth_token": self.token}
        parts = self._login_part()
        if parts.username is None:
            return {}
        if parts.password is None:
            return {"auth_token": unquote(parts.username)}
        return {"user": unquote(parts.username), "pass": unquote(parts.password)}

    @property
    def api(self) -> str:
        """Below this subject JetStream is asked."""
        return API if self.credentials is None else HUB_API

    def inbox(self) -> str:
        """Answers come below this subject. Raises ValueError."""
        identity = self.identity()
        return "_INBOX" if identity is None else identity.inbox

    @property
    def wants_tls(self) -> bool:
        """Whether nothing may be said unencrypted, whatever the server offers."""
        return self.tls is not None or any(p.scheme == "tls" for p in self._servers())

    def context(self, tls_required: bool) -> ssl.SSLContext | None:
        """How to encrypt, if the server or the address asks for it; never silently not.

        Raises ValueError for a file that cannot be used.
        """
        if isinstance(self.tls, ssl.SSLContext):
            return self.tls
        if tls_required or self.wants_tls:
            return (self.tls or TlsFiles()).context()
        return None

    def _each(self) -> list[str]:
        return [each for each in (part.strip() for part in self.url.split(",")) if each]

    def _servers(self) -> list[SplitResult]:
        each = self._each()
        if not 0 < len(each) <= SERVERS_MAX:
            raise ValueError(
                f"DILOCO_NATS_URL names {len(each)} servers: give one, or the nodes of one hub, "
                f"{SERVERS_MAX} at most, separated by commas"
            )
        return [_parts(one if "://" in one else f"nats://{one}") for one in each]

    def _login_part(self) -> SplitResult:
        servers = self._servers()
        return next((parts for parts in servers if parts.username is not None), servers[0])


def _parts(url: str) -> SplitResult:
    """Of one server. What is wrong is said without it: there may be a password in it."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises where it is none
    except ValueError:
        raise ValueError(
            "DILOCO_NATS_URL cannot be read: give nats://HOST:PORT. Write the signs '/', '#', '?', "
            "'@' and '%' of a password as %2F, %23, %3F, %40 and %25"
        ) from None
    return parts


def _endpoint(parts: SplitResult) -> tuple[str, int]:
    return parts.hostname or "127.0.0.1", parts.port or 4222


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
