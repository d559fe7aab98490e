"""A stream as a file and back, by JetStream's own snapshots: taken while the stream is written to.

What the server sends is one consistent state of the stream, of the moment in which it was asked or
a little later, as an archive that only a server reads. Consumers are left out: those of this
project live as long as a connection.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from diloco_shared.bus.nats.api import answer_of, api_call
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.nats.link import NatsLink, Raw
from diloco_shared.bus.port import BusError, NoStream, Refused, Unavailable

# Of a chunk. The server sends the next ones when it is told that those before were taken.
CHUNK_BYTES = 128 << 10
# A server that says nothing for so many seconds, and a disk that takes nothing, are waited for no
# longer. The server itself gives up after a few seconds without an acknowledgement.
SILENT_S = 30.0
# Chunks that wait for this side's disk: the server sends no more than a few megabytes ahead.
WAITING_MAX = 1024


@dataclass(slots=True)
class ChunksArriving:
    """Chunks on their way to a file; `missed`: one was not taken, for want of room."""

    chunks: asyncio.Queue[Raw] = field(default_factory=lambda: asyncio.Queue(WAITING_MAX))
    missed: bool = False

    def take(self, raw: Raw) -> None:
        try:
            self.chunks.put_nowait(raw)
        except asyncio.QueueFull:
            self.missed = True


class ServerStreams:
    """All streams of a server, whole: see `hub.backup.Streams`."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus, self.link = bus, bus.link

    async def names(self) -> list[str]:
        """See `streams_of`."""
        return await streams_of(self.link)

    async def config_of(self, stream: str) -> dict[str, Any] | None:
        """See `config_of`."""
        about = await _about(self.link, stream)
        return None if about is None else about["config"]

    async def save(self, stream: str, file: Path) -> dict[str, Any] | None:
        """See `save`."""
        return await save(self.link, stream, file)

    async def load(self, stream: str, file: Path, about: dict[str, Any]) -> None:
        """See `load`."""
        await load(self.link, stream, file, about)

    async def make(self, config: dict[str, Any]) -> None:
        """An empty one, set up so."""
        await self.bus.ensure(config)

    async def copied(self, stream: str) -> bool:
        """Whether every node that keeps a copy has all of it. Raises BusError."""
        about = await _about(self.link, stream) or {}
        copies = about.get("cluster", {}).get("replicas") or ()
        return all(copy["current"] and not copy.get("lag") for copy in copies)


async def streams_of(link: NatsLink) -> list[str]:
    """Names of all streams. Raises BusError."""
    names: list[str] = []
    while True:
        asked = {"offset": len(names)}
        answer = await api_call(link, "STREAM.NAMES", asked, what="names of streams")
        page = answer.get("streams") or []
        names += page
        if not page or len(names) >= answer.get("total", 0):
            return sorted(names)


async def _about(link: NatsLink, stream: str) -> dict[str, Any] | None:
    """What the server tells of a stream; None once it is gone. Raises BusError."""
    try:
        return await api_call(link, f"STREAM.INFO.{stream}", {}, what=f"stream {stream}")
    except NoStream:
        return None


async def save(link: NatsLink, stream: str, file: Path) -> dict[str, Any] | None:
    """Write the stream into a new file; its `config` and `state`. None: there is no such stream.

    Raises BusError where not all of it came, and OSError.
    """
    inbox, arrived = link.new_inbox(), ChunksArriving()
    async with link.subscribed(inbox, arrived.take):
        asked = {"deliver_subject": inbox, "no_consumers": True, "chunk_size": CHUNK_BYTES}
        try:
            call = f"STREAM.SNAPSHOT.{stream}"
            answer = await api_call(link, call, asked, what=f"snapshot of {stream}")
        except NoStream:
            return None
        with file.open("xb") as out:
            async for chunk in _chunks(link, stream, arrived):
                await asyncio.to_thread(out.write, chunk)
    return {"config": answer["config"], "state": answer["state"]}


async def _chunks(link: NatsLink, stream: str, arrived: ChunksArriving) -> AsyncIterator[bytes]:
    """All of a snapshot; the next ones are asked for once these are taken."""
    while True:
        try:
            async with asyncio.timeout(SILENT_S):
                raw = await arrived.chunks.get()
        except TimeoutError:
            raise Unavailable(
                f"snapshot of {stream}: the server sent nothing for {SILENT_S:g} s"
            ) from None
        if arrived.missed:
            raise Unavailable(f"snapshot of {stream}: this disk is slower than the server sends")
        if not raw.payload:  # the end, or why there will be none
            if raw.status >= 300:
                why = raw.headers.get("Description", raw.status)
                raise Unavailable(f"snapshot of {stream}: the server ended it ({why})")
            return
        yield raw.payload
        if raw.reply:
            await link.publish(raw.reply, b"")


async def load(link: NatsLink, stream: str, file: Path, about: dict[str, Any]) -> None:
    """Make the stream of what `save` wrote; `about` is what it returned.

    Raises BusError, also where there is such a stream, and OSError. What was begun is gone then.
    """
    asked = {"config": about["config"], "state": about["state"]}
    what = f"restore of {stream}"
    answer = await api_call(link, f"STREAM.RESTORE.{stream}", asked, what=what)
    to = str(answer["deliver_subject"])
    with file.open("rb") as source:
        for chunk in pieces(source):
            await _given(link, to, chunk, what)
    raw = await link.request(to, b"", timeout_s=SILENT_S)
    restored = answer_of(raw.payload, what)["state"]
    # What was written while the server read its files may have come along.
    if restored["last_seq"] < (last := about["state"]["last_seq"]):
        with suppress(BusError):
            await api_call(link, f"STREAM.DELETE.{stream}", {}, what=what)
        raise Refused(f"{what}: it ends at message {restored['last_seq']}, not at {last}")


async def _given(link: NatsLink, to: str, chunk: bytes, what: str) -> None:
    """One chunk that the server has taken; it says nothing, or why it takes no more."""
    raw = await link.request(to, chunk, timeout_s=SILENT_S)
    if raw.payload:
        answered = json.loads(raw.payload) if raw.payload[:1] == b"{" else {}
        if "error" in answered:
            raise Refused(f"{what}: {answered['error'].get('description', 'not taken')}")


def pieces(source: IO[bytes]) -> Iterator[bytes]:
    """A file in chunks."""
    while chunk := source.read(CHUNK_BYTES):
        yield chunk
