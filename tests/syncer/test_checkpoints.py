"""One cut at a time, sealed once everybody's part is there; and the way back to it."""

from typing import Any

import pytest

from diloco_shared.protocol.messages import (
    TapeCheckpoint,
    TapeEnd,
    TapeEpoch,
    TapeRestore,
    TapeSnapshot,
)
from diloco_shared.protocol.records import Restore
from diloco_syncer.checkpoints.restoring import RETRY_S
from diloco_syncer.events import (
    Append,
    Appended,
    Capture,
    InstallLoaded,
    Kept,
    Led,
    Load,
    Loaded,
    Publish,
    Published,
    Seal,
    Sealed,
    SendBeat,
    SendGrant,
    Snapshot,
    SnapshotBrokenOff,
    SnapshotDone,
    SnapshotFailed,
    Staged,
    Tell,
    Unload,
    Wanted,
)
from diloco_syncer.history.history import History, TapeFault
from diloco_syncer.machine import Machine


def wanted(checkpoint: int = 0, restore: Restore | None = None) -> Wanted:
    return Wanted(paused=False, stopping=False, quorum=2, checkpoint=checkpoint, restore=restore)


def of(effects: Any, kind: Any) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


def marks(driver: Any) -> list[tuple[int, str]]:
    return [(r.number, r.outcome) for r in driver.tape if isinstance(r, TapeCheckpoint)]


def merged(driver: Any) -> None:
    """One round more, of whichever fragment is due."""
    per_round, before = driver.spec.algorithm.steps_per_round, len(driver.rounds)
    for learner in ("a", "b"):
        driver.step(learner, per_round)
    for learner in ("a", "b"):
        driver.answer(driver.pulls[-1], learner)
    p = driver.rounds[-1].fragment
    assert (len(driver.rounds), driver.rounds[-1].outcome) == (before + 1, "committed")
    for learner in ("a", "b"):
        driver.adopted_at[learner][p] = driver.steps[learner]
        driver.step(learner, 0)


def test_a_checkpoint_is_sealed_once_every_learner_has_given_its_part(running: Any) -> None:
    merged(running)
    seen = running.give(wanted(checkpoint=1))
    capture = of(seen, Capture)[0]
    assert (capture.number, capture.covers) == (1, len(running.tape))
    assert of(seen, SendBeat)[-1].beat.checkpoint == 1, "told at once"
    assert of(running.give(Kept(1)), Seal) == []
    assert of(running.step("a", 0, checkpoint=1), Seal) == []
    assert of(running.step("b", 0, checkpoint=1), Seal) == [Seal(1, {"a": 0, "b": 0}, {})]
    running.give(Sealed(1, ("a", "b")))
    assert marks(running) == [(1, "begun"), (1, "complete")]
    assert running.machine.user_requests.checkpoints.state()[0] == "complete"
    running.give(wanted(checkpoint=1))
    assert marks(running) == [(1, "begun"), (1, "complete")], "a wish is fulfilled once"


def test_what_is_published_after_the_mark_carries_it(running: Any) -> None:
    merged(running)
    running.give(wanted(checkpoint=1))
    merged(running)
    assert [e.checkpoint for e in of(running.effects, Publish)] == [0, 0, 0, 1]


def test_a_learner_that_dies_is_not_waited_for_and_one_that_is_slow_not_for_ever(
    running: Any,
) -> None:
    running.give(wanted(checkpoint=1))
    running.give(Kept(1))
    running.now += 6.0  # longer than b's lease
    seen = running.step("a", 1, checkpoint=1)
    assert of(seen, Seal) == [Seal(1, {"a": 0, "b": 0}, {})]

    running.give(Sealed(1, ("a",)))
    running.step("b", 1)
    running.give(wanted(checkpoint=2))
    running.give(Kept(2))
    late: list[Any] = []
    for _ in range(700):
        running.now += 1.0
        late += of([*running.step("a", 1, checkpoint=2), *running.step("b", 1)], Seal)
    assert [s.number for s in late] == [2] and list(late[0].late) == ["b"]


