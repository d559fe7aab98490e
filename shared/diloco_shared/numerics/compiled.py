"""Numeric kernels compiled to machine code, and their work spread over threads."""

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])

# What kernels hold as constants besides: the tables of codecs.
ROWS = (Path(__file__).parents[1] / "spec" / "codecs.py",)
# Folders of machine code kept, four megabytes each: some processes may still run older sources.
FOLDERS_MAX = 8


def kernel(function: F) -> F:
    """Compile at the first call, without the interpreter's lock, and keep the code on disk.

    No fast-math and no contraction: every operation rounds as IEEE 754 says, in the order
    written, whatever the width of the processor's vectors. Kernels may call each other. They
    make no arrays: callers lend them what they work in, so that no views have to be counted
    (numba's `_nrt`), which would take longer than the work on a few thousand values.
    """
    config: Any = numba.config
    usual = config.CACHE_DIR
    try:
        # Read when the function is wrapped; it is other people's setting before and after.
        config.CACHE_DIR = str(FOLDER)
        options: dict[str, Any] = {"nogil": True, "fastmath": False, "_nrt": False}
        compile_ = numba.njit(cache=FOLDER is not None, error_model="numpy", **options)
        return cast(F, compile_(function))
    finally:
        config.CACHE_DIR = usual


def _folder() -> Path | None:
    """A folder of machine code for exactly these sources; None where none can be written.

    numba by itself looks only at the file of a kernel, not at those of the kernels and types that
    went into it: after an upgrade it would go on with old code or fail on what it cannot find.
    It lies beside the sources, or where numba is told to keep such code (NUMBA_CACHE_DIR): the
    sources may lie where nobody may write.
    """
    package = Path(__file__).parent
    config: Any = numba.config
    place = Path(config.CACHE_DIR) if config.CACHE_DIR else package / "__pycache__"
    digest = hashlib.blake2b(digest_size=8)
    for source in (*sorted(package.rglob("*.py")), *ROWS):
        digest.update(source.read_bytes())
    folder = place / f"kernels-{digest.hexdigest()}"
    if folder.is_dir():
        # numba wants to write there even to read.
        return folder if os.access(folder, os.W_OK) else None
    try:
        folder.mkdir(parents=True)
        others = sorted(folder.parent.glob("kernels-*"), key=lambda path: path.stat().st_mtime)
    except OSError:
        return None
    for old in others[:-FOLDERS_MAX]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


FOLDER = _folder()


# --------------------------------------------------------------------------------------------------
# Spreading independent ranges of work over threads; what is computed does not depend on it.

# Shares per thread: one that is delayed leaves its rest to the others.
SHARES = 8


# Processors that this process may use at most, if it was told so: one number, or none.
_most: list[int] = []


def use_at_most(processors: int) -> None:
    """From now on: of a process that shares its machine."""
    _most[:] = [processors]


def cores() -> int:
    """Processors that this process may use."""
    return min([*_most, _allowed()])


def _allowed() -> int:
    """By the system."""
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


def parallel_for(work: Callable[[int, int], None], ranges: int, threads: int) -> None:
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
