"""Samples by REST: text as it comes, one at a time, and what to do where there is none."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator.making import Maker
from waiting import until

from diloco_coordinator.exports import sampling_io
from diloco_coordinator.exports.sampling_io import ChildSampler, Told
from diloco_shared.protocol.samples import (
    PROMPT_CHARS_MAX,
    TOKENS_MAX,
    SampleAsked,
    SampleBegun,
    SampleDone,
    SampleFailed,
    SampleLine,
    SampleText,
)

PLACE = "/v1/runs/demo/samples"


class Author:
    """Writes what a test says, at its word."""

    def __init__(self, *lines: SampleLine) -> None:
        self.lines = lines
        self.go = asyncio.Event()
        self.go.set()
        self.asked: list[tuple[Path, SampleAsked]] = []
        self.ended = 0

    def hindrance(self) -> str:
        return ""

    async def sample(self, folder: Path, asked: SampleAsked, told: Told) -> None:
        self.asked.append((folder, asked))
        try:
            for line in self.lines:
                await self.go.wait()
                told(line)
        finally:
            self.ended += 1


WRITES = (SampleBegun(), SampleText(text="a"), SampleText(text="né\n"), SampleDone(pieces=2))


@pytest.fixture
def maker(world: Any) -> Maker:
    world.exporter, world.sampler = Maker(), Author(*WRITES)
    maker: Maker = world.exporter
    maker.go.set()
    return maker


async def exported(world: Any, desk: Any, status: Callable[..., Any]) -> str:
    """A run with a complete export: its id."""
    run = {"name": "demo", "budget": {"steps": 96}}
    assert (await desk.ask("POST", "/v1/runs", run)).status_code == 201
    await world.says(status("demo"))
    await until(lambda: "demo" in desk.registry.statuses)
    begun = (await desk.ask("POST", "/v1/runs/demo/exports")).json()["id"]
    await until(lambda: desk.exports.records[begun].state == "complete")
    return str(begun)


def told(text: str) -> list[Any]:
    """The data of every event."""
    return [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]


async def test_text_comes_piece_by_piece_from_the_newest_export(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        export = await exported(world, desk, status)
        body = {"prompt": "def ", "tokens": 9, "temperature": 0, "seed": 3}
        answer = await desk.ask("POST", PLACE, body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        first, *pieces, last = told(answer.text)
        assert first == {"begun": True, "export": export, "steps": 24}
        assert pieces == [{"text": "a"}, {"text": "né\n"}]
        assert last == {"done": True, "pieces": 2}
        ((folder, asked),) = world.sampler.asked
        assert folder == desk.exports.shelf.files(desk.exports.records[export])
        assert asked == SampleAsked(prompt="def ", tokens=9, temperature=0.0, seed=3)
        # And again, by its id, as an answer to a message.
        body = {"prompt": "why?", "chat": True, "export": export}
        assert (await desk.ask("POST", PLACE, body)).status_code == 200
        assert world.sampler.asked[-1][1].chat


async def test_without_an_export_it_says_what_to_do(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    maker.go.clear()
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", {"name": "demo", "budget": {"steps": 96}})
        none = await desk.ask("POST", PLACE)
        assert none.status_code == 409
        assert "export the run first (POST /v1/runs/demo/exports" in none.json()["detail"]
        assert (await desk.ask("POST", "/v1/runs/other/samples")).status_code == 404
        await world.says(status("demo"))
        await until(lambda: "demo" in desk.registry.statuses)
        await desk.ask("POST", "/v1/runs/demo/exports")
        going = await desk.ask("POST", PLACE)
        assert going.status_code == 409 and "is being made" in going.json()["detail"]
        maker.go.set()
        await until(lambda: [r.state for r in desk.exports.records.values()] == ["complete"])
        unknown = await desk.ask("POST", PLACE, {"export": "ffff"})
        assert unknown.status_code == 404 and "known: " in unknown.json()["detail"]
        assert not world.sampler.asked


async def test_a_model_of_ones_own_kind_writes_elsewhere(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    maker.known = False
    async with world.coordinator() as desk:
        await exported(world, desk, status)
        answer = await desk.ask("POST", PLACE)
        assert answer.status_code == 409 and "of its own kind" in answer.json()["detail"]


async def test_one_at_a_time_and_the_next_when_it_is_over(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await exported(world, desk, status)
        world.sampler.go.clear()
        first = asyncio.create_task(desk.ask("POST", PLACE))
        await until(lambda: world.sampler.asked)
        busy = await desk.ask("POST", PLACE)
        assert busy.status_code == 429 and busy.headers["Retry-After"] == "5"
        assert "wait for it" in busy.json()["detail"]
        world.sampler.go.set()
        assert told((await first).text)[-1] == {"done": True, "pieces": 2}
        assert (await desk.ask("POST", PLACE)).status_code == 200


async def test_who_goes_away_ends_the_sample(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await exported(world, desk, status)
        world.sampler.go.clear()
        asking = asyncio.create_task(desk.ask("POST", PLACE))
        await until(lambda: world.sampler.asked)
        asking.cancel()
        await until(lambda: world.sampler.ended == 1)
        world.sampler.go.set()
        assert (await desk.ask("POST", PLACE)).status_code == 200


class Stuck(Author):
    """Writes its lines, and then nothing more."""

    async def sample(self, folder: Path, asked: SampleAsked, told: Told) -> None:
        self.asked.append((folder, asked))
        try:
            for line in self.lines:
                told(line)
            await asyncio.Event().wait()
        finally:
            self.ended += 1


class Client:
    """Asks for a sample on a connection of its own, and takes nothing of the answer."""

    def __init__(self, desk: Any) -> None:
        self.left, self.answered = asyncio.Event(), asyncio.Event()
        self.asks = [{"type": "http.request", "body": b"{}", "more_body": False}]
        headers = {"authorization": f"Bearer {desk.token}", "content-type": "application/json"}
        self.asking = asyncio.create_task(
            desk.app(
                {
                    "type": "http",
                    "asgi": {"version": "3.0", "spec_version": "2.3"},
                    "http_version": "1.1",
                    "method": "POST",
                    "scheme": "http",
                    "path": PLACE,
                    "raw_path": PLACE.encode(),
                    "root_path": "",
                    "query_string": b"",
                    "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
                    "client": ("127.0.0.1", 1),
                    "server": ("c", 80),
                },
                self._receive,
                self._send,
            )
        )

    async def _receive(self) -> dict[str, Any]:
        if self.asks:
            return self.asks.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.answered.set()
        if not self.left.is_set():
            await asyncio.Event().wait()


async def test_who_leaves_before_the_first_word_ends_the_sample(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    """Else nobody else could have one for as long as it may take."""
    world.sampler = Stuck()
    async with world.coordinator() as desk:
        await exported(world, desk, status)
        client = Client(desk)
        await until(lambda: world.sampler.asked)
        client.left.set()
        await until(client.asking.done)
        assert world.sampler.ended == 1


async def test_who_leaves_while_the_answer_begins_ends_the_sample(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    """Its stream is never begun then."""
    world.sampler = Stuck(SampleBegun())
    async with world.coordinator() as desk:
        await exported(world, desk, status)
        client = Client(desk)
        await client.answered.wait()
        client.left.set()
        await until(client.asking.done)
        await until(lambda: world.sampler.ended == 1)


async def test_what_fails_is_a_problem_before_the_first_word_and_an_event_behind_it(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await exported(world, desk, status)
        world.sampler.lines = (SampleFailed(reason="it has no tokenizer"),)
        early = await desk.ask("POST", PLACE)
        assert (early.status_code, early.json()["detail"]) == (422, "it has no tokenizer")
        world.sampler.lines = (*WRITES[:2], SampleFailed(reason="no more memory"))
        late = await desk.ask("POST", PLACE)
        assert told(late.text)[1:] == [{"text": "a"}, {"failed": "no more memory"}]


async def test_a_coordinator_without_what_models_need_says_so(
    world: Any, maker: Maker, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sampler = ChildSampler({}, ("/nowhere",))
    monkeypatch.setattr(sampling_io, "NEEDED", ("diloco_learner", "no_such_module"))
    async with world.coordinator() as desk:
        await exported(world, desk, status)
        answer = await desk.ask("POST", PLACE)
        assert answer.status_code == 501
        assert "lacks no_such_module" in answer.json()["detail"]
        assert "diloco generate" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"tokens": TOKENS_MAX + 1}, "tokens"),
        ({"tokens": 0}, "tokens"),
        ({"prompt": "x" * (PROMPT_CHARS_MAX + 1)}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"seed": 2**32}, "seed"),
        ({"folder": "/etc"}, "folder"),
    ],
)
async def test_what_is_beyond_a_limit_is_refused(
    world: Any, maker: Maker, status: Callable[..., Any], body: Any, path: str
) -> None:
    async with world.coordinator() as desk:
        await exported(world, desk, status)
        answer = await desk.ask("POST", PLACE, body)
        assert answer.status_code == 422 and answer.json()["errors"][0]["path"] == path
        assert not world.sampler.asked


async def test_it_needs_the_right_of_an_export(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await exported(world, desk, status)
        made = await desk.ask("POST", "/v1/tokens", {"name": "eve", "scopes": ["read"]})
        desk.token = made.json()["token"]
        assert (await desk.ask("POST", PLACE)).status_code == 403
