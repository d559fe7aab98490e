"""Corpora of a cache that nobody uses: how much room they hold, and how they give it up.

Whoever reads a corpus of the cache holds a lock on a file of it (`hold`) for as long as that is
open. To remove what is open would make no room, and its learner would prepare it anew for hours
when it starts again. Nobody holds it while its learner does so: what was used a while ago counts as
used. Builds before this one hold no such lock: theirs count as unused after that.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from diloco_shared.corpora.folders import Busy, locked
from diloco_shared.corpora.prepare import removed
from diloco_shared.corpora.prepared import Corpus, is_prepared
from diloco_shared.corpora.token_files import TokenFile, is_held

# Names of folders that the cache made: no others are looked at, let alone removed.
_KEY = re.compile(r"[0-9a-f]{32}")
# Of a corpus: learners keep it open for as long as they train. Every corpus has one.
_HELD = "train-00000.bin"

# For so long after it was used last, in seconds: in less, learners are started again, also those of
# a machine that was, and a check is followed by its run. It says so by its time: `TokenFile.hold`.
USED_S = 3600


def hold(corpus: Corpus) -> None:
    """It is in use until nobody of this process has its training tokens open any more."""
    for part in corpus.train.parts[:1]:
        if isinstance(part, TokenFile):
            part.hold()


def kept(cache: Path) -> list[Path]:
    """The cache's corpora, the least recently used first; what died half-way comes before all."""
    with suppress(OSError):  # there is no cache yet
        ours = [path for path in cache.iterdir() if _KEY.fullmatch(path.name) and path.is_dir()]
        return [path for _, path in sorted((_used(path), path) for path in ours)]
    return []


def unused(cache: Path, but: Path) -> list[Path]:
    """Those that nobody writes, has open or has used lately, without `but`; the least recently used
    first."""
    found = []
    for path in kept(cache):
        with _alone(path) as alone:
            if alone and path != but:
                found.append(path)
    return found


def let_go(folder: Path) -> bool:
    """Remove it, unless somebody has begun to use it; whether it gave way."""
    with suppress(OSError), _alone(folder) as alone:
        if alone:
            removed(folder)
        return alone
    return False


def bytes_of(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # removed meanwhile
            continue
    return total


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Under its lock, where nobody else uses it, nor has lately; False, perhaps without the lock,
    where somebody does.

    Nobody waits here: whoever has the lock may have it for hours.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, wait=False))
            alone = not is_held(folder / _HELD) and not _lately(folder)
        except (Busy, OSError):
            alone = False
        yield alone


def _lately(folder: Path) -> bool:
    """Whether a locked one was. Its lock was made just now: that is the disk's own clock, whoever
    shares the disk."""
    now = (folder.parent / f".{folder.name}.lock").stat().st_mtime_ns
    return _used(folder) > now - USED_S * 10**9


def _used(folder: Path) -> int:
    """When it was used last; what died half-way comes first."""
    try:
        return folder.stat().st_mtime_ns if is_prepared(folder) else 0
    except OSError:  # removed meanwhile
        return 0
