"""/v1/members and /v1/events over a memory bus, and what a restart remembers."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from waiting import until

from diloco_coordinator.api.sse_io import STREAMS_MAX, STREAMS_OF_ONE_MAX
from diloco_coordinator.runs.membership import SPEED_S_MAX, UNRENEWED_S, MemberNote
from diloco_coordinator.runs.reasons import Why
from diloco_shared import ambient
from diloco_shared.bus.port import KeyEntry, Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Assignment, Event, LearnerSpeed
from diloco_shared.protocol.wire import decode, encode

pytestmark = pytest.mark.virtual

SPEC: dict[str, Any] = {"name": "demo", "budget": {"steps": 96}}


async def test_an_unknown_learner_is_answered_with_the_known_ones(world: Any) -> None:
    async with world.coordinator() as desk:
        await world.joins("a", "b")
        await until(lambda: len(desk.registry.roll.living) == 2)
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/drain")):
            answer = await desk.ask(method, f"/v1/members/c{path}")
            assert answer.status_code == 404
            assert answer.json()["detail"].endswith("known: a, b")


async def test_a_member_shows_its_process_and_what_its_syncer_sees(
    world: Any, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.joins("syncer-1", role="syncer")
        await world.joins("a")
        await world.says(status())
        await until(lambda: "a" in desk.registry.assigned and desk.registry.statuses)
        shown = await desk.get("/v1/members/a")
        assert (shown["assigned"], shown["alive"], shown["draining"]) == ("demo", True, False)
        assert shown["learner"]["step"] == 8
        assert "lock" not in shown and "boot" not in shown


def speed(learner: str = "a", run: str = "demo", mfu: float | None = 0.4125) -> LearnerSpeed:
    return LearnerSpeed(
        run=run,
        learner=learner,
        incarnation=0,
        platform="gpu",
        device="NVIDIA H100 80GB HBM3",
        devices=8,
        steps=20,
        seconds=10.0,
        tokens_per_s=1000.0,
        data_wait_ratio=0.01,
        mfu=mfu,
        memory_of="device",
        memory_bytes=5,
        memory_peak_bytes=7,
    )


async def test_a_learner_that_trains_shows_how_fast(
    world: Any, status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.joins("syncer-1", role="syncer")
        await world.joins("a", "b", run="demo")
        await world.says(status())
        await until(lambda: {"a", "b"} <= desk.registry.assigned.keys())
        assert (await desk.get("/v1/members/a"))["speed"] is None
        assert (await desk.get("/v1/runs/demo"))["speeds"] == {}

        for told in (speed(), speed("b", mfu=None), speed("ghost")):
            await world.bus.publish(subjects.speed(told.run, told.learner), encode(told))
        await world.bus.publish(subjects.speed("demo", "a"), b"rubbish")
        # A site with credentials says in its own subject whatever it likes.
        await world.bus.publish(subjects.speed("demo", "ghost"), encode(speed("a", mfu=0.99)))
        await until(lambda: desk.registry.speed_of("b"))
        shown = (await desk.get("/v1/members/a"))["speed"]
        assert (shown["tokens_per_s"], shown["mfu"], shown["devices"]) == (1000.0, 0.4125, 8)
        assert "run" not in shown and "learner" not in shown, "the member says it"
        assert (await desk.get("/v1/members/b"))["speed"]["mfu"] is None
        assert (await desk.get("/v1/members/syncer-1"))["speed"] is None
        assert (await desk.get("/v1/runs/demo"))["speeds"].keys() == {"a", "b"}
        metrics = (await desk.ask("GET", "/metrics")).text
        assert 'diloco_learner_mfu{learner="a",run="demo"} 0.4125' in metrics
        assert 'diloco_learner_tokens_per_second{learner="b",run="demo"} 1000.0' in metrics
        assert 'diloco_learner_mfu{learner="b"' not in metrics, "nobody knows it"
        assert "ghost" not in metrics, "no member has this id"

        # What was said for another run, or long ago, is no figure of now.
        await world.joins("b", run="another")
        await until(lambda: desk.registry.speed_of("b") is None)
        later = ambient.monotonic() + SPEED_S_MAX + 1
        monkeypatch.setattr(ambient, "monotonic", lambda: later)
        assert desk.registry.speed_of("a") is None
        monkeypatch.undo()
        await world.dies("a")
        await until(lambda: not desk.registry.roll.notes["a"].alive)
        assert (await desk.get("/v1/members/a"))["speed"] is None


async def test_syncers_show_who_leads_and_how_far_behind_a_standby_is(world: Any) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.joins("a")
        await world.joins("syncer-1", role="syncer", state="leading", tape_seq=40)
        await world.joins("syncer-2", role="syncer", state="standby", tape_seq=37)
        await until(lambda: {"syncer-1", "syncer-2"} <= desk.registry.assigned.keys())
        shown = await desk.get("/v1/members/syncer-2")
        assert (shown["state"], shown["lag_records"]) == ("standby", 3)
        run = await desk.get("/v1/runs/demo")
        assert [(s["id"], s["state"], s["lag_records"]) for s in run["syncers"]] == [
            ("syncer-1", "leading", 0),
            ("syncer-2", "standby", 3),
        ]
        # One that cannot lead says why, and a run that nobody can lead says it of all.
        await world.joins("syncer-1", role="syncer", state="ineligible", reason="record 41")
        await world.joins("syncer-2", role="syncer", state="ineligible", reason="record 38")
        why = "syncer-1 cannot lead: record 41; syncer-2 cannot lead: record 38"
        await until(lambda: desk.registry.plan.waiting.get("demo") == (Why("syncers-unfit", why),))
        run = await desk.get("/v1/runs/demo")
        assert (run["waiting"], run["reason_codes"]) == (why, ["syncers-unfit"])


async def test_a_leader_that_drains_says_what_it_waits_for(world: Any) -> None:
    def at_work(**shown: Any) -> dict[str, Any]:
        return {"role": "syncer", "run": "demo", **shown}

    async def looked(newcomer: str) -> None:
        """Members were looked at once more, and perhaps given other work."""
        await world.joins(newcomer)
        await until(lambda: newcomer in desk.registry.assigned)

    async def says() -> str:
        return str((await desk.get("/v1/members/syncer-1"))["stays"])

    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.joins("a")
        await world.joins("syncer-1", **at_work(state="leading"))
        await until(lambda: "syncer-1" in desk.registry.assigned)
        assert await says() == ""
        await desk.ask("POST", "/v1/members/syncer-1/drain")
        await until(lambda: desk.registry.plan.staying)
        assert await says() == "nobody can take over run demo: start another syncer"
        # What it shows is of the run that it worked for before.
        await world.joins("syncer-2", **at_work(state="standby") | {"run": "earlier"})
        await until(lambda: "syncer-2" in desk.registry.assigned)
        await until(lambda: "hands" in desk.registry.plan.staying.get("syncer-1", ""))
        assert await says() == "hands over run demo to syncer-2"
        await looked("b")
        await world.joins("syncer-2", **at_work(state="standby", shard=1))
        await looked("c")
        assert "syncer-1" in desk.registry.assigned
        await world.joins("syncer-2", **at_work(state="standby"))
        await until(lambda: "syncer-1" not in desk.registry.assigned)
        assert await says() == ""


async def test_the_dead_stay_assigned_until_they_are_forgotten(world: Any) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.joins("syncer-1", role="syncer")
        await world.joins("a")
        await until(lambda: "a" in desk.registry.assigned)
        assert (await desk.ask("DELETE", "/v1/members/a")).status_code == 409
        await world.dies("a")
        await until(lambda: not desk.registry.roll.notes["a"].alive)
        shown = await desk.get("/v1/members/a")
        assert (shown["alive"], shown["assigned"]) == (False, "demo")
        assert shown["gone_since"] > 0
        assert (await desk.ask("DELETE", "/v1/members/a")).status_code == 204
        assert await world.bus.kv_get(subjects.ASSIGNMENTS, "a") is None
        assert (await desk.ask("GET", "/v1/members/a")).status_code == 404


async def test_members_are_told_with_the_time_by_the_coordinators_clock(world: Any) -> None:
    """Since when one is gone is by that clock, and whoever reads it may have another."""
    async with world.coordinator() as desk:
        before = ambient.wall()
        told = (await desk.get("/v1/members"))["now"]
        assert before <= told <= ambient.wall()


async def test_a_member_that_renews_its_key_no_more_is_gone_and_can_be_forgotten(
    world: Any,
) -> None:
    """Its site wrote the key without a lifetime, and was revoked: the server keeps it for ever."""
    async with world.coordinator() as desk:
        await world.joins("a", key="LEARNER.a")
        for _ in range(int(UNRENEWED_S) + 2):
            await world.joins("b")
            await asyncio.sleep(1.0)
        await until(lambda: not desk.registry.roll.notes["a"].alive)
        assert desk.registry.roll.notes["b"].alive
        # A watch that begins again tells of it as before.
        there = await world.bus.kv_get(subjects.MEMBERS, "LEARNER.a")
        await desk.registry._take(subjects.MEMBERS, there)
        assert not (await desk.get("/v1/members/a"))["alive"]
        assert (await desk.ask("DELETE", "/v1/members/a")).status_code == 204
        assert (await world.bus.kv_all(subjects.MEMBERS)).keys() == {"b"}
        assert (await desk.ask("GET", "/v1/members/a")).status_code == 404


async def test_who_is_forgotten_was_gone_for_as_long_as_is_told(world: Any) -> None:
    """Who is drained is kept for a month."""
    async with world.coordinator() as desk:
        notes = desk.registry.roll.notes
        await world.joins("a", "b")
        await until(lambda: len(desk.registry.roll.living) == 2)
        await desk.ask("POST", "/v1/members/a/drain")
        for name in ("a", "b"):
            await world.dies(name)
        await until(lambda: not desk.registry.roll.living)
        for name, seconds in (("a", 31 * 86_400.0), ("b", 1200.0)):
            since = ambient.wall() - seconds
            notes[name] = notes[name].model_copy(update={"gone_since": since})

        def told() -> list[str]:
            events = desk.registry.told.after(0, subjects.CLUSTER)
            return [e.text for _, e in events if e.kind == "member-forgotten"]

        await until(lambda: len(told()) == 2)
        assert told() == [
            "a was gone for 31 days and is forgotten",
            "b was gone for 20 minutes and is forgotten",
        ]


async def test_who_comes_back_while_it_is_forgotten_keeps_its_key(world: Any) -> None:
    async with world.coordinator() as desk:
        await world.joins("a")
        await until(lambda: desk.registry.roll.living)
        desk.registry.renewals.heard["a"] = replace(desk.registry.renewals.heard["a"], revision=0)
        await desk.registry.forget("a")
        assert (await world.bus.kv_all(subjects.MEMBERS)).keys() == {"a"}
        await world.joins("a")
        await until(lambda: desk.registry.roll.living)


async def test_who_is_drained_while_it_is_forgotten_stays_drained(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.coordinator() as desk:
        await world.joins("a")
        await until(lambda: desk.registry.roll.living)
        bus = desk.registry.bus
        delete = bus.kv_delete

        async def late(bucket: str, key: str, **given: Any) -> int:
            if bucket == "notes":
                await desk.registry.drain("a", True)
            found: int = await delete(bucket, key, **given)
            return found

        monkeypatch.setattr(bus, "kv_delete", late)
        await desk.registry.forget("a")
        assert desk.registry.roll.notes["a"].drained
        kept = await bus.kv_get("notes", "a")
        assert MemberNote.model_validate_json(kept.value).drained, "for the next coordinator"


async def test_a_drained_member_loses_its_work_and_gets_none(world: Any) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.joins("syncer-1", role="syncer")
        await world.joins("a", "b")
        await until(lambda: len(desk.registry.assigned) == 3)
        assert (await desk.ask("POST", "/v1/members/a/drain")).json()["draining"]
        await until(lambda: "a" not in desk.registry.assigned)
        entry: KeyEntry = await world.bus.kv_get(subjects.ASSIGNMENTS, "a")
        assert entry.value is not None and decode(entry.value, Assignment).run == ""
        await desk.ask("POST", "/v1/members/a/drain")  # once more
        assert not (await desk.ask("DELETE", "/v1/members/a/drain")).json()["draining"]
        await desk.ask("DELETE", "/v1/members/a/drain")
        await until(lambda: "a" in desk.registry.assigned)
        events = (await desk.get("/v1/events"))["events"]
        told = {e["kind"]: e["text"] for e in events}
        kinds = [e["kind"] for e in events]
        assert kinds.count("member-drained") == kinds.count("member-undrained") == 1
        assert told["member-drained"] == "a gets no more work"
        assert told["member-undrained"] == "a may work again"
        assert "released" in told


async def test_who_works_for_no_run_cannot_be_drained(world: Any) -> None:
    async with world.coordinator() as desk:
        await world.joins("sup", role="supervisor")
        await until(lambda: desk.registry.roll.living)
        answer = await desk.ask("POST", "/v1/members/sup/drain")
        assert (answer.status_code, answer.json()["detail"]) == (
            409,
            "a supervisor works for no run",
        )


async def test_a_restart_loses_nothing(world: Any, status: Callable[..., Any]) -> None:
    """The state is on the bus: runs, members gone and drained, assignments, events, tokens."""
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.joins("syncer-1", role="syncer")
        await world.joins("a", "b", "c")
        await until(lambda: len(desk.registry.assigned) == 4)
        await desk.ask("POST", "/v1/members/c/drain")
        await until(lambda: "c" not in desk.registry.assigned)
        await world.dies("a")
        await until(lambda: not desk.registry.roll.notes["a"].alive)
        made = await desk.ask("POST", "/v1/tokens", {"name": "eve", "scopes": ["read"]})
        await world.tells("evaluation", val_loss=2.0, steps=24)
        await until(lambda: desk.registry.events[-1][1].kind == "evaluation")
        before = [await desk.get(p) for p in ("/v1/runs", "/v1/members", "/v1/events")]
    # The syncer dies while nobody looks.
    await world.dies("syncer-1")
    await world.joins("syncer-2", role="syncer")
    async with world.coordinator() as desk:
        # Its role is not forgotten: the second one stands by, and does not replace it.
        await until(lambda: desk.registry.assigned.get("syncer-2") == "demo")
        runs, members, events = [
            await desk.get(p) for p in ("/v1/runs", "/v1/members", "/v1/events")
        ]
        assert runs["runs"][0]["members"] == ["a", "b", "syncer-1", "syncer-2"]
        assert runs["runs"][0]["revision"] == before[0]["runs"][0]["revision"]
        assert events["events"][: len(before[2]["events"])] == before[2]["events"]
        told = {m["id"]: m for m in members["members"]}
        assert told["a"] == next(m for m in before[1]["members"] if m["id"] == "a")
        assert told["c"]["draining"]
        assert not told["syncer-1"]["alive"]
        desk.token = made.json()["token"]
        assert (await desk.get("/v1/access"))["name"] == "eve"


async def test_two_coordinators_agree_on_who_works(world: Any) -> None:
    async with world.coordinator() as one, world.coordinator() as two:
        await one.ask("POST", "/v1/runs", SPEC)
        await world.joins("syncer-1", role="syncer")
        await world.joins("a", "b")
        await until(lambda: len(one.registry.assigned) == 3)
        await until(lambda: two.registry.assigned == one.registry.assigned)
        await one.ask("POST", "/v1/members/a/drain")
        await until(lambda: two.registry.roll.notes["a"].draining)
        await until(lambda: "a" not in two.registry.assigned)
        await until(lambda: "a" not in one.registry.assigned)


async def test_events_come_by_cursor_and_by_run(world: Any) -> None:
    async with world.coordinator() as desk:
        for n in range(5):
            await world.tells("join", "demo" if n % 2 else "other", n=n)
        await until(lambda: len(desk.registry.events) == 5)
        page = await desk.get("/v1/events?limit=2")
        assert [e["data"]["n"] for e in page["events"]] == [0, 1]
        rest = await desk.get(f"/v1/events?after={page['next']}")
        assert [e["data"]["n"] for e in rest["events"]] == [2, 3, 4]
        mine = await desk.get("/v1/events?run=demo")
        assert [e["data"]["n"] for e in mine["events"]] == [1, 3]
        none = await desk.get(f"/v1/events?after={rest['next']}")
        assert none == {"events": [], "next": rest["next"], "mark": "", "again": False}


async def test_a_coordinator_that_is_behind_tells_nothing_again(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one was asked before, which had heard more: the stream has lost nothing."""
    async with world.coordinator() as desk:
        for n in range(3):
            await world.tells("join", n=n)
        await until(lambda: len(desk.registry.events) == 3)
        read = desk.registry.told.newest
        monkeypatch.setattr(desk.registry.told, "newest", read - 1)
        ahead = await desk.get(f"/v1/events?after={read}")
        assert ahead == {"events": [], "next": read, "mark": "", "again": False}
        chunks = desk.streams.events(read, "").body_iterator
        assert await anext(chunks) == ": open\n\n"
        await world.tells("join", n=3)
        assert '"n": 3' in await anext(chunks)
        lost = await desk.get(f"/v1/events?after={read + 100}")
        assert lost["again"] and [e["data"]["n"] for e in lost["events"]] == [0, 1, 2, 3]

        async def away(stream: str) -> None:
            raise Unavailable("the hub is away")

        monkeypatch.setattr(desk.registry.bus, "stream_info", away)
        assert not (await desk.get(f"/v1/events?after={read + 100}"))["again"], "nobody knows"


