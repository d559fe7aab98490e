"""Exports by REST: begun, watched, downloaded, removed, kept in bounds, found after a restart."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator.making import WEIGHTS, Maker
from waiting import until

from diloco_cli.commands.export import BUSY
from diloco_coordinator.exports.exports import CUT_OFF, ExportRecord
from diloco_coordinator.exports.shelf_io import Shelf
from diloco_coordinator.runs.statuses import run_id_of
from diloco_shared.protocol import subjects

SPEC: dict[str, Any] = {"name": "demo", "budget": {"steps": 96}}


@pytest.fixture
def maker(world: Any) -> Maker:
    world.exporter = Maker()
    maker: Maker = world.exporter
    return maker


async def submitted(world: Any, desk: Any, status: Callable[..., Any], **more: Any) -> None:
    """A run that has published something."""
    name = more.get("name", "demo")
    assert (await desk.ask("POST", "/v1/runs", {**SPEC, **more})).status_code == 201
    await world.says(status(name))
    await until(lambda: name in desk.registry.statuses)


async def ended(desk: Any, run: str = "demo", state: str = "complete") -> dict[str, Any]:
    """The newest export of a run, once it has ended so."""

    async def look() -> Any:
        found = (await desk.get(f"/v1/runs/{run}/exports"))["exports"]
        return found[-1] if found and found[-1]["state"] == state else None

    view: dict[str, Any] = await until(look)
    return view


def told(desk: Any, kind: str) -> list[Any]:
    """Events of the run."""
    return [e for _, e in desk.registry.told.after(0, "demo") if e.kind == kind]


async def test_an_export_is_made_shown_and_downloaded(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        answer = await desk.ask("POST", "/v1/runs/demo/exports")
        begun = answer.json()
        assert (answer.status_code, begun["state"], begun["run"]) == (
            202,
            "running",
            "demo",
        )
        assert answer.headers["Location"] == f"/v1/runs/demo/exports/{begun['id']}"
        place = answer.headers["Location"]
        record = desk.exports.of(run_id_of(desk.registry.runs["demo"]))[0]
        await until(lambda: (p := desk.exports.pace(record)) and p.view()["bytes_total"])
        moving = await desk.get(place)
        assert moving["progress"] | {"bytes_per_s": None, "seconds_left": None} == {
            "stage": "fetching",
            "bytes_done": 25,
            "bytes_total": 100,
            "bytes_per_s": None,
            "seconds_left": None,
        }
        early = await desk.ask("GET", f"{place}/files/diloco.json")
        assert early.status_code == 404 and "none, it is running" in early.json()["detail"]
        maker.go.set()
        done = await ended(desk)
        assert (done["epoch"], done["steps"], done["versions"]) == (1, 24, [3, 2])
        assert done["progress"] is None and "folder" not in done
        assert done["bytes"] == sum(f["bytes"] for f in done["files"])
        for file in done["files"]:
            got = await desk.ask("GET", f"{place}/files/{file['name']}")
            assert got.status_code == 200
            assert got.headers["content-length"] == str(file["bytes"]) == str(len(got.content))
            assert hashlib.sha256(got.content).hexdigest() == file["sha256"]
        rest = await desk.ask("GET", f"{place}/files/model.safetensors", Range="bytes=6990-")
        assert (rest.status_code, rest.content) == (206, WEIGHTS[6990:])
        await until(lambda: told(desk, "exported"))


async def test_what_is_asked_for_is_what_is_made(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    maker.go.set()
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        body = {"version": 0, "dtype": "bf16"}
        assert (await desk.ask("POST", "/v1/runs/demo/exports", body)).status_code == 202
        view = await ended(desk)
        asked = {"version": 0, "checkpoint": "", "dtype": "bf16"}
        assert view["asked"] == asked == maker.asked[0].asked.model_dump()
        assert maker.asked[0].run_id == desk.registry.runs["demo"].spec["id"]


async def test_a_checkpoint_is_named_by_number_or_reference(
    world: Any, maker: Maker, kept: Any, tmp_path: Path
) -> None:
    maker.go.set()
    elsewhere = {"run_checkpoint_root": str(tmp_path / "own")}
    (tmp_path / "own").mkdir()
    async with world.coordinator() as desk:
        made = await desk.ask("POST", "/v1/runs", SPEC)
        ref = kept(made.json()["spec"], 3)
        for name in ("3", "000003", ref, f"{tmp_path}/{ref}"):
            answer = await desk.ask("POST", "/v1/runs/demo/exports", {"checkpoint": name})
            assert answer.status_code == 202, answer.text
            await ended(desk)
            await until(lambda: not running(desk))
        assert [r.asked.checkpoint for r in maker.asked] == [ref] * 4
        missing = await desk.ask("POST", "/v1/runs/demo/exports", {"checkpoint": "4"})
        assert missing.status_code == 404 and f"known: {ref}" in missing.json()["detail"]
        made = await desk.ask("POST", "/v1/runs", {**SPEC, "name": "two", "keeping": elsewhere})
        far = kept(made.json()["spec"], 1)
        shutil.move(tmp_path / Path(far).parts[0], tmp_path / "own" / Path(far).parts[0])
        body = {"checkpoint": "1"}
        assert (await desk.ask("POST", "/v1/runs/two/exports", body)).status_code == 202
        await ended(desk, "two")
        assert maker.asked[-1].asked.checkpoint == f"{tmp_path}/own/{far}"


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ({"version": 7}, 409, "the newest of every fragment is 0"),
        ({"version": -1}, 422, "version"),
        ({"version": 0, "checkpoint": "1"}, 422, "version"),
        ({"checkpoint": "3"}, 404, "there is no checkpoint demo."),
        ({"checkpoint": "../../etc/passwd"}, 404, "names no checkpoint"),
        ({"checkpoint": ""}, 422, "checkpoint"),
        ({"dtype": "fp8"}, 422, "dtype"),
        ({"to": "/tmp"}, 422, "to"),
        ([], 422, "whole"),
    ],
)
async def test_what_cannot_be_is_refused_at_once(
    world: Any, maker: Maker, status: Callable[..., Any], body: Any, code: int, says: str
) -> None:
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        answer = await desk.ask("POST", "/v1/runs/demo/exports", body)
        assert answer.status_code == code and says in answer.json()["detail"], answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert not maker.asked and (await desk.get("/v1/runs/demo/exports"))["exports"] == []


async def test_a_run_without_parameters_or_that_nobody_knows_is_named(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        early = await desk.ask("POST", "/v1/runs/demo/exports")
        assert early.status_code == 409 and "no parameters yet" in early.json()["detail"]
        await world.says(status("demo", versions=(-1, 0)))
        await until(lambda: "demo" in desk.registry.statuses)
        assert (await desk.ask("POST", "/v1/runs/demo/exports")).status_code == 409
        for method, path in (
            ("POST", "/v1/runs/nobody/exports"),
            ("GET", "/v1/runs/nobody/exports"),
            ("GET", "/v1/runs/demo/exports/abc"),
            ("DELETE", "/v1/runs/demo/exports/abc"),
            ("GET", "/v1/runs/demo/exports/abc/files/diloco.json"),
        ):
            answer = await desk.ask(method, path)
            assert answer.status_code == 404 and "known: " in answer.json()["detail"], path


async def test_no_name_of_a_file_leads_out_of_its_folder(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    maker.go.set()
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        await desk.ask("POST", "/v1/runs/demo/exports")
        place = f"/v1/runs/demo/exports/{(await ended(desk))['id']}/files"
        for name in ("..%2Frecord.json", "%2e%2e%2frecord.json", "record.json", "%2Fetc"):
            assert (await desk.ask("GET", f"{place}/{name}")).status_code == 404, name


async def test_reading_and_acting_need_their_scopes(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    maker.go.set()
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        await desk.ask("POST", "/v1/runs/demo/exports")
        place = f"/v1/runs/demo/exports/{(await ended(desk))['id']}"
        made = await desk.ask("POST", "/v1/tokens", {"name": "eve", "scopes": ["read"]})
        desk.token = made.json()["token"]
        assert (await desk.ask("GET", f"{place}/files/diloco.json")).status_code == 200
        assert (await desk.ask("POST", "/v1/runs/demo/exports")).status_code == 403
        assert (await desk.ask("DELETE", place)).status_code == 403


async def test_one_of_a_run_and_few_in_all_at_a_time(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        for name in ("demo", "two", "three"):
            await submitted(world, desk, status, name=name)
        first = (await desk.ask("POST", "/v1/runs/demo/exports")).json()["id"]
        again = await desk.ask("POST", "/v1/runs/demo/exports")
        assert (again.status_code, again.json()["title"]) == (409, BUSY)
        assert first in again.json()["detail"]
        assert (await desk.ask("POST", "/v1/runs/two/exports")).status_code == 202
        third = await desk.ask("POST", "/v1/runs/three/exports")
        assert third.status_code == 409
        assert "exports of other runs are being made" in third.json()["detail"]
        maker.go.set()
        await ended(desk, "two")
        await ended(desk)
        assert (await desk.ask("POST", "/v1/runs/three/exports")).status_code == 202
        await ended(desk, "three")


async def test_one_that_fails_says_why_and_leaves_no_files(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    maker.fault = "fragment 2 has another digest than was published"
    maker.go.set()
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        await desk.ask("POST", "/v1/runs/demo/exports")
        failed = await ended(desk, state="failed")
        assert failed["reason"] == maker.fault and failed["files"] == []
        place = world.folder / "exports" / maker.asked[0].folder / failed["id"]
        assert os.listdir(place) == ["record.json"]
        (event,) = await until(lambda: told(desk, "export-failed"))
        metrics = (await desk.ask("GET", "/metrics")).text.splitlines()
        assert 'diloco_export_failed{run="demo"} 1.0' in metrics
        assert maker.fault in event.text


@pytest.mark.parametrize("spoiled", ["diloco.json", "model.safetensors"])
async def test_what_is_not_whole_is_no_export(
    world: Any, maker: Maker, status: Callable[..., Any], spoiled: str
) -> None:
    maker.spoil = lambda to: (to / spoiled).write_bytes(b"{")
    maker.go.set()
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        await desk.ask("POST", "/v1/runs/demo/exports")
        assert "is not whole" in (await ended(desk, state="failed"))["reason"]


async def test_one_that_is_removed_ends_and_is_gone(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        begun = (await desk.ask("POST", "/v1/runs/demo/exports")).json()
        await until(lambda: maker.asked)
        place = f"/v1/runs/demo/exports/{begun['id']}"
        assert (await desk.ask("DELETE", place)).status_code == 204
        assert maker.ended == [begun["id"]], "its process is gone"
        assert (await desk.ask("GET", place)).status_code == 404
        (folder,) = (world.folder / "exports").iterdir()
        assert os.listdir(folder) == ["past.json"], "what tells that it was made"
        assert (await desk.ask("POST", "/v1/runs/demo/exports")).status_code == 202


async def test_exports_outlive_a_restart_and_half_a_one_has_failed(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        maker.go.set()
        await desk.ask("POST", "/v1/runs/demo/exports")
        whole = await ended(desk)
        maker.go.clear()
        half = (await desk.ask("POST", "/v1/runs/demo/exports")).json()
        await until(lambda: len(maker.asked) == 2)
    assert maker.ended[-1] == half["id"], "no process outlives its coordinator"
    async with world.coordinator() as desk:
        found = {e["id"]: e for e in (await desk.get("/v1/runs/demo/exports"))["exports"]}
        assert found[whole["id"]] == whole
        assert (found[half["id"]]["state"], found[half["id"]]["reason"]) == ("failed", CUT_OFF)
        place = world.folder / "exports" / maker.asked[1].folder / half["id"]
        assert os.listdir(place) == ["record.json"]
        await until(lambda: told(desk, "export-failed"))
        (event,) = told(desk, "export-failed")
        assert event.text == f"export {half['id']} of demo failed: {CUT_OFF}"
        got = await desk.ask("GET", f"/v1/runs/demo/exports/{whole['id']}/files/model.safetensors")
        assert got.content == WEIGHTS
        await until(lambda: "demo" in desk.registry.statuses)
        assert (await desk.ask("POST", "/v1/runs/demo/exports")).status_code == 202


async def test_few_are_kept_and_the_oldest_go(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    maker.go.set()
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        made = []
        for _ in range(world.export_limits["kept_max"] + 1):
            begun = (await desk.ask("POST", "/v1/runs/demo/exports")).json()
            made.append(begun["id"])
            await until(lambda: not running(desk))
        shown = [e["id"] for e in (await desk.get("/v1/runs/demo/exports"))["exports"]]
        assert shown == made[1:]
        folder = world.folder / "exports" / maker.asked[0].folder
        assert sorted(os.listdir(folder)) == sorted([*made[1:], "past.json"])


def running(desk: Any) -> list[str]:
    """Exports that are being made."""
    return [r.id for r in desk.exports.records.values() if r.state == "running"]


async def test_a_run_exports_by_itself_as_often_as_it_says(
    world: Any, maker: Maker, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_coordinator.exports.exporting_io.LOOK_S", 0.01)
    maker.go.set()
    keeping = {"export_every_rounds": 10, "exports": 2}
    async with world.coordinator() as desk:
        await submitted(world, desk, status, keeping=keeping)  # of one round
        for committed in (10, 19, 20, 31):
            await world.says(status("demo", rounds_committed=committed))
            await until(
                lambda c=committed: desk.registry.statuses["demo"].rounds_committed == c  # type: ignore[misc]
            )
            if committed != 19:
                await until(lambda c=committed: maker.asked and maker.asked[-1].rounds == c)  # type: ignore[misc]
                await ended(desk)
        assert [r.rounds for r in maker.asked] == [10, 20, 31]
        await world.says(status("demo", "finished", rounds_committed=33))
        await until(lambda: maker.asked[-1].rounds == 33)
        await ended(desk)
        found = (await desk.get("/v1/runs/demo/exports"))["exports"]
        assert [(e["rounds"], e["automatic"], e["final"]) for e in found] == [
            (31, True, False),
            (33, True, True),
        ]


async def test_after_a_restore_the_next_one_is_as_far_away_as_any(
    world: Any, maker: Maker, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_coordinator.exports.exporting_io.LOOK_S", 0.01)
    maker.go.set()
    async with world.coordinator() as desk:
        await submitted(world, desk, status, keeping={"export_every_rounds": 10})
        for epoch, committed in ((0, 10), (0, 20), (1, 15), (1, 20)):
            await world.says(status("demo", rounds_committed=committed, epoch=epoch))
            await until(lambda c=committed: desk.registry.statuses["demo"].rounds_committed == c)  # type: ignore[misc]
            await desk.exports.look()
            await until(lambda: not running(desk))
        assert [r.rounds for r in maker.asked] == [10, 20, 20]


async def test_the_last_export_is_made_though_its_coordinator_is_exchanged_meanwhile(
    world: Any, maker: Maker, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_coordinator.exports.exporting_io.LOOK_S", 0.01)
    async with world.coordinator() as desk:
        await submitted(world, desk, status, keeping={"export_every_rounds": 10})
        await world.says(status("demo", "finished", rounds_committed=12))
        await until(lambda: maker.asked)
    maker.go.set()
    async with world.coordinator() as desk:
        await until(lambda: len(maker.asked) == 2)
        assert (await ended(desk))["final"]
        for _ in range(5):
            await desk.exports.look()
        assert [r.final for r in maker.asked] == [True, True]
        # A hub that was put back begins an epoch, and what was made of the end is of no use.
        again = {"rounds_committed": 12, "epoch": 29_000_000}
        await world.says(status("demo", "finished", **again))
        await until(lambda: len(maker.asked) == 3)
        assert (await ended(desk))["final"]
        for _ in range(5):
            await desk.exports.look()
        assert len(maker.asked) == 3


def full(*_: Any) -> None:
    """A disk that takes not even a record."""
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_full_disk_is_told_once_where_nobody_asked(
    world: Any, maker: Maker, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_coordinator.exports.exporting_io.LOOK_S", 0.01)
    maker.go.set()
    async with world.coordinator() as desk:
        await submitted(world, desk, status, keeping={"export_every_rounds": 10})
        begin, tried = Shelf.begin, []

        def begins_not(shelf: Shelf, record: Any) -> None:
            tried.append(record)
            full()

        monkeypatch.setattr(Shelf, "begin", begins_not)
        await world.says(status("demo", rounds_committed=10))
        await until(lambda: len(tried) > 3)
        (event,) = told(desk, "export-failed")
        metrics = (await desk.ask("GET", "/metrics")).text.splitlines()
        assert 'diloco_export_failed{run="demo"} 1.0' in metrics
        assert "disk is full" in event.text
        monkeypatch.setattr(Shelf, "begin", begin)
        await ended(desk)


async def test_what_is_removed_is_not_made_again_by_itself(
    world: Any, maker: Maker, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whom ever, or because there is a newer one: the coordinator would never be done."""
    monkeypatch.setattr("diloco_coordinator.exports.exporting_io.LOOK_S", 0.01)
    world.export_limits = {"kept_max": 1, "at_once": 1}
    maker.go.set()
    keeping = {"export_every_rounds": 10}
    async with world.coordinator() as desk:
        for name in ("demo", "two"):
            await submitted(world, desk, status, name=name, keeping=keeping)
            await world.says(status(name, "finished", rounds_committed=12))
        await until(lambda: {r.run for r in maker.asked} == {"demo", "two"})
        await until(lambda: not running(desk))
        both = list(desk.exports.records.values())
        assert len(both) == 2, "no run pushes out another one's newest"
        for one in both:
            await desk.ask("DELETE", f"/v1/runs/{one.run}/exports/{one.id}")
        for _ in range(10):
            await desk.exports.look()
        assert [r.run for r in maker.asked] == [*dict.fromkeys(r.run for r in maker.asked)]
        assert desk.exports.past.keys() == {r.run_id for r in maker.asked}
        made = len(maker.asked)
    async with world.coordinator() as desk:  # nor after a restart
        await until(lambda: {"demo", "two"} <= desk.registry.statuses.keys())
        for _ in range(10):
            await desk.exports.look()
        assert len(maker.asked) == made and not desk.exports.records
        for name in ("demo", "two"):
            assert (await desk.ask("DELETE", f"/v1/runs/{name}")).status_code == 204
        await until(lambda: not os.listdir(world.folder / "exports"))
        assert not desk.exports.past


