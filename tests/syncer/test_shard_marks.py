"""Checkpoints of a run with two shards: marks of the first, and parts of the other."""

import asyncio
import math
from typing import Any

import pytest
from syncer.contexts import context
from syncer.two_shards import ALGORITHM, captured, marks, over

from diloco_shared.bus.port import StreamSpec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    TapeCheckpoint,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeTerm,
)
from diloco_shared.protocol.records import Restore
from diloco_shared.protocol.wire import encode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.checkpoints.checkpoints import LOOK_S
from diloco_syncer.checkpoints.marks_io import PAGE, Marks
from diloco_syncer.events import (
    Append,
    Appended,
    Capture,
    Event,
    FindMark,
    Kept,
    Load,
    Loaded,
    MarkFound,
    Seal,
    Sealed,
    Stage,
    Staged,
    Tell,
    TimePassed,
    Wanted,
)
from diloco_syncer.history.history import History
from diloco_syncer.machine import Machine


def test_the_others_mark_when_a_learner_tells_of_it_before_they_merge_what_it_sends(
    pair: list[Any],
) -> None:
    first, second = pair
    wish = Wanted(paused=False, stopping=False, quorum=2, checkpoint=1)
    first.give(wish)
    second.give(wish)
    assert (marks(first), marks(second)) == ([(1, "begun")], [])
    begun = next(n for n, r in enumerate(first.tape, 1) if isinstance(r, TapeCheckpoint))
    needed = [driver.machine.user_requests.checkpoints.needed_from for driver in (first, second)]
    assert needed == [begun, math.inf], "where the other shards look for it"
    for learner in ("a", "b"):
        second.step(learner, 6)
    pull = second.pulls[-1]
    second.answer(pull, "a", checkpoint=1)
    second.answer(pull, "b")
    kinds = [r.kind for r in second.tape]
    assert kinds.index("checkpoint") < kinds.index("round"), "the cut goes before that round"
    seen = second.give(Kept(1))
    assert [e for e in seen if isinstance(e, Seal)] == [Seal(1, {}, {})], "it waits for nobody"


def test_a_mark_that_learners_have_met_does_not_wait_for_the_one_before_it(
    pair: list[Any],
) -> None:
    _, second = pair
    for number in (1, 2):
        for learner in ("a", "b"):
            second.step(learner, 6)
        pull = second.pulls[-1]
        second.answer(pull, "a", checkpoint=number)
        second.answer(pull, "b", checkpoint=number)
    assert marks(second) == [(1, "begun"), (1, "failed"), (2, "begun")]
    kinds = [(r.kind, getattr(r, "number", None)) for r in second.tape]
    rounds = [i for i, (kind, _) in enumerate(kinds) if kind == "round"]
    assert rounds[0] < kinds.index(("checkpoint", 2)) < rounds[1], "the cut goes before its round"


def test_a_mark_that_nobody_has_set_is_not_set_and_holds_nothing_up(pair: list[Any]) -> None:
    """A lying learner: else all true marks were too low from then on, and no checkpoint whole."""
    _, second = pair
    second.first_mark = 0
    for learner in ("a", "b"):
        second.step(learner, 6)
    pull = second.pulls[-1]
    second.answer(pull, "a", checkpoint=10**9)
    told = second.answer(pull, "b")
    assert marks(second) == []
    assert [r.kind for r in second.tape][-1] == "round", "it is merged as ever"
    assert not [e for e in told if isinstance(e, FindMark)], "of one claim we look once"
    refused = [e for e in second.effects if isinstance(e, Tell) and e.kind == "refused"]
    assert refused[0].text.startswith("a told of a checkpoint that was never begun")
    second.first_mark = 1
    second.step("a", checkpoint=1, mark=1)
    assert marks(second) == [(1, "begun")], "the next one is believed if it is there"


def test_the_first_shard_believes_no_marks_since_they_are_its_own(pair: list[Any]) -> None:
    first, _ = pair
    told = first.step("a", 2, checkpoint=10**9, mark=10**9)
    assert not [e for e in told if isinstance(e, FindMark)]
    assert marks(first) == []


