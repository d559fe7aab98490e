"""nats-py's client (2.16.0) with its traffic counted and what it does on a bad connection repaired.

A reconnect does not wait for a peer that has stopped reading, an error sent by the server leads to
a reconnect instead of a closed client, any byte that comes counts as a sign of life, and no
cancellation is lost.
"""

import asyncio
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import nats.errors
from nats.aio.client import PING_PROTO, Client
from nats.aio.msg import Msg
from nats.protocol.command import sub_cmd

from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.nats.keys import Credentials
from diloco_shared.bus.nats.refusals import NO_TLS
from diloco_shared.bus.nats.wire import Headers
from diloco_shared.bus.port import Traffic


def cancellations() -> int:
    """How often the task that runs now was told to end, whether or not it heard of it."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


@contextmanager
def no_cancellation_lost() -> Iterator[None]:
    """Raises a cancellation again that came in the meantime and was swallowed.

    nats-py swallows one while it flushes, and `asyncio.wait_for` of Python 3.11 one that comes at
    the moment in which what it waits for ends. One that came before is none: whoever clears up
    after a cancellation asks, too.
    """
    before = cancellations()
    try:
        yield
    finally:
        if cancellations() > before:
            raise asyncio.CancelledError


class _Counted:
    """nats-py's transport, with what it carries counted; whatever comes calls `heard`."""

    def __init__(self, inner: Any, traffic: Traffic, heard: Callable[[], None]) -> None:
        self._inner = inner
        self._traffic = traffic
        self._heard = heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __bool__(self) -> bool:
        return bool(self._inner)

    def write(self, data: bytes) -> None:
        self._traffic.crossed_socket(out=len(data))
        self._inner.write(data)

    def writelines(self, parts: list[bytes]) -> None:
        self._traffic.crossed_socket(out=sum(map(len, parts)))
        self._inner.writelines(parts)

    async def read(self, size: int) -> bytes:
        return self._came(await self._inner.read(size))

    async def readline(self) -> bytes:
        return self._came(await self._inner.readline())

    def _came(self, data: bytes) -> bytes:
        self._traffic.crossed_socket(into=len(data))
        self._heard()
        return data


