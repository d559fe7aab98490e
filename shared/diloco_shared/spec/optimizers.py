"""The optimizers that a run may choose, inner and outer: their names, and what each keeps."""

import math
from collections.abc import Sequence

from diloco_shared.protocol.messages import TensorSpec

# Optimizers of optax that need nothing but a gradient and a rate, keep plain arrays, and step
# against the gradient; a test runs every one of them on both sides.
OPTIMIZERS = (
    "adabelief",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamaxw",
    "adamw",
    "adan",
    "amsgrad",
    "fromage",
    "lamb",
    "lars",
    "lion",
    "nadam",
    "nadamw",
    "novograd",
    "optimistic_adam_v2",
    "optimistic_gradient_descent",
    "radam",
    "rmsprop",
    "sgd",
    "sign_sgd",
    "signum",
    "sm3",
    "yogi",
)


def known(name: str, *ours: str) -> str:
    """`name` if it is one of `ours` or of OPTIMIZERS, else ValueError with all of them."""
    if name in ours or name in OPTIMIZERS:
        return name
    raise ValueError(f"{name[:40]!r} is not one of {', '.join([*ours, *OPTIMIZERS])}")


# What each keeps per parameter, in bytes; a test makes the state of every one of them.
_STATE = {
    "adafactor": 4.0,  # of vectors; of a matrix next to nothing
    "adagrad": 4.0,
    "adan": 16.0,
    "amsgrad": 12.0,
    "fromage": 0.0,
    "lars": 4.0,
    "lion": 4.0,
    "novograd": 4.0,
    "optimistic_adam_v2": 12.0,
    "optimistic_gradient_descent": 4.0,
    "rmsprop": 4.0,
    "sgd": 0.0,
    "sign_sgd": 0.0,
    "signum": 4.0,
    "sm3": 8.0,
}
_TWO_MOMENTS = 8.0
# Names of the built-in models' matrices of experts end so.
EXPERTS = ("_ExDxF", "_ExFxD")
# As outer optimizers some are given a momentum.
_OUTER = {"nesterov": 4.0, "sgd": 4.0, "rmsprop": 8.0, "adafactor": 8.0}
# Counters, and the header that names the arrays where they travel: per tensor.
STATE_EXTRA = 512


def inner_state_bytes(name: str, tensors: Sequence[TensorSpec]) -> int:
    """Of a learner's moments and counts, as they travel; at most, where it depends on shapes."""

    def per_value(tensor: TensorSpec) -> float:
        if name == "muon":  # orthogonalises matrices by one momentum, all else has two moments
            return 4.0 if _is_matrices(tensor) else _TWO_MOMENTS
        return _STATE.get(name, _TWO_MOMENTS)

    return sum(int(per_value(t) * math.prod(t.shape)) + STATE_EXTRA for t in tensors)


def _is_matrices(tensor: TensorSpec) -> bool:
    """One, or one for each expert of a built-in model."""
    experts = len(tensor.shape) == 3 and tensor.name.endswith(EXPERTS)
    return experts or (len(tensor.shape) == 2 and not tensor.embedding)


def outer_state_bytes(name: str, momentum: float) -> float:
    """Per parameter of the syncer's outer optimizer."""
    if name == "nesterov" and not momentum:
        return 0.0
    return _OUTER.get(name, _STATE.get(name, _TWO_MOMENTS))
