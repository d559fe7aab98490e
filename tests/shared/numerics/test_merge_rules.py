"""Merge rules: what lengths say, and a rule of one's own through the same passes over memory."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from diloco_shared.numerics import codec
from diloco_shared.numerics.merge import Delta, merge
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec import merge_rules
from diloco_shared.spec.algorithm import Algorithm
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.merge_rules import NORM_MAX, MergeRule, Radial, named


def test_radial_averages_lengths_and_takes_the_direction_that_is_left() -> None:
    radial = Radial()
    assert radial.factors([0.25, 0.75], [2.0, 0.0]) == [0.125, 0.0]
    scale = radial.scale([1.0, 3.0], [2.0, 4.0], 0.5, 0.0)
    assert scale == pytest.approx((2.0 + 3 * 4.0) / 4 / 0.5)
    settled = radial.scale([1.0, 3.0], [2.0, 4.0], 0.5, 1.0)
    assert settled == pytest.approx(3.5), "the mean's own length"


def test_where_radial_has_no_answer_the_mean_stands_in() -> None:
    radial = Radial()
    assert radial.factors([0.5, 0.5], [1.0, NORM_MAX * 2]) is None
    assert radial.factors([0.5, 0.5], [1.0, math.nan]) is None
    assert radial.scale([1.0, 1.0], [1.0, 1.0], 1e-7, 0.0) is None


def test_a_rule_that_nobody_knows_is_refused_with_all_names() -> None:
    assert named("mean") is None
    with pytest.raises(ValueError, match="'mode' is not one of rda, mean, clipped"):
        Algorithm.model_validate({"merge": "mode"})


class Shortest(MergeRule):
    """The mean of contributions that are cut to the shortest one's length."""

    def factors(self, shares_M: Sequence[float], norms_M: Sequence[float]) -> list[float] | None:
        most = min(norms_M)
        return [s * min(1.0, most / n) for s, n in zip(shares_M, norms_M, strict=True)]


def test_a_rule_of_ones_own_is_merged_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(merge_rules.RULES, "shortest", Shortest())
    assert Algorithm.model_validate({"merge": "shortest"}).merge == "shortest"
    tensors = [
        TensorSpec(name="t", shape=(7,), embedding=False),
        TensorSpec(name="u", shape=(5,), embedding=True),
    ]
    pieces = Layout.build(tensors, 1).fragments[0]
    rng = np.random.default_rng(3)
    values = [rng.standard_normal(12).astype(np.float32) * size for size in (1.0, 2.0, 50.0)]
    weights = [1.0, 2.0, 1.0]
    deltas = [
        Delta(w, "fp32", codec.encode("fp32", v)) for w, v in zip(weights, values, strict=True)
    ]
    merged = merge(deltas, pieces, "shortest")
    for piece in pieces:
        cut = slice(piece.offset, piece.offset + piece.size)
        norms = [float(np.linalg.norm(v[cut])) for v in values]
        most = math.inf if piece.embedding else min(norms)
        expected = sum(
            w / 4 * min(1.0, most / n) * v[cut].astype(np.float64)
            for w, n, v in zip(weights, norms, values, strict=True)
        )
        np.testing.assert_allclose(merged[cut], expected, rtol=1e-5)
