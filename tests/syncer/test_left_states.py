"""What STATE holds for those that died, or that use it by now, goes; nothing else does (I12)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from syncer.contexts import context
from syncer.purges import STATE, bus_with_states, show, spec, states_on

from diloco_shared.budget import Size
from diloco_shared.bus.port import Held, Unavailable
from diloco_shared.protocol import subjects
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.streams import purging_io as purging
from diloco_syncer.streams.purging_io import LeftStates, superseded
from diloco_syncer.streams.storage_io import Storage


@pytest.fixture
def soon_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was missing for ten seconds is gone."""
    monkeypatch.setattr(purging, "GONE_S", 10.0)


class Left:
    """A leader's looks at what the dead have left, every two seconds."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.storage = Storage(spec(), bus, Size, lambda _: None)
        self.over, self.using = set[tuple[str, str]](), set[str]()
        place = context(spec(), bus, "s1")
        self.states = LeftStates(place, self.storage, lambda: self.over, lambda: self.using)

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
        found = await self.bus.fetch(STATE, "state.r.>")
        return sorted({message.subject.split(".")[3] for message in found})


async def left_states(limit: int = 1 << 30) -> Left:
    return Left(await bus_with_states(limit))


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
    (message,) = await left.bus.fetch(STATE, "state.r.>")
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
        await left.bus.purge(STATE, "state.r.>")
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
    assert len(await left.bus.fetch(STATE, "state.r.>")) == 6
    await left.passes(4)
    found = {m.subject for m in await left.bus.fetch(STATE, "state.r.>")}
    newest = subjects.state("r", "donor", "pod-1", "n2")
    assert found == {newest, newest + ".m"}


@pytest.mark.virtual
async def test_a_crowded_stream_has_room_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next newcomer would be given nothing for as long as it takes to be gone."""
    left = await left_states(10_000)
    await left.look()
    for n in range(4):
        await left.bus.append(subjects.state("r", "donor", "pod-1", f"n{n}"), bytes(2000))
    await show(left.bus, "pod-1", "working", 0)
    with monkeypatch.context() as patch:
        patch.setattr(left.bus, "held", None)
        await left.look()  # it is all awaited: nothing is read
    left.over = {("donor", f"n{n}") for n in range(3)}
    await left.look()
    (newest,) = await left.bus.fetch(STATE, "state.r.>")
    assert newest.subject == subjects.state("r", "donor", "pod-1", "n3")


@pytest.mark.virtual
async def test_what_is_in_use_goes_though_it_was_said_to_an_earlier_leader(
    soon_gone: None,
) -> None:
    """Which answered at once, and was replaced before it had removed it."""
    left = await left_states()
    for newcomer in ("pod-1", "pod-2"):
        await left.sent(newcomer)
        await show(left.bus, newcomer, "working", 0)
    left.using = {"pod-1", "pod-3"}
    await left.look()
    await left.passes(8)
    assert await left.there() == ["pod-1", "pod-2"], "it is there for minutes, and harms nobody"
    await left.passes(4)
    assert await left.there() == ["pod-2"]


@pytest.mark.virtual
async def test_what_is_sent_to_a_later_life_stays_where_an_earlier_one_used_its_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It dies and comes back while STATE is read."""
    left = await left_states(10_000)
    await left.bus.append(subjects.state("r", "donor", "pod-1", "old"), bytes(6000))
    await show(left.bus, "pod-1", "working", 0)
    left.using, held = {"pod-1"}, left.bus.held

    async def meanwhile(*what: Any, **how: Any) -> Any:
        found = await held(*what, **how)
        await left.sent("pod-1", nonce="new")
        return found

    monkeypatch.setattr(left.bus, "held", meanwhile)
    await left.look()
    assert await states_on(left.bus) == [subjects.state("r", "donor", "pod-1", "new") + ".m"]


@asynccontextmanager
async def looking(left: Left) -> AsyncIterator[list[float]]:
    """A leader that looks by itself, each time at what STATE holds; when it has read it."""
    clock, reads = asyncio.get_running_loop().time, list[float]()
    held = left.bus.held

    async def noted(*what: Any, **how: Any) -> Any:
        reads.append(clock())
        return await held(*what, **how)

    left.bus.held = noted  # type: ignore[method-assign]
    work = asyncio.create_task(left.states.keep())
    yield reads
    work.cancel()


@pytest.mark.virtual
async def test_a_stream_that_becomes_crowded_is_looked_at_within_a_second() -> None:
    """And not with the next look at what the dead have left."""
    left = await left_states(10_000)
    await left.storage._see("STATE")
    async with looking(left) as reads:
        await asyncio.sleep(5)
        for n in range(3):
            await left.bus.append(subjects.state("r", "donor", "pod-1", f"n{n}"), bytes(2000))
        await left.storage._see("STATE")
        await asyncio.sleep(5)
        assert not reads, "it is all awaited"
        left.over = {("donor", "n0")}
        await asyncio.sleep(2)
        assert reads
        assert len(await states_on(left.bus)) == 2


@pytest.mark.virtual
async def test_a_new_leader_reads_a_crowded_stream_once_and_again_when_one_of_them_trains() -> None:
    """It does not know yet who trains: nobody has spoken to it."""
    left = await left_states(10_000)
    await left.bus.append(subjects.state("r", "donor", "pod-1", "n"), bytes(6000))
    async with looking(left) as reads:
        await asyncio.sleep(2)
        await left.storage._see("STATE")
        await asyncio.sleep(20)
        assert len(reads) == 1
        left.using = {"pod-2"}
        await asyncio.sleep(5)
        assert len(reads) == 1
        left.using = {"pod-1"}
        await asyncio.sleep(2)
        assert len(reads) == 2 and await states_on(left.bus) == []
