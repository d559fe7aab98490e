"""Fragments of stacked layers: every value is read from, and adopted to, where it belongs."""

import jax
import numpy as np
import pytest

from diloco_learner.models import build, places, tensor_specs, to_named
from diloco_learner.training.fragment_ops import FragmentOps, PieceRun
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import Model

# Query, key, value and output matrices are of one size: runs of layers of four leaves, mixed.
MODEL = build(Model.model_validate({"overrides": {"layers": 5, "width": 16, "head_width": 4}}))
SHAPES = jax.eval_shape(MODEL.init, jax.random.key(0))
SPECS = tensor_specs(SHAPES, MODEL.is_embedding, MODEL.stacked)


@pytest.mark.parametrize("fragments", [1, 3, 40])
def test_what_is_adopted_is_read_again_and_lies_in_its_layer(fragments: int) -> None:
    layout = Layout.build(SPECS, fragments)
    ops = FragmentOps(layout, SHAPES, "bf16", MODEL.stacked)
    orders = [
        at[1:]
        for view, starts in zip(ops.cuts, ops.starts, strict=True)
        for bit, at in zip(view.bits, starts, strict=True)
        if isinstance(bit, PieceRun)
    ]
    if fragments < 10:
        assert any((there != back).any() for there, back in orders), "an order and its inverse"
    rng = np.random.default_rng(0)
    anchors = [rng.standard_normal(size).astype(np.float32) for size in layout.sizes]
    params = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), SHAPES)
    for p, anchor_F in enumerate(anchors):
        params = ops.adopt(p, params, anchor_F, 0.0)
    leaves = {name: np.asarray(leaf) for name, leaf in to_named(params).items()}
    where = places(leaves, MODEL.stacked)
    for p, pieces in enumerate(layout.fragments):
        np.testing.assert_array_equal(np.asarray(ops.read(p, params)), anchors[p])
        for piece in pieces:
            place = where[piece.name]
            lies = leaves[place.leaf] if place.layer is None else leaves[place.leaf][place.layer]
            given = anchors[p][piece.offset : piece.offset + piece.size]
            np.testing.assert_array_equal(lies[piece.start : piece.stop].ravel(), given)


def test_layers_of_one_shape_are_one_run() -> None:
    """However many there are, the program has a few operations."""
    for layers in (5, 50):
        model = build(Model.model_validate({"overrides": {"layers": layers}}))
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        specs = tensor_specs(shapes, model.is_embedding, model.stacked)
        ops = FragmentOps(Layout.build(specs, 4), shapes, "bf16", model.stacked)
        assert max(len(view.bits) for view in ops.cuts) <= 12
