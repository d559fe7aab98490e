"""When a leader asks for a checkpoint to go back to, and what it answers: no machine around it."""

from typing import Any

import pytest
from syncer.test_checkpoints import kept, loaded, merged, of, wanted

from diloco_shared.protocol.messages import Progress, TapeRestore, TapeSnapshot, TensorSpec
from diloco_shared.protocol.records import Restore, RunStatus
from diloco_shared.protocol.run_states import needs_in, seen
from diloco_shared.protocol.wire import decode, encode
from diloco_syncer.checkpoints.restoring import RETRY_S, Restoring
from diloco_syncer.events import (
    Append,
    Appended,
    Kept,
    Load,
    Loaded,
    PurgeUp,
    SnapshotDone,
    Tell,
    Wanted,
)
from diloco_syncer.history.history import History
from diloco_syncer.machine import Machine
from diloco_syncer.status.status import status

WISH = Restore(serial=1, source="t/000001")


@pytest.mark.parametrize(
    ("shards", "told", "due"),
    [(1, 3, False), (2, 2, False), (2, 3, True)],
)
def test_what_is_over_goes_back_only_after_other_shards_have(
    driver_of: Any, shards: int, told: int, due: bool
) -> None:
    """It had ended in epoch 2; learners tell of the one that they are in."""
    history = History(driver_of(shards=shards).spec)
    restoring = Restoring(history)
    restoring.wanted = WISH
    assert restoring.due
    history.epoch, history.outcome, history.ended_in = 2, "finished", 2
    restoring.heard = (told, 1)
    assert restoring.due is due


@pytest.mark.parametrize(
    ("shards", "known", "due"),
    [(1, 1, False), (2, 0, False), (2, 1, True), (2, 2, True)],
)
def test_a_shard_that_could_not_go_back_tries_again_once_another_has(
    driver_of: Any, shards: int, known: int, due: bool
) -> None:
    """Its disk was full for a moment. `known`: the newest restore that a learner has heard of."""
    history = History(driver_of(shards=shards).spec)
    history.layout = (TensorSpec(name="w", shape=(4, 4), embedding=False),)
    restoring = Restoring(history)
    restoring.wanted = WISH
    assert restoring.advance(0.0) == [Load(WISH)]
    failed = restoring.loaded(Loaded(WISH, fault="no room"), 0.0, 1000.0)
    assert isinstance(failed, Tell) and not restoring.due, "the run goes on without it"
    restoring.known = known
    assert restoring.due is due
    assert ("no room" in restoring.reason) is due, "and no round opens meanwhile"
    assert restoring.advance(RETRY_S - 0.1) == []
    assert restoring.advance(RETRY_S) == ([Load(WISH)] if due else [])
    assert restoring.loaded(Loaded(WISH, fault="no room"), RETRY_S, 1000.0) is None, "told once"
    if due and known == 1:  # it has to go back, to whatever the user wants now
        restoring.wanted = restoring.asked = WISH.model_copy(update={"serial": 2})
        again = restoring.loaded(Loaded(restoring.wanted, fault="damaged"), RETRY_S, 1000.0)
        assert isinstance(again, Tell) and restoring.due
    history.stopping, history.outcome = True, "stopped"
    restoring.heard = (1, known)
    assert not restoring.due, "it follows the others, so that learners may leave"


def test_one_learner_alone_makes_no_shard_go_back(driver_of: Any) -> None:
    """It may lie. Two, or the only one that lives, are believed."""
    driver = driver_of(shards=2)
    machine: Machine = driver.machine
    lease_s, known = machine.roster.lease_s, []

    def tell(now: float, learner: str, restore: int, epoch: int = 1) -> None:
        told = progress(learner, restore, epoch)
        machine.roster.progress(told, now)
        machine.user_requests.progress(told, now)
        known.append(machine.user_requests.restoring.known)

    machine.history.epoch, machine.roster.since = 1, 100.0
    tell(100.0, "a", 1)
    assert known.pop() == 0, "the others have not spoken to a new leader yet"
    tell(101.0 + lease_s, "a", 1)
    assert known.pop() == 1, "no other lives"
    for learner, restore in (("b", 0), ("c", 2), ("b", 3)):
        tell(101.0 + lease_s, learner, restore)
    assert known == [1, 1, 2]
    machine.history.epoch = 2  # of which only one that lies speaks already
    tell(101.0 + lease_s, "b", 5, epoch=2)
    machine.history.epoch = 1
    assert known.pop() == 2
    tell(102.0 + lease_s, "c", 0, epoch=0)  # an old word, repeated while it evaluates
    tell(103.0 + 2 * lease_s, "b", 4)
    assert known.pop() == 4


def progress(learner: str, restore: int, epoch: int) -> Progress:
    """Of one that has begun, and knows of a restore."""
    return Progress(
        learner=learner,
        incarnation=0,
        epoch=epoch,
        state="stepping",
        step=1,
        tokens=0,
        c_steps=(0, 0),
        c_tokens=(0, 0),
        adopted=(0, 0),
        adopted_at=(0, 0),
        loss=0.0,
        step_s=1.0,
        wait_s=0.0,
        restore=restore,
    )


