"""The checker hears what an outbox tells of losses, and not what a leader wanted to tell (I10)."""

from diloco_simulator.inside.losses import SOON_S, Losses
from diloco_syncer.events import Tell
from diloco_syncer.members.claims import TOLD_AGAIN_S

LOST, ALIVE = (Tell(f"learner-{now}", "b", {"learner": "b"}) for now in ("lost", "alive"))
LATE_S = TOLD_AGAIN_S + 2 * SOON_S


def test_a_loss_that_is_never_told_is_not_known() -> None:
    losses = Losses(first=True)
    losses.decides(LOST, 0.0)
    assert losses.known(1.0) == losses.known(TOLD_AGAIN_S) == {"b"}, "its turn has not come"
    assert losses.known(LATE_S) == {"b"}, "this beat tells"
    assert losses.known(LATE_S + 1.0) == set()
    losses.tells(LOST)
    assert losses.known(LATE_S + 2.0) == {"b"}


def test_a_leader_that_stood_still_tells_with_its_next_beat() -> None:
    losses = Losses(first=True)
    losses.decides(LOST, 0.0)
    assert [losses.known(at) for at in (1.0, 9 * LATE_S)] == [{"b"}, {"b"}]


def test_who_is_told_lost_is_told_alive() -> None:
    losses = Losses(first=True)
    losses.decides(LOST, 0.0)
    losses.tells(LOST)
    assert losses.stale() == set()
    losses.decides(ALIVE, 5.0)
    assert losses.stale() == {"b"} and losses.known(5.0) == set()
    losses.tells(ALIVE)
    assert losses.stale() == set()


def test_another_shard_than_the_first_tells_nothing_of_learners() -> None:
    losses = Losses(first=False)
    losses.decides(LOST, 0.0)
    assert losses.known(2 * LATE_S) == losses.known(3 * LATE_S) == {"b"}
