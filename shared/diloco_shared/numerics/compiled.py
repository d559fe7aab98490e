"""Compiling numeric kernels to machine code."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])

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
    """
    package = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    folder = package / "__pycache__" / f"kernels-{digest.hexdigest()}"
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
