"""What each optimizer keeps per parameter is what a budget counts with."""

import math

import jax
import numpy as np
import pytest

from diloco_learner.training.inner import optimizer
from diloco_shared.numerics.outer import Outer
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.algorithm import Algorithm
from diloco_shared.spec.optimizers import (
    OPTIMIZERS,
    STATE_EXTRA,
    inner_state_bytes,
    known,
    outer_state_bytes,
)
from diloco_shared.spec.run import Inner

TENSORS = (
    TensorSpec(name="embedding/tokens", shape=(100, 40), embedding=True),
    TensorSpec(name="matrix", shape=(80, 60), embedding=False),
    TensorSpec(name="norm", shape=(3000,), embedding=False),
)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "muon"])
def test_the_inner_state_is_at_most_what_is_counted(name: str) -> None:
    chosen = optimizer(Inner(optimizer=name), lambda n: n.startswith("embedding/"))
    params = {t.name: jax.ShapeDtypeStruct(t.shape, np.float32) for t in TENSORS}
    leaves = jax.tree.leaves(jax.eval_shape(chosen.init, params))
    real = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    counted = inner_state_bytes(name, TENSORS)
    assert real <= counted
    if name not in ("adafactor", "sm3"):  # of matrices these keep rows and columns only
        assert counted - real <= len(TENSORS) * STATE_EXTRA


@pytest.mark.parametrize("name", ["nesterov", *OPTIMIZERS])
def test_the_outer_state_is_what_is_counted(name: str) -> None:
    algorithm = Algorithm.model_validate({"outer_optimizer": name})
    values = 10_000
    kept = sum(np.asarray(x).nbytes for x in Outer(algorithm).init(np.zeros(values, np.float32)))
    assert kept / values == pytest.approx(outer_state_bytes(name, 0.8), abs=0.1)


def test_no_momentum_no_outer_state() -> None:
    algorithm = Algorithm.model_validate({"preset": "short"})
    assert not Outer(algorithm).init(np.zeros(8, np.float32))
    assert outer_state_bytes("nesterov", algorithm.outer_momentum) == 0


def test_an_optimizer_that_nobody_knows_is_refused_with_those_that_are() -> None:
    assert known("sgd") == "sgd" and known("muon", "muon") == "muon"
    for name in ("muon", "adam2", ""):
        with pytest.raises(ValueError, match=f"'{name}' is not one of .*sgd"):
            known(name)
