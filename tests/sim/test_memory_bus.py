"""What only the in-memory bus has: its own clock, cut connections and lost messages."""

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.bus.port import Conflict, Delivery, Refused, StreamSpec, Unavailable
from diloco_shared.protocol.subjects import BUCKETS, PRIVATE_BUCKETS
from diloco_simulator.hub.broker import Fate, MemoryBroker, matches, overlap
from diloco_simulator.hub.bus import MemoryBus

SPEC = StreamSpec("S", ("s.>",), 1 << 20)

tokens = st.sampled_from(["a", "b"])
subjects = st.lists(tokens, min_size=1, max_size=4).map(".".join)
patterns = st.tuples(
    st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3), st.sampled_from(["", ".>"])
).map(lambda parts: ".".join(parts[0]) + parts[1])


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.*", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("a.*.c", "a.b.c", True),
        ("a.*.m", "a.b.c", False),
    ],
)
def test_wildcards(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


@given(patterns, patterns, subjects)
def test_patterns_that_match_one_subject_overlap(one: str, other: str, subject: str) -> None:
    assert overlap(one, one)
    assert overlap(one, other) == overlap(other, one)
    if matches(one, subject) and matches(other, subject):
        assert overlap(one, other)


async def test_keys_expire_by_the_given_clock() -> None:
    now = 100.0
    broker = MemoryBroker(clock=lambda: now)
    bus = MemoryBus(broker, "a")
    await bus.ensure_bucket("b")
    async with bus.kv_watch("b") as changes:
        revision = await bus.kv_create("b", "k", b"1", ttl_s=4.2)
        assert (await anext(changes)).value == b"1"
        now = 104.9
        # Renewed in time; whole seconds, rounded up, as the server counts them.
        revision = await bus.kv_update("b", "k", b"2", revision, ttl_s=4.2)
        assert (await anext(changes)).value == b"2"
        now = 109.8
        assert await bus.kv_get("b", "k") is not None
        now = 109.9
        broker.expire()
        assert (await anext(changes)).value is None
        assert await bus.kv_get("b", "k") is None
        with pytest.raises(Conflict):
            await bus.kv_update("b", "k", b"2", revision)
    # The marker goes as well, after its own minute.
    assert (await bus.stream_info("KV_b")).messages == 1
    now = 169.9
    assert (await bus.stream_info("KV_b")).messages == 0


async def test_message_ids_are_forgotten_after_two_minutes() -> None:
    now = 0.0
    bus = MemoryBus(MemoryBroker(clock=lambda: now), "a")
    await bus.ensure_stream(SPEC)
    assert await bus.append("s.a", b"", msg_id="x") == 1
    now = 119.0
    assert await bus.append("s.a", b"", msg_id="x") == 1
    now = 120.0
    assert await bus.append("s.a", b"", msg_id="x") == 2


async def test_a_server_that_begins_anew_knows_the_ids_of_what_it_holds() -> None:
    """As it reads them from its disk."""
    bus = MemoryBus(MemoryBroker(), "a")
    await bus.ensure_stream(SPEC)
    await bus.append("s.a", b"", msg_id="x")
    await bus.append("s.b", b"", msg_id="y")
    await bus.purge("S", "s.b")
    assert await bus.append("s.b", b"", msg_id="y") == 2, "known, although it is gone"
    bus.broker.restart()
    assert await bus.append("s.a", b"", msg_id="x") == 1
    assert await bus.append("s.b", b"", msg_id="y") == 3


async def test_a_power_cut_takes_nothing_that_is_synced() -> None:
    """But a disk may, which loses what it had written."""
    broker = MemoryBroker()
    bus = MemoryBus(broker, "a")
    await bus.ensure_stream(SPEC)
    await bus.ensure_stream(replace(SPEC, name="U", subjects=("u.>",), synced=False))
    for subject in ("s.a", "u.a"):
        for n in range(3):
            await bus.append(subject, bytes([n]), msg_id=f"{subject}{n}")
    life = bus.life
    assert broker.lose("S", 2) == 0 and broker.lose("U", 2) == 2
    assert int(bus.life) == int(life) + 2, "each has begun a new life"
    assert [(await bus.stream_info(name)).last_seq for name in "SU"] == [3, 1]
    assert await bus.append("u.a", b"", msg_id="u.a2") == 2, "a repeat of what is lost is new"
    assert broker.lose("S", 2, synced=True) == 2
    assert (await bus.stream_info("S")).last_seq == 1


async def test_a_power_cut_takes_nothing_of_a_bucket() -> None:
    """Leases, settings and the lives of learners are decided upon."""
    broker = MemoryBroker()
    bus = MemoryBus(broker, "a")
    for bucket in (*BUCKETS, *PRIVATE_BUCKETS):
        await bus.ensure_bucket(bucket)
        await bus.kv_put(bucket, "k", b"v")
        assert broker.lose(f"KV_{bucket}", 1) == 0, bucket


async def test_a_power_cut_brings_back_what_was_purged_last_and_not_synced() -> None:
    broker = MemoryBroker(clock=lambda: 0.0)
    bus = MemoryBus(broker, "a")
    await bus.ensure_stream(SPEC)
    await bus.ensure_stream(replace(SPEC, name="U", subjects=("u.>",), synced=False))
    for name in ("s", "u"):
        for n in range(6):
            await bus.append(f"{name}.{n % 2}", bytes([n]))
        await bus.purge(name.upper(), ">", below_seq=5)
    there = (await bus.stream_info("U")).bytes
    broker.lose("U", 1)  # sequence 6, which comes again
    assert broker.take_back("S", 4) == 0, "synced"
    assert broker.take_back("U", 2) == 2
    assert [m.seq for m in await bus.fetch("U", ">")] == [3, 4, 5], "in their order"
    newest = await bus.last("U", "u.1")
    assert newest is not None and newest.seq == 4
    assert (await bus.stream_info("U")).bytes == there // 2 * 3
    assert await bus.append("u.1", b"6") == 6
    assert broker.take_back("U", 4) == 0, "once"


async def test_what_was_lost_since_does_not_come_back() -> None:
    broker = MemoryBroker(clock=lambda: 0.0)
    bus = MemoryBus(broker, "a")
    await bus.ensure_stream(replace(SPEC, synced=False))
    for subject in ("s.a", "s.b", "s.c", "s.b"):
        await bus.append(subject, b"")
    await bus.purge("S", "s.b")
    broker.lose("S", 1)  # sequence 3, and the one behind it too
    assert await bus.append("s.c", b"") == 3 and await bus.append("s.c", b"") == 4
    assert broker.take_back("S", 9) == 1
    assert [m.seq for m in await bus.fetch("S", ">")] == [1, 2, 3, 4]


async def test_what_finds_no_room_does_not_come_back() -> None:
    broker = MemoryBroker(clock=lambda: 0.0)
    bus = MemoryBus(broker, "a")
    await bus.ensure_stream(replace(SPEC, synced=False))
    for _ in range(4):
        await bus.append("s.a", b"x")
    each = (await bus.stream_info("S")).bytes // 4
    await bus.purge("S", ">")
    await bus.append("s.a", b"x")
    broker.narrow("S", 3 * each)
    assert broker.take_back("S", 4) == 2
    assert [m.seq for m in await bus.fetch("S", ">")] == [3, 4, 5]


async def test_how_a_stream_persists_is_settled_when_it_is_made() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker, "a")
    for synced in (False, True):
        await bus.ensure_stream(replace(SPEC, synced=synced))
    await bus.append("s.a", b"")
    assert broker.lose("S", 1) == 1
    broker.nodes = 3  # where nobody would notice that the one with the copy began a new life
    await bus.ensure_stream(replace(SPEC, name="U", subjects=("u.>",), synced=False))
    await bus.append("u.a", b"")
    assert broker.lose("U", 1) == 0


