"""A checkpoint that is removed and used at once: one of the two requests is refused."""

import asyncio
import json
from typing import Any

import pytest

from diloco_coordinator.api import checkpoints_io
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints

SPEC: dict[str, Any] = {
    "name": "demo",
    "budget": {"steps": 96},
    "algorithm": {"fragments": 2, "sync_every_steps": 8},
}


BEGINNING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/runs/demo/checkpoints/3/restore", {}),
    ("/v1/runs/demo/checkpoints/3/restore", {"as": "again"}),
    ("/v1/checkpoints/submit?checkpoint={}", {**SPEC, "name": "again"}),
    ("/v1/runs", {**SPEC, "name": "again", "model": {"weights": "checkpoint:{}"}}),
]


def of(ref: str, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A request that begins with a checkpoint, or goes back to it."""
    return path.format(ref), json.loads(json.dumps(body).replace("{}", ref) if body else "{}")


@pytest.mark.parametrize(("path", "body"), BEGINNING)
@pytest.mark.parametrize("first", ["removal", "beginning"])
async def test_a_checkpoint_is_not_removed_while_a_run_is_begun_with_it(
    world: Any, kept: Any, monkeypatch: Any, path: str, body: dict[str, Any], first: str
) -> None:
    """Whoever comes second is refused: both would be told that it is done."""
    async with world.coordinator() as desk:
        spec = (await desk.ask("POST", "/v1/runs", SPEC)).json()["spec"]
        ref, other = kept(spec, 3), kept(spec, 4)
        begin = ("POST", *of(ref, path, body))
        remove = ("DELETE", "/v1/runs/demo/checkpoints/3")
        waits, goes_on = asyncio.Event(), asyncio.Event()

        def held(does: Any) -> Any:
            async def slowly(*given: Any, **more: Any) -> Any:
                found = await does(*given, **more) if first == "removal" else None
                waits.set()
                await goes_on.wait()
                return found or await does(*given, **more)

            return slowly

        with monkeypatch.context() as patched:
            if first == "removal":  # it was asked who needs it, and nothing is removed yet
                slowly = held(checkpoints_io.needed_by_runs)
                patched.setattr(checkpoints_io, "needed_by_runs", slowly)
            else:  # the checkpoint was found, and nothing is written yet
                for name in ("create_run", "update_run"):
                    patched.setattr(desk.registry, name, held(getattr(desk.registry, name)))
            early = asyncio.create_task(desk.ask(*(remove if first == "removal" else begin)))
            await waits.wait()
        late = await desk.ask(*(begin if first == "removal" else remove))
        assert late.status_code == 409, late.text
        assert f"{ref} is being removed" in late.text or f"needs {ref} is" in late.text
        if first == "beginning":
            assert (await desk.ask("DELETE", f"/v1/checkpoints/{other}")).status_code == 204
        goes_on.set()
        assert (await early).is_success
        refused = await desk.ask(*(begin if first == "removal" else remove))
        assert refused.status_code in ((404, 422) if first == "removal" else (409,))


@pytest.mark.parametrize(("path", "body"), BEGINNING[1:3])
async def test_a_run_whose_checkpoint_went_while_it_was_submitted_is_not_made(
    world: Any, kept: Any, monkeypatch: Any, path: str, body: dict[str, Any]
) -> None:
    """A syncer keeps a few, and had asked who needs it before."""
    async with world.coordinator() as desk:
        ref = kept((await desk.ask("POST", "/v1/runs", SPEC)).json()["spec"], 3)
        create = desk.registry.create_run

        async def late(record: Any) -> None:
            RunCheckpoints(world.checkpoints).remove(ref)
            await create(record)

        monkeypatch.setattr(desk.registry, "create_run", late)
        where, asked = of(ref, path, body)
        answer = await desk.ask("POST", where, asked)
        assert (answer.status_code, answer.json()["title"]) == (404, "No such checkpoint")
        assert list(desk.registry.runs) == ["demo"]
