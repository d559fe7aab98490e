"""Several coordinators of one hub: what each one keeps for itself is told as such."""

from typing import Any

from waiting import until

SPEC: dict[str, Any] = {"name": "demo", "budget": {"steps": 96}}


async def test_an_export_that_another_coordinator_may_have_is_not_just_unknown(
    world: Any,
) -> None:
    """A balancer sends each request to another one."""
    async with world.coordinator() as desk:
        assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 201
        unknown = await desk.ask("GET", "/v1/runs/demo/exports/e1")
        assert unknown.json()["detail"] == "'demo' has no export 'e1'; known: none"
        await world.joins("hub-a", "hub-b", role="coordinator")
        await until(lambda: len(desk.registry.roll.living) >= 2)
        unknown = await desk.ask("GET", "/v1/runs/demo/exports/e1")
        assert unknown.status_code == 404
        assert "known: none. It may be another coordinator's: hub-a, hub-b" in unknown.text
