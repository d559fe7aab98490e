"""Accounting of tokens (I5): every token in one class at every instant, against a plain model."""

from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from syncer.ledger_world import P, World, apply, end, record, verdict

from diloco_shared.protocol.messages import Cursor, LifeCount
from diloco_shared.protocol.records import TokenCounts
from diloco_syncer.history.ledger import LIVES_MAX, SPANS_MAX, Ledger, of_run

ACTIONS = (
    *("step", "step", "report", "report", "adopt", "contribute", "contribute", "close", "close"),
    *("die", "leave", "hush", "failover", "finish"),
)
quick = examples(100)
histories = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.sampled_from("ab"), st.integers(0, 63)),
    min_size=8,
    max_size=40,
)


@quick
@given(histories)
def test_every_token_is_in_the_class_that_its_history_says_at_every_instant_i5(
    history: list[tuple[str, str, int]],
) -> None:
    """Steps, adoptions, verdicts, deaths, silence, failovers and the end, in any order."""
    world = World()
    for action, learner, arg in history:
        if not world.ended:
            getattr(world, action)(world.now[learner], arg)
            world.check()
    # A replay of the tape gives what the leader has on it, whoever led when.
    replayed = Ledger.empty(P)
    for r in world.tape:
        apply(replayed, r)
    assert replayed == world.ledger


@quick
@given(histories)
def test_what_is_kept_is_bounded_by_the_learners_i12(history: list[tuple[str, str, int]]) -> None:
    world = World()
    for action, learner, arg in history:
        getattr(world, action)(world.now[learner], arg)
    for t in world.now.values():
        world.report(t, 0)
    for _ in range(2 * P):
        world.close(world.now["a"], 0)
    assert all(len(lives) <= 1 for lives in world.ledger.lives.values())
    assert len(world.counts.heard) <= len(world.now)


# --- by hand -------------------------------------------------------------------------------------


def life(tokens: int, *base: int, **over: Any) -> LifeCount:
    fields: dict[str, Any] = {"learner": "a", "incarnation": 0, "tokens": tokens, **over}
    return LifeCount(adopted=tuple(enumerate(base)), **fields)


def classes(ledger: Ledger, p: int = 0) -> dict[str, int]:
    return {k: v for k, v in ledger.tokens_P()[p].model_dump().items() if v}


def test_a_step_counts_as_merged_once_per_fragment_i5() -> None:
    ledger = Ledger.empty(P)
    ledger.round(record(0, [verdict("a", "merged", 0, 100)]))
    assert ledger.tokens_new(0, "a", 0, 50, 150) == 50
    assert ledger.tokens_new(0, "a", 0, 50, 90) == 0
    # Another fragment, learner or life has counted none of them.
    assert ledger.tokens_new(1, "a", 0, 50, 150) == 100
    assert ledger.tokens_new(0, "b", 0, 50, 150) == 100
    assert ledger.tokens_new(0, "a", 1, 50, 150) == 100
    ledger.round(record(2, [verdict("a", "merged", 50, 150)]))
    assert classes(ledger) == {"merged": 150}
    assert classes(ledger, 1) == {"in_flight": 150}


def test_what_the_gate_refused_stays_refused_unless_a_later_round_merges_it() -> None:
    ledger = Ledger.empty(P)
    ledger.round(record(0, [verdict("a", "refused", 0, 60)], (life(60, 0, 0),)))
    assert classes(ledger) == {"refused": 60}
    ledger.round(record(2, [verdict("a", "merged", 0, 80)], (life(80, 0, 0),)))
    assert classes(ledger) == {"merged": 80}
    ledger.round(record(4, [verdict("a", "refused", 80, 100)], (life(100, 80, 0),)))
    ledger.saw(life(130, 110, 0))  # adopted what the others made of it
    assert classes(ledger) == {"merged": 80, "refused": 20, "overwritten": 10, "in_flight": 20}


