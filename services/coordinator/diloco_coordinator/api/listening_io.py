"""Where the API listens, and for how long it listens to one client.

Below everything that knows of tokens: whoever reaches the port may open connections, and each costs
memory and a descriptor for as long as it is open. So a request has to be complete in time.
"""

import asyncio
import signal
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI
from h11 import IDLE, SEND_BODY
from uvicorn.protocols.http.h11_impl import H11Protocol

from diloco_shared.process.set_up import cannot_listen

log = structlog.get_logger()

# Head and body of a request, in seconds: 1 MiB at most, of which a specification is some kilobytes.
# A connection that has sent a request and waits for the next one is closed after uvicorn's 5 s.
REQUEST_S = 10.0
# Between two looks whether the certificate was renewed, in seconds. Whoever renews one does so days
# before the old one ends.
LOOK_S = 60.0


class Timely(H11Protocol):
    """A connection whose requests have to be complete within REQUEST_S seconds each."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Count from the first byte that is awaited to the last; answers may take their time."""
        if self.conn.their_state not in (IDLE, SEND_BODY):
            self._unwatch()
        elif self._due is None:
            self._due = self.loop.call_later(REQUEST_S, self._overdue)

    def _unwatch(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _overdue(self) -> None:
        self._due = None
        log.warning("a request was not complete in time", address=(self.client or ("",))[0])
        self.transport.abort()


def listen(host: str, port: int, setting: str = "DILOCO_PORT") -> socket.socket:
    """A bound socket; raises AddressTaken saying what to do. `setting`: where the port is from."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise cannot_listen(host, port, error, setting) from None
    return bound


async def answer_on(
    bound: socket.socket, api: FastAPI, cert: Path | None, key: Path | None
) -> None:
    """Answer requests until the process is told to stop; `cert` and `key`: by https."""
    host, port = bound.getsockname()[:2]
    log.info("listening", address=f"{host}:{port}")
    server = server_of(api, ssl_certfile=cert, ssl_keyfile=key)
    if cert is None:
        await server.serve(sockets=[bound])
        return
    certificate = Certificate(cert, key)  # looked at before it is read: what comes between is seen
    server.config.load()
    assert server.config.ssl is not None
    certificate.show_by(server.config.ssl)
    async with asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(certificate.keep())
        await server.serve(sockets=[bound])
        renewing.cancel()


class Certificate:
    """Of the API, in its files. Whoever renews it replaces them; uvicorn reads them once.

    Looks and reads at once, without a thread: a few kilobytes, once a renewal.
    """

    def __init__(self, cert: Path, key: Path | None) -> None:
        self.cert, self.key = cert, key
        self.seen = self._version()
        self.renewed: ssl.SSLContext | None = None  # the present one, once it is not the first one

    def show_by(self, first: ssl.SSLContext) -> None:
        """Whoever connects to `first` is shown the present one; open connections stay as they are.

        It is not loaded into `first`, which may hold one of each kind of key: it would go on with
        the old one of another kind.
        """

        def shown(connection: ssl.SSLObject, _: Any, __: ssl.SSLContext) -> None:
            if self.renewed is not None:
                connection.context = self.renewed

        first.sni_callback = shown

    async def keep(self) -> None:
        """Have the present one, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Take up what was replaced. Files that do not belong together, or cannot be read, change
        nothing: somebody is replacing them. It is said at each look until they do."""
        version = self._version()
        if version == self.seen:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A password, so that nobody is asked for one: a key that wants one is refused.
            context.load_cert_chain(self.cert, self.key, password="")
        except OSError as error:  # of the file, or of what is in it
            log.warning("the certificate of the API stays as it was", error=str(error))
            return
        self.seen, self.renewed = version, context
        log.info("the certificate of the API was renewed")

    def _version(self) -> list[tuple[int, int, int]]:
        """Another one once a file is replaced; shorter where one is not there."""
        found = []
        for path in filter(None, (self.cert, self.key)):
            with suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return found


class Server(uvicorn.Server):
    """A signal ends its serving, and no more: uvicorn's own raises it again when it has served.

    Then the process would end before it has left the cluster and closed its connections.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def server_of(api: FastAPI, **more: Any) -> uvicorn.Server:
    """That answers for `api`."""
    return Server(
        uvicorn.Config(
            api,
            http=Timely,
            log_level="warning",
            log_config=None,  # its lines are lines of our log (process/logs.py)
            # Requests carry no secrets in their addresses, but nobody needs them logged either.
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
            **more,
        )
    )
