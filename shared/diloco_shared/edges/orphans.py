"""Children that end when their parent does, however it went (Linux; elsewhere they live on)."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# Loaded here, since little is safe between fork and exec.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def dies_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn`: the child gets signal `number` when the thread that started it ends.

    Start such children from the main thread only.
    """
    parent = os.getpid()

    def in_child() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, number)
            if os.getppid() != parent:  # it was gone before we asked
                os._exit(1)

    return in_child
