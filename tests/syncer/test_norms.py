"""Norm outliers: judged late, one-sidedly, and never against a majority."""

import json
from collections import deque

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.numerics import codec
from diloco_shared.spec.fragmentation import Piece
from diloco_syncer.rounds.norms import FAR, HISTORY, Norm, NormHistory, Past, inspect


def past(*seen: float) -> Past:
    values = Past(samples_min=20, z_max=6.0)
    for value in seen:
        values.record(0, value)
    return values


def history(*seen: float, steps: int = 1, keeps: bool = False) -> NormHistory:
    """Of contributions of so many steps, whose lengths per root step are given."""
    norms = NormHistory(samples_min=20, z_max=6.0, keeps=keeps)
    for value in seen:
        norms.record(0, norm(value, steps))
    return norms


def norm(per_root_step: float, steps: int = 1) -> Norm:
    return Norm(per_root_step * steps**0.5, steps)


def refused(seen: NormHistory, norms: dict[str, float], fragment: int = 0) -> set[str]:
    """Of a round in which everybody took a single step: both measures are one."""
    return set(seen.outliers(fragment, {m: norm(x) for m, x in norms.items()}))


SEEN = tuple(np.linspace(0.9, 1.1, 20))


def test_nobody_is_judged_before_there_are_enough_samples() -> None:
    round_ = {"a": 1.0, "b": 1.0, "c": FAR - 1}
    assert refused(history(*SEEN[:19]), round_) == set()
    assert refused(history(*SEEN), round_) == {"c"}
    # Fragments have histories of their own.
    assert refused(history(*SEEN), round_, fragment=1) == set()


def test_the_score_is_the_distance_in_robust_deviations() -> None:
    # Median 1, median deviation 0.05: sigma 0.0741.
    z = past(*SEEN).beyond(0, {"a": 1.0, "b": 1.0, "c": 2.0})["c"]
    median = float(np.median(SEEN))
    sigma = 1.4826 * float(np.median(np.abs(np.array(SEEN) - median)))
    assert z == pytest.approx((2.0 - median) / sigma)


@pytest.mark.parametrize(
    ("norms", "outliers"),
    [
        ({"a": 1.0, "b": 1.0, "c": 9.0}, {"c"}),
        ({"a": 1.0, "b": 9.0}, set()),  # half: who is right?
        ({"a": 9.0, "b": 9.0, "c": 1.0}, set()),  # a majority: the regime has changed
        ({"a": 9.0}, set()),
        ({"a": 1.0, "b": 1.0, "c": 0.0}, set()),  # small norms harm nobody
        ({"a": 0.0, "b": 0.0, "c": 1.0}, set()),  # nor does one among those that skipped steps
        ({"a": 0.0, "b": 0.0, "c": 1.5, "d": 1.5, "e": 1.5}, set()),  # all that have one rose
        ({"a": 0.0, "b": 0.0, "c": 9.0}, {"c"}),  # one that lies beside those that skipped theirs
        ({"a": 0.0, "b": 0.0, "c": 1.0, "d": 9.0, "e": 9.0}, {"d", "e"}),
    ],
)
def test_half_or_more_outliers_are_none(norms: dict[str, float], outliers: set[str]) -> None:
    assert refused(history(*SEEN), norms) == outliers


def test_equal_norms_so_far_do_not_make_noise_an_outlier() -> None:
    same = history(*[1.0] * 30)
    assert refused(same, {"a": 1.0, "b": 1.0, "c": 1.2}) == set()
    assert refused(same, {"a": 1.0, "b": 1.0, "c": 1.4}) == {"c"}


