"""/v1/runs/RUN/rounds: a few records are read at a time, and an answer has a few megabytes."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_coordinator.api import rounds_io
from diloco_shared.checkpoints.tape_archive_io import TapeArchive
from diloco_shared.checkpoints.vault_io import Vault
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Verdict
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec

pytestmark = pytest.mark.virtual

SPEC: dict[str, Any] = {"name": "demo", "budget": {"steps": 96}}
PLACE = "/v1/runs/demo/rounds"


class Watched:
    """How many records are decoded between two awaits: in a thread, or else the loop is `held`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pieces: list[int] = []
        self.held = 0
        self._threads = 0
        decode, to_thread = rounds_io.decode_tape, asyncio.to_thread

        async def counted(work: Callable[..., Any], *given: Any) -> Any:
            self._threads, before = 1, self.count
            try:
                return await to_thread(work, *given)
            finally:
                self._threads = 0
                if self.count > before:
                    self.pieces.append(self.count - before)

        def decoded(payload: bytes) -> Any:
            self.count += 1
            self.held += not self._threads
            return decode(payload)

        self.count = 0
        patch.setattr(rounds_io.asyncio, "to_thread", counted)
        patch.setattr(rounds_io, "decode_tape", decoded)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


async def test_records_are_read_a_few_at_a_time_and_not_by_the_loop(
    world: Any, closed: Callable[..., Any], watched: Watched
) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.tape("demo", *(closed(n) for n in range(50)))
        page = await desk.get(f"{PLACE}?limit=1000")
        assert [r["round"] for r in page["rounds"]] == list(range(50)) and page["next"] is None
        assert sum(watched.pieces) == 50 and max(watched.pieces) <= rounds_io.AT_ONCE
        assert watched.held == 0


async def test_an_answer_is_bounded_in_bytes_and_says_where_to_go_on(
    world: Any, closed: Callable[..., Any], watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds_io, "ANSWER_BYTES_MAX", 4000)
    verdict = Verdict(learner="a", incarnation=0, outcome="merged", reason="in time")
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        # The first one is larger than an answer may be: it is told all the same.
        await world.tape("demo", closed(0, *[verdict] * 30), *(closed(n) for n in range(1, 60)))
        after: int | None = 0
        pages = []
        while after is not None:
            watched.pieces.clear()
            answer = await desk.ask("GET", f"{PLACE}?limit=1000&after={after}")
            page = answer.json()
            pages.append([r["round"] for r in page["rounds"]])
            assert len(answer.content) < 4100 or len(pages[-1]) == 1
            assert sum(watched.pieces) <= len(pages[-1]) + rounds_io.AT_ONCE
            after = page["next"]
        assert pages[0] == [0] and [n for some in pages for n in some] == [*range(60)]
        assert len(pages) > 5


@pytest.mark.parametrize("limit", [1, 7, 59])
async def test_next_is_set_as_long_as_rounds_follow(
    world: Any, closed: Callable[..., Any], term: Any, limit: int
) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.tape("demo", *(closed(n) for n in range(60)), term)
        page = await desk.get(f"{PLACE}?limit={limit}")
        assert page["next"] == page["rounds"][-1]["seq"] == limit
        assert (await desk.get(f"{PLACE}?after={60 - limit}&limit={limit}"))["next"] is None


