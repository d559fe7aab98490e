"""The leader's loop: when it may leave after the end, and what it says of events it cannot take."""

import asyncio
import time
from pathlib import Path

import pytest
import structlog
from syncer.conftest import spec
from syncer.contexts import context

from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Join
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import JoinSeen, MarkShown
from diloco_syncer.history.follow_io import Recovered
from diloco_syncer.history.history import History
from diloco_syncer.history.tape_io import Tape
from diloco_syncer.leadership.leader_io import DROPPED_SAY_S, LINGER_S, Leader
from diloco_syncer.leadership.lease_io import LeaseKeeper
from diloco_syncer.machine import Machine
from diloco_syncer.messages import arrivals_io as arrivals
from diloco_syncer.status.status import status


def leader_of(settings: RunSpec, folder: Path, shard: int = 0) -> Leader:
    """Of a run that has not begun; it does not run."""
    bus = MemoryBus(MemoryBroker(), "s")
    return Leader(
        context(settings, bus, folder=folder, checkpoint_root=str(folder), shard=shard),
        Tape(bus, "t"),
        LeaseKeeper(bus, "t", "s", "boot", "lock", 3.0),
        Recovered(History(settings, shard), None, (-1, -1), []),
        lambda seq: None,
    )


@pytest.fixture
def leader(tmp_path: Path) -> Leader:
    """Of a run of one shard."""
    return leader_of(spec(), tmp_path)


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


async def test_another_shard_looks_for_a_mark_that_a_learner_has_met(tmp_path: Path) -> None:
    settings = spec(shards=2)
    leader = leader_of(settings, tmp_path, shard=1)
    await leader.control.ensure_bucket(subjects.STATUS)
    first = status(Machine(settings, History(settings)), 0.0, 0.0, bytes_up=0, bytes_down=0)
    value = encode(first.model_copy(update={"checkpoint": 3}))
    await leader.control.kv_put(subjects.STATUS, subjects.status_key("t", 0), value)
    watching = asyncio.create_task(leader._watch_marks())
    leader.machine.wishes.checkpoints.met("a", 3, 0.0)
    assert await leader.queue.get() == MarkShown(3)
    watching.cancel()
