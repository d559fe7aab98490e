"""A run that is stopped ends and can be deleted, also if nobody is there who could end it."""

import asyncio
from typing import Any

import pytest
from coordinator.conftest import member
from waiting import until

from diloco_coordinator.api.views import MEND
from diloco_coordinator.runs import ending_io as ending
from diloco_coordinator.runs import registry_io as registry
from diloco_coordinator.runs import statuses as standings
from diloco_coordinator.runs.ending_io import end_overdue
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared import ambient
from diloco_shared.bus.repeating import AT_ONCE
from diloco_shared.bus.run_streams import ensure_buckets, ensure_run_streams
from diloco_shared.bus.status_key import Standing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.pace import LAST_EVALUATION
from diloco_shared.protocol.records import RunRecord, RunStatus, TokenCounts

pytestmark = pytest.mark.virtual


def spec(name: str = "demo") -> dict[str, Any]:
    return {"name": name, "budget": {"steps": 96}}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience of a fraction of a second."""
    monkeypatch.setattr(standings, "FORCE_S", 0.3)
    monkeypatch.setattr(standings, "SILENT_S", 0.2)
    monkeypatch.setattr(standings, "SETTLE_S", 0.3)


async def begun(desk: Any, world: Any) -> str:
    """A run with a syncer and a learner; its id."""
    await world.joins("syncer-1", role="syncer")
    await world.joins("learner-1")
    await desk.ask("POST", "/v1/runs", spec())
    await until(lambda: len(desk.registry.assigned) == 2)
    run_id: str = desk.registry.runs["demo"].spec["id"]
    return run_id


async def test_a_stop_without_a_leader_is_carried_out_and_holds_nobody(
    world: Any, status: Any
) -> None:
    async with world.coordinator() as desk:
        run_id = await begun(desk, world)
        await world.says(status(run_id=run_id))
        await until(lambda: "demo" in desk.registry.statuses)
        await world.dies("syncer-1")
        await desk.ask("POST", "/v1/runs/demo/stop")
        view = await until(lambda: _state(desk, "stopped"))
        assert view["status"]["forced"]
        await until(lambda: "learner-1" not in desk.registry.assigned)
        assert desk.registry.assigned == {"syncer-1": "demo"}, "it may end the run properly"
        answer = await desk.ask("DELETE", "/v1/runs/demo")
        assert answer.status_code == 204, answer.text
        assert (await desk.get("/v1/runs"))["runs"] == []


async def _state(desk: Any, wanted: str) -> Any:
    view = await desk.get("/v1/runs/demo")
    return view if view["state"] == wanted else None


async def test_a_run_that_nobody_ever_led_is_stopped_too(world: Any) -> None:
    async with world.coordinator() as desk:
        await begun(desk, world)
        await world.dies("syncer-1")
        await desk.ask("POST", "/v1/runs/demo/stop")
        await until(lambda: _state(desk, "stopped"))


async def test_a_shard_that_nobody_ever_led_is_stopped_and_the_coordinator_goes_on(
    world: Any, status: Any
) -> None:
    """Also one that is started again and finds what was written."""
    async with world.coordinator() as desk:
        await world.joins("syncer-1", "syncer-2", role="syncer")
        await world.joins("learner-1")
        sharded = spec() | {"algorithm": {"shards": 2, "fragments": 6}}
        assert (await desk.ask("POST", "/v1/runs", sharded)).status_code == 201
        await until(lambda: len(desk.registry.assigned) == 3)
        run_id = desk.registry.runs["demo"].spec["id"]
        told = {"versions": (3, -1) * 3, "tokens_by_fragment": (TokenCounts(),) * 6}
        await world.says(status(state="stopped", run_id=run_id, **told))
        await world.dies("syncer-2")
        await desk.ask("POST", "/v1/runs/demo/stop")
        view = await until(lambda: _state(desk, "stopped"))
        assert view["status"]["versions"] == [3, -1] * 3
        answer = await desk.ask("POST", "/v1/runs/demo/checkpoints")
        assert answer.status_code == 409, answer.text
    async with world.coordinator() as desk:
        assert desk.registry.over("demo")


async def test_a_syncer_that_comes_back_settles_what_was_forced(world: Any, status: Any) -> None:
    async with world.coordinator() as desk:
        run_id = await begun(desk, world)
        await world.says(status(run_id=run_id))
        await desk.ask("POST", "/v1/runs/demo/stop")
        await until(lambda: desk.registry.forced("demo"))
        leader = Standing(world.bus, "demo", run_id)
        assert await leader.write(status(run_id=run_id, term=2)) == "the run is settled"
        assert desk.registry.over("demo")
        proper = status(state="stopped", settled=True, run_id=run_id, term=2)
        assert await leader.write(proper) == ""
        await until(lambda: not desk.registry.forced("demo"))
        assert desk.registry.over("demo")


async def test_a_run_once_over_never_gets_members_again(world: Any, status: Any) -> None:
    """A standby leads for a moment after the end: its status replaces nothing."""
    async with world.coordinator() as desk:
        run_id = await begun(desk, world)
        first = Standing(world.bus, "demo", run_id)
        standby = Standing(world.bus, "demo", run_id)
        assert await first.write(status(run_id=run_id)) == ""
        await standby.read()
        end = status(state="finished", settled=True, run_id=run_id)
        assert await first.write(end) == ""
        await until(lambda: not desk.registry.assigned)
        late = status(state="finished", settled=False, run_id=run_id)
        assert await standby.write(late) == "the run is settled"
        looked = desk.registry.revisions.copy()
        for _ in range(3):
            await desk.ask("POST", "/v1/runs", spec("next"))
            await until(lambda: set(desk.registry.assigned.values()) == {"next"})
        assert desk.registry.over("demo") and looked
        assert (await desk.ask("DELETE", "/v1/runs/demo")).status_code == 204


async def test_an_end_that_its_leader_forestalls_is_told_by_nobody_else(
    world: Any, status: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.coordinator() as desk:
        run_id = await begun(desk, world)
        await world.says(status(run_id=run_id))
        refused: list[str] = []

        async def late(standing: Standing, end: RunStatus) -> str:
            refused.append(end.state)
            return "the run is settled"

        monkeypatch.setattr(Standing, "write", late)
        await desk.ask("POST", "/v1/runs/demo/stop")
        await until(lambda: len(refused) >= 2)
        kinds = {event.kind for _, event in desk.registry.events}
        assert "end-forced" not in kinds


async def test_an_end_that_its_leader_did_not_settle_is_settled(world: Any, status: Any) -> None:
    async with world.coordinator() as desk:
        run_id = await begun(desk, world)
        await world.says(status(state="finished", settled=False, run_id=run_id))
        await until(lambda: desk.registry.over("demo"))
        shown: RunStatus = desk.registry.statuses["demo"]
        assert (shown.state, shown.forced) == ("finished", False)
        await until(lambda: not desk.registry.assigned)


async def test_who_never_leaves_a_deleted_run_is_not_waited_for_for_ever(
    world: Any, status: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_coordinator.api.runs_io.LEAVE_LOOKS", 2)
    async with world.coordinator() as desk:
        run_id = await begun(desk, world)
        await world.joins("learner-1", run="demo")
        await until(lambda: desk.registry.working("demo"))
        await world.says(status(state="stopped", run_id=run_id))
        await until(lambda: desk.registry.over("demo"))
        answer = await desk.ask("DELETE", "/v1/runs/demo")
        assert answer.status_code == 409 and "learner-1" in answer.text
        now = ambient.monotonic() + 31.0
        monkeypatch.setattr("diloco_coordinator.api.runs_io.ambient.monotonic", lambda: now)
        assert (await desk.ask("DELETE", "/v1/runs/demo")).status_code == 204


async def test_whatever_keeps_a_run_waiting_is_its_reason_until_it_is_mended(
    world: Any, status: Any
) -> None:
    async with world.coordinator() as desk:
        run_id = await begun(desk, world)
        reason = "ValueError: no such preset"
        await world.joins("learner-1", run="demo", state="unfit", reason=reason)
        joined = "0 of 1 learners have joined"
        await world.says(status(state="waiting", reason=joined, run_id=run_id))
        view = await until(lambda: _state(desk, "waiting"))
        view = await until(lambda: _because(desk, "learners-unfit", "waiting"))
        assert view["reason"] == f"learner-1 cannot work: {reason} ({MEND}); {joined}"
        member = await desk.get("/v1/members/learner-1")
        assert (member["state"], member["reason"]) == ("unfit", reason)
        await world.joins("learner-1", run="demo", state="working", reason="")
        view = await until(lambda: _because(desk, "waiting"))
        assert view["reason"] == joined


async def test_a_run_works_with_those_of_its_learners_that_can(world: Any, status: Any) -> None:
    async with world.coordinator() as desk:
        run_id = await begun(desk, world)
        await world.joins("learner-1", run="demo", state="working")
        await world.joins("learner-2", run="demo", state="unfit", reason="there is no /text")
        await world.says(status(run_id=run_id))
        view = await until(lambda: _because(desk, "running", "learners-unfit"))
        assert view["state"] == "running"
        told = f"2 of 2 ready; learner-2 cannot work: there is no /text ({MEND})"
        assert view["reason"] == told


async def _because(desk: Any, *codes: str) -> Any:
    view = await desk.get("/v1/runs/demo")
    return view if view["reason_codes"] == [*codes] else None


async def test_a_quorum_that_nobody_can_reach_names_its_consequence(
    world: Any, status: Any
) -> None:
    async with world.coordinator() as desk:
        run_id = await begun(desk, world)
        await world.says(status(run_id=run_id))
        await until(lambda: "demo" in desk.registry.statuses)
        answer = await desk.ask("PATCH", "/v1/runs/demo", {"quorum": 5})
        assert answer.json()["consequence"] == (
            "2 of 5 learners are there: no round opens until 3 more join, or 'diloco quorum demo 2'"
        )
        answer = await desk.ask("PATCH", "/v1/runs/demo", {"quorum": 2})
        assert answer.json()["consequence"] == ""


async def test_a_wish_to_drain_is_not_lost_to_another_coordinator(world: Any) -> None:
    """Each writes down what it sees of members: what a user asked the other one for stays."""
    async with world.coordinator() as one, world.coordinator() as two:
        await world.joins("learner-1")
        await until(lambda: "learner-1" in two.registry.roll.notes)
        await until(lambda: "learner-1" in one.registry.roll.notes)
        await one.ask("POST", "/v1/members/learner-1/drain")
        await two.registry._note(two.registry.roll.notes["learner-1"])
        entry = await world.bus.kv_get("notes", "learner-1")
        assert b'"drained":true' in entry.value
        assert two.registry.roll.notes["learner-1"].drained


async def test_a_wish_to_drain_is_shown_whatever_another_coordinator_wrote_before(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's note of a moment ago arrives while the wish is written."""
    async with world.coordinator() as one:
        await world.joins("learner-1")
        await until(lambda: "learner-1" in one.registry.roll.notes)
        before = one.registry.roll.notes["learner-1"].model_dump_json().encode()
        write_if = registry.write_if

        async def overtaken(*args: Any) -> int:
            monkeypatch.setattr(registry, "write_if", write_if)
            await world.bus.kv_put("notes", "learner-1", before)
            await one.registry._take("notes", await world.bus.kv_get("notes", "learner-1"))
            return await write_if(*args)

        monkeypatch.setattr(registry, "write_if", overtaken)
        await one.registry.drain("learner-1", True)
        assert one.registry.roll.notes["learner-1"].drained


