"""The site's half of the transfers: raw TCP and blobs in turn; prints one JSON object a line.

    python -m wan.transfer HOST RAW_PORT NATS_URL BYTES REPEATS CONNECTIONS,...

One payload, the size of a large fragment, is put to the hub and fetched back. Over n connections
of the bus it is n blobs, each on its own connection; raw TCP splits it the same way. Connections
stay open from repeat to repeat, as a learner's do.
"""

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass

from diloco_shared.edges.blobs import get_blob, put_blob
from diloco_shared.edges.bus import StreamSpec
from diloco_shared.edges.nats_bus import NatsBus
from diloco_shared.protocol.messages import Blob
from wan.raw import Connections

STREAM = "WAN"
# A transfer that takes longer has failed: the slowest measured is twenty times quicker.
LIMIT_S = 120.0


@dataclass
class Lane:
    """`count` connections of the bus."""

    buses: list[NatsBus]

    @classmethod
    async def open(cls, url: str, count: int) -> "Lane":
        names = [f"site-{count}-{n}" for n in range(count)]
        return cls(await asyncio.gather(*(NatsBus.connect(url, name=name) for name in names)))

    async def put(self, subject: str, payload: bytes) -> tuple[list[Blob], float]:
        share = -(-len(payload) // len(self.buses))
        began = time.monotonic()
        blobs = await asyncio.gather(
            *(
                put_blob(
                    bus,
                    f"{subject}.{n}",
                    memoryview(payload)[n * share : (n + 1) * share],
                    deadline_s=LIMIT_S,
                )
                for n, bus in enumerate(self.buses)
            )
        )
        return list(blobs), time.monotonic() - began

    async def get(self, blobs: list[Blob], payload: bytes) -> float:
        began = time.monotonic()
        parts = await asyncio.gather(
            *(
                get_blob(bus, STREAM, blob, timeout_s=LIMIT_S)
                for bus, blob in zip(self.buses, blobs, strict=True)
            )
        )
        seconds = time.monotonic() - began
        if b"".join(parts) != payload:
            raise SystemExit("what came back is not what was sent")
        return seconds

    async def close(self) -> None:
        for bus in self.buses:
            await bus.close()


def say(what: str, way: str, connections: int, repeat: int, size: int, seconds: float) -> None:
    print(
        json.dumps(
            {
                "what": what,
                "way": way,
                "connections": connections,
                "repeat": repeat,
                "bytes_per_s": size / seconds,
            }
        ),
        flush=True,
    )


async def measure(
    host: str, port: int, url: str, size: int, repeats: int, counts: list[int]
) -> None:
    payload = random.Random(7).randbytes(size)
    raw = {count: Connections(host, port, count) for count in counts}
    lanes = {count: await Lane.open(url, count) for count in counts}
    owner = lanes[counts[0]].buses[0]
    await owner.ensure_stream(StreamSpec(STREAM, ("wan.>",), 8 * size))
    # The first round is for the connections to find their speed; it is not reported.
    for repeat in range(-1, repeats):
        for count in counts:
            found = {}
            for way in ("put", "get"):
                seconds = await asyncio.to_thread(raw[count].move, way, size)
                found["raw", way] = seconds
            blobs, found["bus", "put"] = await lanes[count].put(f"wan.{repeat}.{count}", payload)
            found["bus", "get"] = await lanes[count].get(blobs, payload)
            await owner.purge(STREAM, "wan.>")
            if repeat >= 0:
                for (what, way), seconds in found.items():
                    say(what, way, count, repeat, size, seconds)
    for count in counts:
        raw[count].close()
        await lanes[count].close()


def main() -> None:
    """Everything is given by wan.py."""
    host, port, url, size, repeats, counts = sys.argv[1:]
    numbers = [int(count) for count in counts.split(",")]
    asyncio.run(measure(host, int(port), url, int(size), int(repeats), numbers))


if __name__ == "__main__":
    main()
