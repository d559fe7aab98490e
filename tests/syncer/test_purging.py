"""What UP holds waits for standbys that follow, for nobody else, and never fills it (I12)."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from syncer.contexts import alone, context
from syncer.purges import STATE, bus_with, bus_with_states, show, spec, states_on
from waiting import until

from diloco_shared.budget import assumed, flying, limits
from diloco_shared.budget.streams import contributions
from diloco_shared.bus.port import Refused, StreamSpec, Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeTerm
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.history.tape_io import Tape, TapeReplaced
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.streams import purging_io as purging
from diloco_syncer.streams.purging_io import UpPurger, forget_states
from diloco_syncer.streams.tail_io import Tail

COVERS = 10


async def left(bus: MemoryBus) -> int:
    return (await bus.stream_info(subjects.up_stream("r"))).messages


async def emptied(bus: MemoryBus) -> None:
    async def empty() -> bool:
        return not await left(bus)

    await until(empty, "an empty stream")


def purger(bus: MemoryBus, run: RunSpec, flying: int = 0) -> UpPurger:
    place = context(run, bus, "s1")
    found = UpPurger(place, Outbox(place), lambda: True, lambda: flying, alone)
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


async def test_a_hub_put_back_while_a_purge_was_tried_keeps_what_its_tape_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has several nodes, of which nobody thinks that they lose anything. Who was a member is in
    no backup, so no standby is waited for."""
    bus, stream = await bus_with(), subjects.tape_stream("r")
    bus.broker.nodes = 3
    await bus.ensure_stream(StreamSpec(stream, ("tape.r.>",), 1 << 20))
    tape, place = Tape(bus, "r"), context(spec(), bus, "s1")
    await tape.append(TapeTerm(epoch=0, term=1, leader="s1", at=0.0))
    tail = Tail(bus, "r", lambda: 0, lambda end, certain: None)
    found = UpPurger(place, Outbox(place), lambda: tail.sure, lambda: 0, tape.still_ours)

    async def goes_down(*_: object, **__: object) -> int:
        monkeypatch.undo()
        bus.broker.lose(stream, 1, synced=True)
        raise Unavailable("the message server went away")

    monkeypatch.setattr(bus, "purge", goes_down)
    found.want(COVERS, 2, 5)
    with pytest.raises(TapeReplaced):
        await asyncio.wait_for(found.work(), 20)
    assert tail.sure and await left(bus) == 1


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
    bus, stream = await bus_with_states(), STATE
    for newcomer in ("a", "b"):
        await bus.append(subjects.state("r", "donor", newcomer, "n"), b"moments")
    purge, refusals = bus.purge, [Unavailable("its connection is down")]

    async def refused_once(*what: Any, **how: Any) -> None:
        if refusals:
            raise refusals.pop()
        await purge(*what, **how)

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
    bus, purges, hub_is_done = await bus_with_states(), list[str](), asyncio.Event()

    async def takes_long(stream: str, subject: str, *, below_seq: int) -> None:
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
    bus, purges = await bus_with_states(), list[str]()

    async def refused(stream: str, subject: str, *, below_seq: int) -> None:
        purges.append(subject)
        raise Refused("no space left on device")

    monkeypatch.setattr(bus, "purge", refused)
    async with forgetting(bus):
        for newcomer in "ab":
            await says_it_is_in_use(bus, newcomer)
        await until(lambda: len(purges) == 2)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_state_that_comes_before_a_wish_has_its_turn_stays(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Its newcomer said that it uses another one, died, and is back: another's purge took minutes,
    or its own found the hub away."""
    bus, may_go = await bus_with_states(), asyncio.Event()
    purge, troubles = bus.purge, [Unavailable("its connection is down")] if fails else []
    tries = list[str]()

    async def slow(stream: str, subject: str, **how: Any) -> int:
        tries.append(subject)
        await may_go.wait()
        if troubles:
            raise troubles.pop()
        return await purge(stream, subject, **how)

    monkeypatch.setattr(bus, "purge", slow)
    old, new = (subjects.state("r", "donor", "b", nonce) for nonce in ("old", "new"))
    await bus.append(old, b"moments")
    async with forgetting(bus):
        for newcomer in "b" if fails else "ab":
            await says_it_is_in_use(bus, newcomer)
        await until(lambda: len(tries) == 1)
        await bus.append(new, b"moments")
        may_go.set()

        async def gone() -> bool:
            return old not in await states_on(bus)

        await until(gone, "what it uses is removed")
    assert await states_on(bus) == [new]


async def test_what_is_said_again_while_it_waits_is_of_what_is_there_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later life has said so, of a later state."""
    bus, may_go, purge = await bus_with_states(), asyncio.Event(), MemoryBus.purge

    async def slow(stream: str, subject: str, **how: Any) -> int:
        await may_go.wait()
        return await purge(bus, stream, subject, **how)

    monkeypatch.setattr(bus, "purge", slow)
    async with forgetting(bus):
        await says_it_is_in_use(bus, "a")
        for nonce in ("old", "new"):
            await bus.append(subjects.state("r", "donor", "b", nonce), b"moments")
            await says_it_is_in_use(bus, "b")
        may_go.set()

        async def gone() -> bool:
            return not await states_on(bus)

        await until(gone, "both are removed")


async def test_up_has_yet_to_let_go_until_a_purge_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes minutes, and a further snapshot would make no room meanwhile."""
    bus, hub_is_done, begun = await bus_with(), asyncio.Event(), asyncio.Event()

    async def takes_long(below: Any) -> None:
        begun.set()
        await hub_is_done.wait()

    found = purger(bus, spec())
    monkeypatch.setattr(found.outbox, "purge_up", takes_long)
    assert found.owes
    work = asyncio.create_task(found.work())
    await begun.wait()
    assert found.owes and not found.waits
    hub_is_done.set()
    await until(lambda: not found.owes, "it has let go")
    work.cancel()


async def test_a_learner_that_says_it_is_a_standby_is_not_waited_for() -> None:
    """Its record stands where those of learners with credentials of their own do."""
    bus = await bus_with()
    key = subjects.member_key("s2", "learner", named=True)
    await show(bus, "s2", "standby", 3, key=key)
    await purged(bus, spec())
