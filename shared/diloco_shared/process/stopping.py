"""How a process ends: on SIGTERM, SIGINT and SIGHUP in order, and with its parent in any case."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial

# A process that ends gives its key back and closes its connections within so many seconds, all
# together: whoever told it to stop kills it soon, and a silent hub is not worth waiting for.
CLOSES_S = 2.0


def stop_signals() -> list[int]:
    """Those that tell this process to stop."""
    numbers: list[int] = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it
        numbers.append(signal.SIGHUP)  # its terminal is closed
    return numbers


async def until_stopped(
    work: Coroutine[object, object, None],
    *,
    once: bool = False,
    ending: Callable[[], bool] = lambda: False,
) -> frozenset[int]:
    """Run `work`; a stop signal cancels it and returns once it has cleaned up.

    Ctrl-C (SIGINT) after that cuts the cleaning up short, unless only the first signal counts
    (`once`). SIGTERM and SIGHUP never do: a repeat of them may be of somebody who does not know of
    the first one, or of a terminal that is closed. What manages services sends SIGKILL where it
    wants an end at once. `ending`: whether `work` cleans up already, for a reason of its own.
    Returns the numbers of all signals that came.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    came: set[int] = set()

    def stop(number: int) -> None:
        first = not came and not ending()
        came.add(number)
        if first or (number == signal.SIGINT and not once):
            task.cancel()

    numbers = stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not came:
            raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
    return frozenset(came)


# --------------------------------------------------------------------------------------------------
# Children that end when their parent does, however it went (Linux; elsewhere they live on).

_PR_SET_PDEATHSIG = 1
# Loaded here, since little is safe between fork and exec.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def dies_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """For a child to call first: it gets signal `number` when the thread that started it ends.

    A `preexec_fn`, or a process pool's initializer (it can be pickled). Start such children from
    the main thread only.
    """
    return partial(die_with, os.getpid(), number)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """For a child to call by itself: its parent has threads, and so runs no code after a fork.

    `parent`: its process id. It ends at once if that one is gone.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it was gone before we asked
            os._exit(1)


def how_ended(code: int | None) -> str:
    """A return code of `subprocess` in words: its status, or the signal that ended it."""
    if code is None:
        return "it does not end"
    if code >= 0:
        return f"status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
