"""What an answer costs: so much for each member and each run, and not for each pair of them."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from waiting import until

from diloco_coordinator.api import look_io
from diloco_coordinator.api.auth_io import Guard
from diloco_coordinator.api.look_io import CUT_OFF
from diloco_coordinator.api.runs_io import Runs
from diloco_coordinator.api.sse_io import STATE_S
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared import ambient
from diloco_shared.protocol.records import RunStatus

pytestmark = pytest.mark.virtual

RUNS = ("one", "three", "two")
SYNCERS = 4


class Work:
    """How often what takes long was done."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: Counter[str] = Counter()
        self._count(patch, look_io, "syncer_views")
        assigned = Registry.assigned.fget  # type: ignore[attr-defined]

        def counted(registry: Registry) -> Any:
            self.done["assigned"] += 1
            return assigned(registry)

        patch.setattr(Registry, "assigned", property(counted))
        self._count(patch, RunStatus, "model_dump")

    def _count(self, patch: pytest.MonkeyPatch, place: Any, name: str) -> None:
        there: Callable[..., Any] = getattr(place, name)

        def counted(*given: Any, **more: Any) -> Any:
            self.done[name] += 1
            return there(*given, **more)

        patch.setattr(place, name, counted)


async def staffed(world: Any, desk: Any, status: Callable[..., Any]) -> None:
    """Three runs, each with some syncers and learners, and one that nobody works for."""
    registry = desk.registry
    for run in (*RUNS, "zero"):
        await desk.ask("POST", "/v1/runs", {"name": run, "budget": {"steps": 96}})
    for run in RUNS:
        for role in ("syncer", "learner"):
            names = [f"{role}-{run}-{n}" for n in range(SYNCERS)]
            await world.joins(*names, role=role, run=run)
            await until(lambda some=names: registry.roll.living.keys() >= {*some})
            for name in names:
                await registry.assign(name, run)
    for run in RUNS:
        await world.says(status(run))
    await until(lambda: len(registry.statuses) == len(RUNS))


@pytest.mark.parametrize(
    ("path", "syncers"),
    [
        ("/v1/members", len(RUNS)),
        ("/v1/runs?brief=true&limit=1000", len(RUNS) + 1),
        ("/metrics", len(RUNS) + 1),
    ],
)
async def test_who_works_for_what_is_put_together_once_an_answer(
    world: Any,
    status: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    syncers: int,
) -> None:
    async with world.coordinator() as desk:
        await staffed(world, desk, status)
        with monkeypatch.context() as patch:
            work = Work(patch)
            assert (await desk.ask("GET", path)).status_code == 200
        assert work.done == {"assigned": 1, "syncer_views": syncers}, "and no status is written out"


async def test_members_are_shown_as_each_of_them_is(world: Any, status: Callable[..., Any]) -> None:
    async with world.coordinator() as desk:
        await staffed(world, desk, status)
        members = (await desk.get("/v1/members"))["members"]
        assert len(members) == 2 * SYNCERS * len(RUNS)
        for member in members[::5]:
            assert await desk.get(f"/v1/members/{member['id']}") == member
            assert member["assigned"] == member["id"].split("-")[1]


