"""What each route of the API needs: a table of all of them, and what happens to who has less."""

import asyncio
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from waiting import until

from diloco_coordinator.access import SCOPES

# What a route needs, and what that is about: the "run" or "member" that it names, in its path or
# its body, or the "cluster". A new route needs a line here.
ROUTES = {
    "POST /v1/runs": ("operate", "run"),
    "GET /v1/runs": ("read", "cluster"),
    "GET /v1/runs/{run}": ("read", "run"),
    "PATCH /v1/runs/{run}": ("operate", "run"),
    "DELETE /v1/runs/{run}": ("operate", "run"),
    "POST /v1/runs/{run}/pause": ("operate", "run"),
    "POST /v1/runs/{run}/resume": ("operate", "run"),
    "POST /v1/runs/{run}/stop": ("operate", "run"),
    "POST /v1/runs/{run}/begin-again": ("operate", "run"),
    "GET /v1/runs/{run}/rounds": ("read", "run"),
    "GET /v1/runs/{run}/metrics": ("read", "run"),
    "GET /v1/runs/{run}/recoveries": ("read", "run"),
    "GET /v1/runs/{run}/stream": ("read", "run"),
    "GET /v1/checkpoints": ("read", "cluster"),
    "DELETE /v1/checkpoints/{folder}": ("operate", "run"),
    "DELETE /v1/checkpoints/{folder}/{number}": ("operate", "run"),
    "GET /v1/runs/{run}/checkpoints": ("read", "run"),
    "POST /v1/runs/{run}/checkpoints": ("operate", "run"),
    "GET /v1/runs/{run}/checkpoints/{number}": ("read", "run"),
    "DELETE /v1/runs/{run}/checkpoints/{number}": ("operate", "run"),
    "POST /v1/runs/{run}/checkpoints/{number}/restore": ("operate", "run"),
    "POST /v1/checkpoints/submit": ("operate", "run"),
    "POST /v1/runs/{run}/exports": ("operate", "run"),
    "GET /v1/runs/{run}/exports": ("read", "run"),
    "GET /v1/runs/{run}/exports/{export}": ("read", "run"),
    "DELETE /v1/runs/{run}/exports/{export}": ("operate", "run"),
    "GET /v1/runs/{run}/exports/{export}/files/{file}": ("read", "run"),
    "POST /v1/runs/{run}/samples": ("operate", "run"),
    "GET /v1/members": ("read", "cluster"),
    "GET /v1/members/{member}": ("read", "member"),
    "DELETE /v1/members/{member}": ("operate", "member"),
    "POST /v1/members/{member}/drain": ("operate", "member"),
    "DELETE /v1/members/{member}/drain": ("operate", "member"),
    "GET /v1/events": ("read", "cluster"),
    "GET /v1/events/stream": ("read", "cluster"),
    "GET /v1/access": ("read", "cluster"),
    "GET /v1/tokens": ("administer", "cluster"),
    "POST /v1/tokens": ("administer", "cluster"),
    "DELETE /v1/tokens/{name}": ("administer", "cluster"),
    "POST /v1/tokens/{name}/rotate": ("administer", "cluster"),
    "GET /v1/audit": ("administer", "cluster"),
    "POST /v1/chaos": ("fault", "member"),
    "GET /v1/chaos": ("read", "cluster"),
    "GET /v1/plan": ("read", "cluster"),
    "GET /metrics": ("read", "cluster"),
    "POST /v1/plan": ("read", "cluster"),
}
OPEN = {"GET /healthz", "GET /readyz"}
# It has no end where it is allowed.
ENDLESS = "GET /v1/events/stream"
LIMITS: dict[str, dict[str, list[str]]] = {
    "none": {},
    "runs": {"runs": ["mine*"]},
    "sites": {"sites": ["mine*"]},
    "both": {"runs": ["mine*"], "sites": ["mine*"]},
}
# By what a route is about: who may change what, of those whose token has the scope.
MAY_CHANGE = {
    "run": {("runs", "mine"), ("both", "mine")},
    "member": {("sites", "mine"), ("both", "mine")},
    "cluster": set(),
}
MAY_NOT_READ = {("run", "runs", "theirs"), ("run", "both", "theirs")}


def expected(needed: str, about: str, scope: str, limit: str, whose: str) -> bool:
    if scope != needed:
        return False
    if limit == "none":
        return True
    if scope == "read":
        return (about, limit, whose) not in MAY_NOT_READ
    return (limit, whose) in MAY_CHANGE[about]


def routes(app: Any) -> set[str]:
    described = app.openapi()["paths"]
    return {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}


def hidden(app: Any) -> Iterator[str]:
    """Routes that the API's description leaves out."""
    for included in app.routes:
        if not getattr(included, "include_in_schema", True) and included.path != app.openapi_url:
            yield included.path
        for route in getattr(getattr(included, "original_router", None), "routes", ()):
            if not route.include_in_schema:
                yield route.path


def body_of(route: str, whose: str) -> Any:
    match route:
        case "POST /v1/chaos":
            return {"kind": "kill", "target": whose}
        case "POST /v1/runs" | "POST /v1/checkpoints/submit":
            return {"name": whose}
        case _:
            return {} if route.startswith(("POST", "PATCH")) else None


def place_of(route: str, whose: str) -> str:
    query = f"?checkpoint={whose}.ab/000001" if route == "POST /v1/checkpoints/submit" else ""
    folder = f"{whose}.ab"
    path = route.partition(" ")[2]
    return path.format(
        run=whose, member=whose, number=1, folder=folder, export="x", file="y", name="nobody"
    ) + (query)