async def test_a_coordinator_that_was_cut_off_ends_nothing_before_it_has_listened(
    world: Any, status: Any
) -> None:
    """A leader may have lived on and spoken all the while."""
    async with world.coordinator() as desk:
        run_id = await begun(desk, world)
        bus, standing = desk.registry.bus, desk.registry.standings
        await world.says(status(state="finished", settled=False, run_id=run_id))
        await until(lambda: standing.at("demo"))
        bus.disconnect()
        cut_at = ambient.monotonic()
        await end_overdue(desk.registry)
        assert standing.listening_since >= cut_at


async def test_an_end_is_not_settled_under_a_leader_that_the_mirror_has_yet_to_hear(
    world: Any, status: Any
) -> None:
    unsettled = status(state="finished", settled=False, run_id="one")
    record = RunRecord(name="demo", spec={"id": "one"}, desired="running", quorum=1, created_at=1.0)
    await ensure_buckets(world.bus, (subjects.STATUS, subjects.RUNS))
    mirror = Registry(world.bus)
    mirror.runs["demo"] = record
    mirror.standings.take("demo", unsettled, ambient.monotonic() - 1.0)
    mirror.standings.put_together("demo", record)
    await world.says(unsettled.model_copy(update={"at": 200.0}))
    await end_overdue(mirror)
    leader = Standing(world.bus, "demo", "one")
    shown = await leader.read()
    assert shown is not None and not shown.settled
    await world.says(unsettled)
    await end_overdue(mirror)
    shown = await leader.read()
    assert shown is not None and shown.settled, "it is as it was heard: nobody speaks"