def test_a_part_of_its_own_that_is_late_is_waited_for_without_a_deadline(running: Any) -> None:
    """A deadline that has passed and changes nothing would be looked at without a pause."""
    running.give(wanted(checkpoint=1))
    checkpoints = running.machine.user_requests.checkpoints
    until = checkpoints.deadline
    assert until is not None
    while running.now < until:
        running.now = min(running.now + 4.0, until)  # within a lease
        for learner in ("a", "b"):
            assert not of(running.step(learner, 0), Seal)
    assert checkpoints.deadline is None
    (seal,) = of(running.give(Kept(1)), Seal)
    assert list(seal.late) == ["a", "b"]
    running.give(Sealed(1))
    running.give(wanted(checkpoint=2))
    assert checkpoints.deadline is not None


def test_another_life_of_a_learner_does_not_answer_for_the_first(running: Any) -> None:
    running.give(wanted(checkpoint=1))
    running.give(Kept(1))
    running.step("a", 0, checkpoint=1)
    seen = running.join("b", 1)
    assert of(seen, Seal) == [Seal(1, {"a": 0, "b": 0}, {})]


def test_what_cannot_be_written_fails_and_says_why(running: Any) -> None:
    running.give(wanted(checkpoint=1))
    seen = running.give(Sealed(1, fault="the folder cannot be written"))
    assert marks(running) == [(1, "begun"), (1, "failed")]
    assert "cannot be written" in of(seen, Tell)[0].text
    running.give(wanted(checkpoint=2))
    assert marks(running)[-1] == (2, "begun")


@pytest.mark.parametrize(
    ("fault", "state", "reason"),
    [("", "complete", "parts of a, b"), ("the disk is full", "failed", "the disk is full")],
)
def test_what_becomes_of_a_checkpoint_after_the_end_of_its_run_is_shown(
    running: Any, fault: str, state: str, reason: str
) -> None:
    running.give(wanted(checkpoint=1))  # its parts are written, and no tape takes a record of it
    decisions = running.machine.user_requests.checkpoints
    running.machine.history.outcome = "stopped"
    assert decisions.making and decisions.state()[0] == "making"
    running.give(Kept(1))
    running.step("a", 0, checkpoint=1)
    seen = running.step("b", 0, checkpoint=1)
    assert of(seen, Seal)
    running.give(Sealed(1, ("a", "b") if not fault else (), fault=fault))
    assert not decisions.making and decisions.state() == (state, reason)
    decisions.given_up()
    assert decisions.state()[0] == state
    successor = Machine(running.spec, running.machine.history).user_requests.checkpoints
    assert successor.state()[0] == "failed" and not successor.making
    # A restore may take the end back, and the next checkpoint is another.
    decisions.recorded(decisions._record(2, "begun", "as the user asked", 0.0), 9, running.now)
    assert decisions.ended is None


def test_one_that_is_sealed_while_the_end_is_on_its_way_to_the_tape_is_complete(
    running: Any,
) -> None:
    running.give(wanted(checkpoint=1))
    running.auto = False
    end = TapeEnd(
        term=running.machine.history.term,
        outcome="stopped",
        reason="as the user asked",
        versions=tuple(running.machine.history.versions),
        at=1.0,
    )
    assert of(running.machine._push(end), Append)
    running.give(Sealed(1, ("a", "b")))
    decisions = running.machine.user_requests.checkpoints
    running.machine.history.outcome = "stopped"
    assert not decisions.making and decisions.state() == ("complete", "parts of a, b")
    running.machine.history.outcome = ""  # a restore takes it back, and the record may follow
    found = decisions.next_record(1.0)
    assert found is not None and (found.number, found.outcome) == (1, "complete")


def test_one_that_is_not_made_before_its_run_is_left_has_failed(running: Any) -> None:
    running.give(wanted(checkpoint=1))
    running.machine.history.outcome = "stopped"
    decisions = running.machine.user_requests.checkpoints
    decisions.given_up()
    assert decisions.state() == ("failed", "the run was over before it was complete")


def test_the_next_checkpoint_waits_for_the_end_of_the_first(running: Any) -> None:
    running.give(wanted(checkpoint=1))
    running.give(wanted(checkpoint=2))
    running.wait(1.0)
    assert marks(running) == [(1, "begun")]
    running.give(Sealed(1))
    assert marks(running) == [(1, "begun"), (1, "complete"), (2, "begun")]


