"""/v1/runs over a memory bus: creation, changes, faults of the input, rounds and metrics."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from waiting import until

from diloco_coordinator.api import runs_io
from diloco_coordinator.runs import statuses as standings
from diloco_shared.bus.port import Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Beat, Verdict
from diloco_shared.protocol.records import Assignment
from diloco_shared.protocol.wire import decode, encode

pytestmark = pytest.mark.virtual

SPEC: dict[str, Any] = {"name": "demo", "budget": {"steps": 96}}


async def test_a_run_waits_for_members_and_then_gets_them(world: Any) -> None:
    async with world.coordinator() as desk:
        made = await desk.ask("POST", "/v1/runs", {**SPEC, "membership": {"learners_min": 2}})
        assert made.status_code == 201
        assert made.headers["Location"] == "/v1/runs/demo"
        assert made.json()["state"] == "queued"
        await until(lambda: desk.registry.plan.waiting)
        assert (await desk.get("/v1/runs/demo"))["reason_codes"] == ["syncers-missing"]
        await world.joins("syncer-1", role="syncer")
        await world.joins("a")

        async def learners_are_missing() -> bool:
            return bool((await desk.get("/v1/runs/demo"))["reason_codes"] == ["learners-missing"])

        await until(learners_are_missing)
        await world.joins("b")
        await until(lambda: len(desk.registry.assigned) == 3)
        assert (await desk.get("/v1/runs/demo"))["members"] == ["a", "b", "syncer-1"]
        kinds = [e["kind"] for e in (await desk.get("/v1/events?run=demo"))["events"]]
        assert kinds[0] == "run-created" and "assigned" in kinds


async def test_three_faults_are_named_with_their_three_paths(world: Any) -> None:
    """I11: nothing is created."""
    body = {
        "name": "demo",
        "algorithm": {"quorum": 0, "fragments": 5},
        "membership": {"lease_s": -1},
        "budget": {"steps": 96},
    }
    async with world.coordinator() as desk:
        answer = await desk.ask("POST", "/v1/runs", body)
        assert answer.status_code == 422
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert {e["path"] for e in problem["errors"]} == {
            "algorithm.quorum",
            "algorithm.sync_every_steps",
            "membership.lease_s",
        }
        assert all(e["path"] in problem["detail"] for e in problem["errors"])
        assert (await desk.get("/v1/runs"))["runs"] == []


async def test_a_name_is_taken_once(world: Any) -> None:
    async with world.coordinator() as desk:
        assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 201
        again = await desk.ask("POST", "/v1/runs", SPEC)
        assert again.status_code == 409
        assert "'demo'" in again.json()["detail"]


async def test_a_repeated_request_creates_once(world: Any) -> None:
    async with world.coordinator() as desk:
        first = await desk.ask("POST", "/v1/runs", SPEC, Idempotency_Key="k1")
        again = await desk.ask("POST", "/v1/runs", SPEC, Idempotency_Key="k1")
        assert (first.status_code, again.status_code) == (201, 201)
        assert again.headers["Idempotency-Replayed"] == "true"
        assert again.json()["created_at"] == first.json()["created_at"]
        other = await desk.ask("POST", "/v1/runs", {**SPEC, "name": "two"}, Idempotency_Key="k1")
        assert other.status_code == 422
        assert [r["name"] for r in (await desk.get("/v1/runs"))["runs"]] == ["demo"]


@pytest.mark.parametrize("coordinators", [1, 2])
async def test_a_request_that_comes_twice_at_once_is_answered_twice_with_one_run(
    world: Any, coordinators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that gave up waiting sends it again while the first one is still at work."""
    made = runs_io.ensure_run_streams

    async def slowly(*given: Any, **more: Any) -> None:
        await asyncio.sleep(0.5)
        await made(*given, **more)

    monkeypatch.setattr(runs_io, "ensure_run_streams", slowly)
    async with world.coordinator() as one, world.coordinator() as two:
        desks = [one, two if coordinators == 2 else one]
        asked = [d.ask("POST", "/v1/runs", SPEC, Idempotency_Key="k") for d in desks]
        answers = await asyncio.gather(*asked)
        assert [a.status_code for a in answers] == [201, 201], [a.text for a in answers]
        assert len({a.json()["spec"]["id"] for a in answers}) == 1
        replayed = [a.headers.get("Idempotency-Replayed") for a in answers]
        assert sorted(replayed, key=str) == [None, "true"]


