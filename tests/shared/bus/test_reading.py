"""A reader of a stream, with a server that a test plays: what it asks for, from where it reads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from diloco_shared.bus.nats import probing, streams
from diloco_shared.bus.nats.link import Raw
from diloco_shared.bus.nats.probing import PORTION_BYTES, download
from diloco_shared.bus.nats.pulls import forget_consumer
from diloco_shared.bus.nats.reader import Reader
from diloco_shared.bus.port import Stored, StreamInfo, Unavailable
from diloco_shared.protocol.pace import silence_s

pytestmark = pytest.mark.virtual


class Link:
    """What is published on it is kept; `away`: nothing can be."""

    api, several_nodes, closed = "$JS.API", False, False

    def __init__(self, *, away: bool = False) -> None:
        self.away = away
        self.published: list[str] = []

    async def publish(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        if self.away:
            raise Unavailable("the server is away")
        self.published.append(subject)


class Coming:
    """An inbox with what a test says; None: nothing comes for as long as it is waited for."""

    def __init__(self, *raws: Raw | None) -> None:
        self.raws = [*raws]

    async def get(self, patience_s: float) -> Raw | None:
        return self.raws.pop(0)


def status(code: int, **headers: str) -> Raw:
    return Raw("inbox", b"", "", {"Status": str(code), **headers})


def reading(*raws: Raw | None, batch: int = 64) -> Any:
    found: Any = Reader(Link(), "S", "s.>", 1, batch)  # type: ignore[arg-type]
    found._inbox, found._reply = Coming(*raws), "inbox"
    found.pulls = []

    async def pull(count: int) -> None:
        found.pulls.append(count)
        found._asked += count

    found._pull = pull
    return found


async def test_what_a_pull_did_not_bring_is_asked_for_again() -> None:
    ended = status(408, **{"Nats-Pending-Messages": "60"})
    reader = reading(status(100), ended, status(100))
    for _ in range(3):
        assert await reader._receive() is None
    assert reader.pulls == [64, 60], "the first one, and once it has ended, what is missing"


async def test_silence_and_other_statuses_end_it() -> None:
    with pytest.raises(Unavailable, match="connection or heartbeat lost"):
        await reading(None)._receive()
    with pytest.raises(Unavailable, match="the server ended the reading \\(status 503\\)"):
        await reading(status(503))._receive()


@pytest.mark.parametrize(
    ("stored", "begins_at"),
    [
        ({5: 50, 6: 60}, 7),  # as it was
        ({5: 50}, 6),  # the newest was removed since: nothing new is there
        ({5: 50, 6: 61}, 6),  # another one has its place
        ({5: 51, 6: 61}, 1),  # whatever is there may be new
        ({}, 7),  # all that was read was removed since: that says nothing
    ],
)
async def test_it_reads_on_from_where_the_stream_is_another_one(
    stored: dict[int, int], begins_at: int
) -> None:
    reader = reading()
    for seq in (5, 6):
        reader._trail.add(seq, 10 * seq)
    reader._next_seq = 7

    async def stored_at(seq: int) -> int:
        return stored.get(seq, 0)

    reader._stored_at = stored_at
    await reader._look_at_trail(1, 8)
    assert reader._next_seq == begins_at


@pytest.mark.parametrize("away", [False, True])
async def test_a_server_is_told_of_a_consumer_that_nobody_reads(away: bool) -> None:
    link: Any = Link(away=away)
    await forget_consumer(link, "S", "r1")
    assert link.published == ([] if away else ["$JS.API.CONSUMER.DELETE.S.r1"])


async def test_a_probe_reads_no_more_than_its_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the messages are: a thin link must not be held for minutes."""
    asked: list[tuple[int, int]] = []
    size = 1 << 10

    class Streams:
        def __init__(self, link: Any) -> None:
            pass

        async def stream_info(self, stream: str) -> StreamInfo:
            return StreamInfo(
                messages=4096, bytes=4096 * size, first_seq=9, last_seq=4104, bytes_max=0
            )

        async def fetch(
            self, stream: str, subject: str, *, start_seq: int, limit: int
        ) -> list[Stored]:
            asked.append((start_seq, limit))
            return [Stored("s.a", bytes(size), {}, start_seq + n) for n in range(limit)]

    monkeypatch.setattr(probing, "NatsStreams", Streams)
    link: Any = Link()
    rate = await download(link, "S", 8 * PORTION_BYTES, 60.0)
    each = PORTION_BYTES // size
    assert asked == [(9, each), (9, 2 * each), (9, 4 * each)]
    assert (rate.bytes, rate.moved) == (4 * PORTION_BYTES, 7 * PORTION_BYTES)


@pytest.mark.parametrize(
    ("pauses_s", "came"),
    [
        ([4.0] * 10, 10),  # of a payload of a hundred gigabytes they come for many seconds
        ([4.0, 6.0, 0.0], 1),  # nothing more for five seconds
        ([4.5] * 20, 13),  # a link on which they would come for longer than anybody waits
    ],
)
async def test_heads_are_read_for_as_long_as_they_come(
    monkeypatch: pytest.MonkeyPatch, pauses_s: list[float], came: int
) -> None:
    class Slow:
        """A reader whose messages come after these pauses."""

        def __init__(self, *of: object, **how: object) -> None:
            self.left = [*pauses_s]

        async def __anext__(self) -> Stored:
            await asyncio.sleep(self.left.pop(0))
            return Stored("s.a", b"", {}, len(pauses_s) - len(self.left))

        async def close(self) -> None:
            pass

    async def there(stream: str, subject: str) -> int:
        return len(pauses_s)

    found = streams.NatsStreams(Link())  # type: ignore[arg-type]
    monkeypatch.setattr(streams, "Reader", Slow)
    monkeypatch.setattr(found, "_there", there)
    heads = await found.heads("S", "s.a", messages_max=100)
    assert [head.seq for head in heads] == [*range(1, came + 1)]


class Deaf(Link):
    """Of a server that answers nothing within the time that a request has."""

    @asynccontextmanager
    async def on_reconnect(self, wake: Any) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def subscribed(self, subject: str, take: Any) -> AsyncIterator[str]:
        yield subject

    def new_inbox(self) -> str:
        return "_INBOX.1"

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> Raw:
        await asyncio.sleep(timeout_s)
        raise Unavailable(f"no answer on {subject}")


@pytest.mark.parametrize("where", [{}, {"below_seq": 9}, {"start_seq": 3}])
async def test_a_server_that_answers_nothing_does_not_hold_nothing(where: dict[str, int]) -> None:
    """Who takes it for that begins to count anew who is gone."""
    found = streams.NatsStreams(Deaf())  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        await found.held("S", "s.>", messages_max=9, **where)


def test_who_fetches_waits_for_heads() -> None:
    assert silence_s() > streams.HEADS_S_MAX