def test_a_new_leader_ends_what_the_old_one_began(running: Any) -> None:
    running.give(wanted(checkpoint=1))
    before = running.machine
    running.machine = Machine(running.spec, before.history)
    running.give(Led("s2", 1000.0 + running.now, tuple(before.history.versions)))
    running.give(wanted(checkpoint=1))
    assert marks(running) == [(1, "begun"), (1, "failed")]
    assert before.history.checkpoint_outcome == "failed"


def test_checkpoints_come_by_themselves_every_so_many_steps(driver_of: Any) -> None:
    driver = driver_of()
    keeping = driver.spec.keeping.model_copy(update={"run_checkpoint_every_steps": 8})
    driver.spec = driver.spec.model_copy(update={"keeping": keeping})
    driver.machine = Machine(driver.spec, History(driver.spec))
    driver.start("a", "b")
    for _ in range(5):
        merged(driver)
        if driver.machine.history.checkpoint_open:
            driver.give(Sealed(driver.machine.history.checkpoint))
    # Four steps a round: after the second and the fourth.
    assert marks(driver) == [(1, "begun"), (1, "complete"), (2, "begun"), (2, "complete")]
    assert [h.stamp.steps for h in driver.rounds][1::2] == [8, 16]


# --- going back ----------------------------------------------------------------------------------


def kept(driver: Any) -> dict[str, Any]:
    """Make checkpoint 1; the history as of it."""
    driver.give(wanted(checkpoint=1))
    meta: dict[str, Any] = driver.machine.history.meta()
    driver.give(Sealed(1))
    return meta


WISH = Restore(serial=1, source="t/000001")


def loaded(meta: dict[str, Any], **changed: Any) -> Loaded:
    fields = {"restore": WISH, "run": "t", "history": meta, "digest": "d" * 32}
    return Loaded(**{**fields, **changed})


def restore_record(meta: dict[str, Any], number: int = 1) -> TapeRestore:
    """That the run goes back, to checkpoint `number`, whose history is `meta`."""
    return TapeRestore(
        epoch=number,
        term=1,
        serial=number,
        source=f"t/00000{number}",
        digest="d" * 32,
        run="t",
        versions=tuple(meta["versions"]),
        anchor_digests=tuple(meta["anchor_digests"]),
        at=1.0,
    )


def test_a_restore_takes_everything_back_under_a_new_epoch(running: Any) -> None:
    merged(running)
    merged(running)
    meta = kept(running)
    h = running.machine.history
    useful, stamp = h.tokens_useful, h.stamp
    merged(running)
    rounds = len(running.rounds)
    assert (h.versions, h.next_round) == ([2, 1], 3)

    seen = running.give(wanted(checkpoint=1, restore=WISH))
    assert of(seen, Load) == [Load(WISH)]
    assert of(running.join("c"), SendGrant) == [], "nobody joins meanwhile"
    for learner in ("a", "b"):
        running.step(learner, 4)
    assert len(running.rounds) == rounds and not running.machine.rounds.open, "no round opens"

    running.auto = False
    seen = running.give(loaded(meta))
    assert running.give(wanted(checkpoint=1, restore=WISH)) == [], "asked for once"
    running.auto = True
    record = seen[0].record
    assert isinstance(record, TapeRestore) and record.epoch == 1
    for effect in seen:
        seen = running._answer(effect)
    assert of(seen, InstallLoaded) == [InstallLoaded(1)]
    assert [(e.epoch, e.version, e.prev_version) for e in of(seen, Publish)] == [
        (1, 1, -1),
        (1, 1, -1),
    ]
    assert of(seen, Snapshot), "the next leader need not go back again"
    assert (h.epoch, h.versions, h.next_round) == (1, [1, 1], 2)
    assert (h.tokens_useful, h.stamp.steps) == (useful, stamp.steps)
    assert not h.ledger.lives, "whoever trained is over; what was under way is counted"
    assert (h.stamp, h.term, h.checkpoint) == (stamp, 1, 1)
    beat = of(seen, SendBeat)[-1].beat
    assert (beat.restored.epoch, beat.restored.source) == (1, WISH.source)
    assert beat.state in ("starved", "running")

    # Learners begin again, in another life; rounds go on from the number of the checkpoint.
    running.steps.clear()
    running.adopted_at.clear()
    for learner in ("a", "b"):
        grant = of(running.join(learner, 1), SendGrant)[0].grant
        assert (grant.versions, grant.restored.epoch, grant.donor) == ((1, 1), 1, "")
        running.step(learner, 0, incarnation=1)
    for learner in ("a", "b"):
        running.step(learner, 4, incarnation=1)
    for learner in ("a", "b"):
        running.answer(running.pulls[-1], learner, incarnation=1)
    last = running.rounds[-1]
    assert (last.epoch, last.round, last.version, last.outcome) == (1, 2, 2, "committed")
    assert History.restore(running.spec, h.meta()).meta() == h.meta()


