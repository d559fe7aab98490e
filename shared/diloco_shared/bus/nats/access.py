"""Where the message server is, and how to be let in: the same for every kind of connection.

The library's connection (client.py) and the lanes (lane_socket.py) both say what an `Address` says.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from diloco_shared.bus.nats.keys import Credentials, read_credentials

# JetStream's questions are asked below this subject by whoever has no identity of its own, ...
API = "$JS.API"
# ... and below this one by whoever has: accounts forward it to the hub's (hub_config.py).
HUB_API = "$JS.hub.API"


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is and how to be let in; what is given beats what the URL says.

    `credentials` is the path of a file (keys.py). It is read anew for every connection, so that a
    key that was changed is used without a new start.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    credentials: Path | None = None

    def endpoint(self) -> tuple[str, int]:
        """Host and port."""
        parts = self._parts()
        return parts.hostname or "127.0.0.1", parts.port or 4222

    def identity(self) -> Credentials | None:
        """As the file says now; None without one. Raises ValueError."""
        return None if self.credentials is None else read_credentials(self.credentials)

    def login(self, info: Mapping[str, Any]) -> dict[str, str]:
        """The part of CONNECT that says who we are, to a server that says `info` of itself.

        Raises ValueError for a credentials file that cannot be used.
        """
        if (identity := self.identity()) is not None:
            return identity.login(info)
        parts = self._parts()
        if self.user is not None:
            return {"user": self.user, "pass": self.password or ""}
        if self.token is not None:
            return {"auth_token": self.token}
        if parts.username is None:
            return {}
        if parts.password is None:
            return {"auth_token": parts.username}
        return {"user": parts.username, "pass": parts.password}

    @property
    def api(self) -> str:
        """Below this subject JetStream is asked."""
        return API if self.credentials is None else HUB_API

    def inbox(self) -> str:
        """Answers come below this subject. Raises ValueError."""
        identity = self.identity()
        return "_INBOX" if identity is None else identity.inbox

    def context(self, tls_required: bool) -> ssl.SSLContext | None:
        """How to encrypt, if the server or the address asks for it; never silently not."""
        if self.tls is not None:
            return self.tls
        if tls_required or self._parts().scheme == "tls":
            return ssl.create_default_context()
        return None

    def _parts(self) -> SplitResult:
        return urlsplit(self.url if "://" in self.url else f"nats://{self.url}")