class RepairedClient(Client):
    """Each method says what of the library it repairs."""

    def __init__(self, traffic: Traffic, address: Address) -> None:
        super().__init__()
        self._traffic = traffic
        self._address = address
        self._identity: Credentials | None = None
        self.over = False  # nobody wants a connection any more
        self._cancelled_before = 0

    # It reads the files of TLS once, and has no client certificate in any other form.
    @property
    def ssl_context(self) -> ssl.SSLContext:
        """Made anew for each connection. Raises nats.errors.Error for files that cannot be used."""
        try:
            context = self._address.context(True)
        except ValueError as error:
            raise nats.errors.Error(str(error)) from None
        assert context is not None
        return context

    # It goes on unencrypted where the server says that it has no TLS, whatever the URL wants: so
    # would whoever stands between us and the server. And it reads a file of credentials in one form
    # only, and once.
    def _connect_command(self) -> bytes:
        if self._address.wants_tls and not self._server_info.get("tls_required"):
            raise nats.errors.Error(NO_TLS)
        line: bytes = super()._connect_command()
        with suppress(ValueError):  # while the file is being replaced, as it said before
            self._identity = self._address.identity()
        if self._identity is None:
            return line
        verb, _, body = line.partition(b" ")
        options = json.loads(body) | self._identity.login(self._server_info)
        return verb + b" " + json.dumps(options).encode() + b"\r\n"

    # These three swallow cancellations.
    async def connect(self, *args: Any, **options: Any) -> None:
        """As the library's; a cancellation that it swallows is raised when it is done."""
        self._cancelled_before = cancellations()
        try:
            with no_cancellation_lost():
                await super().connect(*args, **options)
        finally:
            self._cancelled_before = 0  # a reconnect has a task of its own

    async def request(self, *args: Any, **options: Any) -> Msg:
        with no_cancellation_lost():
            return await super().request(*args, **options)

    async def rtt(self, *args: Any, **options: Any) -> float:
        with no_cancellation_lost():
            return await super().rtt(*args, **options)

    # It shows a server's version and not which start of it this is.
    @property
    def server_id(self) -> str:
        return str(self._server_info.get("server_id", ""))

    # Nor of which cluster it is a node, if of any.
    @property
    def in_cluster(self) -> bool:
        return bool(self._server_info.get("cluster"))

    # Every connection, the first and each further one, begins with this.
    async def _process_connect_init(self) -> None:
        if not isinstance(self._transport, _Counted):  # kept over reconnects
            self._transport: Any = _Counted(self._transport, self._traffic, self._heard)
        await super()._process_connect_init()

    # A refused permission does not end a connection; all else reconnects instead of closing.
    async def _process_err(self, err_msg: str) -> None:
        if not self.is_connected:
            await super()._process_err(err_msg)
            return
        error = nats.errors.Error(f"nats: {err_msg}")
        await self._error_cb(error)
        if "permissions violation" not in err_msg.lower():
            await self._process_op_err(error)

    # Closing a transport waits until its buffer is sent, for ever if the peer does not read.
    # Requests that went out on a lost connection will not be answered on the next. And what still
    # waits to be written was for the server that is gone: whoever asked has given up, or asks anew
    # (subscriptions are told anew), and a hub that was put back from a backup would take it.
    async def _attempt_reconnect(self) -> None:
        self.drop_socket()
        self._pending, self._pending_data_size = [], 0
        for waiting in tuple((getattr(self, "_resp_map", None) or {}).values()):
            if not waiting.done():
                waiting.set_exception(nats.errors.StaleConnectionError())
        await super()._attempt_reconnect()

    # The library forgets the socket of a handshake that failed: one more open for every attempt.
    # And it waits before the next one.
    async def _select_next_server(self) -> None:
        self.drop_socket()
        await super()._select_next_server()

    # It connects again for ever where a cancellation is lost: then neither a time limit, nor
    # `close`, nor the loop itself would end it.
    async def _connect_to_server(self, server: Any) -> None:
        if self.over or cancellations() > self._cancelled_before:
            raise asyncio.CancelledError
        await super()._connect_to_server(server)

    # The library writes a ping past what still waits to be written: a subscription may be after it.
    async def _send_ping(self, future: "asyncio.Future[Any] | None" = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    # A ping whose sender has given up, or was cancelled, is answered, too. The library fails at
    # that, and reads no more.
    async def _process_pong(self) -> None:
        if self._pongs:
            waiting = self._pongs.pop(0)
            if not waiting.done():
                waiting.set_result(True)
            self._pongs_received += 1
            self._pings_outstanding = 0

    # Servers take any bytes as a subject and as headers. The library fails at what is not UTF-8, or
    # is no header, and reads no more: one message would make every reader of its stream deaf.
    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        return self.msg_class(
            subject=subject.decode("utf-8", "replace"),
            reply=reply.decode("utf-8", "replace"),
            data=data,
            headers=headers,
            _client=self,
            _sid=sid,
        )

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        return Headers(bytes(headers)) if headers else None

    # Whatever else it fails at: it says so in its log, and reads no more. A new connection does.
    async def _read_loop(self) -> None:
        await super()._read_loop()
        task = asyncio.current_task()
        if self.is_connected and task is not None and not task.cancelling():
            await self._process_op_err(nats.errors.ProtocolError())

    # While there is no connection, the library keeps the line that tells of a subscription, and
    # sends it with the next one, also where nobody wants it any more: a reader that tries for a
    # night leaves thousands.
    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        sub = self._subs.get(sid)
        super()._remove_sub(sid, max_msgs)
        if sub is not None and self.is_reconnecting:
            line = sub_cmd(sub._subject, sub._queue or "", sid)
            self._pending = [waiting for waiting in self._pending if waiting != line]
            self._pending_data_size = sum(map(len, self._pending))

    # nats-py counts pongs only; one may be queued behind a message that takes seconds itself.
    def _heard(self) -> None:
        self._pings_outstanding = 0

    def drop_socket(self) -> None:
        writer: Any = getattr(self._transport, "_io_writer", None)
        # asyncio's transport has no loop any more when its closing is complete.
        with suppress(AttributeError):
            writer.transport.abort()
