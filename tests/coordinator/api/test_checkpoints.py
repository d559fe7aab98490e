"""Run-wide checkpoints over REST: asked for, listed, restored, with errors that say what to do."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from diloco_coordinator.api import checkpoints_io, vaults_io
from diloco_shared.bus.port import Conflict, Stored
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.checkpoints.tape_archive_io import TapeArchive
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Incarnation, RunRecord
from diloco_shared.protocol.run_states import GONE_BEFORE, NEEDS
from diloco_shared.protocol.wire import decode, encode

SPEC: dict[str, Any] = {
    "name": "demo",
    "budget": {"steps": 96},
    "algorithm": {"fragments": 2, "sync_every_steps": 8},
}


async def submitted(desk: Any) -> dict[str, Any]:
    spec: dict[str, Any] = (await desk.ask("POST", "/v1/runs", SPEC)).json()["spec"]
    return spec


async def record_of(world: Any, run: str) -> RunRecord:
    return decode((await world.bus.kv_get(subjects.RUNS, run)).value, RunRecord)


async def test_a_checkpoint_is_asked_for_by_number_one_at_a_time(world: Any, status: Any) -> None:
    async with world.coordinator() as desk:
        await submitted(desk)
        early = await desk.ask("POST", "/v1/runs/demo/checkpoints")
        assert (early.status_code, early.json()["title"]) == (409, "Nothing to keep yet")
        await world.says(status(checkpoint=2, checkpoint_state="complete"))
        await until(lambda: desk.registry.statuses)
        made = await desk.ask("POST", "/v1/runs/demo/checkpoints")
        assert (made.status_code, made.json()["number"]) == (202, 3)
        assert (await record_of(world, "demo")).checkpoint == 3
        again = await desk.ask("POST", "/v1/runs/demo/checkpoints")
        assert again.status_code == 409 and "checkpoint 3" in again.json()["detail"]
        await world.says(status(checkpoint=3, checkpoint_state="making"))
        await until(lambda: desk.registry.statuses["demo"].checkpoint == 3)
        assert (await desk.ask("POST", "/v1/runs/demo/checkpoints")).status_code == 409


async def test_a_checkpoint_has_a_number_above_all_that_lies_there(
    world: Any, kept: Any, status: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub was put back from a backup, and what it knows is older. The syncer counts so too."""
    async with world.coordinator() as desk:
        left = (tmp_path / kept(await submitted(desk), 7)).parent / "000009"
        left.mkdir()
        (left / "shard-1.json").write_text("{}")
        await world.says(status(checkpoint=2, checkpoint_state="complete"))
        await until(lambda: desk.registry.statuses)
        made = await desk.ask("POST", "/v1/runs/demo/checkpoints")
        assert (made.status_code, made.json()["number"]) == (202, 10)
        await world.says(status(checkpoint=10, checkpoint_state="complete"))
        await until(lambda: desk.registry.statuses["demo"].checkpoint == 10)

        def away(*_: Any) -> int:
            raise OSError("the disk is gone")

        monkeypatch.setattr(RunCheckpoints, "newest", away)
        made = await desk.ask("POST", "/v1/runs/demo/checkpoints")
        assert (made.status_code, made.json()["number"]) == (202, 11)


async def test_what_is_complete_is_listed_shown_and_removed(world: Any, kept: Any) -> None:
    async with world.coordinator() as desk:
        spec = await submitted(desk)
        ref = kept(spec, 3)
        kept({**SPEC, "name": "gone", "id": "ab12"}, 1)
        (found,) = (await desk.get("/v1/runs/demo/checkpoints"))["checkpoints"]
        assert (found["ref"], found["learners"]) == (ref, ["a"])
        assert found["missing"] == {"b": "nothing came"}
        every = (await desk.get("/v1/checkpoints"))["checkpoints"]
        assert [c["run"] for c in every] == ["demo", "gone"], "of deleted runs too"
        assert (await desk.get("/v1/runs/demo/checkpoints/3"))["spec"]["name"] == "demo"
        unknown = await desk.ask("GET", "/v1/runs/demo/checkpoints/4")
        assert unknown.status_code == 404 and f"known: {ref}" in unknown.json()["detail"]
        assert (await desk.ask("DELETE", "/v1/runs/demo/checkpoints/3")).status_code == 204
        assert (await desk.ask("DELETE", "/v1/checkpoints/gone.ab12/1")).status_code == 204
        assert (await desk.get("/v1/checkpoints"))["checkpoints"] == []