def test_no_round_is_recorded_before_it_is_known_whether_a_mark_is_there(pair: list[Any]) -> None:
    _, second = pair
    for learner in ("a", "b"):
        second.step(learner, 6)
    pull = second.pulls[-1]
    second.auto = False
    told = second.answer(pull, "a", checkpoint=10**9)
    assert [e for e in told if isinstance(e, FindMark)]
    # Of a true one, and lower: it may have been set after we looked.
    answered = second.answer(pull, "b", checkpoint=1)
    assert not [e for e in answered if isinstance(e, FindMark)], "one look at a time"
    for stage in [e for e in second.effects if isinstance(e, Stage)][-1:]:
        second.give(Staged(stage.epoch, stage.round, *["d" * 32] * 3))
    again = second.give(MarkFound(0))
    assert [e for e in again if isinstance(e, FindMark)]
    second.give(MarkFound(1))
    appended = [e.record for e in second.effects if isinstance(e, Append)]
    assert not [r for r in appended if isinstance(r, TapeRound)]
    assert [r.number for r in appended if isinstance(r, TapeCheckpoint)] == [1]


def test_a_shard_that_is_over_gives_its_part_of_a_mark_that_it_hears_of_later(
    pair: list[Any],
) -> None:
    """Its tape takes no mark; and learners that met it may have gone: it looks by itself."""
    second = over(pair[1])
    second.first_mark = 0
    assert captured(second.wait(LOOK_S)) == []
    second.first_mark = 1
    assert captured(second.wait(LOOK_S)) == [1]
    assert marks(second) == []
    second.first_mark = 2
    assert captured(second.wait(LOOK_S)) == [], "one at a time"
    assert captured(second.give(Kept(1))) == [2]
    # Its disk was full: it tries again with the next look.
    assert captured(second.give(Sealed(2, fault="no space left"))) == []
    assert captured(second.wait(LOOK_S)) == [2]
    second.give(Kept(2))
    assert captured(second.wait(LOOK_S)) == []
    assert not second.machine.user_requests.checkpoints.making


def test_while_no_learner_is_there_to_tell_a_shard_looks_by_itself(pair: list[Any]) -> None:
    """Whoever asks for a checkpoint then waited for its part, and had none after ten minutes."""
    second = pair[1]
    second.first_mark = 0
    lease_s = second.machine.roster.lease_s
    for _ in range(3):
        second.step("a", 0)
        looks = [e for e in second.wait(lease_s / 2) if isinstance(e, FindMark)]
        assert not looks, "a learner is there, and would tell"
    assert [e for e in second.wait(lease_s + LOOK_S) if isinstance(e, FindMark)]
    assert marks(second) == []
    second.first_mark = 1
    assert captured(second.wait(LOOK_S)) == [1] and marks(second) == [(1, "begun")]
    second.give(Kept(1))
    seen = [*second.step("a", 0), *second.wait(lease_s / 2)]
    assert not [e for e in seen if isinstance(e, FindMark)]


def test_a_look_that_the_hub_does_not_answer_is_waited_for(pair: list[Any]) -> None:
    """Without asking again and again what is due."""
    second = over(pair[1])
    second.auto = False
    assert [e for e in second.wait(LOOK_S) if isinstance(e, FindMark)]
    second.now += 3 * LOOK_S
    assert not [e for e in second.give(TimePassed()) if isinstance(e, FindMark)]
    assert second.machine.deadline is None or second.machine.deadline > second.now
    second.give(MarkFound(0))
    assert second.machine.deadline is not None


def test_a_part_that_is_being_written_at_the_end_goes_before_the_next(pair: list[Any]) -> None:
    second = pair[1]
    second.first_mark = 1
    assert captured(second.step("a", 0, mark=1)) == [1]
    second.machine.history.outcome = "stopped"
    second.first_mark = 2
    assert captured(second.wait(LOOK_S)) == []
    assert captured([*second.give(Kept(1)), *second.wait(LOOK_S)]) == [2]


def test_a_shard_that_is_over_gives_no_part_of_a_checkpoint_that_is_over_too(
    pair: list[Any],
) -> None:
    """Its leader before gave it, or the first shard has given it up."""
    second = over(pair[1])
    second.auto = False
    second.wait(LOOK_S)
    assert captured(second.give(MarkFound(1))) == []


