"""Which fault hits whom: drawn from a seed, so that the same storm can be had again."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Weights of faults, and of whom they hit.
KINDS = {"kill": 6, "hang": 3, "slow": 1}
ROLES = {"learner": 6, "syncer": 2, "coordinator": 1, "nats": 1}
# Seconds of hangs (a leader's lease is 3 s, a learner's 5 s: both sides of them), and of slowness.
HANG_S, SLOW_S = (0.5, 8.0), (4.0, 12.0)
SLOW_FACTOR = 4.0
# Weight of cut links, their seconds (both sides of both leases again), and which ways are cut.
CUT, CUT_S, WAYS = 4, (1.0, 10.0), ("both", "both", "up", "down")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, at a place on the schedule: seconds or rounds, as the storm is drawn."""

    at: float
    kind: str
    target: str
    settings: dict[str, Any]


def storm(
    seed: int,
    *,
    mean: float,
    end: float,
    learners: Sequence[str],
    syncers: Sequence[str],
    links: Sequence[str] = (),
) -> list[Fault]:
    """A Poisson process of faults up to `end`, `mean` apart on average.

    `links`: members that are behind a link which may be cut.
    """
    rng = random.Random(seed)
    kinds = {**KINDS, "cut": CUT} if links else KINDS
    members = {
        "learner": list(learners),
        "syncer": list(syncers),
        "coordinator": ["coordinator"],
        "nats": ["nats"],
    }
    faults, at = [], 0.0
    while (at := at + rng.expovariate(1 / mean)) < end:
        role = rng.choices(list(ROLES), list(ROLES.values()))[0]
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        reached = [name for name in members[role] if name in links]
        if kind == "cut" and not reached:
            kind = "hang"
        if kind == "slow" and role != "learner":
            kind = "hang"  # only a training loop can be slow
        settings: dict[str, Any] = {}
        if kind == "hang":
            settings = {"duration_s": round(rng.uniform(*HANG_S), 1)}
        elif kind == "slow":
            settings = {"duration_s": round(rng.uniform(*SLOW_S), 1), "factor": SLOW_FACTOR}
        elif kind == "cut":
            settings = {"duration_s": round(rng.uniform(*CUT_S), 1), "way": rng.choice(WAYS)}
        target = rng.choice(reached if kind == "cut" else members[role])
        faults.append(Fault(round(at, 2), kind, target, settings))
    return faults
