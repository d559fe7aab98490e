"""Reports that the tape does not repeat yet."""

from typing import Any

from diloco_syncer.history.ledger import Counts, Ledger, count_of


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
