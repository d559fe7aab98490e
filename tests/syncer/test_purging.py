"""What UP holds waits for standbys that follow, for nobody else, and never fills it (I12)."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from syncer.contexts import context
from waiting import until

from diloco_shared.budget import Size, assumed, flying, limits
from diloco_shared.budget.streams import contributions
from diloco_shared.bus.port import Held, Refused, StreamSpec, Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import MemberRecord
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.streams import purging_io as purging
from diloco_syncer.streams.purging_io import LeftStates, UpPurger, forget_states, superseded
from diloco_syncer.streams.storage_io import Storage

COVERS = 10


def spec() -> RunSpec:
    return RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})


async def bus_with(payload: bytes = b"x", bytes_max: int = 1 << 30) -> MemoryBus:
    bus = MemoryBus(MemoryBroker(), "test")
    await bus.ensure_bucket(subjects.MEMBERS)
    await bus.ensure_stream(StreamSpec(subjects.up_stream("r"), ("up.r.>",), bytes_max))
    await bus.append("up.r.a", payload)
    return bus


async def show(
    bus: MemoryBus, name: str, state: str, tape_seq: int, run: str = "r", key: str = ""
) -> None:
    fields: dict[str, Any] = {"boot": "b", "host": "h", "pid": 1, "lock": name, "started_at": 0.0}
    record = MemberRecord(id=name, role="syncer", run=run, state=state, tape_seq=tape_seq, **fields)
    await bus.kv_put(subjects.MEMBERS, key or name, encode(record))


async def left(bus: MemoryBus) -> int:
    return (await bus.stream_info(subjects.up_stream("r"))).messages


async def emptied(bus: MemoryBus) -> None:
    async def empty() -> bool:
        return not await left(bus)

    await until(empty, "an empty stream")


def purger(bus: MemoryBus, run: RunSpec, flying: int = 0) -> UpPurger:
    place = context(run, bus, "s1")
    found = UpPurger(place, Outbox(place), lambda: True, lambda: flying)
    found.want(COVERS, 2, 5)
    return found


async def purged(bus: MemoryBus, run: RunSpec) -> None:
    """It purges at once."""
    work = asyncio.create_task(purger(bus, run).work())
    await emptied(bus)
    work.cancel()


@pytest.mark.parametrize(
    ("state", "tape_seq", "run"),
    [
        ("standby", COVERS, "r"),
        ("ineligible", 3, "r"),
        ("idle", 0, "r"),
        ("standby", 3, "another"),
        ("leading", 3, "r"),
    ],
)
async def test_nobody_is_waited_for_who_has_it_or_cannot_use_it(
    state: str, tape_seq: int, run: str
) -> None:
    bus = await bus_with()
    await show(bus, "s2", state, tape_seq, run)
    await purged(bus, spec())


@pytest.mark.parametrize("state", ["standby", "catching up"])
async def test_a_standby_that_follows_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(purging, "LOOK_S", 0.0)
    bus = await bus_with()
    await show(bus, "s2", state, COVERS - 1)
    work = asyncio.create_task(purger(bus, spec()).work())
    for _ in range(200):
        await asyncio.sleep(0)
    assert await left(bus) == 1
    await show(bus, "s2", state, COVERS)
    await emptied(bus)
    work.cancel()


async def test_a_rewind_lowers_what_a_purge_that_is_under_way_removes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server was away, and has lost its newest: others stand there when it is back."""
    bus = await bus_with()
    away = True

    async def purge(stream: str, subject: str, *, below_seq: int | None = None) -> int:
        if away:
            raise Unavailable("away")
        return await MemoryBus.purge(bus, stream, subject, below_seq=below_seq)

    monkeypatch.setattr(bus, "purge", purge)
    found = purger(bus, spec())
    found.want(COVERS, 3, 7)
    work = asyncio.create_task(found.work())
    for _ in range(20):
        await asyncio.sleep(0)
    assert found.wanted.is_set() is False, "it is at it"
    found.rewound(1)
    await bus.append("up.r.later", b"of a round of now")
    away = False
    async with asyncio.timeout(20):
        while await left(bus) == 2:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)
    assert [s.subject for s in await bus.fetch(subjects.up_stream("r"), "up.r.>")] == ["up.r.later"]
    work.cancel()


