"""Norm outliers: judged late, one-sidedly, and never against a majority."""

import json

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import Piece
from diloco_syncer.rounds.norms import FAR, HISTORY, NormHistory, far, inspect


def history(*seen: float, samples_min: int = 20, z_max: float = 6.0) -> NormHistory:
    norms = NormHistory(samples_min=samples_min, z_max=z_max)
    for value in seen:
        norms.record(0, value)
    return norms


SEEN = tuple(np.linspace(0.9, 1.1, 20))


def test_nobody_is_judged_before_there_are_enough_samples() -> None:
    round_ = {"a": 1.0, "b": 1.0, "c": 1e9}
    assert history(*SEEN[:19]).judge(0, round_) == {}
    assert set(history(*SEEN).judge(0, round_)) == {"c"}
    # Fragments have histories of their own.
    assert history(*SEEN).judge(1, round_) == {}


def test_the_score_is_the_distance_in_robust_deviations() -> None:
    # Median 1, median deviation 0.05: sigma 0.0741.
    z = history(*SEEN).judge(0, {"a": 1.0, "b": 1.0, "c": 2.0})["c"]
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
    ],
)
def test_half_or_more_outliers_are_none(norms: dict[str, float], outliers: set[str]) -> None:
    assert set(history(*SEEN).judge(0, norms)) == outliers


def test_equal_norms_so_far_do_not_make_noise_an_outlier() -> None:
    same = history(*[1.0] * 30)
    assert same.judge(0, {"a": 1.0, "b": 1.0, "c": 1.2}) == {}
    assert set(same.judge(0, {"a": 1.0, "b": 1.0, "c": 1.4})) == {"c"}


@pytest.mark.parametrize(
    ("norms", "outliers"),
    [
        ({"a": 1.0, "b": 1.0, "c": FAR * 1.01}, {"c"}),
        ({"a": 1.0, "b": 1.0, "c": FAR}, set()),
        ({"a": 1.0, "b": 1.0, "c": 1e3, "d": 1e9, "e": 1.0}, {"c", "d"}),
        ({"a": 1.0, "b": 1e9}, set()),  # of two, who is right?
        ({"a": 1e9, "b": 1e9, "c": 1.0}, set()),  # a majority is what is usual
        ({"a": 1.0, "b": 1.0, "c": 1e9, "d": 1e9}, set()),
        ({"a": 0.0, "b": 0.0, "c": 1.0}, {"c"}),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, set()),
    ],
)
def test_what_is_far_of_its_round_is_an_outlier_whatever_was_seen(
    norms: dict[str, float], outliers: set[str]
) -> None:
    assert set(far(norms)) == outliers
    nothing_seen = history().outliers(0, norms)
    assert set(nothing_seen) == outliers
    assert all("times the round's median" in why for why in nothing_seen.values())


def test_reasons_say_what_an_outlier_is_measured_by() -> None:
    said = history(*SEEN).outliers(0, {"a": 1.0, "b": 1.0, "c": 5.0, "d": 1e3, "e": 1.0})
    assert "has robust z" in said["c"]
    assert said["d"] == "1e+03 is 1e+03 times the round's median"
    # Half of a round: only what is far of all others is refused.
    half = history(*SEEN).outliers(0, {"a": 1.0, "b": 1.0, "c": 5.0, "d": 1e3})
    assert set(half) == {"d"}


def test_norms_of_zero_so_far_are_no_reason_to_fail() -> None:
    scores = history(*[0.0] * 30).judge(0, {"a": 0.0, "b": 0.0, "c": 100.0})
    assert set(scores) == {"c"}


def test_a_round_in_which_all_norms_rose_is_measured_from_its_own_middle() -> None:
    # As after warm-up, in a fleet whose first round alone fills the history: the rise takes
    # slightly less than half of them beyond the limit, and they are no outliers of their round.
    rose = {f"learner-{n}": float(x) for n, x in enumerate(np.linspace(1.3, 1.56, 50))}
    norms = history(*SEEN)
    assert sum((x - 1.0) / (1.4826 * 0.05) > 6 for x in rose.values()) in range(20, 25)
    assert norms.judge(0, rose) == {}
    # Who stands out of that round is still seen, and from its middle.
    assert set(norms.judge(0, rose | {"broken": 9.0})) == {"broken"}
    # A round of small norms hides nobody: those seen before are the measure.
    assert set(norms.judge(0, {"a": 0.1, "b": 0.1, "c": 2.0})) == {"c"}


def test_a_round_of_nobody_has_no_outliers() -> None:
    assert history(*SEEN).judge(0, {}) == {}


def test_a_lasting_change_becomes_normal() -> None:
    norms = history(*SEEN)
    round_ = {"a": 9.0, "b": 1.0, "c": 1.0}
    assert norms.judge(0, round_)
    for _ in range(2 * len(SEEN)):
        norms.record(0, 9.0)
    assert norms.judge(0, round_) == {}


def test_what_is_remembered_is_bounded_and_finite() -> None:
    norms = history(float("inf"), float("nan"))
    assert norms.norms == {}
    for n in range(HISTORY + 50):
        norms.record(0, float(n))
    assert len(norms.norms[0]) == HISTORY and norms.norms[0][0] == 50.0


@examples(40)
@given(
    st.lists(st.floats(0.0, 1e30), min_size=20, max_size=40),
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.0, 1e30), min_size=1),
)
def test_outliers_are_always_a_minority_of_the_largest(
    seen: list[float], norms: dict[str, float]
) -> None:
    outliers = history(*seen).judge(0, norms)
    assert 2 * len(outliers) < len(norms) or not outliers
    kept = [value for learner, value in norms.items() if learner not in outliers]
    assert all(norms[learner] > max(kept) for learner in outliers)


def test_it_survives_json() -> None:
    norms = history(*SEEN)
    norms.record(3, 0.1)
    lists = json.loads(json.dumps(norms.to_lists()))
    again = NormHistory.from_lists(lists, samples_min=20, z_max=6.0)
    assert again.norms == norms.norms
    assert again.norms[3].maxlen == HISTORY


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
