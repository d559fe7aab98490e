"""A run that another release submitted, with settings that this one does not know."""

from typing import Any

from waiting import until

from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import encode

OTHER = {"name": "other", "budget": {"steps": 96}, "id": "ab", "of-a-later-release": 1}


async def test_it_is_shown_stopped_and_deleted_beside_others(world: Any) -> None:
    record = RunRecord(name="other", spec=OTHER, desired="running", quorum=1, created_at=1.0)
    async with world.coordinator() as desk:
        await world.bus.kv_put(subjects.RUNS, "other", encode(record))
        await until(lambda: "other" in desk.registry.runs)
        (shown,) = (await desk.get("/v1/runs"))["runs"]
        assert (shown["name"], shown["budget"]) == ("other", None)
        metrics = await desk.ask("GET", "/metrics")
        assert metrics.status_code == 200, metrics.text
        for method, path, body in (
            ("GET", "rounds", None),
            ("GET", "checkpoints", None),
            ("PATCH", "", {"quorum": 1}),
        ):
            answer = await desk.ask(method, f"/v1/runs/other/{path}".rstrip("/"), body)
            assert answer.status_code == 409, answer.text
            assert "another release" in answer.json()["detail"]
        answer = await desk.ask("POST", "/v1/runs/other/stop")
        assert answer.status_code == 200, answer.text
        assert answer.json()["desired"] == "stopped"
        answer = await desk.ask("DELETE", "/v1/runs/other")
        assert answer.status_code == 204, answer.text