@pytest.mark.parametrize(
    ("norms", "outliers"),
    [
        ({"a": 1.0, "b": 1.0, "c": FAR * 1.01}, {"c"}),
        ({"a": 1.0, "b": 1.0, "c": FAR}, set()),
        ({"a": 1.0, "b": 1.0, "c": 1e3, "d": 1e9, "e": 1.0}, {"c", "d"}),
        ({"a": 1.0, "b": 1e9}, set()),  # of two, who is right?
        ({"a": 1e9, "b": 1e9, "c": 1.0}, set()),  # a majority is what is usual
        ({"a": 1.0, "b": 1.0, "c": 1e9, "d": 1e9}, set()),
        ({"a": 0.0, "b": 0.0, "c": 1.0}, set()),  # two that skipped every step, and a healthy one
        ({"a": 0.0, "b": 1.0, "c": 1e9}, {"c"}),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, set()),
    ],
)
def test_what_is_far_of_its_round_is_an_outlier_whatever_was_seen(
    norms: dict[str, float], outliers: set[str]
) -> None:
    nothing_seen = history().outliers(0, {m: norm(x) for m, x in norms.items()})
    assert set(nothing_seen) == outliers
    assert all("times the round's median" in why for why in nothing_seen.values())


def test_an_honest_learner_that_is_much_faster_or_slower_is_no_outlier() -> None:
    """Its steps are neither independent nor all of one direction: lengths of nano, as measured."""
    slow, fast = Norm(0.76, 5), Norm(4.34, 30)
    assert fast.per_root_step > 2 * slow.per_root_step and fast.per_step < slow.per_step
    assert slow.per_step > 1.05 * fast.per_step

    def fleet(*norms: Norm) -> dict[str, Norm]:
        return {f"learner-{n}": norm for n, norm in enumerate(norms)}

    for most, one in ((slow, fast), (fast, slow)):
        norms = NormHistory(samples_min=20, z_max=6.0)
        for _ in range(4):
            seen = fleet(one, *[most] * 5)
            assert norms.outliers(0, seen) == {}
            for each in seen.values():
                norms.record(0, each)
        assert norms.outliers(0, fleet(one, *[most] * 5)) == {}
        # What is scaled is too long by both measures, whoever scales it, and hides nobody else.
        scaled = Norm(4 * one.length, one.steps), Norm(4 * most.length, most.steps)
        assert set(norms.outliers(0, fleet(scaled[0], *[most] * 5))) == {"learner-0"}
        assert set(norms.outliers(0, fleet(one, scaled[1], *[most] * 4))) == {"learner-1"}


def test_fast_ones_do_not_hide_who_is_an_outlier_by_both_measures() -> None:
    """They are above the limit by one measure, and would be half of the round with it."""
    norms = history(*SEEN, steps=4)
    round_ = {m: norm(1.0, 4) for m in "abcd"} | {m: norm(1.5, 16) for m in "efg"}
    assert norms.outliers(0, round_) == {}
    assert set(norms.outliers(0, round_ | {"h": norm(3.0, 4)})) == {"h"}


def test_what_is_far_is_so_by_both_measures() -> None:
    """A learner of a thousand times the steps is honest; one that scales is not."""
    first = {"a": Norm(1.0, 1), "b": Norm(1.0, 1)}
    assert history().outliers(0, first | {"c": Norm(1000.0, 1000)}) == {}
    assert history().outliers(0, first | {"c": Norm(29_000.0, 1000)}) == {}
    assert set(history().outliers(0, first | {"c": Norm(31_000.0, 1000)})) == {"c"}


def test_what_learners_keep_of_their_own_is_no_reason_to_refuse_a_slow_one() -> None:
    """With an alpha of 0.5, as a run of 60 rounds had it: a learner that is asked again after a
    single step still has half of the way to the published parameters in what it brings."""
    usual, slow = Norm(1.0, 24), Norm(0.54, 1)
    for keeps in (False, True):
        norms = history(*(x / 24**0.5 for x in SEEN), steps=24, keeps=keeps)
        fleet = {m: usual for m in "abcde"}
        assert set(norms.outliers(0, fleet | {"f": slow})) == (set() if keeps else {"f"})
        assert norms.outliers(0, fleet | {"f": Norm(1.0, 24)}) == {}
        # What is scaled is too long as a whole as well, whoever scales it.
        for scaled in (Norm(4.0, 24), Norm(4.0, 1), Norm(1e3, 24), Norm(1e3, 1)):
            assert set(norms.outliers(0, fleet | {"f": scaled})) == {"f"}
        # Who is many times as fast brings more, and is too long by no other measure.
        assert norms.outliers(0, fleet | {"f": Norm(4.0, 144)}) == {}