async def test_a_deletion_that_outlives_its_lifetime_is_told_once_more() -> None:
    """As a server tells it, in buckets that tell of lifetimes at all."""
    now = 0.0
    broker = MemoryBroker(clock=lambda: now)
    bus = MemoryBus(broker, "a")
    await bus.ensure_bucket("b")
    await bus.kv_put("b", "k", b"1")
    await bus.kv_put("b", "l", b"1")
    assert await bus.kv_delete("b", "k") == 3
    now = 60.0
    marker = await bus.last("KV_b", "$KV.b.k")
    assert marker is not None and (marker.seq, marker.payload) == (4, b"")
    assert await bus.kv_get("b", "k") is None
    now = 120.0
    info = await bus.stream_info("KV_b")
    assert (info.messages, info.last_seq) == (1, 4)


async def test_what_is_older_than_a_stream_keeps_is_gone() -> None:
    now = 0.0
    bus = MemoryBus(MemoryBroker(clock=lambda: now), "a")
    await bus.ensure_stream(replace(SPEC, age_s_max=600.0))
    await bus.append("s.a", b"")
    now = 300.0
    await bus.append("s.a", b"")
    with pytest.raises(Refused, match="TTL is disabled"):
        await bus.append("s.a", b"", headers={"Nats-TTL": "60s"})
    now = 600.0
    assert [m.seq for m in await bus.fetch("S", "s.a")] == [2]
    now = 900.0
    info = await bus.stream_info("S")
    assert (info.messages, info.first_seq, info.last_seq) == (0, 3, 2)


