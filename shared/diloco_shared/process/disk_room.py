"""Whether a member's own disk takes what the member keeps there for its restarts. Pure.

A full disk stops no training, so nobody would notice it before a restart needs what was not
written. It is named as soon as the next file would find no room, hours before that file is due.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco_shared.budget.terms import shown

# Short of room for this many seconds before it is said: a neighbour's file may be on its way.
SHORT_S = 1.0
# In what a system, or a library, says of a place that has no room.
_NO_ROOM = re.compile(r"no space|quota", re.IGNORECASE)


class DiskRoom:
    """Of one place, where `what` is written now and then; `without`: what its lack means.

    `place`: a folder, or the address of a bucket, of which nobody knows how much it takes. A thread
    that writes may be another than the one that looks.
    """

    def __init__(self, place: Path | str, what: str, without: str) -> None:
        self.place = str(place)
        self.folder = None if "://" in self.place else Path(place)
        self.what = what
        self.without = without
        self.needed = 0  # bytes of the newest: the next takes as much beside those that are kept
        self.failed = ""  # why the newest was not written
        self.reason = ""  # what is amiss and what to do, in the same words until it is over
        self._writing = False
        self._since: float | None = None  # when it was first seen short of room

    @contextmanager
    def writing(self, size: int = 0) -> Iterator[None]:
        """Around an attempt to write `size` bytes, as far as that is known; OSError passes on."""
        self.needed, self._writing = size or self.needed, True
        try:
            yield
        except OSError as error:
            self.failed = str(error)
            raise
        else:
            self.failed = ""
        finally:
            self._writing = False

    def saw(self, free: int | None, now: float) -> str:
        """`free` bytes are left at `now` (seconds, monotonic): the reason; "" while all is well.

        None: the place does not say how many.
        """
        if self._writing:
            return self.reason  # its own file is on the way
        if free is None:
            pass
        elif free < self.needed:
            self._since = now if self._since is None else self._since
        elif self._since is not None:
            # Room has come; should the next attempt fail in spite of it, that says so.
            self._since, self.failed = None, ""
        short = self._since is not None and now - self._since >= SHORT_S
        if not (short or self.failed):
            self.reason = ""
        elif not self.reason:
            self.reason = self._named(free)
        return self.reason

    def _named(self, free: int | None) -> str:
        room = ""
        if free is not None:
            room = f"{self.what} needs {shown(self.needed)} and {shown(free)} are free"
        why = "; ".join(part for part in (self.failed, room) if part)
        if self._since is None and not _NO_ROOM.search(self.failed):
            return f"{self.place} takes nothing ({why}): mend that; {self.without}"
        return f"{self.place} takes nothing more ({why}): free disk space there; {self.without}"
