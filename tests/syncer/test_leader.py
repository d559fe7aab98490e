"""The leader's loop: when it may leave after the end, and what it says of events it cannot take."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
import structlog
from syncer.conftest import spec
from syncer.contexts import context

from diloco_shared import ambient
from diloco_shared.budget import assumed, limits
from diloco_shared.bus.port import StreamSpec, Unavailable
from diloco_shared.bus.run_streams import ensure_buckets, ensure_run_streams
from diloco_shared.bus.stored_records import record_at
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    Grant,
    Join,
    LifeCount,
    Restored,
    TapeEnd,
    TensorSpec,
)
from diloco_shared.protocol.pace import LAST_EVALUATION_S
from diloco_shared.protocol.records import Place
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import JoinSeen, Led, SendGrant, TimePassed
from diloco_syncer.history.follow_io import Recovered
from diloco_syncer.history.history import History
from diloco_syncer.history.tape_io import Tape
from diloco_syncer.leadership.leader_io import BEGIN_S, DROPPED_SAY_S, LINGER_S, Leader
from diloco_syncer.leadership.lease_io import LeaseKeeper
from diloco_syncer.members.roster import GONE_S
from diloco_syncer.messages import arrivals_io as arrivals
from diloco_syncer.streams import purging_io as purging
from diloco_syncer.streams.purging_io import LEFT_LOOK_S


@pytest.fixture
def leader(tmp_path: Path) -> Leader:
    """Of a run that has not begun; it does not run."""
    bus, settings = MemoryBus(MemoryBroker(), "s"), spec()
    return Leader(
        context(settings, bus, folder=tmp_path, checkpoint_root=str(tmp_path)),
        Tape(bus, "t"),
        LeaseKeeper(bus, "t", "s", "boot", "lock", 3.0),
        Recovered(History(settings), None, (-1, -1), []),
        lambda seq: None,
    )


def test_each_end_of_a_run_has_its_own_time_to_leave(leader: Leader) -> None:
    """A restore takes the first end back: learners of the second one are waited for as long."""
    history, roster = leader.machine.history, leader.machine.roster
    now = time.monotonic()
    roster.join("a", 0, "a-0", now)
    assert roster.live(now)
    history.outcome, leader.ended_at = "finished", now - LINGER_S + 60.0
    assert not leader._over()
    leader.ended_at = now - LINGER_S - 60.0
    assert leader._over()
    history.outcome = ""
    assert not leader._over()
    history.outcome = "finished"
    assert not leader._over(), "the other shards have yet to end again"


def test_a_leader_stays_for_a_last_evaluation_that_another_began_in_its_evaluators_place(
    leader: Leader,
) -> None:
    """Whoever stands by does so for two minutes after the end, and may take all its time then."""
    now = time.monotonic()
    leader.machine.roster.join("a", 0, "a-0", now)
    leader.machine.history.outcome = "finished"
    leader.ended_at = now - 120.0 - LAST_EVALUATION_S
    assert not leader._over()


@pytest.mark.virtual
async def test_who_leads_after_the_end_waits_for_learners_to_speak(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader before may have died over a last evaluation, and none of them is known as yet."""
    history, roster = leader.machine.history, leader.machine.roster
    history.ledger.saw(LifeCount(learner="a", incarnation=0, tokens=5))
    history.apply(TapeEnd(term=1, outcome="finished", reason="", versions=(0, 0), at=9.0), 1)
    leader.machine.handle(Led("s", 1000.0, (0, 0)), ambient.monotonic())
    await leader._end()
    assert not leader._over(), "it has a lease to speak"
    roster.join("a", 0, "a-0", ambient.monotonic())
    (member,) = roster.live(ambient.monotonic())
    for state, over in (("stepping", False), ("finished", True)):
        monkeypatch.setattr(member, "progress", SimpleNamespace(state=state))
        assert leader._over() == over
    roster.drop("a")
    assert not leader._over()
    roster.since -= 2 * roster.lease_s
    assert leader._over(), "nobody is left that could speak"