def test_a_wish_that_was_dropped_while_it_was_loaded_may_come_again(driver_of: Any) -> None:
    """As after a hub was put back: the same wish, or another one, has the serial once more."""
    restoring = Restoring(History(driver_of().spec))
    for again in (WISH, WISH.model_copy(update={"source": "t/000002"})):
        restoring.wanted = WISH
        assert restoring.advance(0.0) == [Load(WISH)]
        assert restoring.advance(0.0) == []
        restoring.wanted = None
        if again != WISH:
            restoring.wanted = again
            assert restoring.advance(0.0) == [], "what is loaded is kept by its serial"
        assert restoring.loaded(Loaded(WISH), 0.0, 1000.0) is None
        restoring.wanted = again
        assert restoring.deadline is not None
        assert restoring.advance(0.0) == [Load(again)]
        restoring.asked = None


def test_a_leader_shows_which_checkpoints_nobody_may_remove(running: Any) -> None:
    """What it went back to, and what it shall go back to as long as that may yet be."""

    def needed() -> tuple[str, ...] | None:
        shown = status(running.machine, running.now, 0.0, bytes_up=0, bytes_down=0)
        assert seen(shown).learners.keys() == {"a", "b"}, "it is no learner"
        return needs_in(decode(encode(shown), RunStatus))

    merged(running)
    meta = kept(running)
    assert needed() is None, "there never was a wish"
    running.give(wanted(checkpoint=1, restore=WISH))
    assert needed() == (WISH.source,)
    running.give(loaded(meta))
    assert needed() == (WISH.source,)
    wish = Restore(serial=2, source="t/000009")
    running.give(wanted(checkpoint=1, restore=wish))
    assert needed() == (WISH.source, wish.source)
    running.give(Loaded(wish, fault="damaged"))
    assert needed() == (WISH.source,), "it never went back to the other one"


def test_what_was_never_gone_back_to_is_needed_by_nobody(running: Any) -> None:
    merged(running)
    running.give(wanted(checkpoint=1, restore=WISH))
    running.give(Loaded(WISH, fault="damaged"))
    shown = status(running.machine, running.now, 0.0, bytes_up=0, bytes_down=0)
    assert (needs_in(shown), shown.restores) == ((), 1)
    running.give(Kept(1))
    running.give(wanted(checkpoint=2, restore=WISH))
    assert running.machine.user_requests.checkpoints.needed == ()


@pytest.mark.parametrize("paused", [False, True])
def test_a_run_says_that_it_goes_back_while_it_rests_too(driver: Any, paused: bool) -> None:
    """Its user waits for it, and goes by what it says."""
    driver.start("a", "b")
    driver.give(Wanted(paused=paused, stopping=False, quorum=2, restore=WISH))
    state, reason = driver.machine.announcer.state(driver.now)
    told = "as the user asked; restoring t/000001" if paused else "starved: restoring t/000001"
    assert (state, reason) == ("paused" if paused else "starved", told)


@pytest.mark.parametrize(("shards", "begins"), [(1, 6), (2, 5)])
def test_a_restore_begins_an_epoch_that_no_learner_has_seen(
    driver_of: Any, shards: int, begins: int
) -> None:
    """Learners are in epoch 5 by this restore: of another shard, or of a record that is lost."""
    history = History(driver_of(shards=shards).spec)
    history.epoch, restoring = 2, Restoring(history)
    restoring.wanted, restoring.heard = WISH, (5, WISH.serial)
    theirs = {"versions": [4, 4], "anchor_digests": ["0" * 32] * 2, "layout": []}
    record = restoring.loaded(Loaded(WISH, "t", theirs, "d" * 32), 0.0, 1000.0)
    assert isinstance(record, TapeRestore) and record.epoch == begins


# --- a snapshot that was begun before ----------------------------------------------------------


def late_snapshot(running: Any) -> tuple[SnapshotDone, dict[str, Any]]:
    """One of now, three rounds after the checkpoint to whose state the run will go back."""
    merged(running)
    meta = kept(running)
    for _ in range(3):
        merged(running)
    h = running.machine.history
    return SnapshotDone(h.seq, h.next_round - 1, "late"), meta


def test_a_snapshot_of_before_a_restore_gets_no_record_behind_it(running: Any) -> None:
    """No snapshot would seem due for as many rounds as the run went back, and UP would fill."""
    late, meta = late_snapshot(running)
    machine, h = running.machine, running.machine.history
    machine.snapshotting = True  # it is being written
    running.give(wanted(checkpoint=1, restore=WISH))
    running.auto = False
    (append,) = of(running.give(loaded(meta)), Append)
    running.give(late)
    running.auto = True
    seen = running._answer(append)
    recorded = [r.covers for r in running.tape if isinstance(r, TapeSnapshot)]
    assert late.covers not in recorded and max(recorded) == h.sources.get(WISH.source, h.seq - 1)
    assert PurgeUp(late.round) not in of(seen, PurgeUp)
    assert h.snapshot_round < h.next_round


def test_a_record_of_such_a_snapshot_on_a_tape_covers_no_round(running: Any) -> None:
    """Leaders of older releases wrote some."""
    late, meta = late_snapshot(running)
    machine, h = running.machine, running.machine.history
    running.give(wanted(checkpoint=1, restore=WISH))
    running.give(loaded(meta))
    stood = h.snapshot_covers, h.snapshot_round
    running.auto = False
    record = TapeSnapshot(
        term=h.term, covers=late.covers, round=late.round, path="late", at=running.now
    )
    machine.appending, machine.covered = record, None
    assert not of(running.give(Appended(h.seq + 1, running.now)), PurgeUp)
    assert (h.snapshot_covers, h.snapshot_round, machine.covered) == (*stood, None)
    assert h.seq > stood[0] and machine._closed == 0
    # Nor does a state that one of them kept hold up what follows.
    broken = History.restore(running.spec, {**h.meta(), "snapshot_round": late.round})
    assert broken.snapshot_round == broken.next_round - 1