@pytest.mark.parametrize("newest", [1, 3, 100])
async def test_the_newest_rounds_are_found_wherever_they_lie_on_the_tape(
    world: Any, closed: Callable[..., Any], term: Any, watched: Watched, newest: int
) -> None:
    """Of two shards, which number their rounds by themselves, with other records between."""
    sharded = SPEC | {"algorithm": {"fragments": 2, "shards": 2}}
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", sharded)
        assert await desk.get(f"{PLACE}?newest={newest}") == {"rounds": [], "next": None}
        for n in range(60):
            await world.tape("demo", term, closed(n))
            await world.bus.append(subjects.tape("demo", 1), encode(closed(n)))
        await world.tape("demo", *[term] * 40)
        whole = (await desk.get(f"{PLACE}?limit=1000"))["rounds"]
        assert len(whole) == 120 and {r["shard"] for r in whole} == {0, 1}
        watched.pieces.clear()
        page = await desk.get(f"{PLACE}?newest={newest}")
        assert page == {"rounds": whole[-newest:], "next": None}
        assert sum(watched.pieces) <= 40 + 2 * newest, "what lies before them is not read"
        seen = whole[-2]["seq"]
        page = await desk.get(f"{PLACE}?newest={newest}&after={seen}")
        assert page["rounds"] == whole[-1:], "of those after it"
        last = whole[-1]["seq"]
        assert (await desk.get(f"{PLACE}?newest={newest}&after={last}"))["rounds"] == []


async def test_the_newest_that_do_not_fit_into_one_answer_come_in_several(
    world: Any, closed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds_io, "ANSWER_BYTES_MAX", 4000)
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.tape("demo", *(closed(n) for n in range(60)))
        found: list[int] = []
        after: int | None = 0
        while after is not None:
            page = await desk.get(f"{PLACE}?newest=20&after={after}")
            found, after = found + [r["round"] for r in page["rounds"]], page["next"]
        assert found == list(range(40, 60))


async def test_an_archived_segment_is_fetched_once_for_an_answer(
    world: Any,
    closed: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its records are large, and a few of them are read at a time."""
    monkeypatch.setattr(rounds_io, "FETCH_FIRST", 8)
    monkeypatch.setattr(rounds_io, "FETCH_MAX", 8)
    world.checkpoints = str(tmp_path)
    async with world.coordinator() as desk:
        made = (await desk.ask("POST", "/v1/runs", SPEC)).json()["spec"]
        await world.tape("demo", *(closed(n) for n in range(200)))
        stream = subjects.tape_stream("demo")
        archive = TapeArchive(str(tmp_path), RunSpec.model_validate(made).folder)
        every = await world.bus.fetch(stream, "tape.demo.0", limit=150)
        for at in (0, 50, 100):
            archive.write(every[at : at + 50])
        await world.bus.purge(stream, ">", below_seq=151)
        read, fetched = Vault.read, list[str]()

        def counted(vault: Vault, key: str, **more: Any) -> Any:
            fetched.append(key)
            return read(vault, key, **more)

        monkeypatch.setattr(Vault, "read", counted)
        page = await desk.get(f"{PLACE}?limit=1000")
        assert [r["round"] for r in page["rounds"]] == list(range(200))
        *before, last = (segment.key for segment in archive.segments())
        assert [fetched.count(key) for key in before] == [1, 1]
        # At the end of the archive it is looked again: records may have come into it meanwhile.
        assert fetched.count(last) <= 3


async def test_nothing_more_is_read_for_whoever_has_gone(
    world: Any, closed: Callable[..., Any], watched: Watched
) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.tape("demo", *(closed(n) for n in range(60)))
        said = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> dict[str, Any]:
            return next(said, {"type": "http.disconnect"})

        async def send(message: dict[str, Any]) -> None:
            pass

        scope = {
            "type": "http",
            "method": "GET",
            "path": PLACE,
            "raw_path": PLACE.encode(),
            "query_string": b"limit=1000",
            "headers": [(b"authorization", f"Bearer {desk.token}".encode())],
        }
        await desk.app(scope, receive, send)
        assert watched.pieces == [rounds_io.AT_ONCE]


def test_a_page_ends_before_the_round_that_it_has_no_room_for() -> None:
    page = rounds_io.Page(2)
    assert page.take(3, b"{}") and json.loads(page.json()) == {"rounds": [{}], "next": None}
    assert page.take(5, b"{}") and not page.take(8, b"{}")
    assert json.loads(page.json()) == {"rounds": [{}, {}], "next": 5}
