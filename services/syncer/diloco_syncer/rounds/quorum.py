"""Who is ready for a round, and in words why that is enough or not (paper section 3.2).

What is enough says the policy, `diloco_shared.spec.quorum`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_shared.spec.quorum import QuorumAnswer


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
