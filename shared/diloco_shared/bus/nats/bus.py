"""The bus over NATS JetStream. Several instances in one process are several connections:
use one for control and one for data, so that a link full of chunks never delays a heartbeat.
"""

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from diloco_shared.bus.deliveries import Answers, Deliveries
from diloco_shared.bus.nats.access import Address, TlsFiles
from diloco_shared.bus.nats.lanes import NatsLanes
from diloco_shared.bus.nats.link import CLOSE_S, NatsLink, Raw
from diloco_shared.bus.nats.streams import NatsStreams
from diloco_shared.bus.port import (
    Delivery,
    Handler,
    Lanes,
    Traffic,
    Unavailable,
)
from diloco_shared.protocol import subjects


class NatsBus(NatsStreams):
    """`bus.Bus` over one connection. Make one with `connect`; end it with `close`."""

    def __init__(self, link: NatsLink, lanes: NatsLanes) -> None:
        super().__init__(link)
        self.lanes: Lanes | None = lanes
        self._lanes = lanes
        self.traffic: Traffic = link.traffic

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        token: str | None = None,
        user: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | TlsFiles | None = None,
        credentials: Path | None = None,
        timeout_s: float = 10.0,
        connections: int = 1,
        uplink_bytes_per_s: float = 0.0,
        downlink_bytes_per_s: float = 0.0,
    ) -> "NatsBus":
        """Connect within `timeout_s`, else Unavailable. Reconnects by itself ever after.

        `url`: of one server, or of the nodes of one hub, separated by commas (access.py).
        `name` is what the server's monitoring shows for this connection. Payloads of `put_blob`
        and `get_blob` go over `connections` further ones each (lanes, opened when first needed),
        within the byte budgets (0: no limit); everything else is small and is not held back.
        `credentials` is the file of an identity, and beats all other ways to be let in.
        """
        return await cls.to(
            Address(url, token, user, password, tls, credentials),
            name=name,
            timeout_s=timeout_s,
            connections=connections,
            uplink_bytes_per_s=uplink_bytes_per_s,
            downlink_bytes_per_s=downlink_bytes_per_s,
        )

    @classmethod
    async def to(
        cls,
        address: Address,
        *,
        name: str,
        timeout_s: float = 10.0,
        connections: int = 1,
        uplink_bytes_per_s: float = 0.0,
        downlink_bytes_per_s: float = 0.0,
    ) -> "NatsBus":
        """As `connect`, with all that says where the server is and who we are in one."""
        link = await NatsLink.connect(address, name=name, timeout_s=timeout_s)
        lanes = NatsLanes(
            link,
            address,
            connections=connections,
            uplink_bytes_per_s=uplink_bytes_per_s,
            downlink_bytes_per_s=downlink_bytes_per_s,
        )
        return cls(link, lanes)

    @property
    def connected(self) -> bool:
        return self._link.connected

    @property
    def several_nodes(self) -> bool:
        return self._link.several_nodes

    @property
    def ails(self) -> str:
        return self._link.ails

    @property
    def reconnects(self) -> int:
        """How often the connection came back; a change is a reason to grant everybody patience."""
        return self._link.reconnects

    @property
    def errors(self) -> int:
        """Errors the client library reported so far, refused permissions among them."""
        return self._link.errors

    async def close(self, within_s: float = CLOSE_S) -> None:
        """`within_s`: so long it waits for a server that is silent; 0: not at all."""
        self._lanes.close()
        await self._link.close(within_s)

    # --- core ---------------------------------------------------------------------------------

    async def publish(self, subject: str, payload: bytes) -> None:
        with suppress(Unavailable):
            await self._link.publish(subject, payload)

    @asynccontextmanager
    async def subscribe(
        self, subject: str, *, limit: int = 1024
    ) -> AsyncIterator[AsyncIterator[Delivery]]:
        waiting = Deliveries(subject, limit, self.traffic)
        take = self._meant_for(subject, waiting.put)
        async with (
            self._link.on_close(waiting.end),
            self._link.subscribed(subject, take),
        ):
            await self._link.flush()
            yield waiting

    async def request(self, subject: str, payload: bytes, *, timeout_s: float = 2.0) -> bytes:
        return (await self._link.request(subject, payload, timeout_s=timeout_s)).payload

    @asynccontextmanager
    async def serve(self, subject: str, handler: Handler) -> AsyncIterator[None]:
        async with (
            Answers(subject, handler, self.publish, self.traffic) as answers,
            self._link.subscribed(subject, self._meant_for(subject, answers.start)),
        ):
            await self._link.flush()
            yield

    def _meant_for(self, wanted: str, take: Callable[[Delivery], None]) -> Callable[[Raw], None]:
        """Leaves out what was published elsewhere.

        A consumer of somebody's making can have the messages of a stream delivered anywhere; they
        keep the subject that they were stored under.
        """

        def taken(raw: Raw) -> None:
            if subjects.matches(wanted, raw.subject):
                take(_delivery(raw))
            else:
                self.traffic.count_refused("message", "subject")

        return taken


def _delivery(raw: Raw) -> Delivery:
    return Delivery(raw.subject, raw.payload, raw.reply)
