"""Compiling numeric kernels to machine code."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile at the first call, without the interpreter's lock, and keep the code on disk.

    No fast-math and no contraction: every operation rounds as IEEE 754 says, in the order
    written, whatever the width of the processor's vectors. Kernels may call each other.
    """
    compile_ = numba.njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
    return cast(F, compile_(function))
