"""Spreading independent ranges of work over threads; what is computed does not depend on it."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise

# Shares per thread: one that is delayed leaves its rest to the others.
SHARES = 8


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _helpers() -> ThreadPoolExecutor:
    """Threads beside the callers; made once: a merge takes less time than starting them."""
    return ThreadPoolExecutor(cores(), thread_name_prefix="merge")


# A child begins without its parent's threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)


def spread(work: Callable[[int, int], None], ranges: int, threads: int) -> None:
    """Call work(first, last) for shares of `ranges`, on so many threads, the caller's among them.

    Only what releases the interpreter's lock gains by it. An error of any share is raised when
    no thread works any more.
    """
    shares = min(ranges, SHARES * threads)
    if threads == 1 or shares <= 1:
        work(0, ranges)
        return
    left = deque(pairwise(ranges * k // shares for k in range(shares + 1)))

    def take() -> None:
        while left:
            try:
                first, last = left.popleft()
            except IndexError:  # another thread was faster
                return
            work(first, last)

    helpers = [_helpers().submit(take) for _ in range(min(threads, shares) - 1)]
    try:
        take()
    finally:
        left.clear()
        # What has not begun has nothing left to do; it may stand behind another merge's work.
        begun: list[Future[None]] = [future for future in helpers if not future.cancel()]
        wait(begun)
    for future in begun:
        future.result()
