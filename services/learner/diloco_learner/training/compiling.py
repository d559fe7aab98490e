"""Of the learners of one machine that want the same program at once, one compiles it.

They begin together, on the same model. Each would take its share of the same processors for the
same work, and be ready as late as the last. So one compiles while the others wait, and they read
what it has kept (kept.py).
"""

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jax

# So often whoever compiles shows that it still does, in seconds.
BEAT_S = 1.0
# Whoever shows nothing for so many times as long hangs: the others compile, too.
BEATS_MISSED = 10
# Programs that share a lock wait for each other now and then, and there are no more files.
_LOCKS = 256


def compiled(lowered: Any) -> Any:
    """The program of `jax.jit(...).lower(...)`, from those that are kept if it is there.

    Where another process compiles it right now, this one waits for that, and no longer.
    """
    lock = _lock_of(lowered)
    with nullcontext() if lock is None else _turn(lock):
        return lowered.compile()


def _lock_of(lowered: Any) -> Path | None:
    """None where nothing is kept, or where others are needed to compile, as among several hosts."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or jax.process_count() > 1:
        return None
    digest = hashlib.blake2b(lowered.as_text().encode(), digest_size=8).digest()
    return Path(folder) / f".compiling-{int.from_bytes(digest) % _LOCKS}"


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """As the one that compiles, or when it is done. A folder that takes no lock hinders nobody."""
    from filelock import FileLock, Timeout

    own = FileLock(lock, timeout=0)
    try:
        own.acquire()
    except Timeout:
        _wait(lock)
        yield
        return
    except OSError:
        yield
        return
    done = threading.Event()
    beats = threading.Thread(target=_beat, args=(lock, done), daemon=True)
    try:
        beats.start()
        yield
    finally:
        done.set()
        own.release()


def _beat(lock: Path, done: threading.Event) -> None:
    while not done.wait(BEAT_S):
        with suppress(OSError):
            os.utime(lock)


def _wait(lock: Path) -> None:
    """Until nobody compiles, or whoever does shows nothing any more."""
    from filelock import FileLock, Timeout

    seen, missed = _beaten(lock), 0
    while missed < BEATS_MISSED:
        try:
            with FileLock(lock, timeout=BEAT_S):
                return
        except Timeout:
            now = _beaten(lock)
            seen, missed = now, missed + 1 if now == seen else 0
        except OSError:
            return


def _beaten(lock: Path) -> int:
    try:
        return lock.stat().st_mtime_ns
    except OSError:
        return 0
