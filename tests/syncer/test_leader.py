"""The leader's loop: when it may leave after the end, and what it says of events it cannot take."""

import time
from pathlib import Path

import pytest
import structlog
from syncer.conftest import spec
from syncer.contexts import context

from diloco_shared.protocol.messages import Join
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import JoinSeen
from diloco_syncer.history.follow_io import Recovered
from diloco_syncer.history.history import History
from diloco_syncer.history.tape_io import Tape
from diloco_syncer.leadership.leader_io import DROPPED_SAY_S, LINGER_S, Leader
from diloco_syncer.leadership.lease_io import LeaseKeeper
from diloco_syncer.messages import arrivals_io as arrivals


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
