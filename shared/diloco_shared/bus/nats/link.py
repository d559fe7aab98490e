"""One NATS connection that never gives up: requests with deadlines, subscriptions, byte counts.

Wraps nats-py 2.16.0 as client.py repairs it; a publish while disconnected is refused here instead
of being buffered.
"""

import asyncio
import hashlib
import math
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import nats.errors
import structlog
from nats.aio.msg import Msg

from diloco_shared import ambient
from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.nats.client import RepairedClient, cancellations
from diloco_shared.bus.nats.refusals import not_connected, tells_more
from diloco_shared.bus.nats.wire import Headers, status_of
from diloco_shared.bus.port import Refused, Traffic, Unavailable

# The library flushes by force (and swallows cancellation there) above this; never reached,
# because OUTBOUND_BYTES_MAX is checked first.
_PENDING_BYTES = 64 << 20
# Bytes accepted for a socket that does not take them: two windows of 16 chunks of 512 KiB.
OUTBOUND_BYTES_MAX = 16 << 20
# How often a request looks whether there is room again: the library does not tell.
_ROOM_S = 0.005
# Two missed pings of 5 s: a dead peer is noticed within 15 s, a scheduling hiccup is not.
_PING_S = 5
_PINGS_MISSED_MAX = 2
_RECONNECT_WAIT_S = 0.25
_CONNECT_TIMEOUT_S = 3
# Nodes of a hub elect another leader within moments once they miss theirs, in seconds. Without one
# for longer they are too few.
ELECTION_S = 3.0
MAJORITY_LOST = (
    "the hub has lost its majority: half of its nodes or more are away, and it keeps nothing until "
    "one of them is back"
)
# How long to wait for a clean close before the socket is dropped, unless somebody says so. One with
# TLS waits for the server's last word.
CLOSE_S = 2.0
# The same connection error is logged again after this many repeats (30 s of reconnecting).
_LOG_EVERY = 120

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Raw:
    """One message as received."""

    subject: str
    payload: bytes
    reply: str
    headers: dict[str, str]
    head: bytes = b""  # the headers as they came

    @property
    def status(self) -> int:
        return status_of(self.headers)