async def test_keys_of_a_run_are_removed_several_at_once(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other it took minutes where the hub is far away, and there are many shards."""
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", spec())
        for shard in range(40):
            await world.bus.kv_put(subjects.PLACES, f"demo.{shard}", b"there")
        delete, under_way, most = desk.registry.bus.kv_delete, 0, 0

        async def slow(bucket: str, key: str, **more: Any) -> int:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.1)
            under_way -= 1
            removed: int = await delete(bucket, key, **more)
            return removed

        monkeypatch.setattr(desk.registry.bus, "kv_delete", slow)
        await desk.ask("POST", "/v1/runs/demo/stop")
        await until(lambda: _state(desk, "stopped"))
        answer = await desk.ask("DELETE", "/v1/runs/demo")
        assert answer.status_code == 204, answer.text
        assert not await world.bus.kv_all(subjects.PLACES, "demo.>")
        assert 1 < most <= AT_ONCE


async def test_a_stream_that_is_made_again_after_a_deletion_goes(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a syncer that has yet to hear of it; the coordinator looks for that by itself."""
    monkeypatch.setattr(ending, "LEFTOVERS_LOOK_S", 0.2)
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", spec())
        await asyncio.sleep(1.0)  # until a look has seen the run
        await desk.ask("POST", "/v1/runs/demo/stop")
        await until(lambda: _state(desk, "stopped"))
        answer = await desk.ask("DELETE", "/v1/runs/demo")
        assert answer.status_code == 204, answer.text
        await ensure_run_streams(world.bus, "demo", {"UP": 1 << 20})
        name = subjects.run_stream("demo", "UP")
        await until(lambda: not world.broker.exists(name))


async def test_an_end_waits_to_be_settled_for_who_makes_the_last_evaluation(
    world: Any, status: Any
) -> None:
    """Whoever leads no more told it so."""
    await ensure_buckets(world.bus, (subjects.STATUS, subjects.RUNS))
    mirror = Registry(world.bus)
    mirror.runs["demo"] = RunRecord(
        name="demo", spec={"id": "one"}, desired="running", quorum=1, created_at=1.0
    )
    unsettled = status(state="finished", settled=False, run_id="one")
    await world.says(unsettled)
    mirror.standings.take("demo", unsettled, ambient.monotonic() - 1.0)
    mirror.standings.put_together("demo", mirror.runs["demo"])
    leader = Standing(world.bus, "demo", "one")

    async def settled(role: str, reason: str, run: str) -> bool:
        shown = member("a", role).model_copy(update={"reason": reason, "run": run})
        mirror.roll.seen(shown, 1.0)
        await end_overdue(mirror)
        there = await leader.read()
        assert there is not None
        return there.settled

    assert not await settled("learner", LAST_EVALUATION, "demo")
    for others in (
        ("learner", LAST_EVALUATION, "other"),
        ("syncer", LAST_EVALUATION, "demo"),
        ("learner", "", "demo"),
    ):
        await world.says(unsettled)
        assert await settled(*others), others
