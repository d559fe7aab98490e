"""What leaders show: no figure ends one, and whoever leads after the end changes nothing."""

import asyncio
from typing import Any

import pytest

from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    COUNT_MAX,
    LifeCount,
    Progress,
    SocketBytes,
    TapeEnd,
    TapeEpoch,
    TapeTerm,
    TensorSpec,
)
from diloco_shared.protocol.records import (
    RecoveryRecord,
    Restore,
    RunRecord,
    RunStatus,
    TokenCounts,
)
from diloco_shared.protocol.wire import WireError, decode, encode
from diloco_shared.spec.algorithm import MEMBERS_MAX
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.history.history import History
from diloco_syncer.machine import Machine
from diloco_syncer.members.recoveries import RECOVERIES_MAX
from diloco_syncer.members.roster import Member
from diloco_syncer.status import status as status_module
from diloco_syncer.status import status_writer_io
from diloco_syncer.status.status import ADOPTED_MAX, GONE
from diloco_syncer.status.status_writer_io import StatusWriter, shown_over

SPEC = RunSpec.model_validate({"name": "r", "id": "01", "budget": {"steps": 8}})


class Nothing:
    """In place of an inbox, an outbox and a lease."""

    spec = SPEC
    bytes_in = bytes_out = 0
    lapsed = False

    def tell(self, effect: Any) -> None:
        """Nobody listens."""


def writer_of(bus: MemoryBus, *, over: bool = False, fragments: int = 6) -> StatusWriter:
    """A leader's, of term 1."""
    cut = SPEC.algorithm.model_copy(update={"fragments": fragments})
    spec = SPEC.model_copy(update={"algorithm": cut})
    history, nothing = History(spec), Nothing()
    history.apply(TapeTerm(epoch=0, term=1, leader="a", at=1.0), 1)
    if over:
        versions = tuple(history.versions)
        end = TapeEnd(term=1, outcome="finished", reason="budget", versions=versions, at=2.0)
        history.apply(end, 2)
    found: Any = nothing
    return StatusWriter(bus, Machine(spec, history), found, found, found)


async def hub() -> MemoryBus:
    bus = MemoryBus(MemoryBroker(), "s")
    for bucket in (subjects.STATUS, subjects.RUNS):
        await bus.ensure_bucket(bucket)
    record = RunRecord(
        name="r",
        spec=SPEC.model_dump(mode="json"),
        desired="running",
        quorum=1,
        created_at=0.0,
    )
    await bus.kv_create(subjects.RUNS, "r", encode(record))
    return bus


async def shown(bus: MemoryBus) -> RunStatus:
    entry = await bus.kv_get(subjects.STATUS, "r")
    assert entry is not None and entry.value is not None
    return decode(entry.value, RunStatus)


async def test_a_standby_that_leads_after_the_end_does_not_open_the_run_again() -> None:
    bus = await hub()
    first, standby = writer_of(bus, over=True), writer_of(bus, over=True)
    await first.begin()
    await standby.begin()  # it has the lease before the settled end is there
    await first.last()
    assert (await shown(bus)).settled
    await standby.show()
    assert standby.refused == "the run is settled"
    assert (await shown(bus)).settled
    assert await shown_over(bus, SPEC, 0)


async def test_traffic_and_goodbyes_go_on_from_what_the_leader_before_showed() -> None:
    bus = await hub()
    first = writer_of(bus)
    await first.begin()
    first.bytes_before = (7, 9)
    shows = first._status().model_copy(update={"learners": {"b": {**GONE, "incarnation": 3}}})
    assert await first.standing.write(shows) == ""
    second = writer_of(bus)
    await second.begin()
    assert second.bytes_before == (7, 9)
    assert second.machine.roster.farewells == {"b": 3}


@pytest.mark.parametrize(
    ("epoch", "begun", "serial", "due"),
    [
        (0, True, 2, False),  # its user was told that it failed, and the run trained on
        (0, True, 3, True),  # a later wish
        (1, True, 2, True),  # it was fulfilled, and the tape has lost the record
        (-1, True, 2, True),  # another epoch began since: nobody can tell
        (0, False, 2, True),  # nothing can begin without it
    ],
)
async def test_what_an_earlier_leader_gave_up_is_not_gone_back_to_after_all(
    epoch: int, begun: bool, serial: int, due: bool
) -> None:
    bus = await hub()
    first, second = writer_of(bus), writer_of(bus)
    first.machine.user_requests.restoring.unfit = 2
    first.machine.history.epoch, second.machine.history.epoch = epoch + 1, 1
    await first.begin()
    assert await first.standing.write(first._status()) == ""
    if begun:
        tensor = TensorSpec(name="w", shape=(9, 1), embedding=False)
        second.machine.history.layout = (tensor,)
    await second.begin()
    restoring = second.machine.user_requests.restoring
    restoring.wanted = Restore(serial=serial, source="r.01/000003")
    assert restoring.due is due


@pytest.mark.parametrize(("shown", "due"), [(0, False), (1, True)])
async def test_what_was_given_up_stays_so_once_the_hub_is_put_back(
    shown: int, *, due: bool
) -> None:
    """Every tape goes on in another epoch then. A wish that was fulfilled in one that the tape has
    lost is due again."""
    bus = await hub()
    first = writer_of(bus)
    first.machine.user_requests.restoring.unfit = 2
    first.machine.history.epoch = shown
    await first.begin()
    assert await first.standing.write(first._status()) == ""
    put_back = TapeEpoch(epoch=30_000_000, term=30_000_000, reason="put back", at=9.0)
    later = writer_of(bus)
    later.machine.history.layout = (TensorSpec(name="w", shape=(9, 1), embedding=False),)
    # And something was lost before anybody led.
    for record in (put_back, put_back.model_copy(update={"epoch": 30_000_001})):
        later.machine.history.apply(record, later.machine.history.seq + 1)
    await later.begin()
    restoring = later.machine.user_requests.restoring
    restoring.wanted = Restore(serial=2, source="r.01/000003")
    assert restoring.due is due
    assert later._status().restores == (0 if due else 2), "whoever leads next reads it"


