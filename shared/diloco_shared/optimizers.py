"""Names of the optimizers that a run may choose, inner and outer."""

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
