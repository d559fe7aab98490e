"""Whatever a request names, nothing outside the places of checkpoints is opened, listed or told."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from diloco_shared.checkpoints.vault_io import Vault
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import decode

# As a run of two fragments wants it, which the checkpoints of `kept` have.
SPEC: dict[str, Any] = {
    "name": "demo",
    "algorithm": {"fragments": 2},
    "budget": {"steps": 96},
}
FOREIGN = (
    "s3://evil/ckpt",
    "gs://evil/ckpt",
    "file:///etc",
    "/etc",
    "~/x",
    "http://169.254.169.254/latest",
    "{}-evil",
    "{}/..",
    "{}/leads",
)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every place that somebody opened."""
    found: list[str] = []
    before = Vault.__init__

    def init(self: Vault, root: str) -> None:
        found.append(root)
        before(self, root)

    monkeypatch.setattr(Vault, "__init__", init)
    return found


@pytest.fixture
def foreign(world: Any, kept: Any, tmp_path: Path) -> tuple[str, ...]:
    """Addresses that the settings do not name; `secret` lies behind one, and beside the root."""
    world.checkpoints = str(tmp_path / "root")
    for folder in ("root", "root-evil/secret.x/000001"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "root-evil/secret.x/000001/manifest.json").write_text("{}")
    (tmp_path / "root/leads").symlink_to(tmp_path / "root-evil")
    return tuple(address.format(world.checkpoints) for address in FOREIGN)


async def test_a_reference_of_a_request_reaches_the_configured_places_alone(
    world: Any, foreign: tuple[str, ...], opened: list[str]
) -> None:
    async with world.coordinator() as desk:
        assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 201
        opened.clear()
        for address in foreign:
            ref = f"{address}/none.x/000001"
            begin = f"/v1/checkpoints/submit?checkpoint={quote(ref, safe='')}"
            from_it = {**SPEC, "name": "two", "model": {"weights": f"checkpoint:{ref}"}}
            answers = (
                await desk.ask("POST", begin, {**SPEC, "name": "two"}),
                await desk.ask("POST", "/v1/runs/demo/exports", {"checkpoint": ref}),
                await desk.ask("POST", "/v1/runs", from_it),
            )
            assert [a.status_code for a in answers] == [404, 404, 422], address
            for answer in answers:
                assert "DILOCO_CHECKPOINT_ROOTS" in answer.text and "secret" not in answer.text
        assert not opened
        assert list(await world.bus.kv_all(subjects.RUNS)) == ["demo"]


async def test_a_run_keeps_its_checkpoints_in_configured_places_alone(
    world: Any, foreign: tuple[str, ...], opened: list[str]
) -> None:
    async with world.coordinator() as desk:
        opened.clear()
        for address in foreign:
            body = {**SPEC, "keeping": {"run_checkpoint_root": address}}
            answer = await desk.ask("POST", "/v1/runs", body)
            assert answer.status_code == 422, address
            assert {e["path"] for e in answer.json()["errors"]} == {"keeping.run_checkpoint_root"}
        assert not opened
        below = {"run_checkpoint_root": f"{world.checkpoints}/team"}
        made = await desk.ask("POST", "/v1/runs", {**SPEC, "keeping": below})
        assert made.status_code == 201


async def test_a_run_that_was_let_in_by_another_setting_is_not_followed_out(
    world: Any, foreign: tuple[str, ...], opened: list[str]
) -> None:
    """Or whoever writes its record into the bucket would lead the coordinator anywhere."""
    world.places = ("/before",)
    async with world.coordinator() as desk:
        body = {**SPEC, "keeping": {"run_checkpoint_root": "/before/x"}}
        assert (await desk.ask("POST", "/v1/runs", body)).status_code == 201
    world.places = ()
    async with world.coordinator() as desk:
        opened.clear()
        path = "/v1/runs/demo/checkpoints"
        for method, where in (
            ("GET", path),
            ("GET", f"{path}/1"),
            ("DELETE", f"{path}/1"),
            ("POST", f"{path}/1/restore"),
        ):
            answer = await desk.ask(method, where, {} if method == "POST" else None)
            assert answer.status_code == 404 and "DILOCO_CHECKPOINT_ROOTS" in answer.text
        assert not opened


async def test_a_folder_in_the_root_that_is_a_link_is_not_followed(
    world: Any, foreign: tuple[str, ...]
) -> None:
    async with world.coordinator() as desk:
        gone = await desk.ask("DELETE", "/v1/checkpoints/leads/000001")
        assert gone.status_code == 404
        begin = "/v1/checkpoints/submit?checkpoint=leads/000001"
        assert (await desk.ask("POST", begin, SPEC)).status_code == 404


async def test_further_places_are_reached(world: Any, kept: Any, tmp_path: Path) -> None:
    world.checkpoints, world.places = str(tmp_path / "other"), (str(tmp_path),)
    async with world.coordinator() as desk:
        made = await desk.ask("POST", "/v1/runs", SPEC)
        ref = kept(made.json()["spec"], 3)
        begin = f"/v1/checkpoints/submit?checkpoint={tmp_path}/{ref}"
        assert (await desk.ask("POST", begin, {**SPEC, "name": "two"})).status_code == 201
        entry = (await world.bus.kv_all(subjects.RUNS))["two"]
        begun = decode(entry.value, RunRecord).restore
        assert begun is not None and begun.source == f"{tmp_path}/{ref}"