def test_a_mark_that_was_lost_with_its_record_is_not_set_again(running: Any) -> None:
    merged(running)
    meta, h = kept(running), running.machine.history
    h.checkpoint = 0  # as if the message server had lost the records of it
    running.give(wanted(checkpoint=0, restore=WISH))
    running.give(loaded(meta))
    assert (h.restored.source, h.checkpoint) == (WISH.source, 1)


def test_nothing_staged_or_snapped_before_a_restore_counts_after_it(running: Any) -> None:
    """I4: a round of that number comes again, with other contributions."""
    merged(running)
    meta = kept(running)
    running.auto = False
    for learner in ("a", "b"):
        running.step(learner, 4)
    stage = None
    for learner in ("a", "b"):
        stage = running.answer(running.pulls[-1], learner)
    assert stage is not None
    running.auto = True
    running.give(wanted(checkpoint=1, restore=WISH))
    running.give(loaded(meta))
    digest = "e" * 32
    rounds = len(running.rounds)
    running.give(Staged(0, 1, digest, digest, digest))
    assert len(running.rounds) == rounds
    covered = running.machine.history.snapshot_covers
    running.give(SnapshotDone(1, 5, "old"))
    assert running.machine.history.snapshot_covers == covered


def test_what_is_still_published_when_history_goes_back_takes_no_number_and_no_place(
    driver_of: Any,
) -> None:
    """Its number comes again: a round after it would be recorded where none can follow."""
    driver = driver_of(overlap_steps=8)  # two rounds in flight
    driver.start("a", "b")
    merged(driver)
    meta = kept(driver)
    answer, unsent = driver._answer, []

    def unpublished(effect: Any) -> list[Any]:
        if isinstance(effect, Publish) and effect.round >= 0:
            unsent.append(effect)
            return []
        found: list[Any] = answer(effect)
        return found

    driver._answer = unpublished
    merged(driver)
    driver._answer = answer
    assert [e.round for e in unsent] == [1]
    driver.give(wanted(checkpoint=1, restore=WISH))
    driver.give(loaded(meta))
    driver.steps.clear()
    driver.adopted_at.clear()
    for learner in ("a", "b"):
        driver.join(learner, 1)
        driver.step(learner, 0, incarnation=1)
    for learner in ("a", "b"):
        driver.step(learner, 4, incarnation=1)
    assert [r.n for r in driver.machine.rounds.open] == [1]
    for learner in ("a", "b"):
        driver.answer(driver.pulls[-1], learner, incarnation=1)
    assert [(r.epoch, r.round) for r in driver.rounds] == [(0, 0), (0, 1), (1, 1)]
    driver.give(Published.of(unsent[0]))
    assert driver.machine.published == (1, 1)


@pytest.fixture
def writing(driver: Any) -> Any:
    """The first snapshot is being written until the test says that it is over."""
    answer = driver._answer
    driver._answer = lambda e: [] if isinstance(e, Snapshot) else answer(e)
    driver.start("a", "b")
    return driver


@pytest.mark.parametrize("over", ["done", SnapshotFailed("full"), SnapshotBrokenOff(), "recorded"])
def test_the_snapshot_of_a_restore_waits_for_the_one_that_is_being_written(
    writing: Any, over: Any
) -> None:
    """Two at once would remove each other's files."""
    (first,) = of(writing.effects, Snapshot)
    done = SnapshotDone(first.covers, first.round, "here")
    meta = kept(writing)
    writing.give(wanted(checkpoint=1, restore=WISH))
    if over == "recorded":  # behind the restore
        writing.auto = False
        (append,) = of(writing.give(loaded(meta)), Append)
        writing.give(done)
        writing.auto = True
        seen = writing._answer(append)
    else:
        seen = writing.give(loaded(meta))
        assert of(seen, InstallLoaded) and not of(seen, Snapshot)
        seen = writing.give(done if over == "done" else over)
    (again,) = of(seen, Snapshot)
    assert again.covers >= writing.machine.history.sources[WISH.source]


