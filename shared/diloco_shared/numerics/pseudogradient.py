"""Pseudo-gradients: how far local training moved from the published fragment (paper section 2).

    delta = anchor_base - theta        (shape (F,), fp32)

Positive against the direction of training, so that the outer optimizer can take it as a gradient.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]


def pseudogradient(anchor_F: Any, theta_F: Any) -> Any:
    """anchor - theta, for numpy or jax arrays."""
    return anchor_F - theta_F


def rebase(delta_F: Values, anchor_base_F: Values, anchor_now_F: Values) -> Values:
    """The pseudo-gradient against a newer anchor: anchor_now - theta."""
    return delta_F + (anchor_now_F - anchor_base_F)