async def test_it_knows_up_to_which_round_contributions_are_gone() -> None:
    bus = await bus_with()
    found = purger(bus, spec())
    assert found.removed == -1
    work = asyncio.create_task(found.work())
    await until(lambda: found.removed == 5, "the round that the snapshot covers")
    found.begun_again()
    assert found.removed == -1, "rounds are counted from a checkpoint on"
    work.cancel()


async def waiting(held: int, flying: int, limit: int = 1 << 20) -> tuple[MemoryBus, UpPurger]:
    """UP holds so many bytes, and a standby is behind."""
    bus = await bus_with(bytes(held), limit)
    await show(bus, "s2", "standby", COVERS - 1)
    return bus, purger(bus, spec(), flying)


async def test_as_long_as_what_may_come_until_the_next_look_has_room() -> None:
    """And not until the stream is half full: it is fuller as soon as a snapshot is written."""
    bus, found = await waiting(900 << 10, 100 << 10)
    assert not await found._free_to_go() and found.waits
    await bus.append("up.r.b", bytes(100 << 10))
    assert await found._free_to_go() and not found.waits
    bus, found = await waiting(600 << 10, 10 << 10)
    assert not await found._free_to_go()
    await bus.append("up.r.b", bytes(220 << 10))
    assert await found._free_to_go(), "as much again may come until the next look"


async def test_an_earlier_wait_says_nothing_of_how_fast_up_fills_now() -> None:
    """What came since then came in minutes."""
    bus, found = await waiting(100 << 10, 10 << 10)
    assert not await found._free_to_go()
    await bus.append("up.r.b", bytes(500 << 10))
    work = asyncio.create_task(found.work())
    await until(lambda: found.held < math.inf and not found.wanted.is_set(), "a look")
    assert found.waits and await left(bus) == 2
    work.cancel()


async def test_of_a_stream_that_is_smaller_than_what_may_come_half_is_used() -> None:
    _, found = await waiting(500 << 10, 1 << 30)
    assert not await found._free_to_go()
    _, found = await waiting(600 << 10, 1 << 30)
    assert await found._free_to_go()


@pytest.mark.parametrize(("late", "waits"), [(0, True), (38, True), (200, True), (242, False)])
async def test_up_of_a_large_model_has_room_to_wait_while_snapshots_are_written(
    late: int, waits: bool
) -> None:
    """A snapshot of 188 GB was begun after an interval of 240 rounds, and `late` rounds came since.

    Streams of a small model have 64 MiB at least, and so no world could see it.
    """
    body = {
        "name": "r",
        "model": {"preset": "gemma-12b"},
        "algorithm": {"fragments": 24, "codec_up": "int4"},
        "keeping": {"snapshot_every_rounds": 240},
        "budget": {"steps": 20_000},
    }
    job = assumed(RunSpec.model_validate(body), learners=4)
    held, limit = contributions(job, 240 + late), limits(job)["UP"]
    _, found = await waiting(1, flying(job))

    async def stream_info(stream: str) -> Any:
        return SimpleNamespace(bytes=held, bytes_max=limit)

    found.data = SimpleNamespace(stream_info=stream_info)  # type: ignore[assignment]
    assert await found._free_to_go() is not waits


