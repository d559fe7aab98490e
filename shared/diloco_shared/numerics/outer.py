"""The outer optimizer (paper section 3.6): Nesterov SGD by default, any optax optimizer by name.

Run eagerly, one operation at a time on the CPU, so that a Nesterov step is the formula's own
roundings and the same inputs give the same bits on every machine. Of the others optax compiles
parts, and some (`lamb`, `lars`, `adafactor`) reduce over the fragment: those repeat to the bit on
one kind of machine and one version of jax.
"""

import inspect
import warnings
from typing import Any

import jax
import numpy as np
import optax
from numpy.typing import NDArray

from diloco_shared.config import Algorithm

Values = NDArray[np.float32]


def optimizer(algorithm: Algorithm) -> optax.GradientTransformation:
    """The configured outer optimizer; ValueError for a name that optax does not have."""
    name, rate = algorithm.outer_optimizer, algorithm.outer_rate
    if name == "nesterov":
        momentum = algorithm.outer_momentum or None
        return optax.sgd(rate, momentum=momentum, nesterov=momentum is not None)
    factory = getattr(optax, name, None)
    if not callable(factory) or inspect.isclass(factory):
        raise ValueError(_refusal(name, "optax has no such function"))
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:  # a type that can be called, such as a generic alias
        raise ValueError(_refusal(name, "it has no signature")) from error
    if "learning_rate" not in parameters:
        raise ValueError(_refusal(name, "it takes no learning_rate"))
    settings = {"momentum": algorithm.outer_momentum} if "momentum" in parameters else {}
    with warnings.catch_warnings():
        # Some announce changes of optax' own; the pinned version settles those.
        warnings.simplefilter("ignore")
        transform: optax.GradientTransformation = factory(rate, **settings)
    return transform


def _refusal(name: str, why: str) -> str:
    return (
        f"algorithm.outer_optimizer {name[:40]!r} is neither 'nesterov' nor an optax optimizer "
        f"that can be used here: {why}"
    )


class Outer:
    """The outer optimizer of one run; its state is a tuple of arrays per fragment."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.transform = optimizer(algorithm)
        self.device = jax.devices("cpu")[0]
        self.structure: Any = None
        if algorithm.outer_optimizer != "nesterov":
            self._try_out(algorithm.outer_optimizer)

    def _try_out(self, name: str) -> None:
        """ValueError now rather than in the first round.

        Some optimizers need the loss itself (line searches) or a random key; some building blocks
        have the signature of an optimizer and would ascend.
        """
        theta_F = delta_F = np.ones(4, dtype=np.float32)
        try:
            new_F, leaves = theta_F, self.init(theta_F)
            for _ in range(2):  # some only look on in their first step
                new_F, leaves = self.apply(new_F, leaves, delta_F)
            kept = all(np.asarray(leaf).dtype.kind in "fiub" for leaf in leaves)
        except Exception as error:  # whatever optax raises: it is not ours to enumerate
            raise ValueError(_refusal(name, f"a step of it fails ({error})"[:200])) from error
        if not kept:
            raise ValueError(_refusal(name, "its state is not made of plain numbers"))
        if not (new_F < theta_F).all():
            raise ValueError(_refusal(name, "it does not step against the gradient"))

    def init(self, theta_F: Values) -> list[Any]:
        """State leaves for parameters of shape (F,)."""
        with jax.default_device(self.device):
            leaves, self.structure = jax.tree.flatten(self.transform.init(theta_F))
        return [np.asarray(leaf) for leaf in leaves]

    def apply(
        self, theta_F: Values, leaves: list[Any], delta_F: Values
    ) -> tuple[Values, list[Any]]:
        """One outer step against the merged pseudo-gradient: new (theta_F, leaves)."""
        if self.structure is None:
            self.init(theta_F)
        with jax.default_device(self.device):
            state = jax.tree.unflatten(self.structure, leaves)
            update, state = self.transform.update(delta_F, state, theta_F)
            new_F = np.asarray(optax.apply_updates(theta_F, update), dtype=np.float32)
            return new_F, [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