@pytest.mark.parametrize("shards", [1, 2])
def test_of_several_shards_none_waits_long_for_who_has_yet_to_begin(
    leader: Leader, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    """The leader of another shard may have left before it came: it never begins."""
    algorithm = leader.spec.algorithm.model_copy(update={"shards": shards})
    leader.spec = leader.spec.model_copy(update={"algorithm": algorithm})
    now = time.monotonic()
    leader.machine.roster.join("a", 0, "a-0", now)
    leader.machine.history.outcome, leader.ended_at = "finished", now - BEGIN_S / 2
    assert not leader._over()
    leader.ended_at = now - 2 * BEGIN_S
    assert leader._over() == (shards > 1)
    (member,) = leader.machine.roster.live(now)
    for state, over in (("joining", shards > 1), ("stepping", False), ("finished", True)):
        monkeypatch.setattr(member, "progress", SimpleNamespace(state=state))
        assert leader._over() == over


def test_a_flood_of_dropped_events_is_said_now_and_then_with_its_count(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MAX", 0)

    def flood() -> None:
        for n in range(50):
            join = Join(learner="a", incarnation=0, nonce=str(n), config={})
            leader._put(JoinSeen(join))

    with structlog.testing.capture_logs() as logs:
        flood()
        leader.dropped_said_at -= DROPPED_SAY_S
        flood()
    assert [line["dropped"] for line in logs] == [{"JoinSeen": 1}, {"JoinSeen": 51}]


@pytest.mark.virtual
@pytest.mark.parametrize("wait_s", [0.4, 3.0])
async def test_it_rests_until_its_next_deadline(leader: Leader, wait_s: float) -> None:
    began = ambient.monotonic()
    leader.machine = SimpleNamespace(deadline=began + wait_s)  # type: ignore[assignment]
    assert isinstance(await leader._next(), TimePassed)
    assert ambient.monotonic() - began == pytest.approx(wait_s, abs=0.01)


@pytest.mark.virtual
async def test_an_event_comes_before_the_deadline(leader: Leader) -> None:
    leader.machine = SimpleNamespace(deadline=ambient.monotonic() + 3.0)  # type: ignore[assignment]
    seen = JoinSeen(Join(learner="a", incarnation=0, nonce="n", config={}))
    leader._put(seen)
    assert await leader._next() == seen


@pytest.mark.virtual
async def test_what_was_sent_to_an_earlier_leader_is_not_heard_again(leader: Leader) -> None:
    """Its rounds are over, and the tape says what came of them."""
    await ensure_run_streams(leader.data, "t", limits(assumed(leader.spec)))
    for n in range(3):
        await leader.data.append(f"up.t.a.{n}", b"")
    assert await leader._up_info() == 3


@pytest.mark.virtual
async def test_a_newcomer_is_let_in_behind_the_places_of_what_is_merged(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads on behind them, where its life before has read."""
    await ensure_buckets(leader.control)
    monkeypatch.setattr(leader.lease, "ours", AsyncMock())
    leader.machine.history.ledger.places[3] = 0, 40
    grant = Grant(
        learner="a",
        incarnation=1,
        nonce="n",
        accepted=True,
        reason="",
        epoch=0,
        term=1,
        versions=(),
        donor="",
        stamp=leader.machine.history.stamp,
    )
    effect = SendGrant(grant)
    said, full = AsyncMock(), AsyncMock(side_effect=Unavailable("no space left on device"))
    monkeypatch.setattr(leader.outbox, "send", said)
    with monkeypatch.context() as patched:
        patched.setattr(leader.control, "kv_create", full)
        await leader._let_in(effect)
    assert not said.called, "it asks again"
    await leader._let_in(effect)
    said.assert_awaited_once_with(effect)
    there = await record_at(leader.control, subjects.PLACES, "t.3.0", Place)
    assert there is not None and there.record.sequences == 40


async def test_what_its_shard_owes_a_checkpoint_is_waited_for(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked for once more when all shards are over: nobody tells of it any more."""
    checkpoints, history = leader.machine.user_requests.checkpoints, leader.machine.history
    history.shard, history.outcome = 1, "finished"
    history.layout = (TensorSpec(name="w", shape=(2,), embedding=False),)
    monkeypatch.setattr("diloco_syncer.leadership.leader_io.until_over", AsyncMock())
    await leader._end()
    assert checkpoints.owes and not leader._over()
    checkpoints.last_look = "done"
    assert leader._over()


async def leads_until(
    leader: Leader,
    done: asyncio.Event,
    monkeypatch: pytest.MonkeyPatch,
    within_s: float = 60.0,
) -> None:
    await ensure_run_streams(leader.data, "t", limits(assumed(leader.spec)))
    await ensure_buckets(leader.control)
    events = StreamSpec(subjects.EVENTS_STREAM, (subjects.EVENTS_FILTER,), 1 << 20)
    await leader.control.ensure_stream(events)
    monkeypatch.setattr(leader, "_loop", done.wait)
    monkeypatch.setattr(leader, "_watch_lease", asyncio.Event().wait)  # it leads
    async with asyncio.timeout(within_s):
        await leader.run()


@pytest.mark.virtual
async def test_a_leader_sets_leases_back_where_the_run_went_back_lately(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = asyncio.Event()

    async def set_back_again() -> None:
        back.set()

    monkeypatch.setattr(leader, "_set_back_again", set_back_again)
    leader.machine.history.restored = Restored(epoch=1, serial=1, source="r.ab/000001")
    await leads_until(leader, back, monkeypatch)


@pytest.mark.virtual
async def test_what_newcomers_that_died_have_left_goes_however_large_the_model_is(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of seven billion parameters, whose state may take days: sent to a pod that is gone."""
    gone, purge = asyncio.Event(), leader.control.purge
    await ensure_run_streams(leader.data, "t", limits(assumed(leader.spec)))
    await leader.control.append(subjects.state("t", "a", "pod-1", "n") + ".m", b"moments")

    async def purged(stream: str, subject: str, *, below_seq: int | None = None) -> None:
        await purge(stream, subject, below_seq=below_seq)
        if subject == subjects.states_of("t", "pod-1"):
            gone.set()

    monkeypatch.setattr(leader.control, "purge", purged)
    # Scaled: a tenth of the time, so that nothing else of a leader's day happens meanwhile.
    monkeypatch.setattr(purging, "GONE_S", GONE_S / 10)
    monkeypatch.setattr(purging, "LEFT_LOOK_S", LEFT_LOOK_S / 10)
    leader.machine.history.sizes_P = (7_000_000_000, 0)
    # It is gone, then it is known to be, and a look is made.
    await leads_until(leader, gone, monkeypatch, within_s=(2 * GONE_S + 3 * LEFT_LOOK_S) / 10)


def test_no_room_is_sought_while_up_lets_go_what_a_snapshot_covers(leader: Leader) -> None:
    assert not leader.fullness.waits()
    leader.purger.purging = True
    assert leader.fullness.waits()


def test_what_learners_use_is_known_to_whoever_looks_after_state(leader: Leader) -> None:
    assert leader._left_states().using() == set()
    now = time.monotonic()
    leader.machine.roster.join("a", 0, "a-0", now).progress = Mock(state="stepping")
    assert leader._left_states().using() == {"a"}


@pytest.mark.virtual
async def test_the_end_of_all_shards_wakes_it(leader: Leader) -> None:
    """Else it would leave at its next deadline, and an ended run has none."""
    await leader._end()
    assert leader.ended_at is not None and isinstance(await leader.queue.get(), TimePassed)


async def test_places_are_those_of_a_checkpoint_before_a_restore_is_on_the_tape(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slow link learners are back right after it, and would take further places."""
    done: list[object] = []

    async def write() -> None:
        done.append(leader.merged_positions.back)

    async def rewind(serial: int) -> None:
        done.append(serial)

    monkeypatch.setattr(leader.merged_positions, "write", write)
    monkeypatch.setattr(leader.checkpointer, "rewind", rewind)
    monkeypatch.setattr(leader.checkpointer, "merged", lambda serial: {3: (4, 0)})
    await leader._goes_back(7)
    assert done == [{3: (4, 0)}, 7]