async def test_who_is_late_with_a_submission_hides_no_events_of_the_run_that_took_its_name(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator waits long for a server; meanwhile the user asks another one."""
    made, waits, goes_on = runs_io.ensure_run_streams, asyncio.Event(), asyncio.Event()

    async def slowly(*given: Any, **more: Any) -> None:
        if not waits.is_set():
            waits.set()
            await goes_on.wait()
        await made(*given, **more)

    monkeypatch.setattr(runs_io, "ensure_run_streams", slowly)
    async with world.coordinator() as one, world.coordinator() as two:
        late = asyncio.create_task(one.ask("POST", "/v1/runs", SPEC))
        await waits.wait()
        assert (await two.ask("POST", "/v1/runs", SPEC)).status_code == 201
        await world.tells("init")
        goes_on.set()
        assert (await late).status_code == 409
        await world.tells("end")

        def kinds() -> list[str]:
            return [e.kind for _, e in two.registry.told.after(0, "demo")]

        await until(lambda: "end" in kinds())
        assert kinds() == ["run-created", "init", "end"]


async def test_a_repeated_request_is_not_answered_with_somebody_elses_run(world: Any) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        for _ in "12":
            answer = await desk.ask("POST", "/v1/runs", SPEC, Idempotency_Key="k")
            assert (answer.status_code, answer.json()["title"]) == (409, "The name is taken")

        async def delete() -> None:
            await desk.ask("POST", "/v1/runs/demo/stop")
            assert (await desk.ask("DELETE", "/v1/runs/demo")).status_code == 204

        await delete()
        for replayed in (None, "true"):
            mine = await desk.ask("POST", "/v1/runs", SPEC, Idempotency_Key="k")
            assert mine.status_code == 201
            assert mine.headers.get("Idempotency-Replayed") == replayed
        await delete()
        for _ in "12":
            late = await desk.ask("POST", "/v1/runs", SPEC, Idempotency_Key="k")
            assert (late.status_code, late.json()["title"]) == (409, "The run was deleted")
            assert not desk.registry.runs, "whoever deleted it wants none"
        await desk.ask("POST", "/v1/runs", SPEC)
        answer = await desk.ask("POST", "/v1/runs", SPEC, Idempotency_Key="k")
        assert answer.status_code == 409, "the name is used anew"


async def test_a_repeated_request_finds_the_run_that_another_coordinator_made(world: Any) -> None:
    async with world.coordinator() as one, world.coordinator() as two:
        first = await one.ask("POST", "/v1/runs", SPEC, Idempotency_Key="k")
        two.registry.runs.pop("demo", None)  # as where its watch is behind
        two.registry.revisions.pop((subjects.RUNS, "demo"), None)
        again = await two.ask("POST", "/v1/runs", SPEC, Idempotency_Key="k")
        assert again.status_code == 201, again.text
        assert again.json()["spec"]["id"] == first.json()["spec"]["id"]


async def test_an_unknown_run_is_answered_with_the_known_ones(world: Any) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        for method, path in (("GET", ""), ("POST", "/pause"), ("DELETE", ""), ("GET", "/rounds")):
            answer = await desk.ask(method, f"/v1/runs/other{path}")
            assert answer.status_code == 404
            assert answer.json()["detail"].endswith("known: demo")


async def test_pause_resume_stop_and_no_way_back(world: Any) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        for verb, desired in (("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
            answer = await desk.ask("POST", f"/v1/runs/demo/{verb}")
            assert (answer.status_code, answer.json()["desired"]) == (200, desired)
        back = await desk.ask("POST", "/v1/runs/demo/resume")
        assert (back.status_code, back.json()["title"]) == (409, "The run is stopped")
        assert (await desk.ask("POST", "/v1/runs/demo/stop")).status_code == 200


async def test_a_wish_that_changes_nothing_is_no_event(world: Any) -> None:
    """I12: whoever may operate one run would push out everybody's events by repeating it."""
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        for verb in ("resume", "pause", "pause", "pause", "resume", "resume"):
            assert (await desk.ask("POST", f"/v1/runs/demo/{verb}")).status_code == 200
        last = (await world.bus.stream_info(subjects.EVENTS_STREAM)).last_seq
        await until(lambda: desk.registry.told.newest == last)
        kinds = [e["kind"] for e in (await desk.get("/v1/events?run=demo"))["events"]]
        assert [k for k in kinds if k.startswith("run-")] == [
            "run-created",
            "run-paused",
            "run-running",
        ]


async def test_a_change_based_on_an_old_look_is_refused(world: Any) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        etag = (await desk.ask("GET", "/v1/runs/demo")).headers["ETag"]
        path = "/v1/runs/demo"
        first = await desk.ask("PATCH", path, {"quorum": 2}, If_Match=etag)
        assert (first.status_code, first.json()["quorum"]) == (200, 2)
        second = await desk.ask("PATCH", path, {"quorum": 3}, If_Match=etag)
        assert second.status_code == 412
        assert first.headers["ETag"] in second.json()["detail"]
        third = await desk.ask("PATCH", path, {"quorum": 3}, If_Match=first.headers["ETag"])
        assert third.json()["quorum"] == 3


async def test_a_quorum_that_no_round_could_reach_is_refused(world: Any) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        answer = await desk.ask("PATCH", "/v1/runs/demo", {"quorum": 65})
        assert answer.json()["errors"][0]["path"] == "quorum"
        wrong = await desk.ask("PATCH", "/v1/runs/demo", {"quorum": "x", "speed": 1})
        assert {e["path"] for e in wrong.json()["errors"]} == {"quorum", "speed"}


async def test_two_coordinators_change_one_run(world: Any) -> None:
    """The one that wrote last with an old view tries again; neither change is lost."""
    async with world.coordinator() as one, world.coordinator() as two:
        await one.ask("POST", "/v1/runs", SPEC)
        await until(lambda: two.registry.there("demo"))
        await one.ask("PATCH", "/v1/runs/demo", {"quorum": 2})
        paused = await two.ask("POST", "/v1/runs/demo/pause")
        assert (paused.json()["desired"], paused.json()["quorum"]) == ("paused", 2)


async def test_deleting_takes_a_run_that_is_over_and_all_it_left(
    world: Any, status: Callable[..., Any], closed: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.says(status(state="running"))
        await world.tape("demo", closed(0))
        await world.bus.kv_put(subjects.SHARDS, "demo.3", b"x")
        await world.bus.kv_put(subjects.SHARDS, "demo2.3", b"x")
        await until(lambda: desk.registry.statuses)
        assert (await desk.ask("DELETE", "/v1/runs/demo")).status_code == 409
        await world.says(status(state="finished"))
        await until(lambda: desk.registry.over("demo"))
        assert (await desk.ask("POST", "/v1/runs/demo/pause")).status_code == 409
        assert (await desk.ask("DELETE", "/v1/runs/demo")).status_code == 204
        assert (await desk.get("/v1/runs"))["runs"] == []
        assert set(await world.bus.kv_all(subjects.SHARDS)) == {"demo2.3"}
        assert (await desk.get("/v1/events?run=demo"))["events"] == []
        assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 201


async def test_runs_come_page_by_page(world: Any) -> None:
    async with world.coordinator() as desk:
        for name in ("c", "a", "b"):
            await desk.ask("POST", "/v1/runs", {**SPEC, "name": name})
        page = await desk.get("/v1/runs?limit=2")
        assert ([r["name"] for r in page["runs"]], page["next"]) == (["a", "b"], "b")
        rest = await desk.get("/v1/runs?limit=2&after=b")
        assert ([r["name"] for r in rest["runs"]], rest["next"]) == (["c"], None)
        brief = (await desk.get("/v1/runs?brief=true"))["runs"]
        assert [r["state"] for r in brief] == ["queued"] * 3
        assert all("spec" not in r and "status" not in r for r in brief)


async def test_rounds_show_who_was_left_out_and_why(
    world: Any, closed: Callable[..., Any], term: Any
) -> None:
    merged = Verdict(learner="a", incarnation=0, outcome="merged", reason="in time")
    refused = Verdict(learner="b", incarnation=0, outcome="refused", reason="non-finite values")
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        assert (await desk.get("/v1/runs/demo/rounds"))["rounds"] == []
        await world.tape("demo", term, *(closed(n, merged, refused) for n in range(300)))
        page = await desk.get("/v1/runs/demo/rounds?limit=2")
        assert [r["round"] for r in page["rounds"]] == [0, 1]
        assert page["rounds"][0]["verdicts"][1]["reason"] == "non-finite values"
        rest = await desk.get(f"/v1/runs/demo/rounds?after={page['next']}&limit=1000")
        assert [r["round"] for r in rest["rounds"]] == list(range(2, 300))
        assert rest["next"] is None


async def test_metrics_tell_losses_over_time(world: Any, status: Callable[..., Any]) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        for n in range(3):
            await world.says(status(at=100.0 + n))
            await world.tells("evaluation", val_loss=5.0 - n, steps=8 * n, each={"code": 4.0 - n})
        curves = desk.registry.histories
        await until(lambda: curves.of("demo") and curves.of("demo")[-1]["at"] == 102.0)
        await until(lambda: len(desk.registry.events) == 4)
        metrics = await desk.get("/v1/runs/demo/metrics")
        assert [e["val_loss"] for e in metrics["evaluations"]] == [5.0, 4.0, 3.0]
        assert [e["each"]["code"] for e in metrics["evaluations"]] == [4.0, 3.0, 2.0]
        sample = metrics["history"][-1]
        assert (sample["loss"], sample["useful_share"]) == ({"a": 2.5}, 0.5)
        assert (sample["alive"], sample["participating"]) == (2, 1)


async def test_what_is_told_late_of_a_deleted_run_is_not_the_next_ones(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever evaluated it was cut off, and its name is given again."""
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await desk.ask("POST", "/v1/runs/demo/stop")
        await until(lambda: desk.registry.over("demo"))
        assert (await desk.ask("DELETE", "/v1/runs/demo")).status_code == 204
        await world.tells("evaluation", val_loss=5.0, steps=8)
        await until(lambda: [e.kind for _, e in desk.registry.events] == ["evaluation"])
        tell, phases = desk.registry.tell, list[str]()

        async def noted(run: str, *what: Any) -> None:
            phases.append(desk.registry.runs[run].phase)
            await tell(run, *what)

        monkeypatch.setattr(desk.registry, "tell", noted)
        await desk.ask("POST", "/v1/runs", SPEC)
        assert phases == ["submitting"], "what is told of it before is shown no more"
        await until(lambda: "run-created" in {e.kind for _, e in desk.registry.events})
        assert (await desk.get("/v1/runs/demo/metrics"))["evaluations"] == []
    async with world.coordinator() as desk:  # and one that reads all of it anew
        assert (await desk.get("/v1/runs/demo/metrics"))["evaluations"] == []


async def test_a_loss_that_is_not_a_number_is_shown_as_none(
    world: Any, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.says(status(learners={"a": {"loss": float("nan")}}))
        await until(lambda: desk.registry.statuses)
        assert (await desk.get("/v1/runs/demo"))["status"]["learners"]["a"]["loss"] is None


async def test_a_run_is_streamed_until_it_is_over(world: Any, status: Callable[..., Any]) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.says(status(state="finished"))
        await until(lambda: desk.registry.statuses)
        answer = await desk.ask("GET", "/v1/runs/demo/stream")
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert '"state": "finished"' in answer.text


async def test_without_the_bus_the_answer_says_that_training_goes_on(world: Any) -> None:
    async with world.coordinator() as desk:

        async def away(*_: Any, **__: Any) -> int:
            raise Unavailable("no answer on runs")

        desk.registry.bus.kv_create = away
        answer = await desk.ask("POST", "/v1/runs", SPEC)
        assert answer.status_code == 503
        assert "training goes on" in answer.json()["detail"]


async def test_a_run_submitted_again_under_its_name_is_another_one(
    world: Any, status: Callable[..., Any]
) -> None:
    """Whoever kept something of the first finds its mark, and an assignment to the second."""
    async with world.coordinator() as desk:

        async def assignment(member: str) -> Assignment:
            entry = await world.bus.kv_get(subjects.ASSIGNMENTS, member)
            return decode(entry.value, Assignment)

        first = (await desk.ask("POST", "/v1/runs", SPEC)).json()["spec"]["id"]
        await world.joins("learner-1")
        await world.joins("syncer-1", role="syncer")
        await until(lambda: len(desk.registry.assigned) == 2)
        await world.joins("learner-1", run="demo")
        await world.says(status(state="finished"))
        await until(lambda: desk.registry.over("demo") and desk.registry.working("demo"))
        deleting = asyncio.create_task(desk.ask("DELETE", "/v1/runs/demo"))
        await world.joins("learner-1")
        assert (await deleting).status_code == 204, "once nobody works for it any more"
        assert set(await world.bus.kv_all(subjects.DELETED)) == {first}
        assert (await assignment("learner-1")).run == ""

        second = (await desk.ask("POST", "/v1/runs", SPEC)).json()["spec"]["id"]
        assert second != first
        await until(lambda: len(desk.registry.assigned) == 2)
        assert (await assignment("learner-1")).run_id == second
        # Written by a coordinator that had not seen the deletion: void, and replaced.
        await desk.registry.assign("learner-1", "")
        stale = Assignment(member="learner-1", run="demo", run_id=first, at=0.0)
        await world.bus.kv_put(subjects.ASSIGNMENTS, "learner-1", encode(stale))
        await until(
            lambda: (
                desk.registry.assignments["learner-1"].run_id == second
                and desk.registry.assigned.get("learner-1") == "demo"
            )
        )
        assert (await desk.get("/v1/runs/demo"))["members"] == ["learner-1", "syncer-1"]
        kinds = {e["kind"] for e in (await desk.get("/v1/events?run=demo"))["events"]}
        assert kinds <= {"run-created", "assigned", "released"}


async def test_a_run_is_not_deleted_under_somebody_who_works_for_it(
    world: Any, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_coordinator.api.runs_io.LEAVE_LOOKS", 1)
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.joins("learner-1", run="demo")
        await world.says(status(state="finished"))
        await until(lambda: desk.registry.over("demo") and desk.registry.working("demo"))
        answer = await desk.ask("DELETE", "/v1/runs/demo")
        assert answer.status_code == 409
        assert "learner-1" in answer.json()["detail"]


@pytest.mark.parametrize("subject", [subjects.beat("demo"), subjects.lapsed_beat("demo")])
async def test_a_state_that_its_leader_cannot_write_is_heard(
    subject: str, world: Any, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's disk is full: no key takes anything, and beats are passed on all the same."""
    monkeypatch.setattr(standings, "UNWRITTEN_S", 0.0)
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        run_id = (await desk.get("/v1/runs/demo"))["spec"]["id"]
        there = status(run_id=run_id)
        await world.says(there)

        async def shown() -> bool:
            told = {"state": "full", "reason": "the hub's disk is full", "versions": (), "live": ()}
            of_run = {"run": "demo", "run_id": run_id, "epoch": 0, "term": 1, "stamp": there.stamp}
            await world.bus.publish(subject, b"no beat")
            await world.bus.publish(subject, encode(Beat(**of_run, **told)))
            return bool((await desk.get("/v1/runs/demo"))["state"] == "full")

        await until(shown)
        assert (await desk.get("/v1/runs/demo"))["reason"] == "the hub's disk is full"
