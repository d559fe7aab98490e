"""What outlives its lifetime goes from the bus in memory as it goes from a server.

A server counts lifetimes by its own clock, so only what is there in the end is compared: what
stays, how many markers there are, and how many messages there were. Several messages of one second
go in any order.
"""

import asyncio
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
from shared.bus.test_parity import begin_anew
from waiting import NotYet, until

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Bus
from diloco_shared.hub.nats_server import NatsServer
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

pytestmark = pytest.mark.live

NS = 1_000_000_000
BRIEF = {"Nats-TTL": "1s"}
HEADERS: tuple[dict[str, str], ...] = (
    {},
    BRIEF,
    BRIEF,
    {"A": "1", **BRIEF},
    {"KV-Operation": "DEL", **BRIEF},
    {"KV-Operation": "PURGE", **BRIEF},
    {"KV-Operation": "DEL", "Nats-TTL": "600s"},
)
KEYS = "abcdefgh"
WRITES = 24


def bucket(name: str, **more: Any) -> dict[str, Any]:
    """As those of the product, which are in test_parity.py, with shorter lifetimes of markers."""
    return {
        "name": name,
        "subjects": [f"{name}.>"],
        "storage": "file",
        "discard": "new",
        "max_bytes": -1,
        "max_msgs_per_subject": 1,
        "num_replicas": 1,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "duplicate_window": NS,
        **more,
    }


BUCKETS = (
    bucket("marked", subject_delete_marker_ttl=600 * NS),
    bucket("unmarked"),
    bucket("marked-for-a-moment", subject_delete_marker_ttl=NS),
)
AGED = bucket("aged", max_age=NS, allow_msg_ttl=False)


async def held(bus: Bus, stream: str) -> Any:
    """All that there is of it, in no order; and how much there was."""
    messages = await bus.fetch(stream, ">")
    info = await bus.stream_info(stream)
    there = sorted((m.subject, m.payload, sorted(m.headers.items())) for m in messages)
    return there, info.messages, info.bytes, info.first_seq, info.last_seq


async def written(bus: Bus, stream: str, writes: list[tuple[str, dict[str, str]]]) -> list[int]:
    """At once, so that no lifetime ends in between; their sequences."""
    appends = (bus.append(f"{stream}.{key}", b"1", headers=headers) for key, headers in writes)
    return await asyncio.gather(*appends)


@pytest.mark.parametrize("anew", [False, True])
async def test_what_is_left_of_random_writes_is_the_same(
    nats_server: NatsServer, anew: bool
) -> None:
    """Also where the server begins `anew` before, or while, lifetimes end."""
    rng, now = Random(f"lifetimes {anew}"), 0.0
    async with AsyncExitStack() as stack:
        real = await NatsBus.connect(nats_server.url, name="real")
        stack.push_async_callback(real.close)
        broker = MemoryBroker(clock=lambda: now)
        memory = MemoryBus(broker, "memory")
        for config in (*BUCKETS, AGED):
            name = config["name"]
            headers = HEADERS if config["allow_msg_ttl"] else ({},)
            writes = [(rng.choice(KEYS), rng.choice(headers)) for _ in range(WRITES)]
            for bus in (real, memory):
                await bus.ensure(config)
            assert await written(real, name, writes) == await written(memory, name, writes), name
        if anew:
            await begin_anew(nats_server, real, broker)
        for _ in range(3):  # the messages' own lifetimes, and those of markers
            now += 1.5
            broker.expire()
        for config in (*BUCKETS, AGED):
            name = config["name"]
            expected = await held(memory, name)

            async def same(name: str = name, expected: Any = expected) -> bool:
                if (found := await held(real, name)) != expected:
                    raise NotYet(str(found))
                return True

            await until(same, f"{name}: {expected}")
