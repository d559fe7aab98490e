"""/v1/plan: an answer without a run, and faults by their path."""

from typing import Any


async def test_a_plan_comes_with_reasons_and_alternatives(world: Any) -> None:
    async with world.coordinator() as desk:
        answer = await desk.ask("POST", "/v1/plan", {"params": 5e9, "chips": 4096})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["settings"]["sync_every_steps"] % body["settings"]["fragments"] == 0
        assert body["reasons"]["learners"]
        assert len(body["sensitivity"]) == 10


async def test_what_may_be_asked_is_told_with_meanings_and_defaults(world: Any) -> None:
    async with world.coordinator() as desk:
        schema = await desk.get("/v1/plan")
        assert schema["required"] == ["params", "chips"]
        assert schema["properties"]["link_gbit_per_s"]["default"] == 5.0
        assert all(about["description"] for about in schema["properties"].values())


async def test_what_is_wrong_or_short_is_said(world: Any) -> None:
    async with world.coordinator() as desk:
        wrong = await desk.ask("POST", "/v1/plan", {"params": 5e9, "chips": 0, "chip": 1})
        assert wrong.status_code == 422
        assert {"chips", "chip"} <= {e["path"] for e in wrong.json()["errors"]}
        short = {"params": 5e9, "chips": 4096, "link_gbit_per_s": 1e-6}
        answer = await desk.ask("POST", "/v1/plan", short)
        assert answer.status_code == 422
        assert "link_gbit_per_s must be at least" in answer.json()["detail"]
        desk.token = "wrong"
        assert (await desk.ask("POST", "/v1/plan", short)).status_code == 401