async def test_events_are_streamed_from_a_cursor_on(world: Any) -> None:
    async with world.coordinator() as desk:
        await world.tells("join", n=0)
        await world.tells("join", n=1)
        await until(lambda: len(desk.registry.events) == 2)
        first = desk.registry.events[0][0]
        chunks = desk.streams.events(first, "").body_iterator
        assert await anext(chunks) == ": open\n\n"
        told = json.loads((await anext(chunks)).split("data: ")[1])
        assert told["data"] == {"n": 1}
        waiting = asyncio.create_task(anext(chunks))
        await world.tells("join", n=2)
        assert json.loads((await waiting).split("data: ")[1])["data"] == {"n": 2}
        assert desk.streams.open == 1
        await chunks.aclose()
        assert desk.streams.open == 0


async def test_an_event_that_comes_while_a_slow_reader_is_sent_another_is_not_held_back(
    world: Any,
) -> None:
    """Else it would come with the next one, whenever that is."""
    async with world.coordinator() as desk:
        await world.tells("join", n=0)
        await until(lambda: len(desk.registry.events) == 1)
        chunks = desk.streams.events(0, "").body_iterator
        assert await anext(chunks) == ": open\n\n"
        assert '"n": 0' in await anext(chunks)
        await world.tells("join", n=1)
        await until(lambda: len(desk.registry.events) == 2)
        assert '"n": 1' in await anext(chunks)
        waiting = asyncio.create_task(anext(chunks))
        await world.tells("join", n=2)
        assert '"n": 2' in await waiting
        await chunks.aclose()