def test_what_learners_keep_of_their_own_makes_nobody_far_of_its_round() -> None:
    first = {m: Norm(1.0, 1000) for m in "ab"}
    for keeps in (False, True):
        norms = history(keeps=keeps)
        assert set(norms.outliers(0, first | {"c": Norm(2.0, 1)})) == (set() if keeps else {"c"})
        assert set(norms.outliers(0, first | {"c": Norm(31.0, 1)})) == {"c"}


def test_lengths_are_in_a_snapshot_only_where_they_are_a_measure() -> None:
    assert "norms_whole" not in history(*SEEN, steps=4).to_lists()
    norms = history(*SEEN, steps=4, keeps=True)
    lists = json.loads(json.dumps(norms.to_lists()))
    again = NormHistory.from_lists(lists, samples_min=20, z_max=6.0, keeps=True)
    assert again.to_lists() == norms.to_lists() and again.whole is not None
    round_ = {"a": norm(1.0, 4), "b": norm(1.0, 4), "c": norm(9.0, 4)}
    assert set(again.outliers(0, round_)) == {"c"}
    # An older snapshot does not say them.
    del lists["norms_whole"]
    older = NormHistory.from_lists(lists, samples_min=20, z_max=6.0, keeps=True)
    assert older.outliers(0, round_) == {}
    # Where nothing is kept nobody asks for them.
    plain = NormHistory.from_lists(again.to_lists(), samples_min=20, z_max=6.0)
    assert plain.whole is None and set(plain.outliers(0, round_)) == {"c"}


def test_reasons_say_what_an_outlier_is_measured_by() -> None:
    def said(**round_: Norm) -> dict[str, str]:
        return history(*SEEN, steps=4).outliers(0, round_)

    usual, long, far_ = norm(1.0, 4), norm(5.0, 4), norm(1e3, 4)
    whole = said(a=usual, b=usual, c=long, d=far_, e=usual)
    assert whole["c"].startswith("5 has robust z ") and ", per step 2.5 has " in whole["c"]
    assert whole["d"] == "1e+03 is 1e+03 times the round's median, per step 500 is 1e+03 times"
    assert list(whole) == ["c", "d"]
    # Half of a round: only what is far of all others is refused.
    assert set(said(a=usual, b=usual, c=long, d=far_)) == {"d"}


def test_norms_of_zero_so_far_are_no_reason_to_fail() -> None:
    assert set(past(*[0.0] * 30).beyond(0, {"a": 0.0, "b": 0.0, "c": 100.0})) == set()
    assert past(*[0.0] * 30).beyond(0, {"a": 0.0, "b": 0.0}) == {}


def test_a_round_in_which_all_norms_rose_is_measured_from_its_own_middle() -> None:
    # As after warm-up, in a fleet whose first round alone fills the history: the rise takes
    # slightly less than half of them beyond the limit, and they are no outliers of their round.
    rose = {f"learner-{n}": float(x) for n, x in enumerate(np.linspace(1.3, 1.56, 50))}
    norms = history(*SEEN)
    assert sum((x - 1.0) / (1.4826 * 0.05) > 6 for x in rose.values()) in range(20, 25)
    assert refused(norms, rose) == set()
    # Who stands out of that round is still seen, and from its middle.
    assert refused(norms, rose | {"broken": 9.0}) == {"broken"}
    # A round of small norms hides nobody: those seen before are the measure.
    assert refused(norms, {"a": 0.1, "b": 0.1, "c": 2.0}) == {"c"}


