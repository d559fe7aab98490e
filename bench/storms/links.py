"""Links to the message server: cut, both ways or one, or slow. A port of its own per process.

    python bench/storms/links.py '{"learner-1": 40001}' up --learners 3 …

runs `diloco` with the links of some services led to those ports. `Links`, in the process that makes
the storm, carries what comes there to the server, and holds it while a link is cut: as a network
does that loses packets and sends them again.
"""

import asyncio
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from diloco_shared.protocol.pace import TokenBucket

# Read at once; what a cut link holds is one block each way of every connection.
BLOCK = 64 * 1024
# What a link carries beside them: IP and TCP headers, with timestamps, of full Ethernet packets.
# Acknowledgements of the other way, a fiftieth at most, are left out.
HEADERS, PACKET = 52, 1448
HOST = "127.0.0.1"
# Which way of a link a cut holds up: to the server, and from it.
WAYS = {"both": (True, True), "up": (True, False), "down": (False, True)}


@dataclass(slots=True)
class Link:
    """Of one process."""

    port: int = 0
    up: asyncio.Event = field(default_factory=asyncio.Event)
    down: asyncio.Event = field(default_factory=asyncio.Event)
    cuts: int = 0  # in force
    server: asyncio.Server | None = None
    # By way: what may pass, over all of its connections, and what has; both with headers.
    rate: dict[str, TokenBucket] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})


class Links:
    """Of some processes, in a thread of their own. A context manager."""

    def __init__(
        self, names: Sequence[str], server: Callable[[], str], bytes_per_s: float = 0.0
    ) -> None:
        """`server`: its address as host:port, asked with every connection; LookupError or OSError
        while it is not known. `bytes_per_s`: of each link and way; 0 is no limit."""
        self.address = server
        self.loop = asyncio.new_event_loop()
        self.links = {
            name: Link(rate={way: TokenBucket(bytes_per_s) for way in ("up", "down")})
            for name in names
        }
        self.tasks: set[asyncio.Task[None]] = set()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self.loop).result()

    @property
    def ports(self) -> dict[str, int]:
        return {name: link.port for name, link in self.links.items()}

    def cut(self, name: str, way: str, duration_s: float) -> None:
        """Let nothing pass for so many seconds, and tell nobody."""
        self.loop.call_soon_threadsafe(self._cut, self.links[name], way, duration_s)

    def close(self) -> None:
        """Break all."""
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _close(self) -> None:
        for link in self.links.values():
            if link.server is not None:
                link.server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _listen(self) -> None:
        for link in self.links.values():
            link.up.set()
            link.down.set()

            async def accept(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: Link = link
            ) -> None:
                await self._accept(to, reader, writer)

            link.server = await asyncio.start_server(accept, HOST, 0)
            link.port = link.server.sockets[0].getsockname()[1]

    def _cut(self, link: Link, way: str, duration_s: float) -> None:
        up, down = WAYS[way]
        if up:
            link.up.clear()
        if down:
            link.down.clear()
        link.cuts += 1

        def mend() -> None:
            link.cuts -= 1
            if not link.cuts:
                link.up.set()
                link.down.set()

        self.loop.call_later(duration_s, mend)

    async def _accept(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        ends = [writer]
        try:
            host, _, port = self.address().rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            ends.append(far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(_carry(reader, far_writer, link, "up"))
                group.create_task(_carry(far_reader, writer, link, "down"))
        except (OSError, LookupError, ValueError, ExceptionGroup, asyncio.CancelledError):
            return  # one side is gone, the server is not there yet, or all is over
        finally:
            self.tasks.discard(task)
            for end in ends:
                end.transport.abort()


async def _carry(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    link: Link,
    way: str,
) -> None:
    opened = link.up if way == "up" else link.down
    while data := await reader.read(BLOCK):
        await opened.wait()
        size = len(data) + HEADERS * math.ceil(len(data) / PACKET)
        while wait_s := link.rate[way].take(size, time.monotonic()):  # noqa: ASYNC110
            await asyncio.sleep(wait_s)
        writer.write(data)
        await writer.drain()
        link.bytes[way] += size
    raise ConnectionError  # ends the other way too


def main() -> None:
    """`diloco` with the rest of the arguments, and some services behind links."""
    ports: dict[str, int] = json.loads(sys.argv.pop(1))
    from diloco_cli.__main__ import main as diloco
    from diloco_cli.up.stack import Stack

    child = Stack._child

    def linked(
        stack: Stack, name: str, module: str, environment: dict[str, str], **more: Any
    ) -> Any:
        if name in ports:
            url = urlsplit(stack.nats.url)
            whose = f"{url.username}@" if url.username else ""
            direct = f"nats://{whose}{HOST}:{ports[name]}"
            environment = {**environment, "DILOCO_NATS_URL": direct}
        return child(stack, name, module, environment, **more)

    Stack._child = linked  # type: ignore[method-assign, assignment]
    diloco()


if __name__ == "__main__":
    main()
