"""A purge is cut into slices, so that the server answers others in between; a real one."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from shared.bus.proxy import SPEC
from waiting import until

from diloco_shared.bus.nats import purging
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import NoStream, Unavailable
from diloco_shared.hub.nats_server import NatsServer

pytestmark = pytest.mark.live

SLICE, LATE = 8, 4


class Asked:
    """What was purged with each request, and by what it was said."""

    def __init__(self) -> None:
        self.purges: list[tuple[dict[str, Any], int]] = []
        self.before: Callable[[], Awaitable[Any]] | None = None  # the next one

    @property
    def largest(self) -> int:
        return max(count for _, count in self.purges)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found, call = Asked(), purging.api_call

    async def seen(link: Any, subject: str, body: dict[str, Any], **how: Any) -> dict[str, Any]:
        if not subject.startswith("STREAM.PURGE"):
            return await call(link, subject, body, **how)
        if found.before is not None:
            await found.before()
        answer = await call(link, subject, body, **how)
        found.purges.append((body, answer["purged"]))
        return answer

    monkeypatch.setattr(purging, "api_call", seen)
    monkeypatch.setattr(purging, "SLICE_BYTES", 0)
    monkeypatch.setattr(purging, "SLICE_MIN", SLICE)
    monkeypatch.setattr(purging, "LATE_MAX", LATE)
    return found


@asynccontextmanager
async def filled(server: NatsServer, *subjects: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url, name="purges")
    await bus.ensure_stream(SPEC)
    for subject in subjects:
        await bus.append(subject, b"chunk")
    try:
        yield bus
    finally:
        await bus.close()


async def left(bus: NatsBus) -> list[tuple[str, int]]:
    return [(m.subject, m.seq) for m in await bus.fetch("S", "s.>")]


async def test_no_request_removes_more_than_a_slice(nats_server: NatsServer, asked: Asked) -> None:
    async with filled(nats_server, *["s.a", "s.b"] * 50) as bus:
        assert await bus.purge("S", "s.a") == 50
        assert asked.largest == SLICE
        assert len(asked.purges) == 7, "as many as it takes"
        assert [subject for subject, _ in await left(bus)] == ["s.b"] * 50


async def test_slices_among_others_are_alike(
    nats_server: NatsServer, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fewer are left, the thinner they lie; what small slices leave would go at once."""
    async with filled(nats_server, *["s.a", "s.b"] * 50) as bus:
        monkeypatch.setattr(purging, "SLICE_BYTES", (await bus.stream_info("S")).bytes // 5)
        assert await bus.purge("S", "s.a") == 50
        assert [count for _, count in asked.purges] == [10] * 5


async def test_what_takes_no_more_than_a_slice_is_one_request(
    nats_server: NatsServer, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purging, "SLICE_BYTES", 100 << 20)
    async with filled(nats_server, *["s.a", "s.b"] * 50) as bus:
        assert await bus.purge("S", "s.a", below_seq=41) == 20
        assert asked.purges == [({"filter": "s.a", "seq": 41}, 20)]
        assert await bus.purge("S", ">") == 80
        assert asked.purges[1:] == [({"filter": ">"}, 80)], "whole blocks are dropped at once"


@pytest.mark.parametrize("below", [60, 97, 101, 5000])
async def test_what_stands_above_stays(nats_server: NatsServer, asked: Asked, below: int) -> None:
    """Though slices are counted, and the count says nothing of sequences."""
    async with filled(nats_server, *["s.a", "s.a", "s.b", "s.a"] * 25) as bus:
        expected = [(s, seq) for s, seq in await left(bus) if s == "s.b" or seq >= below]
        assert await bus.purge("S", "s.a", below_seq=below) == 100 - len(expected)
        assert await left(bus) == expected
        assert asked.largest <= SLICE + LATE


async def test_where_most_of_what_is_above_does_not_match_slices_are_cut_all_the_same(
    nats_server: NatsServer, asked: Asked
) -> None:
    """And what is left is removed subject by subject: a server reads what matches above, too."""
    below = ["s.a.1"] * 40 + ["s.a.2"] * 6 + ["s.a.3"] * 2
    async with filled(nats_server, *below, *["s.a.4"] * 12, *["s.b"] * 100) as bus:
        assert await bus.purge("S", "s.a.*", below_seq=len(below) + 1) == len(below)
        assert asked.largest <= SLICE
        said = [body for body, _ in asked.purges]
        assert any("keep" in body for body in said)
        assert not any(body["filter"] == "s.a.*" and "seq" in body for body in said)
        assert (await bus.stream_info("S")).messages == 112


async def test_what_comes_meanwhile_stays(nats_server: NatsServer, asked: Asked) -> None:
    """Also what comes after it was counted, when no more than a slice is left to remove."""
    async with filled(nats_server, *["s.a"] * 69) as bus:

        async def comes() -> None:
            for _ in range(2):
                await bus.append("s.a", b"of a later life")

        asked.before = comes
        assert await bus.purge("S", "s.a", below_seq=70) == 69
        assert [seq for _, seq in await left(bus)] == [70 + n for n in range(2 * len(asked.purges))]
        assert len(asked.purges) > 5


async def test_what_comes_in_masses_meanwhile_stays(nats_server: NatsServer, asked: Asked) -> None:
    """A slow server on a fast link is sent more, between count and request, than is allowed for."""
    async with filled(nats_server, *["s.a"] * 69) as bus:

        async def comes() -> None:
            for _ in range(LATE + 2):
                await bus.append("s.a", b"of a later life")

        asked.before = comes
        await bus.purge("S", "s.a", below_seq=70)
        found = [seq for _, seq in await left(bus)]
        assert found == [70 + n for n in range((LATE + 2) * len(asked.purges))]
        assert any("keep" in body for body, _ in asked.purges)


@pytest.mark.parametrize("silent", [1, 2])
async def test_a_slice_without_an_answer_shows_how_much_comes_while_the_server_stalls(
    nats_server: NatsServer, asked: Asked, silent: int
) -> None:
    """Whoever asked would begin anew, and know nothing of it; a server that goes on is given up."""
    async with filled(nats_server, *["s.a"] * 69) as bus:
        left_out = silent

        async def stalls() -> None:
            nonlocal left_out
            if left_out:
                left_out -= 1
                for _ in range(20):
                    await bus.append("s.a", b"of a later life")
                raise Unavailable("no answer within 5 s")

        asked.before = stalls
        if silent == 2:
            with pytest.raises(Unavailable, match="no answer"):
                await bus.purge("S", "s.a", below_seq=70)
            return
        await bus.purge("S", "s.a", below_seq=70)
        assert [seq for _, seq in await left(bus)] == [*range(70, 90)]
        keeps = [count for body, count in asked.purges if "keep" in body]
        assert keeps == [SLICE] * 3, "69 were there, and 40 may come"


async def test_who_removes_the_same_meanwhile_changes_nothing(
    nats_server: NatsServer, asked: Asked
) -> None:
    async with filled(nats_server, *["s.a"] * 60, *["s.b"] * 3) as bus:

        async def other() -> None:
            asked.before = None
            await purging.purge_at_once(bus.link, "S", "s.a", seq=40)

        asked.before = other
        await bus.purge("S", "s.a", below_seq=51)
        assert [seq for _, seq in await left(bus)] == [*range(51, 64)]


async def test_a_server_that_is_started_anew_ends_a_purge(
    nats_server: NatsServer, asked: Asked
) -> None:
    """What has come since may have the sequences of what it lost: whoever asked says anew below
    which one it may go."""
    async with filled(nats_server, *["s.a"] * 60) as bus:

        async def anew() -> None:
            if len(asked.purges) == 2:
                life = bus.life
                await nats_server.stop()
                await nats_server.start()
                await until(lambda: bus.connected and bus.life != life, "the next life")

        asked.before = anew
        with pytest.raises(Unavailable, match="lost its end"):
            await bus.purge("S", "s.a", below_seq=61)
        assert len(asked.purges) == 3
        assert [seq for _, seq in await left(bus)] == [*range(1 + 3 * SLICE, 61)]


async def test_where_more_subjects_match_than_are_told_it_is_one_request(
    nats_server: NatsServer, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is counted is too few, and too many would go."""
    matching = purging.matching

    async def told(*where: Any) -> purging.Matching:
        return (await matching(*where))._replace(messages=20, counted=False)

    monkeypatch.setattr(purging, "matching", told)
    async with filled(nats_server, *["s.a"] * 60) as bus:
        assert await bus.purge("S", "s.a", below_seq=31) == 30
        assert asked.purges == [({"filter": "s.a", "seq": 31}, 30)]
        monkeypatch.undo()
        with pytest.raises(NoStream):
            await bus.purge("T", "s.a")
