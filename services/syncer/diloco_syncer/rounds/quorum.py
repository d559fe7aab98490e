"""Whose contributions are enough for a merge, and why or why not (paper section 3.2).

The one place that decides it. A round asks four times: before it opens, before it pulls, while
answers come, and before it merges; the end of a run and its status ask too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class QuorumAnswer:
    """Whether it is enough; if not, how many learners more would do. `needs`: the rule in words."""

    enough: bool
    short: int
    needs: str


class Quorum(Protocol):
    """A policy. One of your own may look at who they are: at their sites, say."""

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


@dataclass(frozen=True, slots=True)
class Readiness:
    """One live, stepping learner's steps since the previous round opened."""

    learner: str
    steps: int
    silent_s: float


def ready(live: Sequence[Readiness], steps_needed: int) -> tuple[str, ...]:
    """Those that have taken their steps for this round."""
    return tuple(r.learner for r in live if r.steps >= steps_needed)


def explain(
    live: Sequence[Readiness], answer: QuorumAnswer, *, steps_needed: int, suspect_s: float
) -> str:
    """The answer in words, naming who is awaited and how far each is."""
    there = ready(live, steps_needed)
    waiting = [r for r in live if r.learner not in there]
    parts = [f"{len(there)} of {len(live)} ready, {answer.needs}"]
    for r in waiting[:4]:  # a reason is for reading: the first four say enough
        if r.silent_s >= suspect_s:
            parts.append(f"{r.learner} is suspect for {r.silent_s:.1f} s")
        else:
            parts.append(f"{r.learner} has {r.steps} of {steps_needed} steps")
    if len(waiting) > 4:
        parts.append(f"and {len(waiting) - 4} more")
    return "; ".join(parts)
