"""The wish to begin again from what is published: refused while a syncer may have more."""

from typing import Any

import pytest
from waiting import until

from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeTerm
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import decode

pytestmark = pytest.mark.virtual

WHY = "the tape needs x, which is gone: 'diloco begin-again demo' begins a new epoch"


async def begun(
    desk: Any, world: Any, status: Any, *syncers: tuple[str, str], tape: bool = True
) -> None:
    """A run with these syncers (id, state)."""
    await world.joins("a", "b")
    for name, state in syncers:
        shown = {"run": "demo", "state": state, "reason": WHY if state == "ineligible" else ""}
        await world.joins(name, role="syncer", **shown)
    created = await desk.ask("POST", "/v1/runs", {"name": "demo", "budget": {"steps": 96}})
    assert created.status_code == 201, created.text
    if tape:
        await world.tape("demo", TapeTerm(epoch=0, term=1, leader="s1", at=1.0))
    await world.says(status())

    async def shown() -> bool:
        run = await desk.get("/v1/runs/demo")
        return [s["state"] for s in run["syncers"]] == [state for _, state in syncers]

    await until(shown)


async def test_the_run_says_that_it_cannot_go_on_and_what_to_do(world: Any, status: Any) -> None:
    async with world.coordinator() as desk:
        await begun(desk, world, status, ("s1", "ineligible"), ("s2", "ineligible"))
        run = await desk.get("/v1/runs/demo")
        assert (run["state"], run["reason_codes"]) == ("leaderless", ["syncers-unfit"])
        assert run["reason"].endswith(WHY), "which names the command"


async def test_the_wish_names_the_end_of_the_tape(world: Any, status: Any) -> None:
    async with world.coordinator() as desk:
        await begun(desk, world, status, ("s1", "ineligible"))
        answer = await desk.ask("POST", "/v1/runs/demo/begin-again")
        assert answer.status_code == 202, answer.text
        entry = await world.bus.kv_get(subjects.RUNS, "demo")
        assert decode(entry.value, RunRecord).begin_again == 1
        await desk.ask("POST", "/v1/runs/demo/begin-again")
        last = (await world.bus.stream_info(subjects.EVENTS_STREAM)).last_seq
        await until(lambda: desk.registry.told.newest == last)
        events = (await desk.get("/v1/events"))["events"]
        assert [e["kind"] for e in events].count("begin-again") == 1


async def test_it_is_refused_while_somebody_leads_or_may(world: Any, status: Any) -> None:
    for state in ("leading", "standby", "catching up"):
        async with world.coordinator() as desk:
            await begun(desk, world, status, ("s1", "ineligible"), ("s2", state))
            assert (await desk.get("/v1/runs/demo"))["reason_codes"] == ["running"]
            answer = await desk.ask("POST", "/v1/runs/demo/begin-again")
            assert answer.status_code == 409
            assert "need not begin again" in answer.json()["title"]
        world = type(world)()


async def test_nothing_is_wished_for_on_an_empty_tape(world: Any, status: Any) -> None:
    """The wish names its newest record; 0 would say that nobody ever wished."""
    async with world.coordinator() as desk:
        await begun(desk, world, status, ("s1", "ineligible"), tape=False)
        answer = await desk.ask("POST", "/v1/runs/demo/begin-again")
        assert answer.status_code == 409 and "empty" in answer.json()["detail"]
