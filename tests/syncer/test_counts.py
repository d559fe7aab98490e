"""Reports that the tape does not repeat yet."""

from typing import Any

import pytest
from syncer.ledger_world import end

from diloco_shared.protocol.messages import LifeCount, TapeEnd, TapeRound
from diloco_shared.protocol.wire import MESSAGE_BYTES_MAX, encode
from diloco_syncer.events import Wanted
from diloco_syncer.history import counts as counts_module
from diloco_syncer.history.counts import Counts, count_of
from diloco_syncer.history.ledger import Ledger


def test_a_report_says_where_each_fragment_was_adopted(running: Any) -> None:
    progress = running.progress("a", 5, tokens=500, c_tokens=(100, 500), c_steps=(1, 5))
    count = count_of(progress)
    assert (count.tokens, count.adopted, count.left) == (500, ((0, 400), (1, 0)), False)
    assert count_of(progress.model_copy(update={"state": "finished"})).left


def test_what_the_ledger_knows_is_not_told_again(running: Any) -> None:
    counts, ledger = Counts(), Ledger.empty(2)
    counts.saw(running.progress("a", 5, tokens=500, c_tokens=(100, 500)))
    (told,) = counts.unrecorded(ledger)
    assert told.adopted == ((0, 400),), "adopted at 0 is what is taken for granted"
    ledger.saw(told)
    assert counts.unrecorded(ledger) == ()
    counts.saw(running.progress("a", 4, tokens=400, c_tokens=(0, 400)))  # overtaken
    assert counts.unrecorded(ledger) == ()
    counts.saw(running.progress("a", 5, tokens=500, c_tokens=(0, 500)))
    assert [c.adopted for c in counts.unrecorded(ledger)] == [((0, 500),)]


def test_a_dead_lifes_last_report_is_told_once_and_then_forgotten(running: Any) -> None:
    counts, ledger = Counts(), Ledger.empty(2)
    counts.saw(running.progress("a", 5))
    counts.saw(running.progress("a", 1, incarnation=1))
    for count in counts.unrecorded(ledger):
        ledger.saw(count)
    assert ledger.processed == 6 * running.spec.tokens_per_step
    assert counts.unrecorded(ledger) == ()
    assert list(counts.heard) == [("a", 1)]


@pytest.mark.parametrize(("learners", "fragments"), [(200, 512), (3000, 8)])
def test_what_one_record_cannot_hold_follows_on_the_next_i12(learners: int, fragments: int) -> None:
    """An epoch has begun: everybody has adopted every fragment, since the newest record."""
    counts, ledger = Counts(), Ledger.empty(fragments)
    for learner in (f"{n:063d}" for n in range(learners)):
        adopted = tuple((p, 10**15) for p in range(fragments))
        count = LifeCount(learner=learner, incarnation=0, tokens=10**15, adopted=adopted)
        counts.heard[learner, 0] = count
    present, records = ledger.with_counts(counts.unrecorded(ledger)), 0
    while told := counts.to_record(ledger):
        assert len(encode(end(told))) < MESSAGE_BYTES_MAX / 4
        for count in told:
            ledger.saw(count)
        records += 1
    assert records > 1
    assert ledger.meta() == present.meta()


def test_a_round_and_an_end_say_no_more_than_a_record_holds_i12(
    running: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(counts_module, "ADOPTIONS_TOLD_MAX", 1)
    for learner in "ab":
        running.adopted_at[learner] = [2, 2]
        running.step(learner, 4)
    for learner in "ab":
        running.answer(running.pulls[-1], learner)
    running.give(Wanted(paused=False, stopping=True, quorum=2))
    running.wait(20.0)
    assert isinstance(running.tape[-1], TapeEnd)
    told = [r.counts for r in running.tape if isinstance(r, TapeRound | TapeEnd)]
    assert [sum(len(c.adopted) for c in counts) for counts in told][:2] == [1, 1]
    assert running.machine.history.ledger.processed == 8 * running.spec.tokens_per_step
