"""The site's half of the transfers: raw TCP and blobs in turn; prints one JSON object a line.

    python -m wan.transfer HOST RAW_PORT NATS_URL BYTES REPEATS CONNECTIONS,...

One payload, the size of a large fragment, is put to the hub and fetched back, each over 1, 2, 4, 8
connections, and as many bytes by plain TCP over as many. Twice in a row by the bus: the first time
after a pause in which its connections have been closed (cold), then at once again (warm). Plain
TCP's stay open.
"""

import asyncio
import json
import random
import sys
import time

from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamSpec
from wan.raw import Connections

STREAM = "WAN"
# A transfer that takes longer has failed: the slowest measured is twenty times quicker.
LIMIT_S = 120.0


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
    buses = {
        count: await NatsBus.connect(url, name=f"site-{count}", connections=count)
        for count in counts
    }
    await buses[counts[0]].ensure_stream(StreamSpec(STREAM, ("wan.>",), 4 * size))
    # The first round is for the connections to find their speed; it is not reported.
    for repeat in range(-1, repeats):
        for count in counts:
            found = {}
            for way in ("put", "get"):
                found["raw", way] = await asyncio.to_thread(raw[count].move, way, size)
            for what in ("cold", "warm"):
                found[what, "put"], found[what, "get"] = await there_and_back(
                    buses[count], f"wan.{repeat}.{count}.{what}", payload
                )
            if repeat >= 0:
                for (what, way), seconds in found.items():
                    say(what, way, count, repeat, size, seconds)
    for count in counts:
        raw[count].close()
        await buses[count].close()


async def there_and_back(bus: NatsBus, subject: str, payload: bytes) -> tuple[float, float]:
    """Seconds to put, and to get."""
    began = time.monotonic()
    blob = await put_blob(bus, subject, payload, deadline_s=LIMIT_S)
    stored = time.monotonic()
    received = await get_blob(bus, STREAM, blob, timeout_s=LIMIT_S)
    seconds = stored - began, time.monotonic() - stored
    if bytes(received) != payload:  # a view would be compared byte by byte
        raise SystemExit("what came back is not what was sent")
    await bus.purge(STREAM, subject)
    return seconds


def main() -> None:
    """Everything is given by wan.py."""
    host, port, url, size, repeats, counts = sys.argv[1:]
    numbers = [int(count) for count in counts.split(",")]
    asyncio.run(measure(host, int(port), url, int(size), int(repeats), numbers))


if __name__ == "__main__":
    main()
