"""A document stays in its split, whatever else there is."""

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.corpora.splits import SPLITS, Split, Splitter, check_fraction

TEXTS = st.lists(st.binary(min_size=1, max_size=4), unique=True, min_size=3, max_size=40)
FRACTIONS = st.sampled_from([0.001, 0.05, 0.25, 0.49])


def dealt(texts: list[bytes], fraction: float) -> dict[bytes, Split]:
    splitter = Splitter(fraction)
    found = {text: splitter.split(text) for text in texts}
    if splitter.empty:
        again = Splitter(fraction, splitter.repair())
        found = {text: again.split(text) for text in texts}
        assert not again.empty
    return found


@given(TEXTS, FRACTIONS)
@examples(100)
def test_three_different_documents_fill_all_splits(texts: list[bytes], fraction: float) -> None:
    assert set(dealt(texts, fraction).values()) == set(SPLITS)


@given(TEXTS, FRACTIONS, st.randoms())
@examples(50)
def test_the_order_of_documents_decides_nothing(
    texts: list[bytes], fraction: float, dice: object
) -> None:
    assert dealt(texts, fraction) == dealt(sorted(texts), fraction)


@given(TEXTS, TEXTS)
@examples(100)
def test_more_documents_move_at_most_those_that_fill_a_split(
    few: list[bytes], more: list[bytes]
) -> None:
    before = dealt(few, 0.2)
    after = dealt(list(dict.fromkeys([*few, *more])), 0.2)
    moved = [text for text in few if before[text] != after[text]]
    assert len(moved) <= 6  # three get their hash's place back, and three are placed anew
    plain = Splitter(0.2)
    if not {plain.split(t) for t in few} ^ set(SPLITS):
        assert not moved


def test_shares_are_what_was_asked_for() -> None:
    splits = list(dealt([f"{n}".encode() for n in range(10_000)], 0.05).values())
    # Binomial: 500 +- 22.
    assert all(400 < splits.count(name) < 600 for name in ("validation", "test"))


def test_a_larger_share_only_takes_from_training() -> None:
    texts = [f"{n}".encode() for n in range(500)]
    small, large = dealt(texts, 0.1), dealt(texts, 0.3)
    assert all(small[t] == "train" for t in texts if large[t] == "train")
    assert all(large[t] == "validation" for t in texts if small[t] == "validation")


@pytest.mark.parametrize("texts", [[], [b"a"], [b"a", b"b"], [b"a", b"b", b"a"]])
def test_fewer_than_three_are_too_few(texts: list[bytes]) -> None:
    splitter = Splitter(0.2)
    for text in texts:
        splitter.split(text)
    with pytest.raises(ValueError, match=f"{len(set(texts))} different documents cannot be split"):
        splitter.repair()


@pytest.mark.parametrize("fraction", [0.0, 0.5, -0.1, float("nan")])
def test_what_leaves_nothing_to_train_on_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"not above 0 and below 0\.5"):
        check_fraction(fraction)
