"""Attacks in what sites share with the hub: leases of data, what people are shown, and room."""

from functools import partial
from typing import Any

from live.attacks import cases as c
from live.attacks.bus import VICTIM, counted, refusals
from live.attacks.cases import attack
from live.attacks.scene import RUN, THIEF, Scene
from waiting import until

from diloco_coordinator.runs.events import BY_ONE_MAX
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamFull, Unavailable
from diloco_shared.bus.stored_records import records_in
from diloco_shared.protocol import subjects as s
from diloco_shared.protocol.records import (
    Event,
    LeaseReply,
    LeaseWish,
    MemberRecord,
    ShardLease,
)
from diloco_shared.protocol.wire import decode, encode


@attack("bus", "asks in its own subject for a lease of data for another learner", c.SITE, c.COUNTED)
async def leases_for_another(scene: Scene) -> None:
    before = await refusals(scene)
    async with scene.bus() as bus:
        wish = await _lease_wish(bus, holder=VICTIM)
        await counted(scene, "wire", before, partial(bus.request, s.lease(RUN, THIEF), wish))


@attack("bus", "takes and gives back leases of data that others hold", c.SITE, c.ANSWERED_NO)
async def takes_leases(scene: Scene) -> None:
    told = scene.told_by_syncers()

    async def noted() -> bool:
        """The syncer notes refusals at 1, 2, 4, … times."""
        for holder in (THIEF, ""):
            wish = await _lease_wish(bus, holder=holder)
            reply = decode(await bus.request(s.lease(RUN, THIEF), wish), LeaseReply)
            assert reply.lease is None and reply.reason
        return any("lease refused" in line and THIEF in line for line in told())

    async with scene.bus() as bus:
        await until(noted, "a line of the syncer's log", patience_s=30)
    c.ANSWERED_NO.seen(scene)


async def _lease_wish(bus: NatsBus, **changes: Any) -> bytes:
    """Of a shard that a learner of site a holds."""
    found = await records_in(bus, s.SHARDS, ShardLease, under=f"{RUN}.")
    lease, revision = next(f for f in found.values() if f.record.holder.startswith("a-"))
    return encode(LeaseWish(lease=lease.model_copy(update=changes), revision=revision))


# --------------------------------------------------------------------------------------------------
# Room.


async def _fills(scene: Scene, kind: str, subject: str) -> None:
    """Whatever the thief may store there, until the leader has taken it back and named it."""
    told, chunk = scene.told_by_syncers(), bytes(1 << 20)
    said = (await scene.status())["state"]
    async with scene.bus() as bus:

        async def named() -> bool:
            for n in range(16):
                try:
                    await bus.append(f"{subject}.{n}", chunk)
                except (StreamFull, Unavailable):
                    break
            return any(
                e["data"]["learner"] == THIEF and e["data"]["stream"] == kind
                for e in await scene.events("flood")
            )

        await until(named, f"an event of the flood of {kind}", patience_s=90, every_s=0.2)
    assert any("flood" in line and THIEF in line for line in told())

    async def as_before() -> bool:
        return bool((await scene.status())["state"] == said)

    await until(as_before, "a run that goes on", patience_s=30, every_s=0.2)
    c.TAKEN_BACK.seen(scene)


@attack("bus", "fills the stream of contributions", c.SITE, c.TAKEN_BACK)
async def fills_up(scene: Scene) -> None:
    await _fills(scene, "UP", f"up.{RUN}.{THIEF}.0.0.0")


@attack("bus", "fills the stream of optimizer states", c.SITE, c.TAKEN_BACK)
async def fills_state(scene: Scene) -> None:
    await _fills(scene, "STATE", f"state.{RUN}.{THIEF}.nobody")


# --------------------------------------------------------------------------------------------------
# What people are shown.


async def left_out(scene: Scene, before: int, *words: str) -> None:
    log = scene.running.data / "coordinator.log"
    await until(
        lambda: any(
            all(w in line for w in words)
            for line in log.read_text(errors="replace")[before:].splitlines()
        ),
        f"a line of the coordinator's log with {words}",
        patience_s=30,
    )
    c.LEFT_OUT.seen(scene)


