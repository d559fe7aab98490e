"""Exports and members of a coordinator whose clock was ahead for a time."""

from collections.abc import Callable
from typing import Any

import pytest
from coordinator.making import Maker
from waiting import until

from diloco_coordinator.runs.assigning_io import assign
from diloco_coordinator.runs.scheduler import GRACE_S
from diloco_shared import ambient
from diloco_shared.ambient import System

KEEPING = {"export_every_rounds": 10, "exports": 2}
SPEC: dict[str, Any] = {"name": "demo", "budget": {"steps": 96}, "keeping": KEEPING}


class Ahead(System):
    """The machine's clocks; `by_s` is how far that of the wall is ahead."""

    by_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.by_s


async def test_what_is_made_after_its_clock_was_mended_is_no_older(
    world: Any, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each one were the first to go, and would be due again at the next look."""
    monkeypatch.setattr("diloco_coordinator.exports.exporting_io.LOOK_S", 0.01)
    maker = world.exporter = Maker()
    maker.go.set()

    async def exported(desk: Any, committed: int) -> None:
        await world.says(status("demo", rounds_committed=committed))
        await until(lambda: maker.asked and maker.asked[-1].rounds == committed)
        await until(lambda: not any(r.state == "running" for r in desk.exports.records.values()))

    with ambient.using(clock := Ahead()):
        clock.by_s = 9 * 3600.0
        async with world.coordinator() as desk:
            assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 201
            for committed in (10, 20, 30):
                await exported(desk, committed)
            clock.by_s = 0.0
            for committed in (40, 50, 60):
                await exported(desk, committed)
        async with world.coordinator() as desk:  # nor after a restart
            await until(lambda: "demo" in desk.registry.statuses)
            for committed in (70, 80):
                await exported(desk, committed)
            found = (await desk.get("/v1/runs/demo/exports"))["exports"]
            for each in found:
                await desk.ask("DELETE", f"/v1/runs/demo/exports/{each['id']}")
            for _ in range(10):
                await desk.exports.look()
    assert [r.rounds for r in maker.asked] == [10, 20, 30, 40, 50, 60, 70, 80]
    assert [e["rounds"] for e in found] == [70, 80]
    assert "serial" not in found[0]


async def test_the_place_of_a_member_that_died_before_the_clock_was_set_back_is_given_to_another(
    world: Any,
) -> None:
    """A machine that begins a day ahead would keep the place for a day."""
    alone = {"learners_min": 1, "learners_max": 1}
    with ambient.using(clock := Ahead()):
        clock.by_s = 86_400.0
        async with world.coordinator() as desk:
            made = await desk.ask("POST", "/v1/runs", {**SPEC, "membership": alone})
            assert made.status_code == 201, made.text
            await world.joins("syncer-1", role="syncer")
            await world.joins("learner-1")
            await until(lambda: desk.registry.assigned.get("learner-1") == "demo")
            await world.joins("learner-2")
            await world.dies("learner-1")
            await until(lambda: not desk.registry.roll.notes["learner-1"].alive)
            clock.by_s = 0.0
            await assign(desk.registry)
            assert "learner-2" not in desk.registry.assigned, "the other may be back in a moment"
            clock.by_s = GRACE_S + 1.0
            await assign(desk.registry)
            assert desk.registry.assigned.get("learner-2") == "demo"