def test_a_snapshot_whose_record_the_end_forbids_holds_up_no_other(writing: Any) -> None:
    (first,) = of(writing.effects, Snapshot)
    writing.now += 6.0
    writing.give(Wanted(paused=False, stopping=True, quorum=2))
    assert isinstance(writing.tape[-1], TapeEnd)
    writing.give(SnapshotDone(first.covers, first.round, "here"))
    assert not writing.machine.snapshotting


def test_a_run_that_has_not_begun_begins_with_a_checkpoint(running: Any, driver_of: Any) -> None:
    merged(running)
    meta = kept(running)
    new = driver_of()
    new.spec = new.spec.model_copy(update={"name": "u"})
    new.machine = Machine(new.spec, History(new.spec))
    new.lead()
    new.give(wanted(restore=WISH))
    new.step("a", 0, state="joining", adopted=(-1, -1), c_steps=(0, 0), c_tokens=(0, 0))
    state, why = new.machine.announcer.state(new.now)
    assert state == "waiting" and WISH.source in why
    assert new.machine.announcer.initializer == ""

    # Away at first: it tries again.
    away = loaded({}, fault="the folder is not mounted")
    assert [e.kind for e in of(new.give(away), Tell)] == ["restore-failed"]
    assert "not mounted" in new.machine.announcer.state(new.now)[1]
    assert of(new.wait(11.0), Load) == [Load(WISH)]
    assert of(new.give(away), Tell) == [], "once, however often it is tried"
    assert of(new.wait(11.0), Load) == [Load(WISH)]
    new.give(loaded(meta))
    h = new.machine.history
    assert (h.initialised, h.versions, h.epoch, h.next_round) == (True, [1, 0], 1, 1)
    assert h.config_hash != meta["config_hash"]
    assert new.machine.user_requests.restoring.due is False


def test_what_history_began_with_is_not_removed(running: Any) -> None:
    merged(running)
    meta = kept(running)
    running.give(wanted(checkpoint=1, restore=WISH))
    running.give(loaded(meta))
    assert not running.machine.history.sources, "a snapshot covers it"
    # Whatever the user wishes by now: who joins without a donor begins with its moments.
    running.give(wanted(checkpoint=2))
    (seal,) = of(running.give(Kept(2)), Seal)
    assert set(seal.needed) == {WISH.source}


def test_what_the_user_wants_to_go_back_to_is_not_removed_meanwhile(running: Any) -> None:
    running.give(wanted(checkpoint=1))
    running.give(wanted(checkpoint=1, restore=WISH))
    running.give(Kept(1))
    running.step("a", 0, checkpoint=1)
    (seal,) = of(running.step("b", 0, checkpoint=1), Seal)
    assert seal == Seal(1, {"a": 0, "b": 0}, {}, (WISH.source,))


def test_what_a_tape_goes_back_to_stays_until_a_snapshot_covers_it(running: Any) -> None:
    """Or a syncer that begins at the snapshot before could not execute the tape."""
    merged(running)
    meta = kept(running)
    history = running.machine.history
    for n in (1, 2):
        history.resume(meta, restore_record(meta, n), history.seq + 1)
    assert set(history.sources) == {"t/000001", "t/000002"}
    assert History.restore(running.spec, history.meta()).sources == history.sources
    assert set(running.machine.user_requests.restoring.needed) >= {"t/000001", "t/000002"}
    covers = history.sources["t/000001"]
    snapshot = TapeSnapshot(term=history.term, covers=covers, round=0, path="here", at=1.0)
    history.apply(snapshot, history.seq + 1)
    assert set(history.sources) == {"t/000002"}


def test_a_restore_whose_record_was_lost_gets_an_epoch_of_its_own(running: Any) -> None:
    """Learners hold the anchors of the lost one under its number."""
    merged(running)
    meta = kept(running)
    running.give(wanted(restore=WISH))
    running.step("a", 1, epoch=4)
    running.give(loaded(meta))
    assert [r.epoch for r in running.tape if isinstance(r, TapeRestore)] == [5]