async def test_what_was_removed_from_a_full_disk_is_marked_once_there_is_room(
    world: Any, maker: Maker, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    maker.go.set()
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        await desk.ask("POST", "/v1/runs/demo/exports")
        view, mark, full = await ended(desk), Shelf._mark, [True]

        def marked(shelf: Shelf, record: ExportRecord) -> None:
            if full.pop():
                full.append(False)
                raise OSError(errno.ENOSPC, "disk is full")
            mark(shelf, record)

        monkeypatch.setattr(Shelf, "_mark", marked)
        await desk.ask("DELETE", f"/v1/runs/demo/exports/{view['id']}")
        folder = world.folder / "exports" / maker.asked[0].folder
        assert os.listdir(folder) == ["past.json"]


async def test_what_cannot_be_written_down_has_failed(
    world: Any, maker: Maker, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be shown as complete, and be gone after a restart."""
    maker.go.set()
    save = Shelf.save

    def full(shelf: Shelf, record: ExportRecord) -> None:
        if record.state == "complete":
            raise OSError(errno.ENOSPC, "No space left on device")
        save(shelf, record)

    monkeypatch.setattr(Shelf, "save", full)
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        await desk.ask("POST", "/v1/runs/demo/exports")
        failed = await ended(desk, state="failed")
        assert "could not be written" in failed["reason"] and "No space" in failed["reason"]
        assert failed["files"] == [] and failed["versions"] == []
        await until(lambda: told(desk, "export-failed"))
        place = world.folder / "exports" / maker.asked[0].folder / failed["id"]
        assert os.listdir(place) == ["record.json"]
    async with world.coordinator() as desk:
        assert (await desk.get("/v1/runs/demo/exports"))["exports"] == [failed]


async def test_that_one_failed_is_written_as_soon_as_the_disk_takes_it(
    world: Any, maker: Maker, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would else give another reason, or another time."""
    save, full = Shelf.save, True

    def sometimes(shelf: Shelf, record: ExportRecord) -> None:
        if record.state == "failed" and full:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(shelf, record)

    monkeypatch.setattr(Shelf, "save", sometimes)
    maker.fault = "the message server does not answer"
    maker.go.set()
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        await desk.ask("POST", "/v1/runs/demo/exports")
        failed = await ended(desk, state="failed")
        assert desk.exports.unwritten.keys() == {failed["id"]}
        full = False
        await desk.exports.look()
        assert desk.exports.unwritten == {}
    async with world.coordinator() as desk:
        assert (await desk.get("/v1/runs/demo/exports"))["exports"] == [failed]


async def test_what_cannot_begin_leaves_nothing(
    world: Any, maker: Maker, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync", full)
            answer = await desk.ask("POST", "/v1/runs/demo/exports")
        assert answer.status_code == 503 and "disk is full" in answer.json()["detail"]
        assert not (world.folder / "exports").exists()


async def test_what_has_no_record_is_swept_away(
    world: Any, maker: Maker, status: Callable[..., Any]
) -> None:
    """Whoever began or removed it was cut off half way."""
    maker.go.set()
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        await desk.ask("POST", "/v1/runs/demo/exports")
        whole = await ended(desk)
    folder = world.folder / "exports" / maker.asked[0].folder
    for rest in (folder / "half" / "files", world.folder / "exports" / "gone.x" / "half"):
        rest.mkdir(parents=True)
        (rest / "model.safetensors").write_bytes(WEIGHTS)
    async with world.coordinator() as desk:
        assert (await desk.get("/v1/runs/demo/exports"))["exports"] == [whole]
        assert os.listdir(folder) == [whole["id"]]
        assert os.listdir(world.folder / "exports") == [folder.name]


async def test_a_deleted_run_takes_its_exports_along(
    world: Any, maker: Maker, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_coordinator.exports.exporting_io.LOOK_S", 0.01)
    maker.go.set()
    async with world.coordinator() as desk:
        await submitted(world, desk, status)
        await desk.ask("POST", "/v1/runs/demo/exports")
        await ended(desk)
        # A message server that has lost everything costs nobody a model.
        await world.bus.kv_delete(subjects.RUNS, "demo")
        await until(lambda: "demo" not in desk.registry.runs)
        await submitted(world, desk, status)  # another run of that name
        assert (await desk.get("/v1/runs/demo/exports"))["exports"] == []
        assert len(os.listdir(world.folder / "exports")) == 1
        await world.bus.kv_put(subjects.DELETED, maker.asked[0].run_id, b"{}")
        await until(lambda: not os.listdir(world.folder / "exports"))


async def test_a_record_that_nobody_can_read_hinders_nothing(world: Any, maker: Maker) -> None:
    place = Path(world.folder) / "exports" / "demo.x" / "one"
    os.makedirs(place)
    os.close(os.open(place / "record.json", os.O_CREAT))
    async with world.coordinator() as desk:
        assert (await desk.get("/v1/runs"))["runs"] == []


async def test_the_interface_describes_itself(world: Any, maker: Maker) -> None:
    async with world.coordinator() as desk:
        described = json.dumps((await desk.http.get("/openapi.json")).json()["paths"])
        for path in ("/exports", "/exports/{export}", "/exports/{export}/files/{file}"):
            assert f'"/v1/runs/{{run}}{path}"' in described