def test_what_was_given_in_an_epoch_before_is_given_again(pair: list[Any]) -> None:
    """The first shard takes no part that is older than its own."""
    second = over(pair[1])
    second.first_mark = 1
    assert captured(second.wait(LOOK_S)) == [1]
    second.give(Kept(1))
    assert captured(second.step("a", 0, epoch=3)) == [1]
    second.give(Kept(1))
    assert captured(second.wait(LOOK_S)) == []


def test_a_shard_looks_once_more_when_all_are_over(pair: list[Any]) -> None:
    """Who is left then has no more learners to tell it."""
    first, second = (over(driver) for driver in pair)
    decisions = second.machine.user_requests.checkpoints
    second.first_mark = 0
    second.wait(LOOK_S)
    second.auto = False
    second.wait(LOOK_S)  # it looks, and may do so before the mark was set
    assert not decisions.owes
    decisions.all_over()
    second.give(TimePassed())
    assert decisions.owes
    second.give(MarkFound(0))
    assert decisions.owes, "that was of before"
    assert captured(second.give(MarkFound(1, open=1))) == [1]
    assert decisions.owes
    second.give(Kept(1))
    assert not decisions.owes
    first.machine.user_requests.checkpoints.all_over()
    assert not first.machine.user_requests.checkpoints.owes, "it looks for none"


def test_a_part_that_cannot_be_written_at_the_last_look_is_tried_again(pair: list[Any]) -> None:
    """A disk is full for a moment; the first shard waits, and whoever leaves gives nothing."""
    second = over(pair[1])
    decisions = second.machine.user_requests.checkpoints
    second.first_mark = 1
    decisions.all_over()
    assert captured(second.give(TimePassed())) == [1]
    second.give(Sealed(1, fault="no space left"))
    assert decisions.owes
    assert captured(second.wait(LOOK_S)) == [1]
    second.give(Kept(1))
    assert not decisions.owes


def test_a_shard_that_was_stopped_before_it_had_a_state_owes_nothing(driver_of: Any) -> None:
    second = driver_of(**ALGORITHM)
    second.machine = Machine(second.spec, History(second.spec, 1))
    second.lead()
    second.machine.history.outcome = "stopped"
    decisions = second.machine.user_requests.checkpoints
    decisions.all_over()
    second.give(TimePassed())
    assert not decisions.owes


def test_a_shard_that_goes_back_gives_no_part_of_the_end_that_it_leaves(pair: list[Any]) -> None:
    """Of two that are written at a time, the older one could stay."""
    second, wish = over(pair[1]), Restore(serial=1, source="t/000001")
    second.give(wished(0, wish))
    assert [e for e in second.step("a", 0, epoch=3) if isinstance(e, Load)]
    second.first_mark = 1
    assert captured(second.wait(LOOK_S)) == []


def test_no_mark_is_set_while_a_part_of_the_end_before_is_written(pair: list[Any]) -> None:
    second = over(pair[1])
    second.first_mark = 1
    assert captured(second.wait(LOOK_S)) == [1]
    second.machine.history.outcome = ""  # a restore took it back
    assert marks(second) == []
    second.step("a", 0, mark=1)
    assert marks(second) == []
    second.give(Kept(1))
    second.step("a", 0, mark=1)
    assert marks(second) == [(1, "begun")]


def test_a_shard_that_is_not_over_looks_when_it_is_told(pair: list[Any]) -> None:
    second = pair[1]
    second.first_mark = 1
    for _ in range(30):
        seen = [*second.step("a", 0), *second.wait(LOOK_S / 10)]
        assert not [e for e in seen if isinstance(e, FindMark)]
    seen = second.step("a", 0, mark=1)
    assert len([e for e in seen if isinstance(e, FindMark)]) == 1
    assert marks(second) == [(1, "begun")]


def wished(checkpoint: int, restore: Restore | None = None) -> Wanted:
    return Wanted(paused=False, stopping=False, quorum=2, checkpoint=checkpoint, restore=restore)


def restored(driver: Any, wish: Restore, meta: dict[str, Any]) -> None:
    """The shard has loaded what it goes back to."""
    driver.give(Loaded(wish, "t", {**meta, "checkpoint_at": 1.0}, "d" * 32))
    assert [r.serial for r in driver.tape if isinstance(r, TapeRestore)] == [wish.serial]


