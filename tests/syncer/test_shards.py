"""Two shards of one run: each its own fragments, rounds, tape and epoch; nothing in common."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from syncer.contexts import context

from diloco_shared.bus.blobs import manifest_subject, put_blob
from diloco_shared.bus.port import StreamSpec
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import Layout
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    InitManifest,
    TapeCheckpoint,
    TapeEnd,
    TapeEpoch,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeTerm,
    TensorSpec,
)
from diloco_shared.protocol.records import Restore
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec, config_hash
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
    InitSeen,
    Kept,
    Led,
    Load,
    Loaded,
    MarkFound,
    Publish,
    Seal,
    Sealed,
    SendGrant,
    SendPull,
    Stage,
    Staged,
    Tell,
    TimePassed,
    Wanted,
)
from diloco_syncer.history.history import History, TapeFault
from diloco_syncer.machine import Machine
from diloco_syncer.merging.payloads_io import Payloads
from diloco_syncer.merging.store import FragmentStore
from diloco_syncer.messages.inbox_io import Inbox
from diloco_syncer.status.status import status
from diloco_syncer.status.status_writer_io import over_elsewhere, shown_over, until_over

# As the driver's learners have it.
TENSORS = (
    TensorSpec(name="a", shape=(8,), embedding=False),
    TensorSpec(name="b", shape=(6,), embedding=True),
)
ALGORITHM = {"fragments": 4, "shards": 2, "sync_every_steps": 8, "overlap_steps": 1}


def begun(driver_of: Any, shard: int) -> Any:
    """A driver of one shard, initialised; learners a and b step."""
    driver = driver_of(**ALGORITHM)
    driver.machine = Machine(driver.spec, History(driver.spec, shard))
    driver.lead()
    owned = driver.spec.algorithm.owned(shard)
    for learner in ("a", "b"):
        driver.adopted_at[learner] = [0, 0, 0, 0]
        driver.join(learner)
    subjects = tuple(f"up.t.a.init.{p}.0" if p in owned else "" for p in range(4))
    digests = tuple(f"{p:032x}" if p in owned else "" for p in range(4))
    sizes = tuple(n if p in owned else 0 for p, n in enumerate(Layout.build(TENSORS, 4).sizes))
    driver.give(InitSeen("a", 0, config_hash(driver.spec), TENSORS, subjects, digests, sizes, True))
    for learner in ("a", "b"):
        driver.step(learner, 0)
    return driver


def rounds(driver: Any, steps: int) -> list[tuple[int, int, int]]:
    """(step, round, fragment) of the pulls while both learners step side by side."""
    seen = []
    for _ in range(steps):
        for learner in ("a", "b"):
            for effect in driver.step(learner):
                if isinstance(effect, SendPull):
                    pull = effect.pull
                    seen.append((driver.steps["a"], pull.round, pull.fragment))
                    for one in ("a", "b"):
                        driver.answer(pull, one)
                        driver.adopted_at[one][pull.fragment] = driver.steps[one]
    return seen


@pytest.fixture
def pair(driver_of: Any) -> list[Any]:
    return [begun(driver_of, shard) for shard in (0, 1)]


def test_each_shard_merges_its_own_fragments_in_turn_a_little_after_the_other(
    pair: list[Any],
) -> None:
    """H = 8, F = 2: one round per 4 steps and shard; the first openings are 2 steps apart."""
    first, second = (rounds(d, 16) for d in pair)
    assert [(n, p) for _, n, p in first] == [(0, 0), (1, 2), (2, 0), (3, 2)]
    assert [(n, p) for _, n, p in second] == [(0, 1), (1, 3), (2, 1)]
    assert second[0][0] - first[0][0] == 2
    versions = [d.machine.history.versions for d in pair]
    assert versions == [[2, -1, 2, -1], [-1, 2, -1, 1]]
    assert [d.machine.history.stamp.steps for d in pair] == [16, 12]


def test_a_round_of_another_shards_fragment_cannot_follow(pair: list[Any]) -> None:
    rounds(pair[1], 6)
    history = pair[0].machine.history
    foreign = pair[1].rounds[0].model_copy(update={"term": history.term})
    with pytest.raises(TapeFault, match="not in shard 0"):
        history.apply(foreign, history.seq + 1)
    assert History.restore(pair[1].spec, pair[1].machine.history.meta()).owned == (1, 3)


def test_what_another_shard_published_says_nothing_about_this_ones_tape(pair: list[Any]) -> None:
    first = pair[0]
    first.step("a", 1, adopted=(0, 9, 0, 9))
    assert not [r for r in first.tape if isinstance(r, TapeEpoch)]
    first.step("a", 1, adopted=(1, 9, 0, 9))
    assert [r.epoch for r in first.tape if isinstance(r, TapeEpoch)] == [1]


def test_an_epoch_that_one_shard_began_the_others_follow(pair: list[Any]) -> None:
    second = pair[1]
    second.step("a", 1, epoch=1)
    assert [r.epoch for r in second.tape if isinstance(r, TapeEpoch)] == [1]
    second.step("b", 1, epoch=1)
    assert second.machine.history.epoch == 1


def over(driver: Any) -> Any:
    """The driver, behind the end of its tape."""
    h = driver.machine.history
    end = TapeEnd(term=h.term, outcome="finished", reason="", versions=tuple(h.versions), at=9.0)
    driver.tape.append(end)
    h.apply(end, len(driver.tape))
    return driver


def test_a_shard_that_is_over_publishes_in_the_epoch_that_another_began(pair: list[Any]) -> None:
    """Or learners would end without its fragments."""
    second = over(pair[1])
    effects = second.step("a", 1, epoch=3)
    assert [r.epoch for r in second.tape if isinstance(r, TapeEpoch)] == [3]
    published = [(e.epoch, e.fragment) for e in effects if isinstance(e, Publish)]
    assert published == [(3, 1), (3, 3)]
    assert second.machine.history.outcome == "finished"


def test_a_shard_that_ended_before_it_heard_of_a_restore_goes_back_with_the_others(
    pair: list[Any],
) -> None:
    second, meta = pair[1], pair[1].machine.history.meta()
    over(second)
    wish = Restore(serial=1, source="t/000001")
    wanted = Wanted(paused=False, stopping=False, quorum=2, checkpoint=0, restore=wish)
    assert not [e for e in second.give(wanted) if isinstance(e, Load)], "nobody has gone back"
    effects = second.step("a", 1, epoch=1, restore=1)
    assert [e for e in effects if isinstance(e, Load)] == [Load(wish)]
    second.give(Loaded(wish, "t", {**meta, "checkpoint_at": 1.0}, "d" * 32))
    assert [r.epoch for r in second.tape if isinstance(r, TapeRestore)] == [1]
    assert second.machine.history.outcome == ""


@pytest.mark.parametrize(("known", "epoch"), [(3, 5), (4, 4)])
def test_a_restore_takes_the_epoch_of_the_other_shard_but_not_that_of_a_lost_one(
    pair: list[Any], known: int, epoch: int
) -> None:
    """Learners are in epoch 4, which began with their restore `known`; this one is number 4."""
    second, meta = pair[1], pair[1].machine.history.meta()
    wish = Restore(serial=4, source="t/000001")
    second.give(Wanted(paused=False, stopping=False, quorum=2, checkpoint=0, restore=wish))
    second.step("a", 1, epoch=4, restore=known)
    second.give(Loaded(wish, "t", {**meta, "checkpoint_at": 1.0}, "d" * 32))
    assert [r.epoch for r in second.tape if isinstance(r, TapeRestore)] == [epoch]


def test_a_successor_publishes_what_was_over_but_not_published(pair: list[Any]) -> None:
    second = over(pair[1])
    second.machine = Machine(second.spec, second.machine.history)
    effects = second.give(Led("s2", 1000.0, (-1, -1, -1, 0)))
    assert [(e.fragment, e.version) for e in effects if isinstance(e, Publish)] == [(1, 0)]
    assert not any(isinstance(e, Append) for e in effects)


def test_one_shard_names_the_donor(pair: list[Any]) -> None:
    donors = []
    for d in pair:
        for learner in ("a", "b"):
            d.step(learner, 1, adopted=(0, 0, 0, 0))
        donors += [e.grant.donor for e in d.join("c") if isinstance(e, SendGrant)]
    assert donors[0] in ("a", "b") and donors[1] == ""


def marks(driver: Any) -> list[tuple[int, str]]:
    return [(r.number, r.outcome) for r in driver.tape if isinstance(r, TapeCheckpoint)]


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


def captured(effects: list[Any]) -> list[int]:
    return [e.number for e in effects if isinstance(e, Capture)]


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
    assert not [e for e in second.wait(3 * LOOK_S) if isinstance(e, FindMark)]


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


def test_a_store_holds_nothing_of_other_shards(driver_of: Any) -> None:
    spec = driver_of(**ALGORITHM).spec
    layout = Layout.build(TENSORS, 4)
    values = [np.full(n, p, np.float32) for p, n in enumerate(layout.sizes)]
    own = [v if p in spec.algorithm.owned(1) else None for p, v in enumerate(values)]
    store = FragmentStore.init(layout, spec.algorithm, own)
    assert {name.partition(".")[0] for name in store.state_arrays()} == {"1", "3"}
    again = FragmentStore.restore(store.meta(), store.state_arrays(), spec.algorithm)
    assert again.anchor(3).tobytes() == values[3].tobytes() and sorted(again.fragments) == [1, 3]


def test_shards_must_divide_the_fragments() -> None:
    with pytest.raises(ValueError, match="multiple of shards"):
        RunSpec.model_validate(
            {
                "name": "t",
                "algorithm": {"fragments": 4, "shards": 3, "sync_every_steps": 8},
                "budget": {"steps": 8},
            }
        )


def test_a_shard_that_is_over_lets_learners_in_for_the_others(pair: list[Any]) -> None:
    """One grant of all shards: without it the rest of the run would have no learners."""
    first = pair[0]
    first.give(Wanted(paused=False, stopping=True, quorum=2))
    for _ in range(8):
        rounds(first, 1)
    assert first.machine.history.outcome == "stopped"
    (grant,) = [e.grant for e in first.join("c") if isinstance(e, SendGrant)]
    assert grant.accepted


async def test_a_leader_is_needed_until_every_shard_is_over() -> None:
    spec = RunSpec.model_validate(
        {"name": "r", "algorithm": {"fragments": 24, "shards": 3}, "budget": {"steps": 1}}
    )
    bus = MemoryBus(MemoryBroker(), "s")
    await bus.ensure_bucket(subjects.STATUS)
    shown = status(Machine(spec, History(spec)), 0.0, 0.0, bytes_up=0, bytes_down=0)
    for shard, state, over in ((2, "finished", False), (1, "running", False), (1, "stopped", True)):
        told = encode(shown.model_copy(update={"shard": shard, "state": state}))
        await bus.kv_put(subjects.STATUS, subjects.status_key("r", shard), told)
        assert await over_elsewhere(bus, spec, 0) is over
    await until_over(bus, spec, 0)
    assert await shown_over(bus, spec, 0) is False


async def test_a_shard_takes_its_own_initial_parameters_without_the_others() -> None:
    """Another shard has purged its own: a leader of this one must not wait for them."""
    algorithm = {"fragments": 4, "shards": 2, "sync_every_steps": 8}
    spec = RunSpec.model_validate({"name": "r", "algorithm": algorithm, "budget": {"steps": 1}})
    bus = MemoryBus(MemoryBroker(), "s")
    stream = subjects.up_stream("r")
    await bus.ensure_stream(StreamSpec(stream, ("up.r.>",), 1 << 20))
    for p in (1, 3):
        subject = subjects.initial("r", "a", 0, p)
        blob = await put_blob(bus, subject, codec.encode("fp32", np.full(3, p, np.float32)))
        manifest = InitManifest(
            run="r",
            learner="a",
            incarnation=0,
            config_hash=config_hash(spec),
            layout=TENSORS,
            fragment=p,
            blob=blob,
        )
        await bus.append(manifest_subject(subject), encode(manifest))
    seen: asyncio.Queue[Event] = asyncio.Queue()
    payloads = Payloads(lambda: 1 << 20)
    inbox = Inbox(context(spec, bus, shard=1), payloads, seen.put_nowait, lambda _: True)
    reading = asyncio.create_task(inbox.initial())
    while not isinstance(event := await seen.get(), InitSeen):
        pass
    reading.cancel()
    assert [bool(s) for s in event.subjects] == [False, True, False, True]
    assert sorted(payloads.held) == sorted(s for s in event.subjects if s)
    assert [bool(d) for d in event.digests] == [False, True, False, True]
