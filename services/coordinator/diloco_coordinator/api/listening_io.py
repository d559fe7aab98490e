"""Where the API listens, and for how long it listens to one client.

Below everything that knows of tokens: whoever reaches the port may open connections, and each costs
memory and a descriptor for as long as it is open. So a request has to be complete in time.
"""

import asyncio
import signal
import socket
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
    await server_of(api, ssl_certfile=cert, ssl_keyfile=key).serve(sockets=[bound])


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
