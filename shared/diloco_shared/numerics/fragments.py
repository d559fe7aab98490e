"""Values of a fragment out of tensors and back; who is in which fragment: `layout.py`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from diloco_shared.layout import CUT_ABOVE_MEANS as CUT_ABOVE_MEANS
from diloco_shared.layout import Layout as Layout
from diloco_shared.layout import Piece as Piece


def flatten(layout: Layout, fragment: int, tensors: Mapping[str, Any], xp: Any = np) -> Any:
    """Values of one fragment as fp32 of shape (F,). `xp`: numpy, or jax.numpy inside jit."""
    parts = [
        (tensors[p.name] if p.whole else tensors[p.name][p.start : p.stop])
        .reshape(-1)
        .astype(xp.float32)
        for p in layout.fragments[fragment]
    ]
    return xp.concatenate(parts)


def unflatten(layout: Layout, fragment: int, values_F: Any) -> list[tuple[Piece, Any]]:
    """The pieces of one fragment with their values in the pieces' shapes; numpy or jax."""
    return [
        (p, values_F[p.offset : p.offset + p.size].reshape(p.piece_shape))
        for p in layout.fragments[fragment]
    ]