def coordinators_log(scene: Scene) -> int:
    return len((scene.running.data / "coordinator.log").read_text(errors="replace"))


@attack("bus", "says in its own member record that it is another member", c.SITE, c.LEFT_OUT)
async def poses_as_member(scene: Scene) -> None:
    await _says_it_is(scene, VICTIM, draining=True)
    shown = (await scene.ask("GET", f"/v1/members/{VICTIM}")).json()
    assert shown["draining"] is False


@attack("bus", "says in its own member record that it is a syncer", c.SITE, c.LEFT_OUT)
async def poses_as_syncer(scene: Scene) -> None:
    await _says_it_is(scene, THIEF, role="syncer", run=RUN, state="standby", tape_seq=0)
    members = (await scene.ask("GET", "/v1/members")).json()["members"]
    assert not [m for m in members if m["id"] == THIEF and m["role"] == "syncer"]


async def _says_it_is(scene: Scene, member: str, **changes: Any) -> None:
    before, own = coordinators_log(scene), s.member_key(THIEF, "learner", named=True)
    async with scene.bus() as bus:
        theirs = await bus.kv_get(s.MEMBERS, s.member_key(VICTIM, "learner", named=True))
        assert theirs is not None and theirs.value is not None
        record = decode(theirs.value, MemberRecord).model_copy(update={"id": member, **changes})
        await bus.kv_put(s.MEMBERS, own, encode(record), ttl_s=5)
        await left_out(scene, before, "unreadable record", THIEF)
        await bus.kv_delete(s.MEMBERS, own)


@attack("bus", "tells an event of another learner in its own subject", c.SITE, c.LEFT_OUT)
async def misplaced_event(scene: Scene) -> None:
    before = coordinators_log(scene)
    event = Event(run=RUN, kind="finished", source=VICTIM, text="it is over", at=1.0)
    async with scene.bus() as bus:
        await bus.append(s.event_by(THIEF), encode(event))
    await left_out(scene, before, "unreadable event", THIEF)
    assert not await scene.events("finished")


@attack("bus", "says in an event whose request it was", c.SITE, c.WITHOUT_ACTOR)
async def names_an_actor(scene: Scene) -> None:
    event = Event(run=RUN, kind="deed", source=THIEF, text="it", data={"actor": "admin"}, at=1.0)
    async with scene.bus() as bus:
        await bus.append(s.event_by(THIEF), encode(event))

    async def shown() -> bool:
        return bool(await scene.events("deed"))

    await until(shown, "the event", patience_s=20)
    (told,) = await scene.events("deed")
    assert told["source"] == THIEF and "actor" not in told["data"]
    c.WITHOUT_ACTOR.seen(scene)


@attack("bus", "puts a script into an event", c.SITE, c.AS_TEXT)
async def scripts(scene: Scene) -> None:
    text = "<img src=x onerror=alert(1)><script>alert(1)</script>\x1b]0;owned\x07"
    event = Event(run=RUN, kind="note", source=THIEF, text=text, at=1.0)
    async with scene.bus() as bus:
        await bus.append(s.event_by(THIEF), encode(event))

    async def shown() -> bool:
        return bool(await scene.events("note"))

    await until(shown, "the event", patience_s=20)
    answer = await scene.ask("GET", "/v1/events?limit=1000")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    page = await scene.ask("GET", "/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    (told,) = await scene.events("note")
    assert (told["source"], told["text"]) == (THIEF, text)
    printed = scene.command("events")
    assert "onerror" in printed and "\x1b" not in printed and "\x07" not in printed
    c.AS_TEXT.seen(scene)


@attack("bus", "tells thousands of events, so that those of others go", c.SITE, c.LEFT_OUT)
async def floods_events(scene: Scene) -> None:
    before, kept = coordinators_log(scene), await scene.events("run-created")
    assert kept
    event = encode(Event(run=RUN, kind="note", source=THIEF, text="flood", at=1.0))
    async with scene.bus() as bus:
        for _ in range(2 * BY_ONE_MAX):
            await bus.publish(s.event_by(THIEF), event)
        await bus._link.flush(20)
    await left_out(scene, before, "too many events", THIEF)
    assert await scene.events("run-created") == kept