async def test_events_are_streamed_that_came_again_after_a_server_was_killed(world: Any) -> None:
    """It had lost its last ones, and gave their sequences to others."""
    async with world.coordinator() as desk:
        for n in range(3):
            await world.tells("join", n=n)
        await until(lambda: len(desk.registry.events) == 3)
        told = desk.registry.told
        chunks = desk.streams.events(told.newest, "").body_iterator
        assert await anext(chunks) == ": open\n\n"
        waiting = asyncio.create_task(anext(chunks))
        for seq in range(told.newest - 1, told.newest + 2):
            event = Event(run="demo", kind="leave", source="a", text="t", data={"n": seq}, at=9.0)
            assert told.take(seq, subjects.event("demo", "leave"), encode(event), 0.0, ("demo",))
        await desk.registry._notify()
        assert json.loads((await waiting).split("data: ")[1])["data"] == {"n": 2}
        await chunks.aclose()


async def test_a_reader_beyond_the_end_of_the_stream_is_told_what_came_instead(world: Any) -> None:
    """The hub was put back from a backup, say: nobody here has seen what the reader has."""
    async with world.coordinator() as desk:
        for n in range(3):
            await world.tells("join", n=n)
        await until(lambda: len(desk.registry.events) == 3)
        page = await desk.get("/v1/events?after=5000&limit=2")
        assert [e["data"]["n"] for e in page["events"]] == [0, 1] and page["again"]
        rest = await desk.get(f"/v1/events?after={page['next']}")
        assert [e["data"]["n"] for e in rest["events"]] == [2] and not rest["again"]
        chunks = desk.streams.events(5000, "").body_iterator
        assert await anext(chunks) == ": open\n\n"
        assert json.loads((await anext(chunks)).split("data: ")[1])["data"] == {"n": 0}
        await chunks.aclose()
        desk.registry.ready = False  # what is read until now is not all
        page = await desk.get("/v1/events?after=5000")
        assert page == {"events": [], "next": 5000, "mark": "", "again": False}


