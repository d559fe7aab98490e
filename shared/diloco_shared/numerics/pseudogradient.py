"""Pseudo-gradients: how far local training moved from the published fragment (paper section 2).

    delta = anchor_base - theta        (shape (F,), fp32)

Positive against the direction of training, so that the outer optimizer can take it as a gradient.
"""

from typing import Any


def pseudogradient(anchor_F: Any, theta_F: Any) -> Any:
    """anchor - theta, for numpy or jax arrays."""
    return anchor_F - theta_F
