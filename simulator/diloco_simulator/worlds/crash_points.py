"""One small calm world again and again, in which one process dies at another place each time.

A place is anything that a process of a role is about to do and that others can see: every message,
every request and every thread's work. `Options.dies_at` names it by role and number.
"""

from collections import Counter
from dataclasses import replace

from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played

ROLES = ("leader", "standby", "learner", "coordinator")
# The seed of the small world; it was chosen by nobody.
SEED = 1


def small(role: str = "", n: int = 0) -> Options:
    """Two learners, a leader and a standby, and every duty; once it goes back to a checkpoint."""
    return Options.calm(
        learners=2,
        quorum=1,
        fragments=2,
        steps=18,
        safety_s=20.0,
        syncers=2,
        checkpoint_every_steps=6,
        restores=1,
        snapshot_every_rounds=2,
        keyframe_every=2,
        codec_up="int4",
        codec_down="int8",
        dies_at=(role, n),
    )


def case(role: str = "", n: int = 0) -> Case:
    """The small world, in which the n-th passing of a role is its last; (): nobody dies."""
    return replace(Case.drawn(SEED, small(role, n)), exports=True)


def play(role: str = "", n: int = 0) -> WorldResult:
    return played(case(role, n))


def places(every: int, passings: Counter[str]) -> list[tuple[str, int]]:
    """Each `every`-th place to die, of every role."""
    return [(role, n) for role in ROLES for n in range(1, passings[role] + 1, every)]
