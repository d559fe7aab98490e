"""Spreading independent ranges of work over threads; what is computed does not depend on it."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Shares per thread: one that is delayed leaves its rest to the others.
SHARES = 4


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def spread(work: Callable[[int, int], None], ranges: int, threads: int) -> None:
    """Call work(first, last) for shares of `ranges`, on so many threads.

    Only what releases the interpreter's lock gains by it.
    """
    if threads == 1 or ranges == 1:
        work(0, ranges)
        return
    shares = min(ranges, SHARES * threads)
    bounds = [ranges * k // shares for k in range(shares + 1)]
    with ThreadPoolExecutor(min(threads, shares)) as pool:
        for _ in pool.map(work, bounds[:-1], bounds[1:]):
            pass
