"""Layouts: every value exactly once, evenly spread, the same on every machine."""

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.numerics.arrays import flatten
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.fragmentation import CUT_ABOVE_MEANS, Layout, Piece

quick = examples(60)

shapes = st.lists(st.integers(1, 12), max_size=3).map(tuple)
models = st.lists(shapes, min_size=1, max_size=12).map(
    lambda all_shapes: tuple(
        TensorSpec(name=f"t{n}", shape=shape, embedding=n == 0)
        for n, shape in enumerate(all_shapes)
    )
)


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, embedding=False)


def build_or_none(tensors: tuple[TensorSpec, ...], fragments: int) -> Layout | None:
    try:
        return Layout.build(tensors, fragments)
    except ValueError as error:
        assert "set algorithm.fragments lower" in str(error)
        assert len(tensors) < fragments, "one tensor for each would do"
        return None


def shaped(piece: Piece, values_F: Any) -> Any:
    """What a fragment's values hold of a piece, in the piece's shape."""
    return values_F[piece.offset : piece.offset + piece.size].reshape(piece.piece_shape)


def numbered(layout: Layout) -> dict[str, np.ndarray]:
    """Tensors whose values are all different: 0, 1, 2, …"""
    count, tensors = itertools.count(), {}
    for t in layout.tensors:
        values = [next(count) for _ in range(math.prod(t.shape))]
        tensors[t.name] = np.array(values, np.float32).reshape(t.shape)
    return tensors


@quick
@given(models, st.integers(1, 8))
def test_every_value_of_every_tensor_lies_in_exactly_one_fragment(
    tensors: tuple[TensorSpec, ...], fragments: int
) -> None:
    layout = build_or_none(tensors, fragments)
    if layout is None:
        return
    flat = [flatten(layout, p, numbered(layout)) for p in range(fragments)]
    assert tuple(len(values) for values in flat) == layout.sizes
    assert all(size > 0 for size in layout.sizes)
    total = sum(math.prod(t.shape) for t in tensors)
    np.testing.assert_array_equal(np.sort(np.concatenate(flat)), np.arange(total))


@quick
@given(models, st.integers(1, 8))
def test_splitting_and_joining_gives_the_tensors_back(
    tensors: tuple[TensorSpec, ...], fragments: int
) -> None:
    layout = build_or_none(tensors, fragments)
    if layout is None:
        return
    original = numbered(layout)
    joined = {name: np.full_like(values, np.nan) for name, values in original.items()}
    for p in range(fragments):
        values_F = flatten(layout, p, original)
        for piece in layout.fragments[p]:
            values = shaped(piece, values_F)
            if piece.whole:
                joined[piece.name] = values
            else:
                joined[piece.name][piece.start : piece.stop] = values
    for name, values in original.items():
        np.testing.assert_array_equal(joined[name], values, err_msg=name)


@quick
@given(models, st.integers(1, 8))
def test_no_fragment_exceeds_the_mean_by_more_than_the_largest_piece(
    tensors: tuple[TensorSpec, ...], fragments: int
) -> None:
    layout = build_or_none(tensors, fragments)
    if layout is None:
        return
    largest = max(piece.size for pieces in layout.fragments for piece in pieces)
    assert max(layout.sizes) <= sum(layout.sizes) / fragments + largest


@examples(25)
@given(st.lists(st.integers(1, 30), min_size=3, max_size=7))
def test_the_worst_fragment_is_within_four_thirds_of_the_optimum(sizes: list[int]) -> None:
    """Vectors of one row are never cut, so the optimum can be tried out."""
    tensors = [spec(f"t{n}", 1, size) for n, size in enumerate(sizes)]
    layout = Layout.build(tensors, 3)
    loads = []
    for owners in itertools.product(range(3), repeat=len(sizes)):
        loads.append(
            max(sum(s for s, o in zip(sizes, owners, strict=True) if o == p) for p in range(3))
        )
    assert max(layout.sizes) <= min(loads) * 4 / 3


def test_an_embedding_above_twice_the_mean_is_cut_by_rows() -> None:
    layout = Layout.build([spec("embedding", 100, 4), spec("a", 10, 4), spec("b", 10, 4)], 4)
    assert CUT_ABOVE_MEANS * 480 / 4 < 400
    assert max(layout.sizes) - min(layout.sizes) <= 40
    pieces = [p for f in layout.fragments for p in f if p.name == "embedding"]
    assert len(pieces) == 4 and not any(p.whole for p in pieces)
    bounds = sorted((p.start, p.stop) for p in pieces)
    assert bounds[0][0] == 0 and bounds[-1][1] == 100
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))


def test_what_is_not_much_larger_than_the_mean_stays_whole() -> None:
    layout = Layout.build([spec("a", 20), spec("b", 10)], 2)
    assert all(piece.whole for pieces in layout.fragments for piece in pieces)


def test_ties_go_by_name_then_to_the_lowest_fragment_whatever_the_order() -> None:
    tensors = [spec(name, 4) for name in "dbca"]
    layout = Layout.build(tensors, 2)
    names = [[piece.name for piece in pieces] for pieces in layout.fragments]
    assert names == [["a", "c"], ["b", "d"]]
    assert Layout.build(tensors[::-1], 2).fragments == layout.fragments


def test_equal_layouts_share_a_digest_and_others_do_not() -> None:
    tensors = [spec("a", 4, 2), spec("b", 3)]
    digest = Layout.build(tensors, 2).digest()
    assert len(digest) == 32
    assert Layout.build(list(tensors), 2).digest() == digest
    assert Layout.build(tensors, 1).digest() != digest
    assert Layout.build([spec("a", 2, 4), spec("b", 3)], 2).digest() != digest
    embedding = TensorSpec(name="a", shape=(4, 2), embedding=True)
    assert Layout.build([embedding, spec("b", 3)], 2).digest() != digest
    # The order in which a model lists its tensors cuts nothing otherwise.
    assert Layout.build(tensors[::-1], 2).digest() == digest


def test_scalars_are_pieces_too() -> None:
    layout = Layout.build([spec("gain"), spec("a", 3)], 1)
    values = flatten(layout, 0, {"gain": np.float32(7.0), "a": np.zeros(3, np.float32)})
    shapes = {piece.name: shaped(piece, values).shape for piece in layout.fragments[0]}
    assert shapes == {"gain": (), "a": (3,)}


def test_jax_and_numpy_lay_out_alike() -> None:
    layout = Layout.build([spec("a", 9, 3), spec("b", 3)], 3)
    tensors = numbered(layout)
    for p in range(3):
        ours = flatten(layout, p, {k: jnp.asarray(v) for k, v in tensors.items()}, jnp)
        np.testing.assert_array_equal(np.asarray(ours), flatten(layout, p, tensors))


@pytest.mark.parametrize(
    ("tensors", "fragments", "words"),
    [
        ([spec("a", 2), spec("a", 3)], 1, "share a name"),
        ([spec("a", 2), spec("b", 0, 3)], 1, "without values: b"),
        ([spec("a", 1)], 2, "1 tensors cannot fill 2 fragments"),
    ],
)
def test_what_cannot_be_laid_out_is_said(
    tensors: list[TensorSpec], fragments: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Layout.build(tensors, fragments)