def test_a_skipped_round_loses_nothing() -> None:
    ledger = Ledger.empty(P)
    given_back = verdict("a", "refused", 0, 60, reason="skipped: 1 contributions of 2 needed")
    ledger.round(record(0, [given_back], (life(60, 0, 0),)))
    assert classes(ledger) == {"in_flight": 60}


def test_silence_loses_what_speaking_again_brings_back() -> None:
    ledger = Ledger.empty(P)
    ledger.saw(life(60, 10, 0))
    lost = ledger.tokens_P(lambda learner, incarnation: True)[0]
    assert (lost.overwritten, lost.lost, lost.in_flight) == (10, 50, 0)
    assert classes(ledger) == {"overwritten": 10, "in_flight": 50}


def test_the_end_of_the_run_loses_what_was_under_way() -> None:
    ledger = Ledger.empty(P)
    ledger.round(record(0, [verdict("a", "merged", 0, 40)]))
    ledger.end(end((life(60, 40, 0),)))
    assert classes(ledger) == {"merged": 40, "lost": 20}


def test_samples_behind_the_newest_merged_step_of_a_dead_life_are_read_again() -> None:
    """The others of what it lost are skipped: another fragment has merged their samples."""
    ledger = Ledger.empty(P)
    ledger.round(record(0, [verdict("a", "merged", 0, 40)], (life(70, 40, 0),)))
    assert ledger.reread() == 0
    ledger.saw(life(0, 0, 0, incarnation=1))
    assert ledger.reread() == 30
    assert classes(ledger) == {"merged": 40, "lost": 30}
    assert classes(ledger, 1) == {"lost": 70}
    for n in (1, 2):
        ledger.round(record(n, []))
    assert ledger.lives["a"].keys() == {1} and ledger.reread() == 30


def test_merged_cursors_are_the_newest_of_any_fragment_and_close_finished_shards() -> None:
    ledger = Ledger.empty(P, shards=8)
    cursor = Cursor(shard=3, sequences=20, passes=1, finished=((2, 0),))
    ledger.round(record(0, [verdict("a", "merged", 0, 40, cursor=cursor)]))
    older = Cursor(shard=3, sequences=99, passes=0)
    ledger.round(record(1, [verdict("a", "merged", 0, 40, cursor=older)]))
    beyond = Cursor(shard=8, sequences=1)
    ledger.round(record(2, [verdict("a", "merged", 40, 50, cursor=beyond)]))
    assert ledger.places == {3: (1, 20), 2: (1, 0)}


def test_a_life_that_is_settled_is_not_believed_any_more() -> None:
    ledger = Ledger.empty(P)
    ledger.saw(life(30, 0, 0))
    ledger.saw(life(0, 0, 0, incarnation=1))
    for n in (0, 1):
        ledger.round(record(n, []))
    ledger.saw(life(90, 0, 0))
    assert ledger.processed == 30 and ledger.tokens_new(0, "a", 0, 0, 30) == 0


def test_floods_of_spans_and_lives_are_bounded_i12() -> None:
    ledger = Ledger.empty(P)
    ledger.saw(life(1000, 0, 0))
    for n in range(40):
        ledger.round(record(2 * n, [verdict("a", "refused", 20 * n, 20 * n + 10)]))
    refused = ledger.lives["a"][0].refused_P[0]
    assert len(refused) == SPANS_MAX
    assert refused[-2:] == [
        (20 * (SPANS_MAX - 2), 20 * (SPANS_MAX - 2) + 10),
        (20 * (SPANS_MAX - 1), 790),
    ]
    for incarnation in range(1, 100):
        ledger.saw(life(5, 0, 0, incarnation=incarnation))
    assert len(ledger.lives["a"]) == LIVES_MAX
    assert sum(ledger.tokens_P()[0].model_dump().values()) == ledger.processed == 1000 + 99 * 5


counts_of = st.builds(
    lambda cuts: TokenCounts(
        **dict(
            zip(
                TokenCounts.model_fields,
                [b - a for a, b in zip([0, *cuts], [*cuts, 1000], strict=True)],
                strict=True,
            )
        )
    ),
    st.lists(st.integers(0, 1000), min_size=4, max_size=4).map(sorted),
)


