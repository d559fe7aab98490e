"""/v1/chaos over a memory bus: forwarded to the target's own agent, and refused for a reason."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from waiting import until

from diloco_shared.process.chaos import Abilities, FaultAgent
from diloco_simulator.hub.bus import MemoryBus


@asynccontextmanager
async def agent(world: Any, target: str, *, enabled: bool = True) -> AsyncIterator[FaultAgent]:
    """A process that would be harmed, but only notes it."""
    bus = MemoryBus(world.broker, target)
    found = FaultAgent(bus, target, enabled=enabled, abilities=Abilities(kill=lambda: None))
    found.answer_s = 0.0
    serving = asyncio.create_task(found.serve())
    yield found
    serving.cancel()
    await asyncio.gather(serving, *found.tasks, return_exceptions=True)


async def _answered(desk: Any, body: dict[str, Any]) -> Any:
    """Until the agent listens."""

    async def ask() -> Any:
        answer = await desk.ask("POST", "/v1/chaos", body)
        return answer if answer.status_code != 503 else None

    return await until(ask)


async def test_a_fault_is_planned_applied_and_told(world: Any) -> None:
    async with world.coordinator() as desk, agent(world, "a"):
        await world.joins("a")
        await until(lambda: desk.registry.roll.living)
        answer = await _answered(desk, {"kind": "kill", "target": "a"})
        assert answer.status_code == 202
        assert answer.json()["when"] == "in 0 s"

        async def truth() -> Any:
            (fault,) = (await desk.get("/v1/chaos"))["faults"] or [{}]
            return fault if "applied_at" in fault and "planned_at" in fault else None

        fault = await until(truth)
        assert (fault["id"], fault["target"]) == (answer.json()["id"], "a")


async def test_a_fault_at_a_step_waits_for_it(world: Any) -> None:
    async with world.coordinator() as desk, agent(world, "a") as there:
        there.stepped(5)
        await world.joins("a")
        await until(lambda: desk.registry.roll.living)
        answer = await _answered(desk, {"kind": "kill", "target": "a", "at_step": 9})
        assert answer.json()["when"] == "at step 9 (now 5)"
        assert [f.at_step for f in there.armed] == [9]
        await until(lambda: len(desk.registry.events) == 1)
        (planned,) = (e for _, e in desk.registry.events)
        assert planned.text == "a is to be killed at step 9 (now 5)"


async def test_a_repeated_request_inflicts_one_fault(world: Any) -> None:
    async with world.coordinator() as desk, agent(world, "a") as there:
        there.stepped(5)
        await world.joins("a")
        await until(lambda: desk.registry.roll.living)
        body = {"kind": "kill", "target": "a", "at_step": 9}
        await _answered(desk, {"kind": "kill", "target": "a", "at_step": 99})
        first = await desk.ask("POST", "/v1/chaos", body, Idempotency_Key="k")
        await until(lambda: len(desk.registry.events) == 2)
        again = await desk.ask("POST", "/v1/chaos", body, Idempotency_Key="k")
        assert first.json() == again.json()
        assert sorted(f.at_step for f in there.armed) == [9, 99]


@pytest.mark.parametrize(
    "more",
    [
        {"duration_s": 3},
        {"kind": "slow", "factor": 3},
        {"target": "b"},
        {"kind": "kill", "duration_s": 0},
        {"at_step": 8},
        {"at_step": None, "after_s": 2},
    ],
)
async def test_a_key_stands_for_one_fault(world: Any, more: dict[str, Any]) -> None:
    """Another one was answered with 202, and nothing was inflicted."""
    async with world.coordinator() as desk, agent(world, "a") as there:
        there.stepped(5)
        for member in "ab":
            await world.joins(member)
        await until(lambda: len(desk.registry.roll.living) == 2)
        await _answered(desk, {"kind": "kill", "target": "a", "at_step": 99})
        first = {"kind": "hang", "target": "a", "duration_s": 5, "at_step": 9}
        assert (await desk.ask("POST", "/v1/chaos", first, Idempotency_Key="k")).status_code == 202
        await until(lambda: len(desk.registry.events) >= 2)
        answer = await desk.ask("POST", "/v1/chaos", first | more, Idempotency_Key="k")
        assert answer.status_code == 422
        assert answer.json()["title"] == "Another request used this Idempotency-Key"
        again = await desk.ask("POST", "/v1/chaos", first | {"run": ""}, Idempotency_Key="k")
        assert again.status_code == 202


async def test_a_repeat_is_known_after_its_target_has_gone(world: Any) -> None:
    async with world.coordinator() as desk, agent(world, "a") as there:
        there.stepped(5)
        await world.joins("a")
        await until(lambda: desk.registry.roll.living)
        await _answered(desk, {"kind": "kill", "target": "a", "at_step": 99})
        body = {"kind": "kill", "target": "a", "at_step": 9}
        first = await desk.ask("POST", "/v1/chaos", body, Idempotency_Key="k")
        assert first.status_code == 202
        await until(lambda: len(desk.registry.events) == 2)
        await world.dies("a")
        await until(lambda: not desk.registry.roll.living)
        again = await desk.ask("POST", "/v1/chaos", body, Idempotency_Key="k")
        assert (again.status_code, again.json()) == (202, first.json())


async def test_refusals_say_why(world: Any) -> None:
    async with world.coordinator() as desk, agent(world, "a"):
        await world.joins("a")
        await until(lambda: desk.registry.roll.living)
        unknown = await desk.ask("POST", "/v1/chaos", {"kind": "kill", "target": "z"})
        assert unknown.status_code == 404
        assert "known: a, nats. Who was just started" in unknown.json()["detail"]
        cannot = await _answered(desk, {"kind": "nan", "target": "a"})
        assert cannot.status_code == 409
        other = await desk.ask("POST", "/v1/chaos", {"kind": "kill", "target": "a", "run": "x"})
        assert (other.status_code, other.json()["title"]) == (409, "Another run's target")
        wrong = {"kind": "burn", "target": "a", "factor": 0}
        faults = (await desk.ask("POST", "/v1/chaos", wrong)).json()["errors"]
        assert {f["path"] for f in faults} == {"kind", "factor"}
        silent = await desk.ask("POST", "/v1/chaos", {"kind": "kill", "target": "nats"})
        assert silent.status_code == 503


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"kind": "kill", "duration_s": 5}, "duration_s is for hang and slow: kill has no end"),
        ({"kind": "hang", "duration_s": 5, "factor": 3}, "factor is for slow, not for hang"),
        ({"kind": "kill", "at_step": 9, "after_s": 2}, "give at_step or after_s, not both"),
    ],
)
async def test_what_does_not_belong_to_a_fault_is_refused(
    world: Any, more: dict[str, Any], said: str
) -> None:
    async with world.coordinator() as desk, agent(world, "a") as there:
        await world.joins("a")
        await until(lambda: desk.registry.roll.living)
        answer = await desk.ask("POST", "/v1/chaos", {"target": "a", **more})
        assert answer.status_code == 422 and said in answer.text
        assert not there.armed and not there.tasks


async def test_the_message_server_is_everybodys(world: Any) -> None:
    async with world.coordinator() as desk:
        asked = {"kind": "kill", "target": "nats"}
        limited = await desk.makes("eve", "fault", runs=["demo"])
        answer = await desk.asks_as(limited, "POST", "/v1/chaos", asked)
        assert (answer.status_code, answer.json()["title"]) == (
            403,
            "The token does not allow this",
        )
        anywhere = await desk.makes("anna", "fault")
        answer = await desk.asks_as(anywhere, "POST", "/v1/chaos", asked)
        assert answer.status_code == 503, "let in; no supervisor is here who could do it"


async def test_who_may_not_see_a_member_is_not_told_its_name(world: Any) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", {"name": "demo", "budget": {"steps": 96}})
        await world.joins("syncer-1", role="syncer")
        await world.joins("a", run="demo")
        await until(lambda: {"a", "syncer-1"} <= desk.registry.assigned.keys())
        await world.joins("idle", role="supervisor")
        await world.joins("mine-1", role="coordinator")
        await until(lambda: "mine-1" in desk.registry.roll.living)
        eve = await desk.makes("eve", "read", "fault", runs=["other"], sites=["mine-*"])
        asked = {"kind": "kill", "target": "mine-2"}
        answer = await desk.asks_as(eve, "POST", "/v1/chaos", asked)
        assert answer.status_code == 404
        assert "'mine-2'; known: mine-1, nats. Who" in answer.json()["detail"]
        every = await desk.ask("POST", "/v1/chaos", asked)
        assert "known: a, mine-1, nats, syncer-1. Who" in every.json()["detail"]


async def test_chaos_is_off_unless_the_deployment_says_so(world: Any) -> None:
    async with world.coordinator(chaos=False) as desk:
        await world.joins("a")
        answer = await desk.ask("POST", "/v1/chaos", {"kind": "kill", "target": "a"})
        assert (answer.status_code, answer.json()["title"]) == (403, "No faults are allowed here")
        assert "DILOCO_CHAOS=1" in answer.json()["detail"]
        assert not (await desk.get("/v1/access"))["chaos"]
