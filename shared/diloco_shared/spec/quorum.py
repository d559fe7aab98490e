"""Whose contributions are enough for a merge (paper section 3.2).

The one place that decides it. A round asks four times: before it opens, before it pulls, while
answers come, and before it merges; the end of a run and its status ask too, and the coordinator
asks what another K would mean for a run as it stands. A policy of your own is a class here, which
`policy` returns. One that is content with fewer than K changes the simulator's promise I3, too,
which states the paper's rule once more.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class QuorumAnswer:
    """Whether it is enough; if not, how many learners more would do. `needs`: the rule in words."""

    enough: bool
    short: int
    needs: str


class Quorum(Protocol):
    """A policy. It is told the names of learners, and nothing else of them."""

    def answer(self, learners: Collection[str]) -> QuorumAnswer: ...


@dataclass(frozen=True, slots=True)
class AtLeast:
    """K learners, whoever they are: the paper's rule."""

    k: int

    def answer(self, learners: Collection[str]) -> QuorumAnswer:
        short = max(self.k - len(learners), 0)
        return QuorumAnswer(not short, short, f"{self.k} needed")


def policy(k: int) -> Quorum:
    """What is in force while the run's quorum is `k`."""
    return AtLeast(k)


def within_reach(learners: Collection[str]) -> int:
    """The K with which these learners are enough, as many as they are; 0 where none would do."""
    k = len(learners)
    return k if k and policy(k).answer(learners).enough else 0
