"""What the newest rounds of every fragment merged: should their outcome be lost, it is undone.

A round that is committed is published at once, and the next one of its fragment waits for that. So
of a syncer that is gone with its disk a version or two are unknown at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from diloco_shared.protocol.messages import LastMerged

# Versions remembered per fragment: one that is not published, and more after a change of leaders.
KEPT = 4


@dataclass(slots=True)
class RecentMerges:
    """Of P fragments: (version, round, tokens that it merged first), oldest first."""

    merges_P: list[list[tuple[int, int, int]]] = field(default_factory=list)

    @classmethod
    def of(cls, merges_P: Sequence[Sequence[Sequence[int]]]) -> Self:
        """Inverse of `merges_P` as JSON."""
        return cls([[(m[0], m[1], m[2]) for m in merges] for merges in merges_P])

    def add(self, p: int, version: int, round_: int, tokens: int) -> None:
        """A committed round."""
        self.merges_P[p] = [*self.merges_P[p], (version, round_, tokens)][-KEPT:]

    def undo(self, p: int, version: int) -> tuple[frozenset[int], int]:
        """(rounds, tokens) of the versions above `version`, which are no more."""
        gone = [m for m in self.merges_P[p] if m[0] > version]
        self.merges_P[p] = [m for m in self.merges_P[p] if m[0] <= version]
        return frozenset(m[1] for m in gone), sum(m[2] for m in gone)


def without(rounds: frozenset[int], merged: dict[str, LastMerged]) -> dict[str, LastMerged]:
    """Who was merged last, had there not been these rounds."""
    left: dict[str, LastMerged] = {}
    for learner, (life, newest, before) in merged.items():
        known = [n for n in (newest, before) if n >= 0 and n not in rounds]
        if known:
            left[learner] = (life, known[0], known[1] if len(known) > 1 else -1)
    return left