@quick
@given(st.lists(st.tuples(counts_of, st.integers(1, 97)), min_size=1, max_size=4))
def test_a_runs_figure_is_the_mean_by_size_and_adds_up(
    fragments: list[tuple[TokenCounts, int]],
) -> None:
    tokens_P, sizes_P = tuple(t for t, _ in fragments), [size for _, size in fragments]
    mean = of_run(tokens_P, sizes_P).model_dump()
    assert sum(mean.values()) == 1000
    for name, value in mean.items():
        exact = sum(getattr(t, name) * n for t, n in fragments) / sum(sizes_P)
        assert abs(value - exact) < 1
        assert value == exact or exact % 1


def test_before_there_are_parameters_there_is_no_mean() -> None:
    assert of_run((TokenCounts(merged=5),), [0]) == TokenCounts()


def test_a_run_that_goes_back_to_a_checkpoint_counts_on_from_there() -> None:
    """Its lives are over then, and incarnations of another run say nothing about this one's."""
    ledger, present = Ledger.empty(P), Ledger.empty(P)
    ledger.round(record(0, [verdict("a", "merged", 0, 40, incarnation=7)], (life(0),)))
    ledger.saw(life(60, 40, 0, incarnation=7))
    present.saw(life(500, 0, 0, incarnation=2))
    present.saw(life(70, 0, 0, learner="b", incarnation=3))
    present.saw(life(0, learner="b", incarnation=4))  # joined, has not trained
    ledger.resume(present, own=False)
    assert classes(ledger) == {"merged": 40, "lost": 20} and ledger.reread() == 20
    ledger.saw(life(900, 0, 0, incarnation=2))  # of before
    ledger.saw(life(70, 0, 0, learner="b", incarnation=3))  # it hung meanwhile
    assert ledger.processed == 60
    ledger.saw(life(5, 0, 0, incarnation=3))
    ledger.saw(life(5, 0, 0, learner="b", incarnation=4))
    assert classes(ledger) == {"merged": 40, "lost": 20, "in_flight": 10}


def test_what_lives_of_a_lost_history_had_done_by_their_checkpoint_counts_once() -> None:
    """The tape that a backup put back knows nothing of them. One that had not trained may go on."""
    ledger, present = Ledger.empty(P), Ledger.empty(P)
    ledger.saw(life(60, 0, 0, incarnation=7))
    ledger.saw(life(0, learner="b", incarnation=7))
    present.saw(life(30, 0, 0, incarnation=2))
    present.saw(life(10, 0, 0, learner="c", incarnation=5))
    ledger.resume(present, own=True)
    ledger.saw(life(90, 0, 0, incarnation=7))
    ledger.saw(life(20, 0, 0, learner="c", incarnation=5))
    assert ledger.processed == 60
    ledger.saw(life(5, 0, 0, learner="b", incarnation=7))
    ledger.saw(life(5, 0, 0, incarnation=8))
    assert classes(ledger) == {"lost": 60, "in_flight": 10}


def test_no_more_names_are_known_after_a_checkpoint_than_before_i12(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that the present knows are kept: they were settled last."""
    monkeypatch.setattr("diloco_syncer.history.ledger.NAMES_MAX", 3)
    ledger, present = Ledger.empty(P), Ledger.empty(P)
    ledger.newest = {name: 7 for name in ("w", "x", "y")}
    present.newest = {name: 9 for name in ("a", "y")}
    ledger.resume(present, own=True)
    assert ledger.newest == {"x": 7, "a": 9, "y": 9}


def test_a_shard_of_the_syncer_forgets_lives_once_its_own_fragments_are_settled_i12() -> None:
    ledger = Ledger.empty(P, owned=(0,))
    ledger.saw(life(30, 0, 0))
    ledger.saw(life(0, 0, 0, incarnation=1))
    ledger.round(record(0, []))
    assert ledger.lives["a"].keys() == {1} and ledger.processed == 30
    assert all(sum(t.model_dump().values()) == 30 for t in ledger.tokens_P())