async def test_a_leader_removes_the_state_that_a_learner_says_it_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A site's own account may not: a purge's filter could name any learner's."""
    bus = await bus_with()
    stream = subjects.state_stream("r")
    await bus.ensure_stream(StreamSpec(stream, ("state.r.>",), 1 << 30))
    for newcomer in ("a", "b"):
        await bus.append(subjects.state("r", "donor", newcomer, "n"), b"moments")
    purge, refusals = bus.purge, [Unavailable("its connection is down")]

    async def refused_once(*what: Any) -> None:
        if refusals:
            raise refusals.pop()
        await purge(*what)

    monkeypatch.setattr(bus, "purge", refused_once)
    async with forgetting(bus):
        await says_it_is_in_use(bus, "b")

        async def there() -> bool:
            found = [message.subject for message in await bus.fetch(stream, "state.r.>")]
            return found == [subjects.state("r", "donor", "a", "n")]

        await until(there, "only what was sent to the other")


@asynccontextmanager
async def forgetting(bus: MemoryBus) -> AsyncIterator[None]:
    """A leader that hears which states are in use."""
    task = asyncio.create_task(forget_states(context(spec(), bus, "s1")))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def says_it_is_in_use(bus: MemoryBus, newcomer: str) -> None:
    async def asked() -> bool:
        return await bus.request(subjects.forget_state("r", newcomer), b"", timeout_s=0.2) == b""

    await until(asked, "a leader", tolerated=(Unavailable,))


async def test_a_learner_is_answered_before_its_state_is_gone_and_has_it_removed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundred gigabytes take minutes. Who waited for that in vain would ask again and again."""
    bus, purges, hub_is_done = await bus_with(), list[str](), asyncio.Event()

    async def takes_long(stream: str, subject: str) -> None:
        purges.append(subject)
        await hub_is_done.wait()

    monkeypatch.setattr(bus, "purge", takes_long)
    async with forgetting(bus):
        for newcomer in "abbbc":
            await says_it_is_in_use(bus, newcomer)
        assert purges == [subjects.states_of("r", "a")], "one at a time"
        hub_is_done.set()
        await until(lambda: len(purges) == 3)
        await says_it_is_in_use(bus, "a")
        await until(lambda: len(purges) == 4, "what was sent to a later life")
    assert purges == [subjects.states_of("r", newcomer) for newcomer in "abca"]


async def test_what_cannot_be_removed_keeps_nobody_elses_from_going(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(purging, "FORGET_S", 0.0)
    bus, purges = await bus_with(), list[str]()

    async def refused(stream: str, subject: str) -> None:
        purges.append(subject)
        raise Refused("no space left on device")

    monkeypatch.setattr(bus, "purge", refused)
    async with forgetting(bus):
        for newcomer in "ab":
            await says_it_is_in_use(bus, newcomer)
        await until(lambda: len(purges) == 2)


async def test_a_learner_that_says_it_is_a_standby_is_not_waited_for() -> None:
    """Its record stands where those of learners with credentials of their own do."""
    bus = await bus_with()
    key = subjects.member_key("s2", "learner", named=True)
    await show(bus, "s2", "standby", 3, key=key)
    await purged(bus, spec())


@pytest.fixture
def soon_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was missing for ten seconds is gone."""
    monkeypatch.setattr(purging, "GONE_S", 10.0)