async def test_what_the_coordinator_forced_is_no_end_that_a_tape_tells_of() -> None:
    bus = await hub()
    leader = writer_of(bus)
    status = leader._status()
    end = {"state": "stopped", "settled": True, "forced": True}
    assert await leader.standing.write(status.model_copy(update=end)) == ""
    assert not await shown_over(bus, SPEC, 0), "whoever comes back leads, and ends it"
    other = {"state": "stopped", "settled": True, "run_id": "02"}
    entry = await bus.kv_get(subjects.STATUS, "r")
    assert entry is not None
    value = encode(status.model_copy(update=other))
    await bus.kv_update(subjects.STATUS, "r", value, entry.revision)
    assert not await shown_over(bus, SPEC, 0), "it is of a deleted run"


def test_totals_beyond_what_a_message_holds_are_shown_as_the_most_that_it_does() -> None:
    """The sum of what is bounded has no bound, and what cannot be shown would end each leader."""
    bus = MemoryBus(MemoryBroker(), "s")
    leader = writer_of(bus)
    leader.bytes_before = (COUNT_MAX + 1, COUNT_MAX + 1)
    ledger = leader.machine.history.ledger
    for learner in "ab":
        ledger.saw(LifeCount(learner=learner, incarnation=0, tokens=COUNT_MAX, adopted=()))
    status = leader._status()
    assert (status.bytes_up, status.bytes_down) == (COUNT_MAX, COUNT_MAX)
    assert status.tokens_processed == COUNT_MAX
    assert {t.lost + t.in_flight for t in status.tokens_by_fragment} == {COUNT_MAX}


async def test_a_status_that_no_message_holds_ends_no_leader(monkeypatch: Any) -> None:
    bus, made = await hub(), asyncio.Event()
    leader = writer_of(bus)
    await leader.begin()
    sound = leader._status()

    def status() -> RunStatus:
        if made.is_set():
            return sound
        made.set()
        raise WireError("RunStatus of 1100000 bytes exceeds the wire limit")

    monkeypatch.setattr(leader, "_status", status)
    monkeypatch.setattr(status_writer_io, "STATUS_S", 0.0)
    written = asyncio.Event()
    monkeypatch.setattr(leader, "_note", lambda refused: written.set())
    keeping = asyncio.create_task(leader.keep())
    waiting = asyncio.create_task(written.wait())
    await asyncio.wait({keeping, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert made.is_set() and not keeping.done()
    assert await shown(bus) == sound
    for task in (keeping, waiting):
        task.cancel()


def crowd(leader: StatusWriter, learners: int) -> None:
    """So many learners, whose names and figures are as long as they may be."""
    fragments = leader.machine.history.fragments
    most = (COUNT_MAX,) * fragments
    sockets = dict.fromkeys(SocketBytes.model_fields, COUNT_MAX)
    for n in range(learners):
        name = f"{n:063d}"
        progress = Progress(
            learner=name,
            incarnation=COUNT_MAX,
            epoch=0,
            state="recovering",
            step=COUNT_MAX,
            tokens=COUNT_MAX,
            c_steps=most,
            c_tokens=most,
            adopted=most,
            adopted_at=most,
            loss=1 / 3,
            step_s=1 / 3,
            wait_s=1 / 3,
            sockets=SocketBytes(**sockets),
        )
        member = Member(name, COUNT_MAX, 0.0, 0, merged_round=COUNT_MAX, progress=progress)
        leader.machine.roster.members[name] = member


@pytest.mark.parametrize(
    ("learners", "fragments", "versions"),
    [(8, 512, True), (MEMBERS_MAX, ADOPTED_MAX // MEMBERS_MAX, True), (MEMBERS_MAX, 512, False)],
)
def test_a_status_of_as_many_learners_and_fragments_as_there_may_be_fits_one_message(
    learners: int, fragments: int, versions: bool
) -> None:
    classes = TokenCounts.model_fields
    leader = writer_of(MemoryBus(MemoryBroker(), "s"), fragments=fragments)
    crowd(leader, learners)
    names = tuple(leader.machine.roster.members)
    times = dict.fromkeys((t for t in RecoveryRecord.model_fields if t.endswith("_at")), 1 / 3)
    back = RecoveryRecord(learner=names[0], incarnation=COUNT_MAX, donor=names[1], **times)
    told = {
        "alive": names,
        "participating": names,
        "recoveries": (back,) * RECOVERIES_MAX,
        "tokens_by_fragment": (TokenCounts(**dict.fromkeys(classes, COUNT_MAX)),) * fragments,
        "versions": (COUNT_MAX,) * fragments,
        "reason": "x" * 500,
    }
    full = leader._status().model_copy(update=told)
    assert len(encode(full)) < 1_000_000
    assert {"adopted" in shown for shown in full.learners.values()} == {versions}


async def test_a_last_status_that_no_message_holds_is_shown_without_its_learners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the end would end each leader."""
    monkeypatch.setattr(status_module, "ADOPTED_MAX", MEMBERS_MAX * 512)
    bus = await hub()
    leader = writer_of(bus, over=True, fragments=512)
    await leader.begin()
    crowd(leader, MEMBERS_MAX)
    await leader.last()
    told = await shown(bus)
    assert told.settled and told.state == "finished" and told.learners == {}