async def test_a_reader_whose_cursor_others_have_overtaken_is_told_to_begin_anew(
    world: Any,
) -> None:
    """A killed server lost its newest events, and others have got their numbers since."""
    async with world.coordinator() as desk:
        for n in range(5):
            await world.tells("join", n=n)
        await until(lambda: len(desk.registry.events) == 5)
        read = await desk.get("/v1/events")
        assert read["next"] == 5 and len(read["mark"]) == 16
        cursor = f"after=5&mark={read['mark']}"
        same = await desk.get(f"/v1/events?{cursor}")
        assert same == {"events": [], "next": 5, "mark": read["mark"], "again": False}
        for seq in range(4, 9):
            event = Event(run="demo", kind="leave", source="a", text="t", data={"n": -seq}, at=9.0)
            told = desk.registry.told
            assert told.take(seq, subjects.event("demo", "leave"), encode(event), 0.0, ("demo",))
        page = await desk.get(f"/v1/events?{cursor}&limit=6")
        assert page["again"] and [e["data"]["n"] for e in page["events"]] == [0, 1, 2, -4, -5, -6]
        rest = await desk.get(f"/v1/events?after={page['next']}&mark={page['mark']}")
        assert not rest["again"] and [e["data"]["n"] for e in rest["events"]] == [-7, -8]
        for unmarked in ("after=5", f"after=5000&mark={read['mark']}"):
            page = await desk.get(f"/v1/events?{unmarked}&run=other")
            assert page["events"] == [] and page["mark"] == "", "nothing of what it cannot see"