def test_the_first_shard_begins_no_checkpoint_before_it_has_gone_back(pair: list[Any]) -> None:
    """Another shard may have gone back already, and would keep what it has since."""
    first, wish = pair[0], Restore(serial=1, source="t/000001")
    meta = first.machine.history.meta()
    first.give(wished(2, wish))
    assert marks(first) == []
    restored(first, wish, meta)
    assert marks(first) == [(2, "begun")]
    (capture,) = [e for e in first.effects if isinstance(e, Capture)]
    restore = next(n for n, r in enumerate(first.tape, 1) if isinstance(r, TapeRestore))
    assert capture.covers > restore


@pytest.mark.parametrize("ahead", [False, True])
def test_another_shard_that_has_to_go_back_sets_a_mark_that_may_be_of_before(
    pair: list[Any], ahead: bool
) -> None:
    """But not one that learners met in the epoch of the restore, where the first shard has been."""
    second, wish = pair[1], Restore(serial=2, source="t/000001")
    meta = second.machine.history.meta()
    second.give(wished(0, wish))
    second.step("a", 0, epoch=int(ahead), restore=2 * ahead, mark=5)
    assert marks(second) == ([] if ahead else [(5, "begun")])
    restored(second, wish, meta)
    kinds = [r.kind for r in second.tape if isinstance(r, TapeCheckpoint | TapeRestore)]
    assert kinds == (["restore", "checkpoint"] if ahead else ["checkpoint", "restore"])


def test_no_mark_is_set_behind_the_record_of_a_restore(pair: list[Any]) -> None:
    """The run goes back to the very checkpoint that learners tell of: its number is taken then."""
    second, wish = pair[1], Restore(serial=1, source="t/000005")
    meta = second.machine.history.meta()
    second.give(wished(0, wish))
    second.auto = False
    second.give(Loaded(wish, "t", {**meta, "checkpoint_at": 1.0}, "d" * 32))
    second.step("a", 0, mark=5)
    assert second.give(MarkFound(5)) == [], "nothing follows the restore"
    second.tape.append(second.machine.appending)
    second.auto = True
    second.give(Appended(len(second.tape), 1000.0))
    assert second.machine.history.checkpoint == 5 and marks(second) == []


async def marks_of(bus: MemoryBus, *records: TapeRecord) -> None:
    for record in records:
        await bus.append(subjects.tape("t", 0), encode(record))


def mark(number: int, outcome: Any = "begun") -> TapeCheckpoint:
    return TapeCheckpoint(term=1, number=number, outcome=outcome, reason="", at=0.0)


async def test_the_first_shards_marks_are_found_also_after_the_hub_lost_some(
    driver_of: Any,
) -> None:
    spec = driver_of(**ALGORITHM).spec
    bus = MemoryBus(MemoryBroker(), "s")
    await bus.ensure_stream(StreamSpec(subjects.tape_stream("t"), ("tape.t.>",), 1 << 20))
    found: asyncio.Queue[Event] = asyncio.Queue()
    looking = Marks(context(spec, bus, shard=1), found.put_nowait)
    working = asyncio.create_task(looking.work())
    looking.want()
    assert await found.get() == MarkFound(0)
    term = TapeTerm(epoch=0, term=1, leader="s", at=0.0)
    await marks_of(bus, *[term] * (PAGE + 1), mark(1))
    looking.want()
    assert await found.get() == MarkFound(1, open=1)
    await marks_of(bus, mark(1, "complete"))
    looking.want()
    assert await found.get() == MarkFound(1), "it is over"
    await bus.append(subjects.tape("t", 0), b"damaged")
    bus.broker.lose(subjects.tape_stream("t"), 4, synced=True)
    await marks_of(bus, mark(2), term, term)
    looking.want()
    assert await found.get() == MarkFound(2, open=2)
    looking.want()
    assert await found.get() == MarkFound(2, open=2)
    await bus.purge(subjects.tape_stream("t"), ">")
    await marks_of(bus, mark(3))
    looking.want()
    assert await found.get() == MarkFound(3, open=3)
    working.cancel()
