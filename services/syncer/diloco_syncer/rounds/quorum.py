"""Whether enough learners are ready for a round, and why or why not (paper section 3.2)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Readiness:
    """One live, stepping learner's steps since the previous round opened."""

    learner: str
    steps: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """`reached`: K are ready."""

    reached: bool
    ready: tuple[str, ...]


def quorum(live: Sequence[Readiness], *, needed: int, steps_needed: int) -> Answer:
    """K learners with `steps_needed` inner steps make the quorum."""
    ready = tuple(r.learner for r in live if r.steps >= steps_needed)
    return Answer(len(ready) >= needed, ready)


def explain(
    live: Sequence[Readiness], answer: Answer, *, needed: int, steps_needed: int, suspect_s: float
) -> str:
    """The answer in words, naming who is awaited and how far each is."""
    ready = set(answer.ready)
    waiting = [r for r in live if r.learner not in ready]
    parts = [f"{len(answer.ready)} of {len(live)} ready, {needed} needed"]
    for r in waiting[:4]:  # a reason is for reading: the first four say enough
        if r.silent_s >= suspect_s:
            parts.append(f"{r.learner} is suspect for {r.silent_s:.1f} s")
        else:
            parts.append(f"{r.learner} has {r.steps} of {steps_needed} steps")
    if len(waiting) > 4:
        parts.append(f"and {len(waiting) - 4} more")
    return "; ".join(parts)