async def test_every_route_has_a_line_in_the_table(world: Any) -> None:
    async with world.coordinator() as desk:
        there = routes(desk.app) | {f"GET {path}" for path in hidden(desk.app)}
        assert there == ROUTES.keys() | OPEN, "say in ROUTES what the new route needs"


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("scope", SCOPES)
async def test_every_route_lets_in_who_may_and_nobody_else(
    world: Any, scope: str, limit: str
) -> None:
    if scope == "administer" and limit != "none":
        pytest.skip("no such token can be made")
    async with world.coordinator() as desk:
        token = await desk.makes("eve", scope, **LIMITS[limit])
        for (route, (needed, about)), whose in product(ROUTES.items(), ("mine", "theirs")):
            may = expected(needed, about, scope, limit, whose)
            if route == ENDLESS and may:
                continue
            method, place = route.partition(" ")[0], place_of(route, whose)
            answer = await desk.asks_as(token, method, place, body_of(route, whose))
            let_in = answer.status_code not in (401, 403, 429)
            assert let_in is may, (route, whose, answer.text)
            if not let_in:
                assert answer.json()["title"] == "The token does not allow this"


async def test_who_may_not_ask_is_told_so_before_the_faults_of_what_was_asked(world: Any) -> None:
    async with world.coordinator() as desk:
        eve = await desk.makes("eve", "read")
        for path in ("/v1/chaos", "/v1/runs", "/v1/checkpoints/submit?checkpoint=x.ab/000001"):
            answer = await desk.asks_as(eve, "POST", path, {"kind": 5, "nobody": "knows"})
            assert (path, answer.status_code) == (path, 403), answer.text


async def test_lists_leave_out_what_the_token_may_not_see(world: Any) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", {"name": "theirs", "budget": {"steps": 96}})
        await world.joins("syncer-1", role="syncer")
        await world.joins("a")
        await until(lambda: desk.registry.assigned.get("a") == "theirs")
        await desk.ask("POST", "/v1/runs", {"name": "mine", "budget": {"steps": 96}})
        await world.joins("idle", role="supervisor")
        await until(lambda: "idle" in desk.registry.roll.notes)
        await world.tells("evaluation", "theirs", val_loss=1.0, steps=1)
        await world.tells("fault-planned", "theirs", id="f1", kind="kill", target="a")
        await until(lambda: len([e for _, e in desk.registry.events if e.run == "theirs"]) >= 3)
        eve = await desk.makes("eve", "read", runs=["mine"])

        async def shown(path: str, key: str) -> list[Any]:
            found: list[Any] = (await desk.asks_as(eve, "GET", path)).json()[key]
            return found

        assert [r["name"] for r in await shown("/v1/runs", "runs")] == ["mine"]
        assert [m["id"] for m in await shown("/v1/members", "members")] == ["idle"]
        events = await shown("/v1/events?limit=1", "events")
        assert [e["run"] for e in events] == ["mine"], "what is left out takes no place on a page"
        assert {e["run"] for e in await shown("/v1/events", "events")} == {"mine"}
        assert await shown("/v1/chaos", "faults") == []
        metrics = (await desk.asks_as(eve, "GET", "/metrics")).text
        assert 'run="mine"' in metrics
        assert "theirs" not in metrics and '"a"' not in metrics
        assert "theirs" in (await desk.ask("GET", "/metrics")).text
        absent = await desk.asks_as(
            await desk.makes("bob", "read", runs=["m*"]), "GET", "/v1/runs/m"
        )
        assert absent.status_code == 404 and "theirs" not in absent.text
        assert (await desk.get("/v1/chaos"))["faults"], "there is one to be left out"


async def test_a_limited_token_begins_nothing_with_a_foreign_checkpoint(
    world: Any, kept: Any
) -> None:
    theirs = {"name": "theirs", "id": "ab", "budget": {"steps": 96}}
    ref = kept(theirs, 1)
    mine = {"name": "mine", "budget": {"steps": 96}, "algorithm": {"fragments": 2}}
    async with world.coordinator() as desk:
        eve = await desk.makes("eve", "read", "operate", runs=["mine"])
        for path, body in (
            (f"/v1/checkpoints/submit?checkpoint={ref}", mine),
            (f"/v1/checkpoints/submit?checkpoint={world.checkpoints}/mine.ab/000001", mine),
            ("/v1/runs", {**mine, "model": {"weights": f"checkpoint:{ref}"}}),
        ):
            assert (await desk.asks_as(eve, "POST", path, body)).status_code == 403, path
        listed = (await desk.asks_as(eve, "GET", "/v1/checkpoints")).json()
        assert listed == {"checkpoints": [], "damaged": [], "tapes": [], "next": None}
        assert len((await desk.get("/v1/checkpoints"))["checkpoints"]) == 1
        unlimited = await desk.ask("POST", f"/v1/checkpoints/submit?checkpoint={ref}", mine)
        assert unlimited.status_code != 403


async def test_a_stream_ends_when_its_token_does(world: Any) -> None:
    async with world.coordinator() as desk:
        eve = await desk.makes("eve", "read")
        headers = {"Authorization": f"Bearer {eve}"}
        reading = desk.http.stream("GET", "/v1/events/stream", headers=headers)

        async def revoke_soon() -> None:
            await until(lambda: desk.streams.open == 1)
            await desk.ask("DELETE", "/v1/tokens/eve")
            await world.tells("evaluation", "demo", val_loss=1.0, steps=1)

        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(revoke_soon())
            async with reading as answer:
                assert "val_loss" not in (await answer.aread()).decode()
        assert desk.streams.open == 0
