"""Which of jax's platforms there are: those that JAX_PLATFORMS names, and the host's processor.

Where somebody names a device alone, jax has no other platform: the host has none of its arrays. But
what is copied from a device goes through one (`recovery.moments`). So the host is put behind what
is named, where it is used for nothing else: `check` sees to it.
"""

import jax

HOST = "cpu"
# What was named where the host was not, or nothing.
_alone: list[str] = []


def with_host(named: str) -> str:
    """What jax is to look for where these platforms are named; "" is all it knows."""
    return named if not named or HOST in named.split(",") else f"{named},{HOST}"


def settle() -> None:
    """Before jax is asked for a device for the first time."""
    named = jax.config.values["jax_platforms"] or ""
    if with_host(named) != named:
        jax.config.update("jax_platforms", with_host(named))
        _alone[:] = [named]


def check() -> None:
    """Raises RuntimeError where a device is named that is not here: jax would take the host."""
    if _alone and jax.default_backend() == HOST:
        raise RuntimeError(
            f"JAX_PLATFORMS is {_alone[0]}, and jax finds no such device here: look at the driver, "
            f"or name {HOST} too where its processor may do the work"
        )