async def test_the_cursor_of_a_deleted_runs_last_event_is_still_one_after_a_restart(
    world: Any,
) -> None:
    """Its events are purged, and those before are not told twice."""
    async with world.coordinator() as desk:
        await world.tells("join", "other", n=0)
        await world.tells("join", n=1)
        await until(lambda: len(desk.registry.events) == 2)
    await world.bus.purge(subjects.EVENTS_STREAM, "ev.demo.>")
    async with world.coordinator() as desk:
        assert (await desk.get("/v1/events?after=2"))["events"] == []


async def test_an_event_that_cannot_be_shown_costs_nobody_the_others(world: Any) -> None:
    """Nor does a restart read it again."""
    async with world.coordinator() as desk:
        await world.tells("join", n=0, x=b"\xff")
        await world.tells("join", n=1)
        await until(lambda: desk.registry.events)
        assert [e["data"] for e in (await desk.get("/v1/events"))["events"]] == [{"n": 1}]
        # Even if one were kept.
        (seq, good), *_ = desk.registry.events
        bad = good.model_copy(update={"data": {"x": b"\xff"}})
        desk.registry.told.kept.append((seq + 1, bad))
        listed = (await desk.get("/v1/events"))["events"]
        assert [e["data"] for e in listed] == [{"n": 1}, {}]
        chunks = desk.streams.events(seq, "").body_iterator
        assert await anext(chunks) == ": open\n\n"
        assert json.loads((await anext(chunks)).split("data: ")[1])["data"] == {}
        await chunks.aclose()


