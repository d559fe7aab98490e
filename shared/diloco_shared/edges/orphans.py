"""Children that end when their parent does, however it went (Linux; elsewhere they live on)."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

_PR_SET_PDEATHSIG = 1
# Loaded here, since little is safe between fork and exec.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def dies_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """For a child to call first: it gets signal `number` when the thread that started it ends.

    A `preexec_fn`, or a process pool's initializer (it can be pickled). Start such children from
    the main thread only.
    """
    return partial(_die_with, os.getpid(), number)


def _die_with(parent: int, number: int) -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it was gone before we asked
            os._exit(1)
