"""A run of two tensors in two fragments, and the record that its parameters begin with."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol.messages import TapeInit, TensorSpec
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec, config_hash

TENSORS = (
    TensorSpec(name="a", shape=(8, 2), embedding=False),
    TensorSpec(name="b", shape=(6,), embedding=True),
)
LAYOUT = Layout.build(TENSORS, 2)


def drawn(rng: np.random.Generator) -> list[NDArray[np.float32]]:
    """Parameters by fragment."""
    return [rng.standard_normal(n).astype(np.float32) for n in LAYOUT.sizes]


def first_record(
    spec: RunSpec, subjects: Sequence[str], values: Sequence[NDArray[np.float32]]
) -> TapeInit:
    """Says that learner a's `values`, under these subjects, are version 0."""
    return TapeInit(
        run=spec.name,
        config_hash=config_hash(spec),
        layout=TENSORS,
        anchor_digests=tuple(digest_array(values_F) for values_F in values),
        subjects=tuple(subjects),
        learner="a",
        incarnation=0,
        at=2.0,
    )