async def test_streams_are_bounded(world: Any) -> None:
    """I12."""
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        desk.streams.held.update({f"t{n}": STREAMS_OF_ONE_MAX for n in range(4)})
        assert desk.streams.open == STREAMS_MAX
        answer = await desk.ask("GET", "/v1/runs/demo/stream")
        assert answer.status_code == 503
        assert "Retry-After" in answer.headers


async def test_one_token_takes_no_more_than_its_share_of_the_streams(world: Any) -> None:
    """I12: who may only read locks out nobody."""
    async with world.coordinator() as desk:
        eve = await desk.makes("eve", "read")

        def asks(token: str) -> asyncio.Task[Any]:
            sent = {"Authorization": f"Bearer {token}"}
            return asyncio.create_task(desk.http.get("/v1/events/stream", headers=sent))

        at_once = [asks(eve) for _ in range(STREAMS_OF_ONE_MAX + 4)]
        await until(lambda: sum(task.done() for task in at_once) == 4)
        assert desk.streams.held == {"eve": STREAMS_OF_ONE_MAX}
        answer = await asks(eve)
        assert answer.status_code == 429 and "Retry-After" in answer.headers
        assert "16 of the token 'eve' are open" in answer.json()["detail"]
        owner = asks(desk.token)
        await until(lambda: desk.streams.held["admin"] == 1)
        for task in (*at_once, owner):
            task.cancel()
        await asyncio.gather(*at_once, owner, return_exceptions=True)
        assert desk.streams.open == 0 and not desk.streams.held


async def test_a_reader_with_an_impossible_cursor_is_answered(world: Any) -> None:
    """Python reads no number of thousands of digits."""
    async with world.coordinator() as desk:
        sent = {"Authorization": f"Bearer {desk.token}", "Last-Event-ID": "9" * 5000}
        asked = asyncio.create_task(desk.http.get("/v1/events/stream", headers=sent))
        await until(lambda: desk.streams.open or asked.done())
        assert not asked.done(), asked.result().text
        asked.cancel()
