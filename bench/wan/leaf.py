"""The site's half of the transfers behind a message server of its own; a JSON object a line.

    python -m wan.leaf HUB_URL LEAF_URL CREDENTIALS BYTES REPEATS

One payload is put to the hub and fetched back over 1 and 4 connections, directly and by way of the
site's own message server (a leaf node), in turn. Then messages of one byte are stored one after the
other, either way: what the way there and back takes.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path

from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.protocol import subjects

CONNECTIONS = (1, 4)
# A transfer that takes longer has failed.
LIMIT_S = 120.0
MESSAGES = 50
SITE = "oslo"


async def measure(urls: dict[str, str], credentials: Path, size: int, repeats: int) -> None:
    payload = random.Random(7).randbytes(size)
    buses = {
        (way, count): await NatsBus.connect(
            url, name=SITE, credentials=credentials, connections=count
        )
        for way, url in urls.items()
        for count in CONNECTIONS
    }
    # The first round is for the connections to find their speed; it is not reported.
    for repeat in range(-1, repeats):
        for number, ((way, count), bus) in enumerate(buses.items()):
            subject = subjects.contribution("r", SITE, 0, number, repeat + 1, 0)
            put_s, get_s = await there_and_back(bus, subject, payload)
            if repeat >= 0:
                rates = {"put": size / put_s, "get": size / get_s}
                print(json.dumps({"way": way, "connections": count} | rates), flush=True)
    for way in urls:
        seconds = await answers(buses[way, 1])
        print(json.dumps({"way": way, "answer_s": statistics.median(seconds)}), flush=True)
    for bus in buses.values():
        await bus.close()


async def there_and_back(bus: NatsBus, subject: str, payload: bytes) -> tuple[float, float]:
    """Seconds to put, and to get."""
    began = time.monotonic()
    blob = await put_blob(bus, subject, payload, deadline_s=LIMIT_S)
    stored = time.monotonic()
    received = await get_blob(bus, subjects.up_stream("r"), blob, timeout_s=LIMIT_S)
    seconds = stored - began, time.monotonic() - stored
    if bytes(received) != payload:
        raise SystemExit("what came back is not what was sent")
    return seconds


async def answers(bus: NatsBus) -> list[float]:
    """Seconds until a byte was stored, of each."""
    found = []
    for number in range(MESSAGES):
        began = time.monotonic()
        await bus.append(subjects.contribution("r", SITE, 1, 0, number, 0), b"1")
        found.append(time.monotonic() - began)
    return found


def main() -> None:
    """Everything is given by wan.py."""
    hub, leaf, credentials, size, repeats = sys.argv[1:]
    urls = {"direct": hub, "leaf": leaf}
    asyncio.run(measure(urls, Path(credentials), int(size), int(repeats)))


if __name__ == "__main__":
    main()