def test_what_does_not_fit_is_told_and_the_run_goes_on(running: Any) -> None:
    merged(running)
    meta = kept(running)
    running.give(wanted(checkpoint=1, restore=WISH))
    layout = [{**t, "shape": [9]} if t["name"] == "a" else t for t in meta["layout"]]
    seen = running.give(loaded({**meta, "layout": layout}))
    assert of(seen, Tell)[0].kind == "restore-failed"
    assert of(seen, Unload) == [Unload(1)], "it is as large as the run's own"
    merged(running)
    assert running.machine.history.epoch == 0
    running.give(wanted(checkpoint=1, restore=Restore(serial=2, source="t/000001")))
    fragments = {"versions": [1, 1, 1], "anchor_digests": ["0" * 32] * 3}
    again = Restore(serial=2, source="t/000001")
    seen = running.give(loaded({**meta, **fragments}, restore=again))
    assert "set algorithm.fragments = 3" in of(seen, Tell)[0].text


def test_every_wish_is_answered_also_where_an_earlier_one_was_answered_so(running: Any) -> None:
    """Whoever waits for the third must not take the second's answer for its own."""
    merged(running)
    meta, damaged = kept(running), "a part of it is damaged"
    told: list[Tell] = []
    for serial, fault in ((1, damaged), (2, ""), (3, damaged), (4, damaged)):
        wish = Restore(serial=serial, source=f"t/00000{1 + serial % 2}")
        running.wait(RETRY_S)
        seen = running.give(wanted(checkpoint=1, restore=wish))
        assert damaged not in running.machine.user_requests.restoring.reason
        seen += running.give(loaded(meta, restore=wish, fault=fault))
        told += [e for e in of(seen, Tell) if e.kind.startswith("restore")]
        assert running.machine.history.restores == (2 if serial > 1 else 0)
    kinds = ["restore-failed", "restored", "restore-failed", "restore-failed"]
    assert [e.kind for e in told] == kinds
    assert [e.data for e in told] == [{"serial": n, "shard": 0} for n in (1, 2, 3, 4)]


def test_what_the_user_wants_no_longer_is_not_kept(running: Any) -> None:
    merged(running)
    meta = kept(running)
    running.give(wanted(restore=WISH))
    running.give(wanted(restore=None))
    assert running.give(loaded(meta)) == [Unload(1)]
    running.give(wanted(restore=WISH))
    assert of(running.give(loaded(meta)), Unload) == []


def test_a_record_that_speaks_of_another_state_is_refused(running: Any) -> None:
    merged(running)
    meta = kept(running)
    merged(running)  # the state is another one than the checkpoint's, which may not take its place
    record = restore_record({**meta, "versions": [9, 9]})
    history = running.machine.history
    before = history.meta()
    with pytest.raises(TapeFault, match="another one by now"):
        history.resume(meta, record, history.seq + 1)
    assert history.meta() == before != meta
    with pytest.raises(TapeFault, match="needs the state"):
        history.apply(record, history.seq + 1)
    assert history.meta() == before


def test_another_wish_waits_until_the_first_is_in_force(running: Any) -> None:
    """What was loaded for a record on its way to the tape must be there when it arrives."""
    merged(running)
    meta = kept(running)
    running.give(wanted(restore=WISH))
    running.auto = False
    (append,) = of(running.give(loaded(meta)), Append)
    second = Restore(serial=2, source="t/000001")
    assert of(running.give(wanted(restore=second)), Load) == []
    running.tape.append(append.record)
    seen = running.give(Appended(len(running.tape), 1000.0))
    assert of(seen, InstallLoaded) == [InstallLoaded(1)]
    assert of(seen, Load) == [Load(second)]


def test_a_restore_waits_for_the_epoch_that_is_on_its_way(running: Any) -> None:
    """Its own is the one after: loaded before, it would be recorded under the same number."""
    merged(running)
    kept(running)
    running.auto = False
    (append,) = of(running.step("a", 1, epoch=1), Append)
    assert isinstance(append.record, TapeEpoch)
    assert of(running.give(wanted(restore=WISH)), Load) == []
    running.tape.append(append.record)
    assert of(running.give(Appended(len(running.tape), 1000.0)), Load) == [Load(WISH)]