async def test_one_that_cannot_be_read_hides_no_other(
    world: Any, kept: Any, tmp_path: Path
) -> None:
    """It is damaged, of another release, or pruned since its folder was listed."""
    async with world.coordinator() as desk:
        spec = await submitted(desk)
        _, damaged_ref, _ = [kept(spec, number) for number in (1, 2, 3)]
        (tmp_path / damaged_ref / "manifest.json").write_text("{")
        for path in ("/v1/checkpoints", "/v1/runs/demo/checkpoints"):
            found = await desk.get(path)
            assert [c["number"] for c in found["checkpoints"]] == [1, 3]
            assert [(c["ref"], c["run"]) for c in found["damaged"]] == [(damaged_ref, "demo")]
            assert "is damaged" in found["damaged"][0]["reason"]
        damaged = await desk.ask("GET", "/v1/runs/demo/checkpoints/2")
        assert damaged.status_code == 404 and "is damaged" in damaged.json()["detail"]
        gone = await desk.ask("DELETE", "/v1/runs/demo/checkpoints/2")
        assert gone.status_code == 204 and not (tmp_path / damaged_ref).exists()
        assert (await desk.get("/v1/checkpoints"))["damaged"] == []
        again = await desk.ask("DELETE", "/v1/runs/demo/checkpoints/2")
        assert again.status_code == 404 and "known: " in again.json()["detail"]


async def test_they_are_listed_page_by_page(world: Any, kept: Any, tmp_path: Path) -> None:
    """Only of those on the page is anything read."""
    async with world.coordinator() as desk:
        spec = await submitted(desk)
        refs = [kept(spec, number) for number in (1, 2, 3)]
        (tmp_path / refs[1] / "manifest.json").rename(tmp_path / refs[1] / "shard-0.json")
        kept({**SPEC, "name": "gone", "id": "ab12"}, 1)
        for path in ("/v1/checkpoints", "/v1/runs/demo/checkpoints"):
            page = await desk.get(f"{path}?limit=2")
            assert [c["ref"] for c in page["checkpoints"]] == [refs[0]]
            assert [c["ref"] for c in page["damaged"]] == [refs[1]] and page["next"] == refs[1]
            rest = await desk.get(f"{path}?limit=2&after={page['next']}")
            assert rest["checkpoints"][0]["ref"] == refs[2]
            assert (rest["damaged"], rest["next"]) == ([], None)
        desk.token = await desk.makes("eve", "read", runs=["gone"])
        page = await desk.get("/v1/checkpoints?limit=1")
        assert [c["run"] for c in page["checkpoints"]] == ["gone"] and page["next"] is None


class Hung:
    """A place that does not answer until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.go, self.asked, self.answer = threading.Event(), 0, getattr(RunCheckpoints, method)
        monkeypatch.setattr(RunCheckpoints, method, lambda *what: self._ask(*what))

    def _ask(self, *what: Any) -> Any:
        self.asked += 1
        self.go.wait()
        return self.answer(*what)


async def test_a_place_that_hangs_holds_up_nothing_else(
    world: Any, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listings wait for each other, and for the rest there are threads of their own."""
    monkeypatch.setattr(vaults_io, "LIST_S_MAX", 0.05)
    hung = Hung(monkeypatch, "complete")
    async with world.coordinator() as desk:
        kept(await submitted(desk), 3)
        try:
            listings = [desk.ask("GET", "/v1/checkpoints") for _ in range(40)]
            for answer in await asyncio.gather(*listings):
                assert answer.status_code == 503 and "said nothing" in answer.json()["detail"]
                assert answer.headers["Retry-After"] == "30"
            assert hung.asked <= 1
            assert (await desk.get("/v1/runs/demo/checkpoints/3"))["number"] == 3
            assert await asyncio.to_thread(lambda: "others are served")
        finally:
            hung.go.set()
        monkeypatch.setattr(vaults_io, "LIST_S_MAX", 60.0)
        assert len((await desk.get("/v1/checkpoints"))["checkpoints"]) == 1