class NatsLink:
    """A connection; make one with `connect`."""

    def __init__(self, address: Address, name: str) -> None:
        self.url = address.shown
        self.name = name
        self.traffic = Traffic()
        self.errors = 0
        self.reconnects = 0
        # Since then a leader of the hub's nodes is missing: nothing has shown that there is one.
        self.leaderless_since = math.inf
        self.closed = False
        self.api = address.api
        self._secret = secrets.token_bytes(16)
        self._client = RepairedClient(self.traffic, address)
        self._up = asyncio.Event()
        self._on_reconnect: set[Callable[[], None]] = set()
        self._on_close: set[Callable[[], None]] = set()
        self._last_error = ""
        self._refusal: Exception | None = None  # the last one that tells more than others
        self._repeats = 0

    @classmethod
    async def connect(cls, address: Address, *, name: str, timeout_s: float = 10.0) -> "NatsLink":
        """Connect, trying again until `timeout_s`; raises Unavailable with the last error."""
        link = cls(address, name)
        client = link._client
        try:
            inbox, servers, secrets = address.inbox(), address.urls(), address.secrets()
            address.context(False)
        except ValueError as error:
            raise Unavailable(str(error)) from None
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    servers=servers,
                    # In the order given: an operator spreads processes over a hub's nodes by it.
                    dont_randomize=True,
                    name=name,
                    token=secrets.get("auth_token"),
                    user=secrets.get("user"),
                    password=secrets.get("pass"),
                    inbox_prefix=inbox,
                    error_cb=link._error,
                    disconnected_cb=link._disconnected,
                    reconnected_cb=link._reconnected,
                    closed_cb=link._was_closed,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT_S,
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    ping_interval=_PING_S,
                    max_outstanding_pings=_PINGS_MISSED_MAX,
                    pending_size=_PENDING_BYTES,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            await link.close()
            other = link._last_error or str(error) or "no answer"
            text = not_connected(link.url, timeout_s, link._refusal, other)
            raise Unavailable(text) from None
        except asyncio.CancelledError:
            await link.close()
            raise
        link._up.set()
        return link

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def payload_bytes_max(self) -> int:
        return self._client.max_payload

    @property
    def life(self) -> str:
        return self._client.server_id

    def missed_leader(self) -> None:
        """An answer was that the hub's nodes have no leader."""
        self.leaderless_since = min(self.leaderless_since, ambient.monotonic())

    def heard_leader(self) -> None:
        """An answer was one that only most of the nodes can give together."""
        self.leaderless_since = math.inf

    @property
    def ails(self) -> str:
        """See `bus.Bus.ails`."""
        lost = ambient.monotonic() - self.leaderless_since > ELECTION_S
        return MAJORITY_LOST if lost and self.connected else ""

    @property
    def several_nodes(self) -> bool:
        """Whether the server is one of a hub's several nodes."""
        return self._client.in_cluster

    # --- sending ------------------------------------------------------------------------------

    def message_id(self, name: str) -> str:
        """By what the server knows a repeat of the message that is called `name` here.

        A stream takes each id once, on whichever subject. Whoever may write there at all, and knew
        the next one of somebody else, could say it first: that message would be answered as stored,
        and would not be there. So each connection makes them with a secret of its own.
        """
        return hashlib.blake2b(name.encode(), key=self._secret, digest_size=16).hexdigest()

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        """Hand one message to the socket; raises Unavailable when there is none that takes it."""
        self._check_sendable(subject, payload)
        try:
            await self._client.publish(subject, payload, reply=reply, headers=headers)
        except (OSError, nats.errors.Error) as error:
            raise Unavailable(f"cannot publish on {subject}: {error!r}") from None
        self.traffic.sent(len(payload))

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> Raw:
        """One answer. Waits for a lost connection to return, all within `timeout_s`.

        Raises Unavailable when nobody listens, time runs out or the connection is closed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_sendable(subject, payload)
                self.traffic.sent(len(payload))
                msg = await self._client.request(
                    subject, payload, timeout=timeout_s, headers=headers
                )
        except (TimeoutError, nats.errors.TimeoutError):
            state = "" if self.connected else " (disconnected)"
            raise Unavailable(f"no answer on {subject} within {timeout_s:g} s{state}") from None
        except nats.errors.NoRespondersError:
            raise Unavailable(f"nobody listens on {subject}") from None
        except (OSError, nats.errors.Error) as error:
            raise Unavailable(f"request on {subject} failed: {error!r}") from None
        return self._received(msg)

    async def wait_connected(self) -> None:
        """Return when connected (the caller sets the time limit); Unavailable when closed."""
        while not self._client.is_connected:
            if self.closed:
                raise Unavailable(f"the connection {self.name} is closed")
            self._up.clear()
            await self._up.wait()

    async def _wait_sendable(self, subject: str, payload: bytes) -> None:
        await self.wait_connected()
        while self._client.is_connected and not self._has_room(payload):  # noqa: ASYNC110
            await asyncio.sleep(_ROOM_S)
        self._check_sendable(subject, payload)

    def _has_room(self, payload: bytes) -> bool:
        return self._client.pending_data_size + len(payload) <= OUTBOUND_BYTES_MAX

    def _check_sendable(self, subject: str, payload: bytes) -> None:
        if self.closed:
            raise Unavailable(f"the connection {self.name} is closed")
        if not self._client.is_connected:
            raise Unavailable(f"not connected to {self.url}")
        if not self._has_room(payload):
            raise Unavailable(f"the connection to {self.url} takes no more bytes; try again later")
        limit = self._client.max_payload
        if len(payload) > limit:
            raise Refused(f"{len(payload)} bytes on {subject} exceed the server's limit {limit}")

    # --- receiving ----------------------------------------------------------------------------

    @asynccontextmanager
    async def subscribed(self, subject: str, callback: Callable[[Raw], None]) -> AsyncIterator[str]:
        """Call `callback` with every message on `subject`; yields the subject.

        The server knows of the subscription when the context is entered, if connected then;
        otherwise it learns of it at the reconnect.
        """

        async def deliver(msg: Msg) -> None:
            callback(self._received(msg))

        if self.closed:
            raise Unavailable(f"the connection {self.name} is closed")
        sub = await self._client.subscribe(subject, cb=deliver)
        try:
            yield subject
        finally:
            with suppress(OSError, nats.errors.Error):
                await sub.unsubscribe()

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Round trip to the server: it has then seen everything sent before. Never raises."""
        if self.connected:
            with suppress(TimeoutError, OSError, nats.errors.Error):
                async with asyncio.timeout(timeout_s):
                    await self._client.rtt()

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    @asynccontextmanager
    async def on_reconnect(self, callback: Callable[[], None]) -> AsyncIterator[None]:
        """Call `callback` after every reconnect, and at close, while the context lasts."""
        self._on_reconnect.add(callback)
        try:
            async with self.on_close(callback):
                yield
        finally:
            self._on_reconnect.discard(callback)

    @asynccontextmanager
    async def on_close(self, callback: Callable[[], None]) -> AsyncIterator[None]:
        """Call `callback` when the connection is closed while the context lasts."""
        self._on_close.add(callback)
        try:
            yield
        finally:
            self._on_close.discard(callback)

    def _received(self, msg: Msg) -> Raw:
        self.traffic.received(len(msg.data))
        headers: Any = msg.headers
        head = headers.block if isinstance(headers, Headers) else b""
        return Raw(msg.subject, msg.data, msg.reply, dict(headers or {}), head)

    # --- life ---------------------------------------------------------------------------------

    async def close(self, within_s: float = CLOSE_S) -> None:
        """Close, sending what is pending if the server takes it within so many seconds."""
        self._end()
        self._client.over, before = True, cancellations()
        try:
            async with asyncio.timeout(within_s):
                await self._client.close()
        except asyncio.CancelledError:
            # Or the library's: it waits for what its cancelled reconnecting has waited for.
            if cancellations() > before:
                raise
        except (TimeoutError, OSError, nats.errors.Error):
            _log.warning("connection dropped at close", name=self.name)
        finally:
            self._client.drop_socket()

    async def _error(self, error: Exception) -> None:
        self.errors += 1
        text = str(error) or repr(error)
        if isinstance(error, nats.errors.SlowConsumerError):
            self.traffic.count_dropped(error.subject)
        self._repeats = self._repeats + 1 if text == self._last_error else 0
        self._last_error = text
        if tells_more(error):
            self._refusal = error
        if self._repeats % _LOG_EVERY == 0:
            _log.warning("nats error", name=self.name, error=text, repeats=self._repeats)

    async def _disconnected(self) -> None:
        self._up.clear()
        if not self.closed:
            _log.warning("disconnected", name=self.name, url=self.url)

    async def _reconnected(self) -> None:
        self.reconnects += 1
        self._last_error = ""
        self._up.set()
        _log.info("reconnected", name=self.name, url=self.url, reconnects=self.reconnects)
        for callback in tuple(self._on_reconnect):
            callback()

    async def _was_closed(self) -> None:
        if not self.closed:
            _log.error("connection closed for good", name=self.name, error=self._last_error)
        self._end()

    def _end(self) -> None:
        self.closed = True
        self._up.set()
        for callback in tuple(self._on_close):
            callback()
