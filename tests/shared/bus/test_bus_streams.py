"""Streams: the same promises from the in-memory bus and from JetStream."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from diloco_shared.bus.port import (
    Bus,
    Conflict,
    Refused,
    Stored,
    StreamFull,
    StreamInfo,
    StreamSpec,
    Unavailable,
)
from diloco_shared.bus.run_streams import LARGEST, ensure_run_streams
from diloco_shared.protocol.subjects import STREAM_KINDS
from diloco_shared.protocol.wire import MESSAGE_BYTES_MAX

Open = Callable[[], AbstractAsyncContextManager[tuple[Bus, Bus]]]
SPEC = StreamSpec("S", ("s.>",), 1 << 20)


async def test_ensure_is_idempotent_and_changes_the_limit(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(StreamSpec("S", ("s.>",), 1000))
        await two.ensure_stream(StreamSpec("S", ("s.>",), 1000))
        with pytest.raises(StreamFull):
            await one.append("s.a", bytes(5000))
        await two.ensure_stream(SPEC)
        assert await one.append("s.a", bytes(5000)) == 1


async def test_two_streams_cannot_capture_one_subject(open_buses: Open) -> None:
    async with open_buses() as (one, _):
        await one.ensure_stream(SPEC)
        with pytest.raises(Refused, match="overlap"):
            await one.ensure_stream(StreamSpec("T", ("s.a.*",), 1000))


async def test_sequences_count_over_all_subjects(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        assert [await one.append("s.a", b"1"), await two.append("s.b", b"2")] == [1, 2]
        assert await two.fetch("S", "s.>") == [
            Stored("s.a", b"1", {}, 1),
            Stored("s.b", b"2", {}, 2),
        ]


async def test_headers_and_empty_payloads_survive(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        await one.append("s.a", b"", headers={"Diloco-A": "1", "Diloco-B": "x y"}, msg_id="i")
        stored = Stored("s.a", b"", {"Diloco-A": "1", "Diloco-B": "x y"}, 1)
        assert await two.fetch("S", "s.a") == [stored]
        assert await two.last("S", "s.a") == stored
        async with two.read("S", "s.a") as messages:
            assert await anext(messages) == stored


async def test_a_repeat_under_one_message_id_is_stored_once(open_buses: Open) -> None:
    async with open_buses() as (one, _):
        await one.ensure_stream(SPEC)
        assert await one.append("s.a", b"1", msg_id="x") == 1
        assert await one.append("s.a", b"1", msg_id="x") == 1
        assert await one.append("s.a", b"2", msg_id="y") == 2
        assert (await one.stream_info("S")).messages == 2


async def test_what_others_say_first_under_an_id_is_no_repeat(open_buses: Open) -> None:
    """A stream takes an id once, on whichever subject: who guesses another one's could have its
    message left out, and answered as stored."""
    async with open_buses() as (thief, one):
        await thief.ensure_stream(SPEC)
        assert await thief.append("s.b", b"", msg_id="s.a/1") == 1
        assert await thief.append("s.b", b"", headers={"Nats-Msg-Id": "s.a/1"}) == 2
        assert await one.append("s.a", b"1", msg_id="s.a/1") == 3
        assert await one.append("s.a", b"1", msg_id="s.a/1") == 3


async def test_a_conditional_append_is_per_subject(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        assert await one.append("s.a", b"1", expect_last=0) == 1
        assert await one.append("s.b", b"1", expect_last=0) == 2
        with pytest.raises(Conflict, match=r"s\.a"):
            await two.append("s.a", b"2", expect_last=0)
        with pytest.raises(Conflict):
            await two.append("s.a", b"2", expect_last=2)
        assert await two.append("s.a", b"2", expect_last=1) == 3
        assert [m.payload for m in await one.fetch("S", "s.a")] == [b"1", b"2"]


async def test_a_condition_is_checked_before_the_message_id(open_buses: Open) -> None:
    async with open_buses() as (one, _):
        await one.ensure_stream(SPEC)
        await one.append("s.a", b"1", expect_last=0, msg_id="x")
        with pytest.raises(Conflict):
            await one.append("s.a", b"1", expect_last=0, msg_id="x")


async def test_of_concurrent_conditional_appends_one_wins(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        outcomes = await asyncio.gather(
            *(bus.append("s.a", b"x", expect_last=0) for bus in (one, two) * 8),
            return_exceptions=True,
        )
        assert outcomes.count(1) == 1
        assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 15


async def test_a_full_stream_refuses_and_takes_again_after_a_purge(open_buses: Open) -> None:
    async with open_buses() as (one, _):
        await one.ensure_stream(StreamSpec("S", ("s.>",), 10_000))
        for _ in range(4):
            await one.append("s.a", bytes(2000))
        with pytest.raises(StreamFull):
            await one.append("s.a", bytes(2000))
        assert (await one.stream_info("S")).messages == 4
        assert await one.purge("S", "s.a") == 4
        assert await one.append("s.a", bytes(2000)) == 5


async def test_a_dropping_stream_keeps_the_newest(open_buses: Open) -> None:
    async with open_buses() as (one, _):
        await one.ensure_stream(StreamSpec("S", ("s.>",), 10_000, drop_oldest=True))
        for number in range(20):
            await one.append("s.a", bytes([number]) * 2000)
        kept = [message.seq for message in await one.fetch("S", "s.a")]
        assert kept == [17, 18, 19, 20]


async def test_fetch_filters_starts_and_limits(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        for number in range(600):
            await one.append(f"s.{number % 2}.x", b"%d" % number)
        assert [m.seq for m in await two.fetch("S", "s.1.*")] == [*range(2, 601, 2)]
        late = await two.fetch("S", "s.0.x", start_seq=590)
        assert [m.seq for m in late] == [591, 593, 595, 597, 599]
        assert [m.seq for m in await two.fetch("S", "s.>", start_seq=4, limit=3)] == [4, 5, 6]
        assert [m.seq for m in await two.fetch("S", "s.0.x", limit=1)] == [1]
        assert await two.fetch("S", "s.>", start_seq=601) == []
        assert await two.fetch("S", "s.nothing") == []


async def test_fetch_of_more_bytes_than_one_answer_holds(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(StreamSpec("S", ("s.>",), 64 << 20))
        for number in range(24):
            await one.append("s.a", bytes([number]) * (1 << 20))
        found = await two.fetch("S", "s.a")
        assert [m.payload[-1] for m in found] == [*range(24)]


async def test_last_is_of_exactly_that_subject(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        assert await one.last("S", "s.a") is None
        await one.append("s.a", b"1")
        await one.append("s.a", b"2")
        await one.append("s.a.b", b"3")
        assert await two.last("S", "s.a") == Stored("s.a", b"2", {}, 2)


async def test_a_purge_below_the_first_sequence_removes_nothing(open_buses: Open) -> None:
    async with open_buses() as (bus, _):
        await bus.ensure_stream(SPEC)
        for text in (b"1", b"2", b"3"):
            await bus.append("s.a", text)
        for below in (1, 0):
            assert await bus.purge("S", "s.>", below_seq=below) == 0
            assert await bus.purge("S", "s.a", below_seq=below) == 0
        assert (await bus.stream_info("S")).messages == 3


async def test_purge_counts_and_forgets_the_sequence(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        for subject in ("s.a.1", "s.b.1", "s.a.2", "s.b.2", "s.a.1"):
            await one.append(subject, b"x")
        assert await two.purge("S", "s.b.*") == 2
        assert [m.seq for m in await one.fetch("S", "s.>")] == [1, 3, 5]
        assert await two.purge("S", "s.a.1", below_seq=5) == 1
        assert [m.seq for m in await one.fetch("S", "s.>")] == [3, 5]
        assert await two.purge("S", "s.nothing") == 0
        assert await one.append("s.b.1", b"x", expect_last=0) == 6


async def test_info_tells_sizes(open_buses: Open) -> None:
    async with open_buses() as (one, _):
        await one.ensure_stream(SPEC)
        assert await one.stream_info("S") == StreamInfo(0, 0, 0, 0, SPEC.bytes_max)
        await one.append("s.a", bytes(1000))
        await one.append("s.b", bytes(1000))
        info = await one.stream_info("S")
        assert (info.messages, info.first_seq, info.last_seq) == (2, 1, 2)
        assert 2000 < info.bytes < 2200
        await one.purge("S", "s.>")
        assert await one.stream_info("S") == StreamInfo(0, 0, 3, 2, SPEC.bytes_max)


async def test_a_limit_is_raised_and_what_is_promised_is_told(open_buses: Open) -> None:
    async with open_buses() as (one, _):
        await one.ensure_stream(SPEC)
        before = await one.storage()
        assert before.reserved >= SPEC.bytes_max
        await one.append("s.a", bytes(1000))
        await one.ensure_stream(replace(SPEC, bytes_max=2 * SPEC.bytes_max))
        info, after = await one.stream_info("S"), await one.storage()
        assert info.messages == 1 and info.bytes_max == 2 * SPEC.bytes_max
        assert after.reserved == before.reserved + SPEC.bytes_max
        assert after.bytes >= before.bytes + 1000


async def test_what_is_not_there_is_said(open_buses: Open) -> None:
    async with open_buses() as (one, _):
        with pytest.raises(Unavailable, match=r"nobody listens on s\.a"):
            await one.append("s.a", b"")
        with pytest.raises(Refused, match="stream not found"):
            await one.stream_info("S")
        with pytest.raises(Refused, match="stream not found"):
            await one.last("S", "s.a")
        with pytest.raises(Refused, match="stream not found"):
            await one.purge("S", "s.a")
        with pytest.raises(Unavailable, match="there is no stream S"):
            await one.fetch("S", "s.a")
        await one.delete_stream("S")


async def test_a_deleted_stream_is_gone_with_all_in_it(open_buses: Open) -> None:
    async with open_buses() as (one, _):
        await one.ensure_stream(SPEC)
        await one.append("s.a", b"x")
        await one.delete_stream("S")
        await one.ensure_stream(SPEC)
        assert await one.fetch("S", "s.>") == []


async def test_read_brings_what_is_there_and_what_comes(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        for number in range(200):
            await one.append(f"s.{number % 2}", b"%d" % number)
        async with two.read("S", "s.0", batch=7) as messages:
            assert [(await anext(messages)).seq for _ in range(100)] == [*range(1, 200, 2)]
            await one.append("s.1", b"other")
            await one.append("s.0", b"new")
            assert await anext(messages) == Stored("s.0", b"new", {}, 202)


async def test_read_starts_where_it_is_told(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        for number in range(1, 11):
            await one.append("s.a", b"%d" % number)
        async with (
            two.read("S", "s.a", start_seq=9) as late,
            two.read("S", "s.>", start_seq=12) as future,
        ):
            assert [(await anext(late)).seq for _ in range(2)] == [9, 10]
            await one.append("s.a", b"11")
            await one.append("s.a", b"12")
            assert (await anext(future)).seq == 12
            assert (await anext(late)).seq == 11


async def test_read_waits_for_the_stream(open_buses: Open) -> None:
    async with open_buses() as (one, two), two.read("S", "s.a") as messages:
        waiting = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        await one.ensure_stream(SPEC)
        await one.append("s.a", b"x")
        assert (await waiting).payload == b"x"


async def test_a_cancelled_read_goes_on_without_loss(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        await one.append("s.a", b"1")
        async with two.read("S", "s.a") as messages:
            assert (await anext(messages)).seq == 1
            waiting = asyncio.ensure_future(anext(messages))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await one.append("s.a", b"2")
            assert (await anext(messages)).seq == 2


async def test_a_slow_reader_of_much_gets_all(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(StreamSpec("S", ("s.>",), 64 << 20))
        for number in range(24):
            await one.append("s.a", bytes([number]) * (1 << 20))
        async with two.read("S", "s.a") as messages:
            assert [(await anext(messages)).payload[0] for _ in range(24)] == [*range(24)]


async def test_heads_are_messages_without_their_payloads(open_buses: Open) -> None:
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        assert await two.heads("S", "s.a", messages_max=9) == []
        for n in range(3):
            await one.append("s.a", bytes(1000), headers={"Diloco-N": str(n)}, msg_id=f"i{n}")
            await one.append("s.b", b"other")
        heads = [Stored("s.a", b"", {"Diloco-N": str(n)}, 2 * n + 1) for n in range(3)]
        assert await two.heads("S", "s.a", messages_max=9) == heads
        assert await two.heads("S", "s.a", messages_max=2, messages_min=3) == heads[:2]
        assert await two.heads("S", "s.a", messages_max=9, messages_min=4) == []


async def test_what_messages_hold_is_what_the_stream_counts(open_buses: Open) -> None:
    """Headers and subjects take room, too: of empty messages nothing else does."""
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        for n in range(30):
            await one.append(f"s.{n % 3}", bytes(n), headers={"A": "x" * (n * 100)} if n else None)
        await one.append("s.0", b"", msg_id="x", expect_last=28)
        held = await two.held("S", "s.>", messages_max=100)
        assert {subject: of.messages for subject, of in held.items()} == {
            "s.0": 11,
            "s.1": 10,
            "s.2": 10,
        }
        assert sum(of.bytes for of in held.values()) == (await one.stream_info("S")).bytes
        assert (await two.held("S", "s.1", messages_max=3))["s.1"].messages == 3


async def test_what_subjects_hold_is_counted_from_one_sequence_to_another(
    open_buses: Open,
) -> None:
    """Whoever counts on reads nothing twice, and counts nothing that comes meanwhile."""
    async with open_buses() as (one, two):
        await one.ensure_stream(SPEC)
        for n in range(12):
            await one.append(f"s.{n % 3}", bytes(n))
        whole = await two.held("S", "s.1", messages_max=100)
        halves = [
            await two.held("S", "s.1", messages_max=100, start_seq=start, below_seq=below)
            for start, below in ((1, 6), (6, 13), (12, 13), (13, 14))
        ]
        assert [half["s.1"].messages for half in halves if half] == [2, 2]
        assert sum(half["s.1"].bytes for half in halves if half) == whole["s.1"].bytes
        assert (await two.held("S", "s.1", messages_max=100, start_seq=6))["s.1"].messages == 2


async def test_no_message_of_a_runs_stream_is_larger_than_an_honest_one(open_buses: Open) -> None:
    """Of those that learners write: headers have no limit of their own."""
    async with open_buses() as (one, _):
        await ensure_run_streams(one, "r", dict.fromkeys(STREAM_KINDS, 64 << 20))
        for kind in ("up", "state"):
            largest = bytes(MESSAGE_BYTES_MAX)
            await one.append(f"{kind}.r.a.0.0.0.0.m", largest, headers={"A": "x" * 1000})
            with pytest.raises(Refused, match="maximum"):
                await one.append(f"{kind}.r.a.0.0.0.1.m", b"", headers={"A": "x" * (LARGEST + 1)})
