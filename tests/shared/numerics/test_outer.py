"""The outer optimizer: Nesterov as in the formula, others by their optax names."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from diloco_shared.numerics.merge import Nesterov
from diloco_shared.numerics.outer import Outer
from diloco_shared.spec.algorithm import Algorithm
from diloco_shared.spec.optimizers import OPTIMIZERS

f32 = np.float32


def algorithm(**settings: Any) -> Algorithm:
    return Algorithm.model_validate(settings)


def test_three_nesterov_steps_follow_the_formula_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    theta = rng.standard_normal(50).astype(f32)
    eta, mu = f32(0.7), f32(0.8)
    outer = Outer(algorithm(outer_rate=0.7, outer_momentum=0.8))
    ours, leaves = theta, outer.init(theta)
    expected, momentum = theta, np.zeros(50, f32)
    for _ in range(3):
        delta = rng.standard_normal(50).astype(f32)
        ours, leaves = outer.apply(ours, leaves, delta)
        momentum = delta + mu * momentum
        expected = expected + (-eta) * (delta + mu * momentum)
        assert ours.tobytes() == expected.tobytes()
    assert any(leaf.tobytes() == momentum.tobytes() for leaf in leaves)


def test_three_nesterov_steps_by_hand() -> None:
    """theta 1, delta 1 thrice, eta 0.5, mu 0.5: momentum 1, 1.5, 1.75."""
    outer = Outer(algorithm(outer_rate=0.5, outer_momentum=0.5))
    theta = np.ones(1, f32)
    leaves, seen = outer.init(theta), []
    for _ in range(3):
        theta, leaves = outer.apply(theta, leaves, np.ones(1, f32))
        seen.append(float(theta[0]))
    assert seen == [1 - 0.75, 0.25 - 0.875, -0.625 - 0.9375]


def test_without_momentum_and_at_rate_one_it_is_the_mean_itself() -> None:
    outer = Outer(algorithm(preset="short"))
    theta, delta = np.array([3.0, 5.0], f32), np.array([1.0, -2.0], f32)
    new, leaves = outer.apply(theta, outer.init(theta), delta)
    np.testing.assert_array_equal(new, theta - delta)
    assert leaves == []


def test_arguments_are_not_written_to() -> None:
    outer = Outer(algorithm())
    theta, delta = np.ones(4, f32), np.ones(4, f32)
    leaves = outer.init(theta)
    outer.apply(theta, leaves, delta)
    for array, before in ((theta, 1.0), (delta, 1.0), (leaves[0], 0.0)):
        np.testing.assert_array_equal(array, np.full(4, before, f32))


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_nesterov_begins_with_the_state_that_optax_gives_it(momentum: float) -> None:
    outer, theta = Outer(algorithm(outer_momentum=momentum)), np.ones(4, f32)
    ours, given = outer.init(theta), outer._initial(theta)
    assert len(ours) == len(given) == (momentum > 0)
    for a, b in zip(ours, given, strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_a_syncer_does_without_jax_while_the_outer_optimizer_is_nesterov() -> None:
    """Importing them was much of its start and of its memory."""
    code = """
import sys
import numpy as np
import diloco_syncer.app
from diloco_shared.numerics.outer import Outer
from diloco_shared.spec.run import Algorithm
outer = Outer(Algorithm())
assert outer.init(np.ones(4, np.float32)) and outer.nesterov(0.5)
print(*sorted({"jax", "optax"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.returncode) == ("", 0), run.stderr


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optax_optimizer_goes_on_from_restored_leaves(name: str) -> None:
    """A fresh Outer with the leaves of another computes the same bits: what a restart does."""
    settings = algorithm(outer_optimizer=name, outer_rate=0.1)
    one, two = Outer(settings), Outer(settings)
    theta, delta = np.linspace(-1, 1, 8, dtype=f32), np.linspace(2, 3, 8, dtype=f32)
    theta, leaves = one.apply(theta, one.init(theta), delta)
    by_one, leaves_one = one.apply(theta, leaves, delta)
    by_two, leaves_two = two.apply(theta, leaves, delta)
    assert by_one.tobytes() == by_two.tobytes()
    assert (by_one < theta).all()
    for a, b in zip(leaves_one, leaves_two, strict=True):
        assert a.tobytes() == b.tobytes()


def test_numbers_too_small_to_be_normal_are_kept() -> None:
    """A processor that flushes them to zero would change the bits of an anchor."""
    outer = Outer(algorithm(preset="short"))
    theta = np.array([1e-40, -1e-44], f32)
    new, _ = outer.apply(theta, [], np.zeros(2, f32))
    assert new.tobytes() == theta.tobytes()


def test_the_outer_step_settles_into_plain_averages() -> None:
    outer = Outer(algorithm(outer_rate=0.5, outer_momentum=0.75, outer_settle_from=0.5))
    for fraction, rate, momentum in [(0.0, 0.5, 0.75), (0.5, 0.5, 0.75), (0.75, 0.75, 0.375)]:
        assert outer.nesterov(fraction) == Nesterov(rate, momentum, max(2 * fraction - 1, 0.0))
    for fraction in (1.0, 1.2):  # rounds in flight when the budget ends
        assert outer.nesterov(fraction) == Nesterov(1.0, 0.0, 1.0)
    for begin in (1.0, 0.0):
        assert Outer(algorithm(outer_settle_from=begin)).nesterov(0.0) == Nesterov(0.7, 0.8)
    assert Outer(algorithm()).nesterov(1.0) == Nesterov(1.0, 0.0, 1.0)
    assert Outer(algorithm(outer_settle_from=1.0)).nesterov(1.0) == Nesterov(0.7, 0.8)
    assert algorithm(outer_optimizer="adam").outer_settle_from == 1.0
