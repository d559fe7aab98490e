"""The bus in memory answers as a server does: random operations on both, one after another.

What the simulator shows of the product holds as far as this does. Errors compare by their kind. Now
and then both are stopped in order and begin anew; how lifetimes end shows test_lifetimes.py.
"""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
from waiting import until

from diloco_shared.bus.nats import purging
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import (
    Bus,
    BusError,
    Conflict,
    NoStream,
    Refused,
    StreamFull,
    StreamSpec,
    Unavailable,
)
from diloco_shared.hub.nats_server import NatsServer
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

pytestmark = pytest.mark.live

SUBJECTS = ["s.a", "s.b", "s.a.x", "s.b.x", "s.a.y.z"]
FILTERS = [*SUBJECTS, "s.*", "s.>", "s.*.x", "s.a.>", "s.*.*", "s.none"]
KEYS = ["k", "l", "k.m", "k.n"]
OPERATIONS = 250
# After so many of them the server is stopped and started.
LIFE = 70
# Of errors, the narrowest first.
KINDS = (Conflict, StreamFull, NoStream, Refused, Unavailable)

Ask = Callable[[Bus], Awaitable[Any]]


class Dice:
    """Draws operations: a name to show, and what to ask of either bus."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(f"parity {seed}")
        self.ids: list[str] = ["m0"]

    def drawn(self) -> tuple[str, Ask]:
        kinds = [self.append, self.append, self.append, self.read, self.purge, self.keys, self.keys]
        return self.rng.choice([*kinds, self.stream])()

    def append(self) -> tuple[str, Ask]:
        rng = self.rng
        subject, payload = rng.choice(SUBJECTS), rng.randbytes(rng.choice([0, 1, 100, 3000]))
        more: dict[str, Any] = {}
        if rng.random() < 0.3:
            more["headers"] = {rng.choice(["A", "b"]): rng.choice(["", "1", "x y"])}
        if rng.random() < 0.05:
            more["headers"] = {"Nats-TTL": "60s"}  # which is for buckets
        if rng.random() < 0.3:
            self.ids.append(f"m{len(self.ids)}")
            more["msg_id"] = rng.choice(self.ids[-3:])
        if rng.random() < 0.3:
            more["expect_last"] = rng.randrange(12)
        return f"append {subject} {len(payload)} {more}", lambda bus: bus.append(
            subject, payload, **more
        )

    def read(self) -> tuple[str, Ask]:
        rng = self.rng
        filter_, start = rng.choice(FILTERS), rng.choice([0, 1, 2, 5, 20, 1000])
        limit = rng.choice([None, None, 1, 3])
        most = rng.choice([1, 3, 1000])
        asks: list[tuple[str, Ask]] = [
            (
                f"fetch {filter_} {start} {limit}",
                lambda bus: bus.fetch("S", filter_, start_seq=start, limit=limit),
            ),
            (f"held {filter_} {most}", lambda bus: bus.held("S", filter_, messages_max=most)),
            (f"heads {filter_} {most}", lambda bus: bus.heads("S", filter_, messages_max=most)),
            (f"last {filter_}", lambda bus: bus.last("S", rng_subject)),
            ("info", lambda bus: bus.stream_info("S")),
        ]
        rng_subject = rng.choice([*SUBJECTS, "s.none"])
        return rng.choice(asks)

    def purge(self) -> tuple[str, Ask]:
        filter_ = self.rng.choice([*FILTERS, "other.a"])
        below = self.rng.choice([None, 0, 1, 2, 4, 8, 16, 10_000])
        if below is None and self.rng.random() < 0.7:
            below = self.rng.randrange(1, 12)
        return f"purge {filter_} {below}", lambda bus: bus.purge("S", filter_, below_seq=below)

    def stream(self) -> tuple[str, Ask]:
        rng = self.rng
        if rng.random() < 0.1:
            return "delete", lambda bus: bus.delete_stream("S")
        spec = StreamSpec(
            "S",
            ("s.>",),
            rng.choice([10_000, 20_000, 30_000]),
            drop_oldest=rng.random() < 0.5,
            subject_messages_max=rng.choice([0, 0, 1, 3]),
            message_bytes_max=rng.choice([0, 0, 1000]),
            age_s_max=rng.choice([0.0, 0.0, 600.0]),
            synced=rng.random() < 0.5,
        )
        return f"ensure {spec}", lambda bus: bus.ensure_stream(spec)

    def keys(self) -> tuple[str, Ask]:
        rng = self.rng
        key, value, revision = rng.choice(KEYS), rng.randbytes(3), rng.randrange(1, 30)
        ttl_s = rng.choice([None, 600.0])  # longer than any of this
        some = rng.choice(["k.>", "*", key])
        asks: list[tuple[str, Ask]] = [
            (f"kv_get {key}", lambda bus: bus.kv_get("B", key)),
            (
                f"kv_create {key} {ttl_s}",
                lambda bus: bus.kv_create("B", key, value, ttl_s=ttl_s),
            ),
            (f"kv_put {key} {ttl_s}", lambda bus: bus.kv_put("B", key, value, ttl_s=ttl_s)),
            (
                f"kv_update {key} {revision} {ttl_s}",
                lambda bus: bus.kv_update("B", key, value, revision, ttl_s=ttl_s),
            ),
            ("info of the bucket", lambda bus: bus.stream_info("KV_B")),
            (f"kv_delete {key}", lambda bus: bus.kv_delete("B", key)),
            (
                f"kv_delete {key} {revision}",
                lambda bus: bus.kv_delete("B", key, revision=revision),
            ),
            ("kv_all", lambda bus: bus.kv_all("B")),
            (f"kv_all {some}", lambda bus: bus.kv_all("B", some)),
        ]
        return rng.choice(asks)


async def answer(bus: Bus, ask: Ask) -> Any:
    """What a bus says, in a form that compares."""
    try:
        said = await ask(bus)
    except BusError as error:
        return next(kind for kind in KINDS if isinstance(error, kind))
    if hasattr(said, "first_seq"):
        return said.messages, said.bytes, said.first_seq, said.last_seq, said.bytes_max
    return said


async def begin_anew(server: NatsServer, real: NatsBus, broker: MemoryBroker) -> None:
    """The server is stopped in order, and starts with what it has on its disk."""
    life = real.life
    await server.stop()
    await server.start()
    broker.restart()
    await until(lambda: real.connected and real.life != life, "connected to the new server")


@pytest.mark.parametrize("seed", range(6))
async def test_random_operations_are_answered_alike(
    nats_server: NatsServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, told = Dice(seed), []
    if seed % 2:  # purges are cut into slices, as those of gigabytes are
        for name, value in (("SLICE_BYTES", 0), ("SLICE_MIN", 2), ("LATE_MAX", 1)):
            monkeypatch.setattr(purging, name, value)
    async with AsyncExitStack() as stack:
        real = await NatsBus.connect(nats_server.url, name="real")
        stack.push_async_callback(real.close)
        broker = MemoryBroker()
        memory = MemoryBus(broker, "memory")
        stack.push_async_callback(memory.close)
        for bus in (real, memory):
            await bus.ensure_stream(StreamSpec("S", ("s.>",), 10_000))
            await bus.ensure_bucket("B")
        for n in range(1, OPERATIONS + 1):
            if n % LIFE == 0:
                await begin_anew(nats_server, real, broker)
                told.append("begun anew")
            what, ask = dice.drawn()
            expected, found = await answer(real, ask), await answer(memory, ask)
            told.append(what)
            assert found == expected, "\n".join(told[-30:])