def test_a_round_of_nobody_has_no_outliers() -> None:
    assert history(*SEEN).outliers(0, {}) == {}


def test_a_lasting_change_becomes_normal() -> None:
    norms = history(*SEEN)
    round_ = {"a": 9.0, "b": 1.0, "c": 1.0}
    assert refused(norms, round_)
    for _ in range(2 * len(SEEN)):
        norms.record(0, norm(9.0))
    assert refused(norms, round_) == set()


def test_what_is_remembered_is_bounded_and_finite() -> None:
    values = past(float("inf"), float("nan"))
    assert values.seen == {}
    for n in range(HISTORY + 50):
        values.record(0, float(n))
    assert len(values.seen[0]) == HISTORY and values.seen[0][0] == 50.0


@examples(40)
@given(
    st.lists(st.floats(0.0, 1e30), min_size=20, max_size=40),
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.floats(0.0, 1e30), st.integers(1, 50)),
        min_size=1,
    ),
)
def test_outliers_are_always_a_minority_and_longer_than_the_middle(
    seen: list[float], norms: dict[str, tuple[float, int]]
) -> None:
    round_ = {m: Norm(*said) for m, said in norms.items()}
    outliers = history(*seen).outliers(0, round_)
    assert 2 * len(outliers) < len(norms) or not outliers
    for value in ("per_root_step", "per_step"):
        middle = float(np.median([getattr(n, value) for n in round_.values()]))
        assert all(getattr(round_[m], value) >= middle for m in outliers)


def test_it_survives_json() -> None:
    norms = history(*SEEN, steps=4)
    norms.record(3, Norm(0.1, 1))
    lists = json.loads(json.dumps(norms.to_lists()))
    again = NormHistory.from_lists(lists, samples_min=20, z_max=6.0)
    assert again.to_lists() == norms.to_lists()
    assert again.per_step.seen[3].maxlen == HISTORY and again.per_root_step.seen[3] == deque([0.1])


def test_an_older_snapshot_refuses_nobody_by_what_it_does_not_say() -> None:
    lists = {"norms": history(*SEEN, steps=4).to_lists()["norms"]}
    norms = NormHistory.from_lists(lists, samples_min=20, z_max=6.0)
    round_ = {"a": norm(1.0, 4), "b": norm(1.0, 4), "c": norm(9.0, 4)}
    assert norms.outliers(0, round_) == {}
    for _ in range(20):
        norms.record(0, norm(1.0, 4))
    assert set(norms.outliers(0, round_)) == {"c"}


def test_inspecting_a_payload_finds_its_norm_and_what_is_not_finite() -> None:
    values = np.array([3.0, 4.0], np.float32)
    for name in codec.NAMES:
        payload = codec.encode(name, values)
        # e3m0 knows powers of two only, and e2m1 one value between two.
        found = inspect(payload, name, 2)
        assert (found.finite, found.norm) == (True, pytest.approx(5.0, rel=0.15))
        for bad in (np.nan, np.inf):
            payload = codec.encode(name, np.array([1.0, bad], np.float32))
            found = inspect(payload, name, 2)
            assert (found.finite, found.norm) == (False, 0.0)
    with pytest.raises(ValueError, match="shorter than a header"):
        inspect(b"abc", "fp32", 2)


def test_norms_of_pieces_are_found_where_the_layout_fits() -> None:
    pieces = [Piece("a", (1,), False, 0, 1, 0, 1), Piece("b", (2,), False, 0, 2, 1, 2)]
    payload = codec.encode("fp32", np.array([12.0, 3.0, 4.0], np.float32))
    found = inspect(payload, "fp32", 3, pieces)
    assert (found.finite, found.norm) == (True, 13.0)
    np.testing.assert_array_equal(found.norms_P, [12.0, 5.0])
    np.testing.assert_array_equal(inspect(payload, "fp32", 3, pieces[:1]).norms_P, [13.0])