async def test_a_brief_run_is_the_run_without_what_is_long(
    world: Any, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await staffed(world, desk, status)
        long = {"spec", "status", "speeds", "releases", "budget"}
        brief = (await desk.get("/v1/runs?brief=true"))["runs"]
        whole = (await desk.get("/v1/runs"))["runs"]
        assert brief == [{k: v for k, v in run.items() if k not in long} for run in whole]
        assert long < whole[0].keys() and whole[0] == await desk.get("/v1/runs/one")


async def test_members_say_that_they_may_be_old_while_the_message_server_is_away(
    world: Any,
) -> None:
    async with world.coordinator() as desk:
        assert (await desk.get("/v1/members"))["cut_off"] == ""
        desk.registry.bus.disconnect()
        assert (await desk.get("/v1/members"))["cut_off"] == CUT_OFF
        desk.registry.bus.reconnect()
        world.broker.lose_leader()
        told = (await desk.get("/v1/members"))["cut_off"]
        assert "lost its majority" in told and told.endswith("heard last")
        world.broker.elected()
        assert (await desk.get("/v1/members"))["cut_off"] == ""


async def test_readers_of_a_run_share_a_look_and_take_one_at_most_so_often(world: Any) -> None:
    """However often something changes, and whether or not it is of this run."""
    looks = 0
    shown = {"steps": 0, "state": "running"}

    def now() -> dict[str, Any]:
        nonlocal looks
        looks += 1
        return dict(shown)

    async with world.coordinator() as desk:
        heard: list[list[str]] = [[] for _ in range(8)]

        async def read(to: list[str]) -> None:
            over = lambda view: bool(view["state"] == "stopped")  # noqa: E731
            async for piece in desk.streams.states("demo", now, over).body_iterator:
                to.append(piece)

        async with asyncio.TaskGroup() as readers:
            for to in heard:
                readers.create_task(read(to))
            for n in range(400):
                if n % 100 == 99:
                    shown["steps"] += 1
                await desk.registry._notify()
                await asyncio.sleep(STATE_S / 40)
            # Ten times as long as a look is good for.
            assert 8 <= looks <= 12
            shown["state"] = "stopped"
            await desk.registry._notify()
        told = [json.loads(piece.removeprefix("data: ")) for piece in heard[0]]
        assert [t["steps"] for t in told] == [0, 1, 2, 3, 4] and told[-1]["state"] == "stopped"
        assert all(pieces == heard[0] for pieces in heard)
        assert all(piece is heard[0][n] for pieces in heard for n, piece in enumerate(pieces))


async def test_a_reader_is_told_of_what_changed_just_after_another_had_looked(world: Any) -> None:
    """It is given the look of the other one, and nobody tells of that change once more."""
    shown = {"state": "running"}
    over = lambda view: bool(view["state"] == "finished")  # noqa: E731
    async with world.coordinator() as desk:
        began = ambient.monotonic()
        first = desk.streams.states("demo", lambda: dict(shown), over).body_iterator
        assert "running" in await anext(first)
        told = asyncio.create_task(anext(first))
        await asyncio.sleep(2.5 * STATE_S)
        await desk.registry._notify()  # of something else: it looks again in a while
        await asyncio.sleep(0.9 * STATE_S)
        other = desk.streams.states("demo", lambda: dict(shown), over).body_iterator
        assert "running" in await anext(other)
        shown["state"] = "finished"
        await desk.registry._notify()
        assert "finished" in await told
        assert ambient.monotonic() - began < 6 * STATE_S


async def test_a_stream_ends_with_its_run_and_is_not_that_of_another_of_its_name(
    world: Any, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", {"name": "demo", "budget": {"steps": 96}})
        runs = Runs(desk.registry, Guard(desk.registry, "admin"), desk.streams)
        pieces = (await runs.stream("demo")).body_iterator
        assert "queued" in await anext(pieces)
        record = desk.registry.runs["demo"]
        other = record.model_copy(update={"spec": {**record.spec, "id": "another"}})
        desk.registry.runs["demo"] = other
        await desk.registry._notify()
        assert [piece async for piece in pieces] == []


async def test_a_reader_that_comes_later_is_told_of_what_is_now(world: Any) -> None:
    async with world.coordinator() as desk:
        views: list[dict[str, Any] | None] = [{"n": 1}, {"n": 2}, None]

        async def first() -> str:
            states = desk.streams.states("demo", lambda: views[0], lambda _: True)
            return "".join([piece async for piece in states.body_iterator])

        assert await first() == await first() == 'data: {"n": 1}\n\n'
        for told in ('data: {"n": 2}\n\n', ""):
            del views[0]
            await asyncio.sleep(STATE_S)
            assert await first() == told
