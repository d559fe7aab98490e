"""Publications go out a few at a time, in order, and whole (I12)."""

import asyncio
from collections import Counter
from typing import Any

import pytest
import structlog
from syncer.conftest import Driver, spec
from syncer.contexts import context

from diloco_shared.bus import blobs
from diloco_shared.bus.port import Refused, StreamSpec, TransferProgress, Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import CHUNK_BYTES, HEADER_INDEX
from diloco_shared.protocol.messages import Beat
from diloco_shared.protocol.wire import decode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import (
    Event,
    Full,
    Publish,
    PurgeUnsealed,
    Rewound,
    SendBeat,
    StreamSeen,
    Tell,
)
from diloco_syncer.history.tape_io import Tape
from diloco_syncer.merging import published_io as published
from diloco_syncer.messages import outbox_io as outbox
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.streams import fullness_io as fullness
from diloco_syncer.streams.fullness_io import Fullness, Signs
from diloco_syncer.streams.storage_io import Storage

pytestmark = pytest.mark.virtual

PAYLOAD = bytes(3000)


async def hub(bytes_max: int = 1 << 20) -> MemoryBus:
    bus = MemoryBus(MemoryBroker(), "s")
    for name, captured in subjects.run_streams("t").items():
        synced = name == subjects.tape_stream("t")
        await bus.ensure_stream(StreamSpec(name, (captured,), bytes_max, synced=synced))
    return bus


def driver() -> Driver:
    found = Driver(spec())
    found.start("a", "b")
    return found


async def publish(
    out: Outbox, d: Driver, fragment: int, version: int, payload: bytes = PAYLOAD
) -> None:
    h = d.machine.history
    effect = Publish(-1, fragment, h.epoch, h.term, version, -1, (), {}, h.stamp, 0)
    await out.publish(effect, payload, "fp32", 8, "0" * 32, (), 1)


class Still(Storage):
    """Raises no limit: the run has to do with what there is."""

    async def _grow(self) -> None:
        pass


def looking(bus: MemoryBus, out: Outbox, d: Driver) -> tuple[Fullness, list[Event]]:
    told: list[Event] = []

    def put(event: Event) -> None:
        told.append(event)
        d.give(event)

    tape, storage = Tape(bus, "t"), Still(d.spec, bus, lambda: (0, 0), out.tell)
    no = Signs(lambda: False, lambda: False, lambda: False)
    return Fullness(context(d.spec, bus), d.machine, out, tape, storage, put, no), told