class Left:
    """A leader's looks at what the dead have left, every two seconds."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.storage = Storage(spec(), bus, Size, lambda _: None)
        self.over = set[tuple[str, str]]()
        self.states = LeftStates(context(spec(), bus, "s1"), self.storage, lambda: self.over)

    async def sent(self, newcomer: str, donor: str = "donor", nonce: str = "n") -> None:
        await self.bus.append(subjects.state("r", donor, newcomer, nonce) + ".m", b"moments")

    async def passes(self, seconds: float) -> None:
        for _ in range(int(seconds / 2)):
            await asyncio.sleep(2)
            await self.look()

    async def look(self) -> None:
        await self.storage._see("STATE")
        await self.states.look()

    async def there(self) -> list[str]:
        found = await self.bus.fetch(subjects.state_stream("r"), "state.r.>")
        return sorted({message.subject.split(".")[3] for message in found})


async def left_states(limit: int = 1 << 30) -> Left:
    bus = await bus_with()
    await bus.ensure_stream(StreamSpec(subjects.state_stream("r"), ("state.r.>",), limit))
    return Left(bus)


@pytest.mark.virtual
async def test_what_was_sent_to_a_newcomer_that_died_is_removed(soon_gone: None) -> None:
    """A stream has room for all learners but one, and new names come and die."""
    left = await left_states()
    for newcomer in ("pod-1", "pod-2", "s2"):
        await left.sent(newcomer)
    await show(left.bus, "pod-2", "working", 0)
    await show(left.bus, "s2", "catching up", 0)
    await left.look()
    await left.passes(18)
    assert await left.there() == ["pod-1", "pod-2", "s2"], "it may come back in a moment"
    await left.passes(4)
    assert await left.there() == ["pod-2", "s2"], "who lives may still fetch it"


@pytest.mark.virtual
async def test_who_comes_back_has_its_time_again(soon_gone: None) -> None:
    left = await left_states()
    await left.sent("pod-1")
    await left.look()
    await left.passes(16)
    await show(left.bus, "pod-1", "working", 0)
    await left.passes(6)
    await left.bus.kv_delete(subjects.MEMBERS, "pod-1")
    await left.passes(10)
    assert await left.there() == ["pod-1"]
    await left.passes(4)
    assert await left.there() == []


@pytest.mark.virtual
async def test_what_is_sent_to_a_later_life_stays(
    monkeypatch: pytest.MonkeyPatch, soon_gone: None
) -> None:
    """It comes back while it is looked at."""
    left = await left_states()
    await left.sent("pod-1")
    await left.look()
    await left.passes(18)
    purge = left.bus.purge

    async def late(*what: Any, **how: Any) -> int:
        await left.sent("pod-1", nonce="later")
        return await purge(*what, **how)

    monkeypatch.setattr(left.bus, "purge", late)
    await left.passes(4)
    (message,) = await left.bus.fetch(subjects.state_stream("r"), "state.r.>")
    assert message.subject == subjects.state("r", "donor", "pod-1", "later") + ".m"


@pytest.mark.virtual
async def test_nothing_is_read_of_a_stream_that_is_emptied_in_time(
    monkeypatch: pytest.MonkeyPatch, soon_gone: None
) -> None:
    left = await left_states()
    monkeypatch.setattr(left.bus, "held", None)
    for _ in range(4):
        await left.sent("pod-1")
        await left.passes(8)
        await left.bus.purge(subjects.state_stream("r"), "state.r.>")
        await left.passes(2)


@pytest.mark.virtual
async def test_who_died_is_gone_from_when_it_was_first_missing(soon_gone: None) -> None:
    """Not from when STATE is first read, which is after as long again."""
    left = await left_states()
    await left.sent("pod-1")
    await show(left.bus, "pod-1", "working", 0)
    await left.look()
    await left.bus.kv_delete(subjects.MEMBERS, "pod-1")
    await left.passes(10)
    assert await left.there() == ["pod-1"]
    await left.passes(2)
    assert await left.there() == []


@pytest.mark.virtual
async def test_whose_key_came_back_in_between_is_not_gone(soon_gone: None) -> None:
    """Its message server was away, and is again."""
    left = await left_states()
    await left.sent("pod-1")
    await show(left.bus, "pod-1", "working", 0)
    await left.look()
    await left.bus.kv_delete(subjects.MEMBERS, "pod-1")
    await left.passes(4)
    await show(left.bus, "pod-1", "working", 0)
    await left.passes(2)
    await left.bus.kv_delete(subjects.MEMBERS, "pod-1")
    await left.passes(8)
    assert await left.there() == ["pod-1"]


@pytest.mark.virtual
async def test_who_works_for_another_run_now_fetches_nothing_of_this_one(soon_gone: None) -> None:
    left = await left_states()
    await left.sent("pod-1")
    await show(left.bus, "pod-1", "working", 0, run="another")
    await left.look()
    await left.passes(22)
    assert await left.there() == []


@pytest.mark.virtual
async def test_what_takes_long_to_read_is_read_the_less_often(
    monkeypatch: pytest.MonkeyPatch, soon_gone: None
) -> None:
    left = await left_states()
    await left.sent("pod-1")
    await show(left.bus, "pod-1", "working", 0)
    await left.look()
    held, reads = left.bus.held, list[str]()

    async def slow(*what: Any, **how: Any) -> Any:
        reads.append("")
        await asyncio.sleep(2)
        return await held(*what, **how)

    monkeypatch.setattr(left.bus, "held", slow)
    await left.passes(28)
    assert len(reads) == 2, "after 10 s, and after 18 s without"


@pytest.mark.virtual
async def test_a_server_that_falls_silent_makes_nobody_alive(
    monkeypatch: pytest.MonkeyPatch, soon_gone: None
) -> None:
    """What it told before is no list of those who have something on STATE."""
    left = await left_states()
    for newcomer in ("pod-1", "pod-2"):
        await left.sent(newcomer)
    await left.look()
    await left.passes(16)
    held, silent = left.bus.held, True

    async def half(*what: Any, below_seq: int | None = None, **how: Any) -> Any:
        if silent and below_seq is not None:
            raise Unavailable("it did not tell of all")
        return {} if silent else await held(*what, below_seq=below_seq, **how)

    monkeypatch.setattr(left.bus, "held", half)
    left.states.gone |= dict.fromkeys(("pod-1", "pod-2"), left.states.filled_at or 0.0)
    with pytest.raises(Unavailable):
        await left.passes(2)
    silent = False
    left.states.rest_until = 0.0
    await left.passes(2)
    assert await left.there() == []


def test_states_that_nobody_waits_for_any_more_are_found() -> None:
    one = Held(9, 1)
    held = dict.fromkeys(("state.r.a.b.n1", "state.r.a.b.n1.m", "state.r.a.c.n2", "state.r.x"), one)
    assert superseded(held, {("a", "n1"), ("x", "n2")}) == {"a.b.n1"}


@pytest.mark.virtual
async def test_what_was_sent_to_earlier_lives_goes_though_the_learner_is_back(
    soon_gone: None,
) -> None:
    """It dies over and over while it recovers, and its key is there each time."""
    left = await left_states()
    for n in range(3):
        await left.sent("pod-1", nonce=f"n{n}")
        await left.bus.append(subjects.state("r", "donor", "pod-1", f"n{n}"), b"chunk")
    left.over = {("donor", "n0"), ("donor", "n1"), ("elsewhere", "n2")}
    await show(left.bus, "pod-1", "working", 0)
    await left.look()
    await left.passes(8)
    assert len(await left.bus.fetch(subjects.state_stream("r"), "state.r.>")) == 6
    await left.passes(4)
    found = {m.subject for m in await left.bus.fetch(subjects.state_stream("r"), "state.r.>")}
    newest = subjects.state("r", "donor", "pod-1", "n2")
    assert found == {newest, newest + ".m"}


@pytest.mark.virtual
async def test_a_crowded_stream_has_room_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next newcomer would be given nothing for as long as it takes to be gone."""
    left = await left_states(10_000)
    for n in range(4):
        await left.bus.append(subjects.state("r", "donor", "pod-1", f"n{n}"), bytes(2000))
    await show(left.bus, "pod-1", "working", 0)
    with monkeypatch.context() as patch:
        patch.setattr(left.bus, "held", None)
        await left.look()  # it is all awaited: nothing is read
    left.over = {("donor", f"n{n}") for n in range(3)}
    await left.look()
    (newest,) = await left.bus.fetch(subjects.state_stream("r"), "state.r.>")
    assert newest.subject == subjects.state("r", "donor", "pod-1", "n3")