async def test_a_client_that_is_cut_off_hears_nothing_and_catches_up() -> None:
    broker = MemoryBroker()
    near, far = MemoryBus(broker, "near"), MemoryBus(broker, "far")
    await near.ensure_stream(SPEC)
    async with far.subscribe("news") as news, far.read("S", "s.a") as messages:
        far.disconnect()
        assert not far.connected
        await near.publish("news", b"missed")
        await near.append("s.a", b"kept")
        await far.publish("news", b"lost without an error")
        with pytest.raises(Unavailable, match=r"no answer on s\.a"):
            await far.append("s.a", b"not stored", timeout_s=0.01)
        far.reconnect()
        await near.publish("news", b"heard")
        assert (await anext(news)).payload == b"heard"
        assert (await anext(messages)).payload == b"kept"
        assert far.reconnects == 1
    assert (await near.stream_info("S")).messages == 1


async def test_what_is_gone_is_sent_nothing_more() -> None:
    """A dead process's messages would take the link of the one that comes after it."""
    broker = MemoryBroker()
    near, far = MemoryBus(broker, "near"), MemoryBus(broker, "far")

    async def answer(delivery: Delivery) -> bytes:
        return b"here"

    async with far.subscribe("news"), far.serve("asked", answer):
        assert await near.request("asked", b"") == b"here"
        far.vanish()
        assert broker.publish(Delivery("news", b"")) == 0
        with pytest.raises(Unavailable, match="nobody listens"):
            await near.request("asked", b"")
    async with near.subscribe("news"):
        assert broker.publish(Delivery("news", b"")) == 1


async def test_a_call_waits_for_the_reconnect() -> None:
    bus = MemoryBus(MemoryBroker(), "a")
    await bus.ensure_stream(SPEC)
    bus.disconnect()
    appending = asyncio.create_task(bus.append("s.a", b""))
    await asyncio.sleep(0)
    bus.reconnect()
    assert await appending == 1


def fated(*fates: Fate) -> MemoryBroker:
    rest: Iterator[Fate] = iter(fates)
    return MemoryBroker(
        fault=lambda client, operation, subject: (
            next(rest, "deliver")
            if (client, operation, subject) == ("a", "append", "s.a")
            else "deliver"
        )
    )


async def test_a_lost_request_stores_nothing_and_a_lost_answer_does() -> None:
    bus = MemoryBus(fated("lose_request", "lose_answer"), "a")
    await bus.ensure_stream(SPEC)
    for stored in (0, 1):
        with pytest.raises(Unavailable):
            await bus.append("s.a", b"x", expect_last=0)
        assert (await bus.stream_info("S")).messages == stored
    with pytest.raises(Conflict):
        await bus.append("s.a", b"x", expect_last=0)


