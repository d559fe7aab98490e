"""A submission or a deletion that ends half way can be repeated, and revives nothing."""

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
from waiting import until

from diloco_coordinator.runs import statuses as standings
from diloco_coordinator.runs.assigning_io import assign
from diloco_coordinator.runs.ending_io import delete_run, end_overdue
from diloco_coordinator.runs.membership import MemberNote
from diloco_shared.bus.port import Conflict, Refused, Unavailable
from diloco_shared.bus.status_key import Standing
from diloco_shared.bus.stream_kv import POLL_S, bucket_stream
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import decode, encode

pytestmark = pytest.mark.virtual

SPEC: dict[str, Any] = {"name": "demo", "budget": {"steps": 96}}
BIG = SPEC | {"model": {"preset": "gemma-12b"}}
# Calls of the bus that change something.
WRITES = ("kv_create", "kv_update", "kv_put", "kv_delete", "delete_stream", "purge")


class Cut:
    """Lets `after` writes through, then none until it is healed."""

    def __init__(self, bus: Any, after: int) -> None:
        self.left, self.bus = after, bus
        for name in WRITES:
            setattr(bus, name, self._counted(getattr(bus, name)))

    def _counted(self, call: Any) -> Any:
        async def counted(*args: Any, **more: Any) -> Any:
            if args[0] in (subjects.MEMBERS, "notes", subjects.ASSIGNMENTS):
                return await call(*args, **more)  # not of the request that is cut off
            if self.left == 0:
                raise Unavailable("no answer")
            self.left -= 1
            return await call(*args, **more)

        return counted


async def finished(desk: Any, world: Any, status: Callable[..., Any]) -> str:
    """A run that is over, with members free to work for it; its id."""
    spec = (await desk.ask("POST", "/v1/runs", SPEC)).json()["spec"]
    await world.says(status(state="finished", run_id=spec["id"]))
    await until(lambda: "demo" in desk.registry.statuses)
    await world.joins("syncer-1", role="syncer")
    await world.joins("learner-1")
    await until(lambda: len(desk.registry.roll.living) == 2)
    run_id: str = spec["id"]
    return run_id


async def streams(desk: Any, run: str = "demo") -> list[str]:
    found = []
    for name in subjects.run_streams(run):
        try:
            await desk.registry.bus.stream_info(name)
        except Refused:
            continue
        found.append(name)
    return found


async def test_a_deletion_that_ends_anywhere_revives_nothing_and_is_repeated(
    world: Any, status: Callable[..., Any]
) -> None:
    written = 0
    while True:
        there = type(world)()
        async with there.coordinator() as desk:
            await finished(desk, there, status)
            Cut(desk.registry.bus, written)
            if (await desk.ask("DELETE", "/v1/runs/demo")).status_code == 204:
                break
            await assign(desk.registry)
            assert desk.registry.over("demo") and not desk.registry.assigned, written
        async with there.coordinator() as desk:  # started again
            await assign(desk.registry)
            assert desk.registry.over("demo") and not desk.registry.assigned, written
            view = await desk.get("/v1/runs/demo")
            assert view["state"] in ("finished", "stopped")
            if written:
                assert view["reason_codes"] == ["deleting"]
                again = await desk.ask("POST", "/v1/runs/demo/resume")
                assert again.status_code == 409, "also once its status is gone"
            assert (await desk.ask("DELETE", "/v1/runs/demo")).status_code == 204
            assert (await desk.get("/v1/runs"))["runs"] == [] and not await streams(desk)
            assert not await there.bus.kv_all(subjects.STATUS)
        written += 1
    assert written > 8, "each step was met"


async def test_nobody_writes_a_status_of_a_run_that_is_being_deleted(
    world: Any, status: Callable[..., Any]
) -> None:
    """It would outlive the run."""
    async with world.coordinator() as desk:
        run_id = await finished(desk, world, status)
        await world.bus.kv_delete(subjects.STATUS, "demo")
        late = status(state="finished", run_id=run_id)
        assert await Standing(world.bus, "demo", run_id).write(late) == ""
        await world.bus.kv_delete(subjects.STATUS, "demo")
        record = desk.registry.runs["demo"]
        await desk.registry.update_run(record.model_copy(update={"phase": "deleting"}))
        assert "is deleted" in await Standing(world.bus, "demo", run_id).write(late)


