"""What a reader has yielded last, to recognise a stream that lost its end and was filled again.

A killed server may have lost what it had acknowledged, and others may have written since, before
this reader is back: the sequences that it has passed then hold other messages, which it has not
seen.
"""

from collections import deque
from typing import Generic, TypeVar

M = TypeVar("M")

# Messages that are remembered. The server loses what it took in some milliseconds, or in up to two
# minutes of a stream that is not synced; what was lost of before the oldest of these stays unread.
YIELDED_MAX = 16


class Trail(Generic[M]):
    """Of one reader. By `M` a message is told from another under its sequence."""

    def __init__(self) -> None:
        self._yielded: deque[tuple[int, M]] = deque(maxlen=YIELDED_MAX)

    def add(self, seq: int, mark: M) -> None:
        """It was yielded."""
        self._yielded.append((seq, mark))

    @property
    def newest_first(self) -> list[int]:
        """Sequences to look at until `same` says that one is as it was."""
        return [seq for seq, _ in reversed(self._yielded)]

    def same(self, seq: int, mark: M) -> bool:
        """Whether this message is the one that was yielded; another takes its place."""
        if (seq, mark) in self._yielded:
            return True
        self._yielded = deque((item for item in self._yielded if item[0] < seq), YIELDED_MAX)
        return False
