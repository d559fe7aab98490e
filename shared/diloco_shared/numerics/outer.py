"""The outer optimizer (paper section 3.6): Nesterov SGD by default, any optax optimizer by name.

Nesterov SGD is part of the merge's own passes (merge_kernels.py), with the roundings that optax
has when it runs eagerly, one operation at a time; so do the others. Of those optax compiles parts,
and some (`lamb`, `lars`, `adafactor`) reduce over the fragment: they repeat to the bit on one kind
of machine and one version of jax. Whoever uses Nesterov SGD needs neither: both are imported where
they are used, which spares a syncer time at its start, and memory.
"""

import inspect
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics.merge import Nesterov
from diloco_shared.spec.algorithm import Algorithm

if TYPE_CHECKING:
    import optax

Values = NDArray[np.float32]


def optimizer(algorithm: Algorithm) -> "optax.GradientTransformation":
    """The configured outer optimizer: 'nesterov', or one of `optimizers.OPTIMIZERS`."""
    import optax

    name, rate = algorithm.outer_optimizer, algorithm.outer_rate
    if name == "nesterov":
        momentum = algorithm.outer_momentum or None
        return optax.sgd(rate, momentum=momentum, nesterov=momentum is not None)
    factory = getattr(optax, name)
    takes_momentum = "momentum" in inspect.signature(factory).parameters
    settings = {"momentum": algorithm.outer_momentum} if takes_momentum else {}
    with warnings.catch_warnings():
        # Some announce changes of optax' own; the pinned version settles those.
        warnings.simplefilter("ignore")
        transform: optax.GradientTransformation = factory(rate, **settings)
    return transform


class Outer:
    """The outer optimizer of one run; its state is a tuple of arrays per fragment."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.structure: Any = None  # of the state, as optax nests it

    @cached_property
    def transform(self) -> "optax.GradientTransformation":
        """As optax has it."""
        return optimizer(self.algorithm)

    def nesterov(self, fraction: float) -> Nesterov | None:
        """What the merge's passes step with when so much of the budget is used; None: `apply` must.

        From `outer_settle_from` on rate and momentum go to 1 and 0, and merges settle with them.
        """
        a = self.algorithm
        if a.outer_optimizer != "nesterov":
            return None
        settled = 0.0
        if fraction > a.outer_settle_from:
            settled = (min(fraction, 1.0) - a.outer_settle_from) / (1 - a.outer_settle_from)
        return Nesterov(
            a.outer_rate + settled * (1 - a.outer_rate), a.outer_momentum * (1 - settled), settled
        )

    def init(self, theta_F: Values) -> list[Any]:
        """State leaves for parameters of shape (F,)."""
        if self.algorithm.outer_optimizer == "nesterov":
            return [np.zeros_like(theta_F)] if self.algorithm.outer_momentum else []
        return self._initial(theta_F)

    def _initial(self, theta_F: Values) -> list[Any]:
        import jax

        with jax.default_device(jax.devices("cpu")[0]):
            leaves, self.structure = jax.tree.flatten(self.transform.init(theta_F))
        return [np.asarray(leaf) for leaf in leaves]

    def apply(
        self, theta_F: Values, leaves: list[Any], delta_F: Values
    ) -> tuple[Values, list[Any]]:
        """One outer step against the merged pseudo-gradient: new (theta_F, leaves)."""
        import jax
        import optax

        if self.structure is None:
            self._initial(theta_F)
        with jax.default_device(jax.devices("cpu")[0]):
            state = jax.tree.unflatten(self.structure, leaves)
            update, state = self.transform.update(delta_F, state, theta_F)
            new_F = np.asarray(optax.apply_updates(theta_F, update), dtype=np.float32)
            return new_F, [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