async def test_an_archive_that_hangs_holds_up_nothing_else(
    world: Any, closed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than there are threads: those of everything else are left alone."""
    monkeypatch.setattr(vaults_io, "ASK_S_MAX", 0.05)
    go = threading.Event()
    monkeypatch.setattr(TapeArchive, "read", lambda *_: go.wait())
    async with world.coordinator() as desk:
        await submitted(desk)
        await world.tape("demo", *(closed(n) for n in range(4)))
        await world.bus.purge(subjects.tape_stream("demo"), ">", below_seq=4)
        try:
            asked = [desk.ask("GET", "/v1/runs/demo/rounds") for _ in range(40)]
            for answer in await asyncio.gather(*asked):
                assert answer.status_code == 503 and "said nothing" in answer.json()["detail"]
            body = {**SPEC, "name": "from", "model": {"weights": "checkpoint:demo.ab12/000001"}}
            assert (await desk.ask("POST", "/v1/runs", body)).status_code == 503
            assert (await desk.get("/v1/members"))["members"] == []
            assert (await desk.ask("POST", "/v1/runs", {**SPEC, "name": "b"})).status_code == 201
            assert (await desk.ask("GET", "/v1/runs/b/rounds")).status_code == 200
        finally:
            go.set()


async def test_one_checkpoint_that_nobody_answers_for_is_not_waited_for(
    world: Any, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vaults_io, "ASK_S_MAX", 0.05)
    hung = Hung(monkeypatch, "manifest")
    async with world.coordinator() as desk:
        kept(await submitted(desk), 3)
        try:
            answer = await desk.ask("GET", "/v1/runs/demo/checkpoints/3")
            assert (answer.status_code, answer.json()["title"]) == (
                503,
                "The checkpoints do not answer",
            )
        finally:
            hung.go.set()


async def test_none_begins_once_the_first_shard_is_over(world: Any, kept: Any, status: Any) -> None:
    """It would be accepted, and never be made."""
    async with world.coordinator() as desk:
        spec = {**SPEC, "algorithm": {**SPEC["algorithm"], "shards": 2}}
        run = (await desk.ask("POST", "/v1/runs", spec)).json()
        of_run = {"run_id": run["spec"]["id"], "versions": (1, 1)}
        await world.says(status("demo", "finished", **of_run))
        other = encode(status("demo", "running", shard=1, **of_run))
        await world.bus.kv_put(subjects.STATUS, subjects.status_key("demo", 1), other)
        await until(lambda: desk.registry.statuses.get("demo"))
        await until(lambda: len(desk.registry.standings.shards["demo"]) == 2)
        answer = await desk.ask("POST", "/v1/runs/demo/checkpoints")
        assert (answer.status_code, answer.json()["title"]) == (409, "Part of the run is over")


async def test_what_is_left_of_one_is_told_of_and_may_be_removed(
    world: Any, kept: Any, status: Any, tmp_path: Path
) -> None:
    """It takes room, and nothing reads it; unless it is being made right now."""
    async with world.coordinator() as desk:
        folder = Path(kept(await submitted(desk), 3)).parent
        for left in (tmp_path / folder / "000004", tmp_path / "gone.ab12/000001"):
            left.mkdir(parents=True)
            (left / "shard-0.json").write_text("{}")
        await world.says(status(checkpoint=4, checkpoint_state="making"))
        await until(lambda: desk.registry.statuses)
        (found,) = (await desk.get("/v1/checkpoints"))["damaged"]
        assert found["ref"] == "gone.ab12/000001" and "never completed" in found["reason"]
        assert (await desk.ask("DELETE", "/v1/runs/demo/checkpoints/4")).status_code == 409
        record = await record_of(world, "demo")
        other = record.model_copy(
            update={"spec": {"id": record.spec["id"], "of": "another release"}}
        )
        desk.registry.runs["demo"] = other
        listed = (await desk.get("/v1/checkpoints"))["damaged"]
        assert [each["ref"] for each in listed] == ["gone.ab12/000001"]
        desk.registry.runs["demo"] = record
        await world.says(status(checkpoint=4, checkpoint_state="failed"))
        await until(lambda: desk.registry.statuses["demo"].checkpoint_state == "failed")
        (found,) = (await desk.get("/v1/runs/demo/checkpoints"))["damaged"]
        assert found["ref"] == f"{folder}/000004"
        assert (await desk.ask("DELETE", "/v1/runs/demo/checkpoints/4")).status_code == 204
        assert (await desk.ask("DELETE", "/v1/checkpoints/gone.ab12/1")).status_code == 204
        assert {p.name for p in (tmp_path / folder).iterdir()} == {"000003"}
        assert (await desk.get("/v1/checkpoints"))["damaged"] == []
        for nothing in (4, 4711):
            gone = await desk.ask("DELETE", f"/v1/runs/demo/checkpoints/{nothing}")
            assert gone.status_code == 404
        (tmp_path / folder / "000005").mkdir()
        (tmp_path / folder / "000005/learner-a.json").write_text("{}")
        assert (await desk.get("/v1/checkpoints"))["damaged"] == [], "its mark may just be set"
        assert (await desk.ask("DELETE", "/v1/runs/demo/checkpoints/5")).status_code == 409


async def test_all_that_a_deleted_run_has_left_is_listed_and_may_be_removed(
    world: Any, kept: Any, tmp_path: Path
) -> None:
    """Its archived tape would else lie there for good, and nobody would know of it."""
    async with world.coordinator() as desk:
        lives = Path(kept(await submitted(desk), 3)).parent.name
        kept({**SPEC, "name": "gone", "id": "ab12"}, 1)
        for folder in (lives, "gone.ab12", "lost.cd34"):
            TapeArchive(str(tmp_path), folder).write([Stored("tape.x.0", b"x", {}, 1)])
        (tmp_path / "no folder of a run/tape").mkdir(parents=True)
        (tmp_path / "no folder of a run/tape/x").touch()
        tapes = [{"ref": f"{of}/tape", "run": of[:4]} for of in ("gone.ab12", "lost.cd34")]
        assert (await desk.get("/v1/checkpoints"))["tapes"] == tapes
        page = await desk.get("/v1/checkpoints?limit=3")
        assert (page["tapes"], page["next"]) == (tapes[:1], "gone.ab12/tape")
        page = await desk.get("/v1/checkpoints?limit=3&after=gone.ab12/tape")
        assert (page["tapes"], page["checkpoints"], page["next"]) == (tapes[1:], [], None)
        assert (await desk.get("/v1/runs/demo/checkpoints"))["tapes"] == []
        assert (await desk.ask("DELETE", "/v1/checkpoints/gone.ab12/1")).status_code == 204
        assert (await desk.get("/v1/checkpoints"))["tapes"] == tapes
        kept({**SPEC, "name": "gone", "id": "ab12"}, 2)
        refused = await desk.ask("DELETE", f"/v1/checkpoints/{lives}")
        assert refused.status_code == 409 and "delete the run first" in refused.json()["detail"]
        await world.bus.kv_put(subjects.RUNS, "lost", b"of another release")
        assert (await desk.ask("DELETE", "/v1/checkpoints/lost.cd34")).status_code == 409
        assert (await desk.ask("DELETE", "/v1/checkpoints/gone.ab12")).status_code == 204
        assert (await desk.ask("DELETE", "/v1/checkpoints/demo.ab12")).status_code == 404
        for nothing in ("gone.ab12", "demo", "no folder"):
            assert (await desk.ask("DELETE", f"/v1/checkpoints/{nothing}")).status_code == 404
        there = {
            folder: (tmp_path / folder).exists() for folder in (lives, "gone.ab12", "lost.cd34")
        }
        assert there == {lives: True, "gone.ab12": False, "lost.cd34": True}


async def test_a_checkpoint_that_a_run_is_yet_to_begin_with_is_not_removed(
    world: Any, kept: Any, status: Any, tmp_path: Path
) -> None:
    """The run waits for machines, and could never begin."""
    async with world.coordinator() as desk:
        gone = {**SPEC, "name": "gone", "id": "ab12"}
        refs = [kept(gone, number) for number in (1, 2, 3)]
        where = f"/v1/checkpoints/submit?checkpoint={refs[1]}"
        assert (await desk.ask("POST", where, {**SPEC, "name": "again"})).status_code == 201
        for path in ("gone.ab12", "gone.ab12/2"):
            refused = await desk.ask("DELETE", f"/v1/checkpoints/{path}")
            assert (refused.status_code, refused.json()["title"]) == (409, "A run needs it")
            assert refused.json()["detail"].startswith("'again' begins with gone.ab12/000002")
        admin, desk.token = desk.token, await desk.makes("eve", "operate", runs=["gone"])
        told = (await desk.ask("DELETE", "/v1/checkpoints/gone.ab12")).json()["detail"]
        assert told.startswith("another run begins with")
        desk.token = admin
        assert (await desk.ask("DELETE", "/v1/checkpoints/gone.ab12/1")).status_code == 204
        run_id = (await record_of(world, "again")).spec["id"]
        await world.says(status("again", "finished", run_id=run_id))
        await until(lambda: desk.registry.over("again"))
        assert (await desk.ask("DELETE", "/v1/checkpoints/gone.ab12/2")).status_code == 204
        assert (await desk.ask("DELETE", "/v1/checkpoints/gone.ab12")).status_code == 204


async def test_a_checkpoint_that_a_run_goes_back_to_or_takes_weights_from_is_not_removed(
    world: Any, kept: Any, status: Any
) -> None:
    """Nor where the wish, or the run itself, is not mirrored here yet."""
    async with world.coordinator() as desk:
        spec = await submitted(desk)
        refs = {number: kept(spec, number) for number in (3, 4, 5)}
        await world.says(status())
        await until(lambda: desk.registry.statuses)
        wish = await desk.ask("POST", "/v1/runs/demo/checkpoints/3/restore", {})
        assert wish.status_code == 202
        record = await record_of(world, "demo")
        model = {"weights": f"checkpoint:{refs[4]}"}
        other = {"name": "other", "spec": {"id": "cd34", "model": model}, "phase": "submitting"}
        await world.bus.kv_put(subjects.RUNS, "other", encode(record.model_copy(update=other)))
        for number, whose in ((3, "demo"), (4, "other")):
            refused = await desk.ask("DELETE", f"/v1/runs/demo/checkpoints/{number}")
            assert refused.status_code == 409
            assert refused.json()["detail"].startswith(f"{whose!r} begins with {refs[number]}")
        assert (await desk.ask("DELETE", "/v1/runs/demo/checkpoints/5")).status_code == 204


async def test_what_a_run_went_back_to_stays_until_it_has_gone_back_to_another(
    world: Any, kept: Any, status: Any
) -> None:
    """The record names the newest wish alone, and a wish may be refused."""
    async with world.coordinator() as desk:
        spec = await submitted(desk)
        for number in (3, 5):
            kept(spec, number)
        before = kept({**spec, "name": "gone", "id": "ab12"}, 5)

        async def shows(restores: int, *needed: str) -> None:
            learners = {NEEDS: {NEEDS: needed, GONE_BEFORE: True}}
            await world.says(status(run_id=spec["id"], restores=restores, learners=learners))
            mirrored = desk.registry.statuses
            await until(lambda: "demo" in mirrored and mirrored["demo"].restores == restores)

        async def removed(path: str) -> int:
            answer = await desk.ask("DELETE", f"/v1/checkpoints/{path}")
            return int(answer.status_code)

        await shows(1, before)
        where = "/v1/runs/demo/checkpoints/5/restore"
        assert (await desk.ask("POST", where, {})).json()["serial"] == 2
        damaged = f"demo.{spec['id']}/5"
        assert [await removed(path) for path in (before, damaged)] == [409, 409], "it is open"
        await shows(2, before)
        assert desk.registry.statuses["demo"].learners == {}, "it is no learner"
        assert [await removed(path) for path in (before, damaged)] == [409, 204], "it was refused"
        where = "/v1/runs/demo/checkpoints/3/restore"
        assert (await desk.ask("POST", where, {})).json()["serial"] == 3
        await shows(3, f"demo.{spec['id']}/000003")
        assert await removed(f"demo.{spec['id']}/3") == 409
        assert await removed(before) == 204, "a snapshot covers what came after it"


async def test_a_run_is_sent_back_to_a_checkpoint_that_is_there(
    world: Any, kept: Any, status: Any
) -> None:
    async with world.coordinator() as desk:
        ref = kept(await submitted(desk), 3)
        await world.says(status(restores=4))
        await until(lambda: desk.registry.statuses)
        path = "/v1/runs/demo/checkpoints"
        assert (await desk.ask("POST", f"{path}/2/restore", {})).status_code == 404
        wish = (await desk.ask("POST", f"{path}/3/restore", {})).json()
        assert wish["serial"] == 5
        record = await record_of(world, "demo")
        assert record.restore is not None
        assert (record.restore.serial, record.restore.source) == (5, ref)
        await world.says(status(state="finished"))
        await until(lambda: desk.registry.over("demo"))
        over = await desk.ask("POST", f"{path}/3/restore", {})
        assert (over.status_code, over.json()["title"]) == (409, "The run is over")


async def test_of_two_wishes_to_go_back_at_once_each_has_a_number(
    world: Any, kept: Any, status: Any
) -> None:
    """A syncer that had begun with the first would take the second for the same one."""
    async with world.coordinator() as desk:
        spec = await submitted(desk)
        refs = {number: kept(spec, number) for number in (3, 5)}
        await world.says(status())
        await until(lambda: desk.registry.statuses)
        path = "/v1/runs/demo/checkpoints/{}/restore"
        wishes = await asyncio.gather(*(desk.ask("POST", path.format(n), {}) for n in refs))
        serials = {answer.json()["serial"]: answer.json()["number"] for answer in wishes}
        record = await record_of(world, "demo")
        assert sorted(serials) == [1, 2] and record.restore is not None
        assert (record.restore.serial, record.restore.source) == (2, refs[serials[2]])


async def test_a_wish_to_go_back_is_not_for_a_later_run_of_the_name(
    world: Any, kept: Any, status: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.coordinator() as desk:
        kept(await submitted(desk), 3)
        await world.says(status())
        await until(lambda: desk.registry.statuses)
        look = checkpoints_io.CheckpointRoutes._manifest

        async def slow(self: Any, there: Any, ref: str) -> Any:
            known = desk.registry.runs["demo"]
            other = known.model_copy(update={"spec": {**known.spec, "id": "submitted-anew"}})
            desk.registry.runs["demo"] = other
            return await look(self, there, ref)

        monkeypatch.setattr(checkpoints_io.CheckpointRoutes, "_manifest", slow)
        answer = await desk.ask("POST", "/v1/runs/demo/checkpoints/3/restore", {})
        assert (answer.status_code, answer.json()["title"]) == (
            409,
            "The run is another one by now",
        )


async def test_a_run_of_which_a_part_is_over_is_not_sent_back(
    world: Any, kept: Any, status: Any
) -> None:
    two = {**SPEC, "algorithm": {**SPEC["algorithm"], "shards": 2}}
    async with world.coordinator() as desk:
        spec = (await desk.ask("POST", "/v1/runs", two)).json()["spec"]
        kept(spec, 3)
        await world.says(status())
        other = encode(status(shard=1, state="finished"))
        await world.bus.kv_put(subjects.STATUS, subjects.status_key("demo", 1), other)
        await until(lambda: len(desk.registry.standings.shards.get("demo", ())) == 2)
        path = "/v1/runs/demo/checkpoints/3/restore"
        refused = await desk.ask("POST", path, {})
        assert refused.status_code == 409
        assert "shard 1 of 'demo' is finished" in refused.json()["detail"]
        assert (await desk.ask("POST", path, {"as": "again"})).status_code == 202


async def test_a_new_run_begins_with_a_checkpoint_and_the_lives_it_knows(
    world: Any, kept: Any
) -> None:
    async with world.coordinator() as desk:
        ref = kept(await submitted(desk), 3)
        later = Incarnation(learner="b", incarnation=7, boot="", at=0.0)
        await world.bus.kv_put(subjects.INCARNATIONS, "again.b", encode(later))
        path = "/v1/runs/demo/checkpoints/3/restore"
        assert (await desk.ask("POST", path, {"as": "again"})).status_code == 202
        record = await record_of(world, "again")
        assert record.restore is not None and record.restore.source == ref
        assert record.spec["algorithm"] == (await record_of(world, "demo")).spec["algorithm"]
        assert record.spec["id"] != (await record_of(world, "demo")).spec["id"]
        lives = {
            key: decode(entry.value, Incarnation).incarnation
            for key, entry in (await world.bus.kv_all(subjects.INCARNATIONS)).items()
        }
        assert lives == {"again.a": 4, "again.b": 7}, "never moved back"
        assert (await desk.ask("POST", path, {"as": "again"})).status_code == 409

        # From a file of one's own, by an address of its own.
        more = {**SPEC, "name": "more", "budget": {"steps": 960}}
        place = f"{world.checkpoints}/{ref}"
        where = f"/v1/checkpoints/submit?checkpoint={place}"
        assert (await desk.ask("POST", where, more)).status_code == 201
        begun = (await record_of(world, "more")).restore
        assert begun is not None and begun.source == ref, "it is in the place in use"


async def test_a_request_for_a_name_that_is_taken_changes_no_life(world: Any, kept: Any) -> None:
    async with world.coordinator() as desk:
        kept(await submitted(desk), 3)
        assert (await desk.ask("POST", "/v1/runs", {**SPEC, "name": "again"})).status_code == 201
        path = "/v1/runs/demo/checkpoints/3/restore"
        assert (await desk.ask("POST", path, {"as": "again"})).status_code == 409
        assert not await world.bus.kv_all(subjects.INCARNATIONS)


async def test_a_run_that_cannot_begin_with_it_is_refused(world: Any, kept: Any) -> None:
    async with world.coordinator() as desk:
        ref = kept(await submitted(desk), 3)
        where = f"/v1/checkpoints/submit?checkpoint={ref}"
        other = {
            "name": "other",
            "budget": {"steps": 9},
            "algorithm": {
                "fragments": 6,
                "shards": 2,
                "sync_every_steps": 12,
                "outer_optimizer": "adam",
                "outer_settle_from": 1.0,
            },
            "model": {"overrides": {"width": 8}},
        }
        answer = await desk.ask("POST", where, other)
        assert answer.status_code == 422
        faults = {f["path"]: f["message"] for f in answer.json()["errors"]}
        assert "into 2 fragments" in faults["algorithm.fragments"]
        assert "of 1 syncer shard" in faults["algorithm.shards"]
        assert "one in 8 steps" in faults["algorithm.sync_every_steps"]
        assert "4 bytes of outer state" in faults["algorithm.outer_optimizer"]
        assert "another layout" in faults["model.overrides"]
        nothing = await desk.ask("POST", "/v1/checkpoints/submit?checkpoint=x", other)
        assert nothing.status_code == 404


async def test_a_place_that_nobody_can_reach_is_refused(world: Any) -> None:
    async with world.coordinator() as desk:
        wrong = {**SPEC, "keeping": {"run_checkpoint_root": "ftp://here"}}
        answer = await desk.ask("POST", "/v1/runs", wrong)
        assert answer.status_code == 422
        faults = {e["path"]: e["message"] for e in answer.json()["errors"]}
        assert "one of file://, gs://, s3://" in faults["keeping.run_checkpoint_root"]


async def test_lives_are_counted_on_though_a_site_wrote_what_nobody_can_read(
    world: Any, kept: Any
) -> None:
    async with world.coordinator() as desk:
        kept(await submitted(desk), 3)
        await world.bus.kv_put(subjects.INCARNATIONS, "again.a", b"nothing that anybody reads")
        path = "/v1/runs/demo/checkpoints/3/restore"
        answer = await desk.ask("POST", path, {"as": "again"})
        assert answer.status_code == 202, answer.text
        entry = await world.bus.kv_get(subjects.INCARNATIONS, "again.a")
        assert decode(entry.value, Incarnation).incarnation == 4


async def test_a_site_that_writes_its_life_without_end_holds_nobody_up(
    world: Any, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.coordinator() as desk:
        kept(await submitted(desk), 3)
        attempts = []

        async def overtaken(*place: Any, ttl_s: float | None = None) -> int:
            attempts.append(place)
            assert len(attempts) < 99, "for ever"
            raise Conflict("written meanwhile")

        monkeypatch.setattr("diloco_coordinator.api.checkpoints_io.write_if", overtaken)
        path = "/v1/runs/demo/checkpoints/3/restore"
        answer = await desk.ask("POST", path, {"as": "again"})
        assert answer.status_code == 202, answer.text