async def test_lost_publishes_and_requests() -> None:
    lost: Fate = "lose_request"
    broker = MemoryBroker(
        fault=lambda _, operation, __: lost if operation == "publish" else "deliver"
    )

    async def answer(_: Delivery) -> bytes:
        return b"answer"

    bus = MemoryBus(broker, "a")
    async with bus.subscribe("s") as got, bus.serve("q", answer):
        await bus.publish("s", b"1")
        # The answer is a publish, too.
        with pytest.raises(Unavailable, match="no answer on q"):
            await bus.request("q", b"", timeout_s=0.01)
        lost = "deliver"
        await bus.publish("s", b"2")
        assert (await anext(got)).payload == b"2"
        assert await bus.request("q", b"") == b"answer"


async def test_a_closed_client_refuses_and_its_readers_end() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker, "a")
    await bus.ensure_stream(SPEC)
    async with bus.read("S", "s.a") as messages:
        reading = asyncio.create_task(first(messages))
        await asyncio.sleep(0)
        await bus.close()
        assert await reading is None
    with pytest.raises(Unavailable, match="closed"):
        await bus.append("s.a", b"")


async def first(messages: object) -> object:
    async for message in messages:  # type: ignore[attr-defined]
        return message
    return None


async def test_an_oversized_publish_is_refused() -> None:
    bus = MemoryBus(MemoryBroker(), "a")
    with pytest.raises(Refused):
        await bus.publish("s", bytes((2 << 20) + 1))


async def test_a_hub_without_a_leader_keeps_connections_and_takes_and_tells_nothing() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker, "a")
    await bus.ensure_stream(SPEC)
    await bus.append("s.x", b"1")
    async with bus.read("S", "s.>") as messages, bus.subscribe("t") as heard:
        assert (await anext(messages)).payload == b"1"
        broker.lose_leader()
        assert bus.connected and bus.ails
        for asked in (bus.append("s.x", b"2"), bus.stream_info("S"), bus.fetch("S", "s.>")):
            with pytest.raises(Unavailable):
                await asked
        await bus.publish("t", b"core goes on")
        assert (await anext(heard)).payload == b"core goes on"
        waiting = asyncio.create_task(anext(messages))
        broker.append("s.x", b"3", {}, None, None)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        broker.elected()
        assert (await waiting).payload == b"3" and not bus.ails


async def test_a_node_that_leads_alone_tells_what_it_has_and_keeps_others_writes_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diloco_simulator.hub.bus.PATIENCE_S", 0.01)
    broker = MemoryBroker()
    bus = MemoryBus(broker, "a")
    await bus.ensure_stream(SPEC)
    await bus.append("s.x", b"1")
    broker.lose_leader(tells=True)
    found = await bus.last("S", "s.x")
    assert found is not None and found.payload == b"1" and bus.ails
    with pytest.raises(Unavailable, match="alone"):
        await bus.append("s.x", b"2", expect_last=1)
    with pytest.raises(Conflict, match="on its way"):
        await bus.append("s.x", b"3", expect_last=1)
    with pytest.raises(Unavailable, match="no leader"):
        await bus.purge("S", "s.x")
    broker.elected()
    found = await bus.last("S", "s.x")
    assert found is not None and found.payload == b"2"
    # Of what waits some is lost.
    broker.lose_leader(tells=True)
    with pytest.raises(Unavailable):
        await bus.append("s.x", b"4")
    broker.elected(lambda: False)
    assert (await bus.stream_info("S")).last_seq == 2


async def test_who_answers_a_request_goes_by_its_own_clock_and_not_by_that_of_who_asks() -> None:
    """What is a process's own in a world is known by its context."""
    whose = ContextVar("whose", default="nobody's")
    broker = MemoryBroker()
    server, asker = MemoryBus(broker, "server"), MemoryBus(broker, "asker")

    async def answer(request: Delivery) -> bytes:
        return whose.get().encode()

    async def serve() -> None:
        whose.set("the server's")
        async with server.serve("question", answer):
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0)
    whose.set("the asker's")
    assert await asker.request("question", b"") == b"the server's"
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
