"""Tokens in several files are one sequence, wherever the borders are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.corpora.sequences import Tokens, WrongToken, windows
from diloco_shared.corpora.token_files import token_file

PARTS = st.lists(st.integers(0, 30), min_size=1, max_size=6)


def tokens_of(sizes: list[int]) -> tuple[Tokens, Any]:
    whole = np.arange(sum(sizes), dtype=np.uint16)
    return Tokens(np.split(whole, np.cumsum(sizes)[:-1]), 1000), whole


@given(PARTS, st.data())
@examples(100)
def test_windows_are_those_of_the_concatenation(sizes: list[int], data: st.DataObject) -> None:
    tokens, whole = tokens_of(sizes)
    length = data.draw(st.integers(1, max(len(whole), 1)))
    places = st.integers(0, max(len(whole) - length, 0))
    starts = np.array(data.draw(st.lists(places, max_size=8)), np.int64)
    if len(whole) < length:
        starts = starts[:0]
    found = tokens.windows(starts, length)
    assert found.dtype == np.int32 and found.shape == (len(starts), length)
    np.testing.assert_array_equal(found, windows(whole, starts, length))


@given(PARTS, st.integers(-200, 200), st.integers(-200, 200))
@examples(100)
def test_slices_are_those_of_the_concatenation(sizes: list[int], a: int, b: int) -> None:
    tokens, whole = tokens_of(sizes)
    assert len(tokens) == len(whole)
    np.testing.assert_array_equal(tokens[a:b], whole[a:b])
    np.testing.assert_array_equal(tokens[:], whole)
    if -len(whole) <= a < len(whole):
        assert tokens[a] == whole[a]
    else:
        with pytest.raises(IndexError):
            tokens[a]


def test_blocks_are_all_of_it() -> None:
    tokens, whole = tokens_of([7, 0, 20, 3])
    blocks = list(tokens.blocks(size=10))
    assert max(len(block) for block in blocks) == 5  # uint16
    np.testing.assert_array_equal(np.concatenate(blocks), whole)


def test_a_window_beyond_the_end_is_refused() -> None:
    tokens, _ = tokens_of([5, 5])
    for start in (-1, 8):
        with pytest.raises(IndexError, match="beyond the 10"):
            tokens.windows(np.array([start]), 3)


def test_a_number_that_is_no_token_is_never_trained_on() -> None:
    tokens = Tokens([np.array([1, 2, 300, 3], np.uint32)], 256, "damaged.bin")
    assert tokens.windows(np.array([0]), 2).tolist() == [[1, 2]]
    with pytest.raises(WrongToken, match=r"damaged\.bin has the number 300, which is no token"):
        tokens.windows(np.array([0]), 3)
    two = Tokens([np.array([7], np.uint32), tokens.parts[0]], 256, "damaged.bin")
    with pytest.raises(WrongToken, match=r"It is number 3 of this split, counted from 0\. The"):
        two.windows(np.array([0, 2]), 2)
    huge = Tokens([np.array([2**32 - 1], np.uint32)], 256)
    with pytest.raises(WrongToken):
        huge.windows(np.array([0]), 1)


@pytest.mark.parametrize("wrong", [2**32 + 5, -(2**32) + 5, 2**62])
def test_a_number_of_64_bits_is_no_token_for_its_lower_half(wrong: int) -> None:
    wide = Tokens([np.array([1, wrong], np.int64), np.array([2], np.int64)], 256, "t.npy")
    assert (found := wide.windows(np.array([0, 2]), 1)).tolist() == [[1], [2]]
    assert found.dtype == np.int32
    for start, length in ((1, 1), (0, 3)):
        with pytest.raises(WrongToken, match=rf"has the number {wrong}, which is no token"):
            wide.windows(np.array([start]), length)


def test_the_file_is_named_that_holds_a_number_which_is_no_token(tmp_path: Path) -> None:
    numbers = [np.arange(4, dtype=np.uint16), np.array([0, 9], np.uint16)]
    for n, of_file in enumerate(numbers):
        of_file.tofile(tmp_path / f"{n}.bin")
    parts = [token_file(tmp_path / f"{n}.bin", "uint16", len(a)) for n, a in enumerate(numbers)]
    with pytest.raises(WrongToken, match=r"It is number 5 of .*, in /.*/1\.bin\. The file is dam"):
        Tokens(parts, 9, "c (train)").windows(np.array([3]), 3)
