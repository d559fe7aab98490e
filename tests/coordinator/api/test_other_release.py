"""A run that another release submitted, with settings that this one does not know."""

from typing import Any

import pytest
from structlog.testing import capture_logs
from waiting import until

from diloco_coordinator.runs.assigning_io import Specs, assign
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Assignment, RunRecord
from diloco_shared.protocol.wire import encode

pytestmark = pytest.mark.virtual

OTHER = {"name": "other", "budget": {"steps": 96}, "id": "ab", "of-a-later-release": 1}
RECORD = RunRecord(name="other", spec=OTHER, desired="running", quorum=1, created_at=1.0)


async def test_it_is_shown_stopped_and_deleted_beside_others(world: Any, status: Any) -> None:
    async with world.coordinator() as desk:
        await world.bus.kv_put(subjects.RUNS, "other", encode(RECORD))
        await until(lambda: "other" in desk.registry.runs)
        await world.says(status("other", run_id="ab"))
        await until(lambda: "other" in desk.registry.statuses)
        (shown,) = (await desk.get("/v1/runs"))["runs"]
        assert (shown["name"], shown["budget"]) == ("other", None)
        metrics = await desk.ask("GET", "/metrics")
        assert metrics.status_code == 200, metrics.text
        for method, path, body in (
            ("GET", "rounds", None),
            ("GET", "checkpoints", None),
            ("POST", "exports", None),
            ("PATCH", "", {"quorum": 1}),
        ):
            answer = await desk.ask(method, f"/v1/runs/other/{path}".rstrip("/"), body)
            assert answer.status_code == 409, answer.text
            assert "another release" in answer.json()["detail"]
        answer = await desk.ask("POST", "/v1/runs/other/stop")
        assert answer.status_code == 200, answer.text
        assert answer.json()["desired"] == "stopped"
        await world.says(status("other", "stopped", run_id="ab"))
        await until(lambda: desk.registry.over("other"))
        answer = await desk.ask("DELETE", "/v1/runs/other")
        assert answer.status_code == 204, answer.text


@pytest.mark.parametrize("record", [encode(RECORD), b"a record of a later release"])
async def test_it_keeps_its_members_until_it_is_over(
    world: Any, status: Any, record: bytes
) -> None:
    """Whoever is rolled back to an earlier release must not end what the later one began."""
    async with world.coordinator() as desk:
        await world.bus.kv_put(subjects.RUNS, "other", record)
        await world.joins("syncer-1", role="syncer")
        await world.joins("learner-1")
        for member in ("syncer-1", "learner-1"):
            to = Assignment(member=member, run="other", run_id="ab", at=1.0)
            await world.bus.kv_put(subjects.ASSIGNMENTS, member, encode(to))
        await until(lambda: len(desk.registry.assignments) == 2)
        for _ in range(2):
            await assign(desk.registry)
            assert {a.run for a in desk.registry.assignments.values()} == {"other"}
        await world.says(status("other", "finished", run_id="ab"))
        await until(lambda: {a.run for a in desk.registry.assignments.values()} == {""})


def test_its_specification_is_complained_of_once() -> None:
    """Several looks a second would fill a log with it."""
    specs = Specs()
    with capture_logs() as logs:
        assert [specs.of(RECORD), specs.of(RECORD)] == [None, None]
    assert [entry["event"] for entry in logs] == ["unreadable specification"]


async def test_it_is_gone_once_it_was_deleted_while_nobody_here_watched(world: Any) -> None:
    async with world.coordinator() as desk:
        desk.registry.revisions[subjects.RUNS, "other"] = 1  # of a record that could not be read
        await desk.registry._gone_meanwhile(subjects.RUNS)
        assert (subjects.RUNS, "other") not in desk.registry.revisions
