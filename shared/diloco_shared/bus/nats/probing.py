"""Measurements of a link to the hub that change nothing there: `diloco doctor`.

What is published goes to subjects of the run `_doctor`, which no run can be called, so that no
stream keeps it and nobody hears it. What is fetched lies in a stream already.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import nats.errors

from diloco_shared.bus.nats.api import api_call, nanoseconds
from diloco_shared.bus.nats.link import NatsLink
from diloco_shared.bus.nats.streams import NatsStreams
from diloco_shared.bus.port import BusError, Unavailable
from diloco_shared.bus.stream_kv import bucket_stream
from diloco_shared.protocol import subjects

# A ping waits behind whatever the link carries for others, which takes seconds on a thin one.
PING_S = 5.0
# First portion of a probe: it takes a second at 32 kB/s, below which nobody trains.
PORTION_BYTES = 32 << 10
# As the chunks of a fragment are.
CHUNK_BYTES = 512 << 10
# Runs whose streams are looked at for something to fetch: each look is a round trip.
RUNS_MAX = 8


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One question to the hub: when it was sent and answered by our clock, what the hub's said.

    Unix seconds.
    """

    sent: float
    received: float
    theirs: float


@dataclass(frozen=True, slots=True)
class Rate:
    """What the last portion of a probe took, in seconds; `bytes` 0: not even the first arrived.

    `moved`: bytes of all portions together.
    """

    bytes: int
    seconds: float
    moved: int


async def round_trip(link: NatsLink) -> float:
    """Seconds of one ping. Raises Unavailable."""
    try:
        async with asyncio.timeout(PING_S):
            return float(await link._client.rtt())
    except (TimeoutError, OSError, nats.errors.Error) as error:
        said = str(error) or f"no answer within {PING_S:g} s"
        raise Unavailable(f"ping: {said}") from None


async def clock_sample(link: NatsLink) -> ClockSample:
    """What time it is at the hub. Raises BusError; Refused while the hub has no buckets yet."""
    stream = bucket_stream(subjects.MEMBERS)
    sent = time.time()
    answer = await api_call(link, f"STREAM.INFO.{stream}", {}, what="the hub's clock")
    received = time.time()
    return ClockSample(sent, received, nanoseconds(_moment(answer)) / 1e9)


def _moment(answer: dict[str, Any]) -> str:
    """When the server answered, by its clock; servers before 2.10 do not tell."""
    if not isinstance(found := answer.get("ts"), str):
        raise Unavailable("the server does not tell the time: it is older than 2.10")
    return found


async def refused(link: NatsLink, kind: str, subject: str) -> bool:
    """Whether the server refuses to let us "publish" or "subscribe" there. Raises Unavailable."""
    before = link.errors
    if kind == "publish":
        await link.publish(subject, b"")
        await round_trip(link)
    else:
        async with link.subscribed(subject, lambda _: None):
            await round_trip(link)
    return link.errors > before


async def upload(link: NatsLink, subject: str, bytes_max: int, seconds_max: float) -> Rate:
    """Publish ever larger portions where nobody listens, each followed by a ping.

    Raises Unavailable when the connection is lost.
    """

    async def portion(size: int) -> int:
        for begin in range(0, size, chunk):
            await link.publish(subject, zeros[: min(chunk, size - begin)])
        await link._client.rtt(timeout=math.ceil(seconds_max))
        return size

    chunk = min(CHUNK_BYTES, link.payload_bytes_max)
    zeros = bytes(chunk)
    return await _in_portions(portion, bytes_max, seconds_max)


async def download(link: NatsLink, stream: str, bytes_max: int, seconds_max: float) -> Rate:
    """Read ever larger portions from the beginning of a stream that holds something.

    Raises BusError.
    """
    streams = NatsStreams(link)
    info = await streams.stream_info(stream)
    mean = max(1, info.bytes // max(1, info.messages))

    async def portion(size: int) -> int:
        found = await streams.fetch(
            stream, ">", start_seq=info.first_seq, limit=max(1, min(size // mean, info.messages))
        )
        return sum(len(message.payload) for message in found)

    return await _in_portions(portion, min(bytes_max, info.bytes), seconds_max)


async def _in_portions(
    portion: Callable[[int], Awaitable[int]], bytes_max: int, seconds_max: float
) -> Rate:
    """Each twice the one before it, until the next would exceed a limit; the last one counts.

    A connection begins slowly, and a thin link must not be held for minutes.
    """
    until = time.monotonic() + seconds_max
    size, moved, found = PORTION_BYTES, 0, Rate(0, 0.0, 0)
    try:
        async with asyncio.timeout(seconds_max):
            while moved + size <= bytes_max or not moved:
                began = time.monotonic()
                came = await portion(size)
                now = time.monotonic()
                moved += came
                found = Rate(came, max(now - began, 1e-9), moved)
                if not came or now + 2 * (now - began) > until:
                    break
                size *= 2
    except (TimeoutError, nats.errors.TimeoutError):
        pass
    except (OSError, nats.errors.Error) as error:
        raise Unavailable(f"the connection was lost meanwhile: {error!r}") from None
    return found


async def fullest_publications(link: NatsLink, runs: list[str]) -> tuple[str, int]:
    """The stream of published parameters that holds most, and its bytes; "" where none does."""
    found = ("", 0)
    for run in runs[:RUNS_MAX]:
        stream = subjects.dn_stream(run)
        try:
            info = await NatsStreams(link).stream_info(stream)
        except Unavailable:
            raise
        except BusError:  # a run that has not begun has none
            continue
        if info.messages and info.bytes > found[1]:
            found = (stream, info.bytes)
    return found