async def test_two_who_delete_one_run_at_once(world: Any, status: Callable[..., Any]) -> None:
    async with world.coordinator() as desk:
        await finished(desk, world, status)
        asked = [desk.ask("DELETE", "/v1/runs/demo") for _ in range(2)]
        codes = [a.status_code for a in await asyncio.gather(*asked)]
        assert 204 in codes and set(codes) <= {204, 404}
        assert not desk.registry.runs


async def test_a_long_deletion_holds_up_requests_for_its_own_name_alone(
    world: Any, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.coordinator() as desk:
        await finished(desk, world, status)
        remove, waits, goes_on = desk.registry.bus.purge, asyncio.Event(), asyncio.Event()

        async def slowly(*given: Any) -> None:
            waits.set()
            await goes_on.wait()
            await remove(*given)

        monkeypatch.setattr(desk.registry.bus, "purge", slowly)
        long = asyncio.create_task(desk.ask("DELETE", "/v1/runs/demo"))
        await waits.wait()
        other = await asyncio.wait_for(desk.ask("POST", "/v1/runs", SPEC | {"name": "other"}), 60)
        assert other.status_code == 201
        again = asyncio.create_task(desk.ask("POST", "/v1/runs", SPEC))
        await asyncio.sleep(60)
        assert not again.done() and not long.done()
        goes_on.set()
        assert (await long).status_code == 204 and (await again).status_code == 201
        assert sorted(desk.registry.runs) == ["demo", "other"]
        gc.collect()
        assert not desk.app.state.runs.changing, "no lock outlives its requests"


async def test_the_last_step_of_a_deletion_leaves_the_next_run_of_that_name(
    world: Any, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two coordinators delete it, and it is submitted anew in between."""
    async with world.coordinator() as desk, world.coordinator() as other:
        old = await finished(desk, world, status)
        await until(lambda: other.registry.there("demo"))
        remove = desk.registry.bus.kv_delete

        async def meanwhile(bucket: str, key: str, **given: Any) -> int:
            if (bucket, key) == (subjects.RUNS, "demo"):
                await delete_run(other.registry, "demo", old)
                assert (await other.ask("POST", "/v1/runs", SPEC)).status_code == 201
            return int(await remove(bucket, key, **given))

        monkeypatch.setattr(desk.registry.bus, "kv_delete", meanwhile)
        await delete_run(desk.registry, "demo", old)
        for each in (desk, other):
            await until(lambda of=each: of.registry.there("demo"))  # type: ignore[misc]
            assert each.registry.runs["demo"].spec["id"] != old


async def test_a_deletion_whose_record_changed_is_not_told_as_done(
    world: Any, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a hub that is put back meanwhile: the same run is there, as it was before."""
    async with world.coordinator() as desk:
        old, before = await finished(desk, world, status), desk.registry.runs["demo"]
        remove, times = desk.registry.bus.kv_delete, list[int]()

        async def meanwhile(bucket: str, key: str, **given: Any) -> int:
            if (bucket, key) == (subjects.RUNS, "demo") and not times:
                times.append(1)
                await world.bus.kv_put(bucket, key, encode(before))
            return int(await remove(bucket, key, **given))

        monkeypatch.setattr(desk.registry.bus, "kv_delete", meanwhile)
        with pytest.raises(Conflict):
            await delete_run(desk.registry, "demo", old)
        assert desk.registry.there("demo")
        await delete_run(desk.registry, "demo", old)
        assert not desk.registry.runs


async def test_an_answer_tells_of_what_is_there_with_its_revision(world: Any) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        registry, write = desk.registry, desk.registry.bus.kv_update

        async def slow(bucket: str, key: str, value: bytes, revision: int, **given: Any) -> int:
            mine = await write(bucket, key, value, revision, **given)
            there = decode(value, RunRecord).model_copy(update={"quorum": 5})
            later = await world.bus.kv_put(bucket, key, encode(there))
            await until(lambda: registry.revisions[bucket, key] == later)
            return mine

        registry.bus.kv_update = slow
        answer = (await desk.ask("PATCH", "/v1/runs/demo", {"quorum": 2})).json()
        assert (answer["quorum"], answer["revision"]) == (5, registry.revisions["runs", "demo"])


async def test_what_is_written_here_does_not_hide_what_others_wrote_after_it(world: Any) -> None:
    """The answer to a write may come after the word of a later one."""
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        registry, bus = desk.registry, desk.registry.bus
        write = bus.kv_update

        async def slow(bucket: str, key: str, value: bytes, revision: int, **given: Any) -> int:
            mine = await write(bucket, key, value, revision, **given)
            there = decode(value, RunRecord)
            later = await world.bus.kv_put(
                bucket, key, encode(there.model_copy(update={"quorum": 5}))
            )
            await until(lambda: registry.revisions[bucket, key] == later)
            return mine

        bus.kv_update = slow
        await registry.update_run(registry.runs["demo"].model_copy(update={"quorum": 2}))
        assert registry.runs["demo"].quorum == 5


async def test_a_deletion_touches_nothing_of_the_next_run_of_that_name(
    world: Any, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another coordinator was faster, and the name is taken again."""
    async with world.coordinator() as desk:
        old, remove = await finished(desk, world, status), desk.registry.bus.purge
        others = [1]

        async def meanwhile(*place: str) -> None:
            await remove(*place)
            if others and others.pop():
                await delete_run(desk.registry, "demo", old)
                assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 201

        monkeypatch.setattr(desk.registry.bus, "purge", meanwhile)
        await delete_run(desk.registry, "demo", old)
        await delete_run(desk.registry, "demo", old)
        assert desk.registry.there("demo") and len(await streams(desk)) == 4


@pytest.mark.parametrize("written", [0, 1])
async def test_a_submission_that_was_cut_off_is_repeated(world: Any, written: int) -> None:
    async with world.coordinator() as desk:
        Cut(desk.registry.bus, written)
        answer = await desk.ask("POST", "/v1/runs", SPEC, Idempotency_Key="k")
        assert answer.status_code == 503
        assert bool(await streams(desk)) <= ("demo" in desk.registry.runs), "none without a name"
    await world.joins("syncer-1", role="syncer")
    await world.joins("learner-1")
    async with world.coordinator() as desk:
        await assign(desk.registry)
        assert not desk.registry.assigned, "nobody works for it yet"
        answer = await desk.ask("POST", "/v1/runs", SPEC, Idempotency_Key="k")
        assert answer.status_code == 201, answer.text
        await until(lambda: len(desk.registry.assigned) == 2)
        assert len(await streams(desk)) == 4


async def test_a_submission_without_an_answer_is_repeated_at_once(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the client, at the same coordinator: its name is still its own."""
    async with world.coordinator() as desk:
        look, looks = desk.registry.bus.stream_info, iter((True,))

        async def away(name: str) -> Any:
            if next(looks, False):
                raise Unavailable("no answer")
            return await look(name)

        monkeypatch.setattr(desk.registry.bus, "stream_info", away)
        answers = [await desk.ask("POST", "/v1/runs", SPEC, Idempotency_Key="k") for _ in "12"]
        assert [a.status_code for a in answers] == [503, 201]


async def test_a_submission_that_was_cut_off_is_deleted(world: Any) -> None:
    async with world.coordinator() as desk:
        Cut(desk.registry.bus, 1)
        assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 503
    async with world.coordinator() as desk:
        view = await desk.get("/v1/runs/demo")
        assert (view["state"], view["reason_codes"]) == ("queued", ["submitting"])
        assert (await desk.ask("POST", "/v1/runs/demo/stop")).status_code == 409
        assert (await desk.ask("DELETE", "/v1/runs/demo")).status_code == 204
        assert not await streams(desk)


async def test_a_deletion_while_it_is_submitted_again_does_not_say_that_it_is_gone(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.coordinator() as desk:
        Cut(desk.registry.bus, 1)
        assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 503
    async with world.coordinator() as desk:
        update, begun, on = desk.registry.update_run, asyncio.Event(), asyncio.Event()

        async def slowly(record: RunRecord) -> None:
            begun.set()
            await on.wait()
            await update(record)

        monkeypatch.setattr(desk.registry, "update_run", slowly)
        # The deletion has looked at what was cut off, and waits until nobody works for it.
        looked = asyncio.Event()

        def working(run: str) -> list[str]:
            looked.set()
            return [] if begun.is_set() else ["syncer-1"]

        monkeypatch.setattr(desk.registry, "working", working)
        gone = asyncio.create_task(desk.ask("DELETE", "/v1/runs/demo"))
        await looked.wait()
        again = asyncio.create_task(desk.ask("POST", "/v1/runs", SPEC))
        await begun.wait()
        on.set()
        assert (await again).status_code == 201
        answer = await gone
        assert answer.status_code == 409 and "submitted anew" in answer.text
        assert len(await streams(desk)) == 4


async def test_one_name_for_two_submissions_at_once(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that finds no room removes only what is its own."""
    async with world.coordinator() as desk:
        world.broker.storage_max = 20 << 30
        ensure, held = desk.registry.bus.ensure_stream, asyncio.Event()

        async def waits(spec: Any) -> None:
            await held.wait()
            await ensure(spec)

        monkeypatch.setattr(desk.registry.bus, "ensure_stream", waits)
        first = asyncio.create_task(desk.ask("POST", "/v1/runs", BIG))
        await until(lambda: "demo" in desk.registry.runs)
        others = [asyncio.create_task(desk.ask("POST", "/v1/runs", SPEC)) for _ in range(2)]
        await asyncio.sleep(0.05)
        held.set()
        answers = [a.status_code for a in await asyncio.gather(first, *others)]
        assert answers[0] == 422 and sorted(answers[1:]) == [201, 409]
        assert len(await streams(desk)) == 4
        assert desk.registry.there("demo")


async def test_two_coordinators_take_up_one_submission(world: Any) -> None:
    async with world.coordinator() as one, world.coordinator() as two:
        slow = one.registry.bus.stream_info
        held = asyncio.Event()

        async def waits(name: str) -> Any:
            await held.wait()
            return await slow(name)

        one.registry.bus.stream_info = waits
        first = asyncio.create_task(one.ask("POST", "/v1/runs", SPEC))
        await until(lambda: "demo" in two.registry.runs)
        made = await two.ask("POST", "/v1/runs", SPEC)
        assert made.status_code == 201
        held.set()
        assert (await first).status_code == 409
        entry = await world.bus.kv_get(subjects.RUNS, "demo")
        record = decode(entry.value, RunRecord)
        assert (record.spec["id"], record.phase) == (made.json()["spec"]["id"], "there")
        assert len(await streams(two)) == 4


async def test_a_run_that_goes_while_another_is_ended(
    world: Any, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.coordinator() as desk:
        registry = desk.registry
        for name in ("a", "b"):
            await desk.ask("POST", "/v1/runs", SPEC | {"name": name})
            run_id = registry.runs[name].spec["id"]
            await world.says(status(run=name, state="stopped", settled=False, run_id=run_id))
        await until(lambda: len(registry.statuses) == 2)
        run_id, read = registry.runs["b"].spec["id"], registry.bus.kv_get
        monkeypatch.setattr(standings, "SETTLE_S", 0.0)

        async def meanwhile(*place: str) -> Any:
            if "b" in registry.runs:
                await delete_run(registry, "b", run_id)
            return await read(*place)

        monkeypatch.setattr(registry.bus, "kv_get", meanwhile)
        await end_overdue(registry)
        assert set(registry.runs) == {"a"} and registry.over("b")
        assert run_id not in registry.standings.stopping_since


async def test_nobody_is_assigned_to_a_run_that_went_meanwhile(world: Any) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await delete_run(desk.registry, "demo", desk.registry.runs["demo"].spec["id"])
        with pytest.raises(Conflict):
            await desk.registry.assign("learner-1", "demo")


async def test_a_note_of_a_member_that_was_forgotten_meanwhile(world: Any) -> None:
    async with world.coordinator() as desk:
        await world.joins("learner-1")
        note: MemberNote = await until(lambda: desk.registry.roll.notes.get("learner-1"))
        await until(lambda: ("notes", "learner-1") in desk.registry.revisions)
        desk.registry.revisions["notes", "learner-1"] = 1  # another coordinator wrote since
        desk.registry.roll.forget("learner-1")
        gone = note.model_copy(update={"gone_since": time.time()})
        await desk.registry._note(gone)
        assert "learner-1" not in desk.registry.roll.notes


@pytest.mark.parametrize("noticed", [False, True])
async def test_buckets_that_were_put_back_are_believed(world: Any, noticed: bool) -> None:
    """A backup's revisions are lower; whether a watch has seen that, or a write meets it first."""
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        for _ in range(4):
            await desk.ask("POST", "/v1/runs/demo/pause")
            await desk.ask("POST", "/v1/runs/demo/resume")
        bus, old = desk.registry.bus, desk.registry.revisions[subjects.RUNS, "demo"]
        record = (await bus.kv_get(subjects.RUNS, "demo")).value
        await asyncio.sleep(1.5 * POLL_S)  # so long it takes watches to know the streams' sizes
        await bus.delete_stream(bucket_stream(subjects.RUNS))
        await bus.ensure_bucket(subjects.RUNS)
        assert await bus.kv_put(subjects.RUNS, "demo", record) < old
        if noticed:
            await until(lambda: desk.registry.revisions[subjects.RUNS, "demo"] < old)
        answer = await desk.ask("POST", "/v1/runs/demo/pause")
        assert (answer.status_code, answer.json()["desired"]) == (200, "paused")
