"""Compiled programs on disk: a process that starts again need not compile them again.

JAX keeps them: FOLDER/<digest of the processor>/<program>-cache, and beside each a file that says
when it was used last. Every process of a machine may use the same folder: whoever reads or writes
has the lock.
"""

import hashlib
import platform
from pathlib import Path
from typing import Any

# Unless the settings say otherwise. A run's programs take a megabyte on a CPU and some dozens on a
# GPU, so that these are many runs; and it is little beside one checkpoint of a model that takes
# long to compile. The least recently used programs are removed above it.
KEPT_BYTES_MAX = 1 << 30
# In place of a folder: programs are not kept.
OFF = "off"
# JAX's own names.
_LOCK, _PROGRAM, _USED = ".lockfile", "-cache", "-atime"
# A program is read or written in less. JAX waits as long, for every program: where somebody who
# hangs has the lock, programs are compiled instead.
_LOCK_S = 10.0
# Of the limit, what a process writes before it looks again whether there is room.
_UNSEEN = 64
# More than the file system keeps beside a file's name: such a file needs room of its own.
_PROBE_BYTES = 1 << 16


def keep_on_disk(folder: Path, bytes_max: int = KEPT_BYTES_MAX) -> str:
    """From now on read compiled programs from `folder`, and write them there: at most `bytes_max`.

    Why that cannot be done, in words, or "". Then programs are compiled, and all else is as usual;
    so it is where the disk is full later on, but for a warning of JAX.
    """
    # Not above: settings name this file's limits, and who reads them may have neither.
    import jax
    from filelock import FileLock

    own = folder / _processor()
    try:
        own.mkdir(parents=True, exist_ok=True)
        with FileLock(own / _LOCK, timeout=_LOCK_S):
            _remove_unusable(own)
            probe = own / ".probe"
            try:
                probe.write_bytes(bytes(_PROBE_BYTES))
            finally:
                probe.unlink(missing_ok=True)
    except TimeoutError:
        return f"compiled programs are not kept: another process holds {own / _LOCK} and hangs"
    except OSError as error:
        return (
            f"compiled programs are not kept: {own} cannot be written ({error.strerror or error}). "
            "Make room there, or name another folder in DILOCO_CACHE; 'off' does without"
        )
    for name, value in (
        ("jax_compilation_cache_dir", str(own)),
        ("jax_compilation_cache_max_size", bytes_max),
        ("jax_persistent_cache_min_compile_time_secs", 0.0),
        ("jax_persistent_cache_min_entry_size_bytes", 0),
    ):
        jax.config.update(name, value)
    _look_seldom()
    return ""


def _look_seldom() -> None:
    """JAX reads when every program was used before it writes one, to remove the oldest if there is
    no room: of a thousand programs that takes a quarter of a second, each time. A process makes
    room for some at once instead, and looks again once it has written as much."""
    from jax._src.lru_cache import LRUCache

    look: Any = LRUCache._evict_if_needed
    if look.__module__ == __name__:
        return

    def seldom(self: Any, *, additional_size: int = 0) -> None:
        left = getattr(self, "bytes_unseen", 0) - additional_size
        if self.eviction_enabled and left < 0:
            room = max(additional_size, self.max_size // _UNSEEN)
            look(self, additional_size=room)
            left = room - additional_size
        self.bytes_unseen = left

    LRUCache._evict_if_needed = seldom  # type: ignore[method-assign]


def keep_for_user(given: str) -> str:
    """As `keep_on_disk`, for whoever is no learner with a data folder: in the folder that is
    `given` (DILOCO_CACHE), or else in the user's own cache. A folder that JAX was told stays."""
    import jax

    if given == OFF or (not given and jax.config.values["jax_compilation_cache_dir"]):
        return ""
    usual = Path.home() / ".cache" / "decoupled-diloco" / "compiled"
    return keep_on_disk(Path(given) if given else usual)


def _processor() -> str:
    """Programs use every instruction of the processor that compiled them: another one that has the
    same folder, over a network, must not run them."""
    known = [platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        # What a processor can do, as x86 and Arm call it.
        known += [line for line in lines if line.startswith(("flags", "Features"))][:1]
    except OSError:  # no such file on this system
        pass
    return hashlib.blake2b("\n".join(known).encode(), digest_size=8).hexdigest()


def _remove_unusable(folder: Path) -> None:
    """Whoever dies in writing a program leaves it without the time of its use. JAX would fail on it
    whenever it makes room, and never write it again."""
    for program in folder.glob(f"*{_PROGRAM}"):
        used = folder / f"{program.name.removesuffix(_PROGRAM)}{_USED}"
        if not used.exists() or program.stat().st_size == 0:
            program.unlink()
            used.unlink(missing_ok=True)
