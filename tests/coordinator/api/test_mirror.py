"""What the coordinator mirrors of the bus, when the mirroring is interrupted."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import time
from typing import Any

import pytest
from waiting import until

from diloco_coordinator.runs import registry_io as registry
from diloco_coordinator.runs.registry_io import NOTES
from diloco_shared.bus import run_streams
from diloco_shared.bus.port import KeyEntry, Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Event
from diloco_shared.protocol.wire import encode

SPEC: dict[str, Any] = {"name": "demo", "budget": {"steps": 96}}


def away_once(
    bus: Any, meanwhile: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The first note finds the bus away, while something happens; the bucket, once it did."""
    write, failures = bus.kv_update, list[str]()

    async def away(bucket: str, *args: Any, **kwargs: Any) -> int:
        if bucket == NOTES and not failures:
            failures.append(bucket)
            await meanwhile()
            raise Unavailable("the bus is away")
        revision: int = await write(bucket, *args, **kwargs)
        return revision

    monkeypatch.setattr(bus, "kv_update", away)
    return failures


async def test_members_that_die_together_are_gone_though_the_first_cannot_be_noted(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else the interrupted watch had to tell, no later one tells."""
    monkeypatch.setattr(registry, "RETRY_S", 0.01)
    async with world.coordinator() as desk:
        await world.joins("a", "b", "c")
        await until(lambda: len(desk.registry.roll.living) == 3)

        async def die() -> None:
            for name in ("b", "c"):
                await world.dies(name)

        failures = away_once(desk.registry.bus, die, monkeypatch)
        await world.dies("a")
        await until(lambda: not desk.registry.roll.living)
        assert failures


async def test_a_member_whose_end_left_no_marker_is_gone_too(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Markers of ends last for a while: a watch that was away for longer reads none."""
    monkeypatch.setattr(registry, "RETRY_S", 0.01)
    async with world.coordinator() as desk:
        await world.joins("a", "b")
        await until(lambda: len(desk.registry.roll.living) == 2)

        async def vanish() -> None:
            world.broker.purge("KV_members", "$KV.members.b", None)

        failures = away_once(desk.registry.bus, vanish, monkeypatch)
        await world.dies("a")
        await until(lambda: not desk.registry.roll.living)
        assert failures


async def test_a_run_made_again_while_nobody_listened_has_nothing_of_the_one_before(
    world: Any, status: Callable[..., Any]
) -> None:
    """A watch that begins again tells of the newest record alone. What the new run has told may
    have been read before that."""
    async with world.coordinator() as desk:
        assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 201
        known = desk.registry
        old = known.runs["demo"]
        await world.says(status(run_id=old.spec["id"]))
        await world.tells("end")
        await until(lambda: "end" in kinds_of(known) and known.histories.of("demo"))
        record = old.model_copy(update={"spec": old.spec | {"id": "new"}, "created_at": time()})
        for kind in ("run-created", "init"):
            await world.tells(kind)
        await world.says(status(run_id="new"))
        await until(lambda: "init" in kinds_of(known) and "demo" not in known.statuses)
        await known._take(subjects.RUNS, KeyEntry("demo", encode(record), 1 << 20))
        assert kinds_of(known) == ["run-created", "init"]
        assert known.histories.of("demo") == []
        assert known.statuses["demo"].run_id == "new"


def kinds_of(known: registry.Registry) -> list[str]:
    return [e.kind for _, e in known.told.after(0, "demo")]


async def test_a_token_that_is_gone_when_the_watch_begins_again_does_not_work(world: Any) -> None:
    async with world.coordinator() as desk:
        body = {"name": "alice", "scopes": ["read"]}
        assert (await desk.ask("POST", "/v1/tokens", body)).status_code == 201
        record = desk.registry.tokens["alice"]
        await desk.registry.bus.kv_delete(registry.TOKENS, "alice")
        await until(lambda: "alice" not in desk.registry.tokens)
        desk.registry.tokens["alice"] = record  # as if that had not been heard
        await desk.registry._gone_meanwhile(registry.TOKENS)
        assert "alice" not in desk.registry.tokens
        # A server that lost everything counts from 1 again, and its tokens are good all the same.
        entry = KeyEntry("alice", record.model_dump_json().encode(), 1)
        await desk.registry._take(registry.TOKENS, entry)
        assert "alice" in desk.registry.tokens


async def test_a_token_that_cannot_be_read_opens_nothing_and_its_digest_is_in_no_log(
    world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world.coordinator() as desk:
        await desk.makes("alice", "read")
        stored = desk.registry.tokens["alice"].model_dump(mode="json")
        later = json.dumps(stored | {"a_limit_of_a_later_release": ["x"]}).encode()
        await world.bus.kv_put(registry.TOKENS, "alice", later)
        await until(lambda: "alice" not in desk.registry.tokens)
        said = "".join(capsys.readouterr())
        assert "a_limit_of_a_later_release: Extra inputs" in said
        assert stored["digest"] not in said


async def test_a_token_is_not_brought_back_by_the_echo_of_its_making(world: Any) -> None:
    async with world.coordinator() as desk:
        body = {"name": "alice", "scopes": ["read"]}
        assert (await desk.ask("POST", "/v1/tokens", body)).status_code == 201
        place = registry.TOKENS, "alice"
        echo = await desk.registry.bus.kv_get(*place)
        assert (await desk.ask("DELETE", "/v1/tokens/alice")).status_code == 204
        await desk.registry._take(registry.TOKENS, echo)
        assert "alice" not in desk.registry.tokens
        # The name may be another token's; the end of the first comes late, too.
        assert (await desk.ask("POST", "/v1/tokens", body)).status_code == 201
        await desk.registry._take(registry.TOKENS, KeyEntry("alice", None, echo.revision + 1))
        assert "alice" in desk.registry.tokens


async def test_a_token_is_not_brought_back_by_a_use_whose_noting_was_not_answered(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note is kept, its answer is lost, and its echo comes after the token was revoked."""
    async with world.coordinator() as desk:
        await desk.makes("alice", "read")
        held: list[KeyEntry] = []
        take = desk.registry._take

        async def late(bucket: str, entry: KeyEntry) -> None:
            await take(bucket, entry) if bucket != registry.TOKENS else held.append(entry)

        monkeypatch.setattr(desk.registry, "_take", late)
        token = desk.registry.tokens["alice"]
        used = token.model_copy(update={"used_at": 1.0}).model_dump_json().encode()
        await world.bus.kv_put(registry.TOKENS, "alice", used)
        assert (await desk.ask("DELETE", "/v1/tokens/alice")).status_code == 204
        await until(lambda: len(held) >= 2)
        for entry in held:
            await take(registry.TOKENS, entry)
            assert "alice" not in desk.registry.tokens


async def test_nothing_is_kept_of_members_that_are_forgotten(world: Any) -> None:
    async with world.coordinator() as desk:
        for name in ("a", "b", "c"):
            await world.joins(name)
            await until(lambda name=name: (NOTES, name) in desk.registry.revisions)
            await world.dies(name)
            await until(lambda: not desk.registry.roll.living)
            await desk.registry.forget(name)
        await world.joins("d")
        await until(lambda: (NOTES, "d") in desk.registry.revisions)
        # What the watch still has to tell of those comes before this.
        await world.bus.kv_put(NOTES, "mark", b"no note")
        await until(lambda: (NOTES, "mark") in desk.registry.revisions)
        assert {key for bucket, key in desk.registry.revisions if bucket == NOTES} == {"d", "mark"}


async def test_a_member_that_is_drained_while_it_is_forgotten_stays_so(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion of its note is seen before it is answered."""
    async with world.coordinator() as desk:
        known = desk.registry
        await world.joins("a")
        await until(lambda: (NOTES, "a") in known.revisions)
        await world.dies("a")
        await until(lambda: not known.roll.living)
        delete = known.bus.kv_delete

        async def slowly(bucket: str, key: str, **more: Any) -> None:
            if bucket == NOTES:
                await known.drain("a", True)
            await delete(bucket, key, **more)
            if bucket == NOTES:
                await world.bus.kv_put(NOTES, "mark", b"no note")
                await until(lambda: (NOTES, "mark") in known.revisions)

        monkeypatch.setattr(known.bus, "kv_delete", slowly)
        await known.forget("a")
        assert known.roll.notes["a"].drained
        assert await world.bus.kv_get(NOTES, "a") is not None


async def test_a_beginning_over_a_bad_link_does_nothing_twice_that_is_done(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some thirty requests each third fails: all of them never come through in a row."""
    monkeypatch.setattr(registry, "PROMPT", (0.001, 0.001))
    monkeypatch.setattr(run_streams, "PROMPT", (0.001, 0.001))
    asked = 0

    def fault(client: str, operation: str, subject: str) -> Any:
        nonlocal asked
        asked += 1
        return "deliver" if asked % 3 else "lose_answer"

    world.bus.broker.fault = fault
    mirror = registry.Registry(world.bus)
    async with asyncio.timeout(5.0):
        await mirror.prepare()
    assert mirror.ready
    world.bus.broker.fault = None


async def test_a_note_of_a_member_does_not_undo_a_drain_that_came_between(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both know the newest revision of the key; only one of them has read what stands there."""
    async with world.coordinator() as desk:
        mirror = desk.registry
        await world.joins("a")
        await until(lambda: "a" in mirror.roll.living)
        await until(lambda: (NOTES, "a") in mirror.revisions)
        before, read = mirror.roll.notes["a"], mirror.bus.kv_get
        # Another coordinator notes the same, so that ours has to look again.
        await world.bus.kv_put(NOTES, "a", before.model_dump_json().encode())
        turns = [1]

        async def meanwhile(bucket: str, key: str) -> Any:
            entry = await read(bucket, key)
            if bucket == NOTES and turns and turns.pop():
                await mirror.drain("a", True)
            return entry

        monkeypatch.setattr(mirror.bus, "kv_get", meanwhile)
        await mirror._note(before)
        entry = await world.bus.kv_get(NOTES, "a")
        assert b'"drained":true' in entry.value and mirror.roll.notes["a"].draining


async def test_what_stands_elsewhere_than_it_says_is_left_out(world: Any) -> None:
    """A site with credentials writes in its own places alone; there it could name anybody."""
    async with world.coordinator() as desk:
        await world.joins("a", "evil")
        await until(lambda: len(desk.registry.roll.living) == 2)
        await world.joins("evil", role="syncer", id="a", draining=True)
        event = Event(run="demo", kind="finished", source="a", text="over", at=1.0)
        await world.bus.append(subjects.event("other", "note"), encode(event))
        await world.tells("evaluation", "demo", val_loss=1.0, steps=1)
        await until(lambda: desk.registry.events and desk.registry.events[-1][1].run == "demo")
        assert [e.kind for _, e in desk.registry.events] == ["evaluation"]
        shown = await desk.get("/v1/members/a")
        assert (shown["role"], shown["draining"]) == ("learner", False)
        assert (await desk.get("/v1/members/evil"))["role"] == "learner"


async def test_a_site_says_of_its_learner_that_it_is_a_learner_or_is_left_out(world: Any) -> None:
    """Where a learner with credentials of its own stands, its place says its role."""
    async with world.coordinator() as desk:
        keys = {name: subjects.member_key(name, "learner", named=True) for name in ("a", "b")}
        await world.joins("a", key=keys["a"])
        await world.joins("b", key=keys["b"], role="syncer")
        await world.joins("s", role="syncer")
        await until(lambda: {"a", "s"} <= desk.registry.roll.living.keys())
        assert "b" not in desk.registry.roll.living
        await world.bus.kv_delete(subjects.MEMBERS, keys["a"])
        await until(lambda: "a" not in desk.registry.roll.living)


async def test_a_run_that_is_told_anew_leaves_what_is_known_of_another(
    world: Any,
) -> None:
    """A server that was started anew may answer for long before it tells of the other one."""
    async with world.coordinator() as desk:
        for name in ("one", "two"):
            answer = await desk.ask("POST", "/v1/runs", {**SPEC, "name": name})
            assert answer.status_code == 201, answer.text
        there = await desk.registry.bus.kv_get(subjects.RUNS, "one")
        known = desk.registry.revisions.copy()
        await desk.registry._take(subjects.RUNS, replace(there, anew=True))
        assert desk.registry.revisions == known
        answer = await desk.ask("PATCH", "/v1/runs/two", {"quorum": 1})
        assert answer.status_code == 200, answer.text


async def test_the_ends_of_the_newest_tokens_are_remembered(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "REVOKED_MAX", 2)
    async with world.coordinator() as desk:
        mirror = desk.registry
        for revision, name in enumerate(("a", "b", "a", "c"), start=1000):
            await mirror._take(registry.TOKENS, KeyEntry(name, None, revision))
        kept = {name: at for (b, name), at in mirror.revisions.items() if b == registry.TOKENS}
        assert kept == {"a": 1002, "c": 1003}


async def test_a_run_that_another_release_wrote_anew_is_not_changed_by_what_was_known(
    world: Any,
) -> None:
    async with world.coordinator() as desk:
        assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 201
        await desk.registry.bus.kv_put(subjects.RUNS, "demo", b"of a later release")
        await until(lambda: "demo" not in desk.registry.runs)
        assert (await desk.ask("POST", "/v1/runs/demo/stop")).status_code == 404
        entry = await desk.registry.bus.kv_get(subjects.RUNS, "demo")
        assert entry.value == b"of a later release"