@pytest.mark.parametrize("shards", [1, 2])
async def test_all_of_up_is_purged_without_a_filter_where_one_shard_has_it(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one the server reads all that it removes, and the stream stands still meanwhile."""
    bus, filters = await hub(), list[str]()
    for p in (0, 1):
        await bus.append(f"up.t.a.0.{p}.0.1", b"x")
    purge = bus.purge

    async def noted(stream: str, subject: str, *, below_seq: int | None = None) -> int:
        filters.append(subject)
        return await purge(stream, subject, below_seq=below_seq)

    async def below() -> int:
        return 3

    monkeypatch.setattr(bus, "purge", noted)
    await Outbox(context(spec(shards=shards), bus)).purge_up(below)
    assert (filters == [">"]) == (shards == 1), filters
    left = (await bus.stream_info(subjects.up_stream("t"))).messages
    assert left == shards - 1, "the other shard's stays"


async def test_no_more_than_the_rounds_in_flight_and_one_go_out_at_a_time() -> None:
    bus, d = await hub(5000), driver()
    out = Outbox(context(d.spec, bus))
    most = d.spec.algorithm.rounds_in_flight_max + 1
    await bus.append("dn.t.filler", bytes(4500))
    tasks = [asyncio.create_task(publish(out, d, 0, version)) for version in range(1, most + 3)]
    for _ in range(50):
        await asyncio.sleep(0)
    wanted = [subjects.publication("t", 0, 0, version, 1) for version in range(1, most + 1)]
    assert list(out.sending) == wanted
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_same_publication_may_be_asked_for_twice() -> None:
    bus, d = await hub(), driver()
    out = Outbox(context(d.spec, bus))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(publish(out, d, 0, 1))
    assert not out.sending
    subject, stream = subjects.publication("t", 0, 0, 1, 1), subjects.dn_stream("t")
    assert len(await bus.fetch(stream, f"{subject}.m")) == 1


async def test_what_up_lets_go_while_it_is_looked_at_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have been counted before it went, and nobody shall write a snapshot for that."""
    bus, d = await hub(), driver()
    look, told = looking(bus, Outbox(context(d.spec, bus)), d)
    owed, looks = ["a purge"], look.storage.look

    async def meanwhile() -> None:
        await looks()
        owed.clear()

    monkeypatch.setattr(look.storage, "look", meanwhile)
    look.waits = lambda: bool(owed)
    await look.look(0.0)
    assert {e.kind: e.waits for e in told if isinstance(e, StreamSeen)}["UP"]


@pytest.mark.parametrize("waits", [True, False])
async def test_of_up_it_is_told_whether_it_waits_for_standbys(*, waits: bool) -> None:
    bus, d = await hub(5000), driver()
    look, told = looking(bus, Outbox(context(d.spec, bus)), d)
    look.waits = lambda: waits
    await look.look(0.0)
    seen = {e.kind: e.waits for e in told if isinstance(e, StreamSeen)}
    assert seen["UP"] is waits and not seen["DN"]


async def test_a_full_stream_is_named_once_it_is_refused_for_a_while() -> None:
    bus, d = await hub(5000), driver()
    out = Outbox(context(d.spec, bus))
    look, told = looking(bus, out, d)
    await bus.append("dn.t.filler", bytes(4500))
    publishing = asyncio.create_task(publish(out, d, 0, 1))
    for _ in range(50):
        await asyncio.sleep(0)
    assert any(p.full for p in out.sending.values())
    await look.look(0.0)
    assert not [e for e in told if isinstance(e, Full)]
    await look.look(fullness.FULL_S)
    (full,) = [e for e in told if isinstance(e, Full)]
    assert full.place == "DN"
    assert "raise max_file_store" in full.reason
    await bus.purge(subjects.dn_stream("t"), "dn.t.filler")
    async with asyncio.timeout(30):
        await publishing
    await look.look(fullness.FULL_S + 1)
    assert [e.reason for e in told if isinstance(e, Full)][-1] == ""


async def test_contributions_that_have_no_room_are_named() -> None:
    bus, d = await hub(3000), driver()
    look, told = looking(bus, Outbox(context(d.spec, bus)), d)
    await bus.append("up.t.filler", bytes(2000))
    await look.look(0.0)
    await look.look(fullness.FULL_S)
    (full,) = [e for e in told if isinstance(e, Full)]
    assert full.place == "UP"
    assert "see 'diloco events t'. After no-room raise max_file_store" in full.reason
    assert "nats stream edit" in full.reason, "no setting of a run that goes on does it"
    assert "keeping." not in full.reason


async def test_the_bound_of_the_run_is_named_where_it_keeps_a_full_stream_too_small() -> None:
    """No room of the hub would help."""
    bus, d = await hub(3000), driver()
    look, told = looking(bus, Outbox(context(d.spec, bus)), d)
    look.storage.needed, look.storage.limits = {"UP": 5000}, {"UP": 3000}
    await bus.append("up.t.filler", bytes(2000))
    await look.look(0.0)
    await look.look(fullness.FULL_S)
    (full,) = [e for e in told if isinstance(e, Full)]
    assert "keeping.stream_bytes_max keeps it smaller than the run needs" in full.reason
    assert "raise this stream's limit with 'nats stream edit'" in full.reason
    assert "max_file_store" not in full.reason


@pytest.mark.parametrize(("parameters", "full"), [(0, False), (748, False), (749, True)])
async def test_initial_parameters_that_never_have_room_are_named(
    monkeypatch: pytest.MonkeyPatch, parameters: int, full: bool
) -> None:
    """As when the bound of a run is for a smaller model than that of its learners. Without it the
    run would wait for them, and nobody would know why."""
    bus, d = await hub(3000), Driver(spec())
    d.lead()
    look, told = looking(bus, Outbox(context(d.spec, bus)), d)
    monkeypatch.setattr(d.machine.admission.layouts, "parameters", lambda: parameters)
    await look.look(0.0)
    await look.look(fullness.FULL_S)
    said = [e.reason for e in told if isinstance(e, Full) and e.place == "UP"]
    assert bool(said) == full
    if said:
        text = "UP is full: 0 B of 3 kB used, a set of initial parameters needs 3.004 kB: see"
        assert said[0].startswith(text)
        state, reason = d.machine.announcer.state(0.0)
        assert state == "waiting" and text in reason


async def test_that_a_stream_is_full_is_logged_once_a_minute_and_only_while_it_is() -> None:
    bus, d = await hub(3000), driver()
    look, _ = looking(bus, Outbox(context(d.spec, bus)), d)
    with structlog.testing.capture_logs() as logs:
        await look.look(1000.0)  # not yet full for a while
        assert "full" not in [line["event"] for line in logs]
        await bus.append("up.t.filler", bytes(2000))
        for now in (
            0.0,
            fullness.FULL_S,
            fullness.SAY_S / 2,
            fullness.SAY_S + 1,
            fullness.SAY_S + 9,
        ):
            await look.look(2000.0 + now)
    assert [line["event"] for line in logs].count("full") == 2


class Unwritable(MemoryBus):
    """Refuses every purge while the hub's disk is full."""

    full = True

    async def purge(self, stream: str, subject: str, *, below_seq: int | None = None) -> int:
        if self.full:
            raise Refused("no space left on device")
        return await super().purge(stream, subject, below_seq=below_seq)


async def test_a_full_hub_stays_named_while_nothing_waits_for_it() -> None:
    """Between two rounds nobody pulls, and the disk is as full as before."""
    d = driver()
    bus = Unwritable((await hub()).broker, "s")
    look, told = looking(bus, Outbox(context(d.spec, bus)), d)
    look.pulling = lambda: True
    await look.look(0.0)
    await look.look(1.0)
    (full,) = [e for e in told if isinstance(e, Full) and e.reason]
    assert full.place == "hub"
    assert "without them do so yourself" in full.reason, "a server of one's own stays as it is"
    look.pulling = lambda: False
    await look.look(2.0)
    assert "hub" in d.machine.room.full
    bus.full = False
    await look.look(3.0)
    assert "hub" not in d.machine.room.full


async def test_a_full_hub_is_named_where_only_the_lease_stands_still() -> None:
    """Between two rounds nothing else is written, and nobody else can say why none opens."""
    bus, d = await hub(), driver()
    look, told = looking(bus, Outbox(context(d.spec, bus)), d)
    bus.broker.disk_full = True
    await look.look(0.0)
    assert not [e for e in told if isinstance(e, Full)], "nothing was written"
    look.lapsed = lambda: True
    await look.look(1.0)
    assert [e.place for e in told if isinstance(e, Full) and e.reason] == ["hub"]
    bus.broker.restart()
    await look.look(2.0)
    assert "hub" not in d.machine.room.full
    assert not (await bus.stream_info(subjects.state_stream("t"))).messages, "nothing is left"


async def test_a_full_hub_is_named_while_a_round_is_open() -> None:
    """It waits for contributions, of whose stream no write has failed yet."""
    bus, d = await hub(), driver()
    look, told = looking(bus, Outbox(context(d.spec, bus)), d)
    look.pulling = lambda: True
    bus.broker.disk_full = True
    await look.look(0.0)
    await look.look(1.0)
    assert not [e for e in told if isinstance(e, Full)], "of UP the server says nothing wrong"
    look.lapsed = lambda: True
    await look.look(2.0)
    assert [e.place for e in told if isinstance(e, Full) and e.reason] == ["hub"]
    bus.broker.restart()
    await look.look(3.0)
    assert "hub" not in d.machine.room.full


async def test_a_stream_that_is_missing_is_no_full_disk() -> None:
    bus, d = await hub(), driver()
    look, told = looking(bus, Outbox(context(d.spec, bus)), d)
    look.lapsed = lambda: True
    await bus.delete_stream(subjects.state_stream("t"))
    await look.look(0.0)
    assert not [e for e in told if isinstance(e, Full)]


async def test_a_lease_that_is_not_renewed_says_nothing_of_a_disk_with_room() -> None:
    bus, d = await hub(), driver()
    look, told = looking(bus, Outbox(context(d.spec, bus)), d)
    look.lapsed = lambda: True
    await look.look(0.0)
    bus.broker.squeezed = True  # an answer, which other streams' looks tell of
    await look.look(1.0)
    assert not [e for e in told if isinstance(e, Full)]
    assert not (await bus.stream_info(subjects.state_stream("t"))).messages


async def test_a_beat_of_a_leader_in_doubt_reaches_no_learner() -> None:
    bus, d = await hub(), driver()
    out = Outbox(context(d.spec, bus))
    (beat, *_) = [e.beat for e in d.effects if isinstance(e, SendBeat)]
    heard = bus.subscribe(subjects.beat("t"))
    lapsed = bus.subscribe(subjects.lapsed_beat("t"))
    async with heard as to_learners, lapsed as to_people:
        await out.say_lapsed(beat)
        assert decode((await anext(to_people)).payload, Beat).state == beat.state
        await out.send(SendBeat(beat.model_copy(update={"state": "full"})))
        assert decode((await anext(to_learners)).payload, Beat).state == "full", (
            "the first it heard"
        )


@pytest.mark.parametrize(("shard", "told"), [(0, ["join", "epoch"]), (1, ["epoch"])])
async def test_of_several_shards_one_tells_what_all_see_of_learners(
    shard: int, told: list[str]
) -> None:
    out = Outbox(context(spec(), await hub(), shard=shard))
    for kind in ("join", "epoch"):
        out.tell(Tell(kind, "what happened"))
    assert [out.events.get_nowait().kind for _ in range(out.events.qsize())] == told


async def test_what_the_server_lost_of_dn_is_found() -> None:
    bus, d = await hub(), driver()
    out = Outbox(context(d.spec, bus))
    look, told = looking(bus, out, d)
    await publish(out, d, 0, 1)
    await publish(out, d, 1, 1)
    await look.look(0.0)
    assert not [e for e in told if isinstance(e, Rewound)]
    lost = subjects.publication("t", 0, 1, 1, 1)
    await bus.purge(subjects.dn_stream("t"), f"{lost}.m")
    await look.look(1.0)
    assert [e.published for e in told if isinstance(e, Rewound)] == [(1, -1)]
    assert [e.seen for e in told if isinstance(e, Rewound)] == [(1, -1)]


async def test_what_else_lies_on_dn_ends_no_leader() -> None:
    """It stays there: the next leader would meet it too."""
    bus, d = await hub(), driver()
    out = Outbox(context(d.spec, bus))
    look, told = looking(bus, out, d)
    await bus.append("dn.t.0.0.x.y.m", b"anything")
    await bus.append("dn.t.0.x.0.0.m", b"anything")
    await publish(out, d, 0, 1)
    await publish(out, d, 1, 1)
    await look.look(0.0)
    assert out.acknowledged.newest is not None and not out.acknowledged.doubted
    assert not [e for e in told if isinstance(e, Rewound)]


async def test_chunks_that_were_lost_after_they_were_acknowledged_go_again() -> None:
    bus, d = await hub(), driver()
    out = Outbox(context(d.spec, bus))
    subject, stream = subjects.publication("t", 0, 0, 1, 1), subjects.dn_stream("t")
    broker = bus.broker
    seen = 0

    def fault(client: str, operation: str, where: str) -> Any:
        nonlocal seen
        if operation == "append" and where == f"{subject}.m":
            seen += 1
            if seen == 1:
                # The server dies and forgets: the chunk, its id, and this request.
                broker.life += 1
                broker.purge(stream, subject, None)
                broker._streams[stream].ids.clear()
                return "lose_request"
        return "deliver"

    broker.fault = fault
    await publish(out, d, 0, 1)
    assert len(await bus.fetch(stream, subject)) == 1
    assert len(await bus.fetch(stream, f"{subject}.m")) == 1


async def test_a_link_that_breaks_repeats_no_chunk_that_was_acknowledged(monkeypatch: Any) -> None:
    """Were a pass without a break needed, a large publication would never be over."""
    monkeypatch.setattr(blobs, "PAUSES_S", (0.001, 0.001))
    bus, d = await hub(1 << 24), driver()
    out = Outbox(context(d.spec, bus))
    subject, asked = subjects.publication("t", 0, 0, 1, 1), Counter[str]()

    def fault(client: str, operation: str, where: str) -> Any:
        asked[where] += operation == "append"
        return "lose_answer" if operation == "append" and asked[where] % 3 == 1 else "deliver"

    bus.broker.fault = fault
    out.acknowledged.found(None, bus.life)
    chunks = 6
    await publish(out, d, 0, 1, bytes(chunks * CHUNK_BYTES))
    assert asked[subject] < 2 * chunks and asked[f"{subject}.m"] == 2
    assert len(await bus.fetch(subjects.dn_stream("t"), subject)) == chunks
    assert not out.acknowledged.doubted


async def test_of_a_server_that_died_only_what_it_had_taken_before_goes_again() -> None:
    bus, d = await hub(1 << 25), driver()
    out = Outbox(context(d.spec, bus))
    subject, stream = subjects.publication("t", 0, 0, 1, 1), subjects.dn_stream("t")
    asked = 0

    def fault(client: str, operation: str, where: str) -> Any:
        nonlocal asked
        if operation == "append" and where == subject:
            asked += 1
            if asked == 5:
                assert bus.broker.lose(stream, 2) == 2
        return "deliver"

    bus.broker.fault = fault
    out.acknowledged.doubted = False
    chunks = 20
    await publish(out, d, 0, 1, bytes(range(256)) * (chunks * CHUNK_BYTES // 256))
    stored = await bus.fetch(stream, subject)
    assert {int(s.headers[HEADER_INDEX]) for s in stored} == set(range(chunks))
    assert len(stored) == chunks, "what was there is a repeat"
    assert chunks < asked < 2 * chunks and out.acknowledged.doubted
    (manifest,) = await bus.fetch(stream, f"{subject}.m")
    assert manifest.seq > max(s.seq for s in stored), "else it would not tell what is lost next"
    assert out.acknowledged.newest == (manifest.seq, f"{subject}.m")


async def test_a_server_that_dies_all_the_time_is_let_be(monkeypatch: Any) -> None:
    bus, d = await hub(), driver()
    out = Outbox(context(d.spec, bus))
    subject, asked = subjects.publication("t", 0, 0, 1, 1), 0

    def stored(stream: str, message: Any) -> None:
        nonlocal asked
        asked += message.subject == subject
        bus.broker._streams[stream].ids.clear()
        bus.broker.life += 1

    bus.broker.on_store = stored
    monkeypatch.setattr(TransferProgress, "doubtful", lambda _: [0])
    await publish(out, d, 0, 1)
    assert asked == 1 + outbox.LIVES_MAX


async def test_a_leader_looks_for_no_torn_publication_of_its_own() -> None:
    """It puts the chunks again by itself; and what is told once is not looked for again."""
    bus, d = await hub(1 << 16), driver()
    out, stream = Outbox(context(d.spec, bus)), subjects.dn_stream("t")
    await publish(out, d, 0, 0)
    await publish(out, d, 1, 0)
    await bus.purge(stream, subjects.publication("t", 0, 1, 0, 1))
    look, told = looking(bus, out, d)
    out.acknowledged.doubted = True
    await look.look(0.0)
    assert not [e for e in told if isinstance(e, Rewound)] and look.torn == set()


@pytest.mark.parametrize("later", [0, 3])
async def test_what_an_earlier_leader_left_without_its_chunks_is_published_again(
    later: int, monkeypatch: Any
) -> None:
    """The server lost the chunks, took the manifest, and the leader died before it put them again.

    `later`: publications after it, of which so many may have been under way at once.
    """
    bus, d = await hub(1 << 16), driver()
    monkeypatch.setattr(published, "CHUNKS_S", 0.1)
    before, stream = Outbox(context(d.spec, bus)), subjects.dn_stream("t")
    await publish(before, d, 0, 0)
    await publish(before, d, 1, 0)
    await bus.purge(stream, subjects.publication("t", 0, 1, 0, 1))
    for version in range(1, later + 1):
        await publish(before, d, 0, version)
    d.machine.history.term += 1
    out = Outbox(context(d.spec, bus))
    look, told = looking(bus, out, d)
    look.outbox.under_way_max = later + 1
    await look.look(0.0)
    lost = [e for e in told if isinstance(e, Rewound)]
    assert [(e.published, e.seen) for e in lost] == [((later, -1), (later, -1))]


async def test_what_dead_leaders_never_sealed_goes_and_nothing_else() -> None:
    """Two that died over their keyframes left as much as a keyframe needs."""
    bus, d = await hub(), driver()
    out = Outbox(context(d.spec, bus))
    await publish(out, d, 0, 1)
    d.machine.history.term += 1
    for version, term in ((2, 0), (3, 0), (3, d.machine.history.term)):
        await bus.append(subjects.publication("t", 0, 0, version, term), PAYLOAD)
    await bus.append(subjects.publication("t", 0, 1, 3, 0), PAYLOAD)
    await bus.append("dn.t.0.0.x.y", b"anything")
    stream = subjects.dn_stream("t")
    before = {m.subject for m in await bus.fetch(stream, "dn.t.>")}
    await out.purge_unsealed(PurgeUnsealed(d.machine.history.term))
    gone = before - {m.subject for m in await bus.fetch(stream, "dn.t.>")}
    assert gone == {
        subjects.publication("t", 0, fragment, version, 0)
        for fragment, version in ((0, 2), (0, 3), (1, 3))
    }


async def test_part_of_what_is_on_dn_is_not_taken_for_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that falls silent tells whoever asks for all that it did not, and nobody else."""
    bus, d = await hub(), driver()
    held, silent = bus.held, True

    async def half(*what: Any, below_seq: int | None = None, **how: Any) -> Any:
        nonlocal silent
        if not silent:
            return await held(*what, below_seq=below_seq, **how)
        silent = False
        if below_seq is not None:
            raise Unavailable("it fell silent")
        return {}

    monkeypatch.setattr(bus, "held", half)
    subject = subjects.publication("t", 0, 0, 2, 0)
    await bus.append(subject, PAYLOAD)
    await Outbox(context(d.spec, bus)).purge_unsealed(PurgeUnsealed(1))
    assert await bus.fetch(subjects.dn_stream("t"), subject) == []
