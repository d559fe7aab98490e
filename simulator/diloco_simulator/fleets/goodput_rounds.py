"""Goodput where learners may wait for each other: quorums above 1, and unequal speeds.

A learner works chunks of H/P steps. A round is due when the first learner it used last finishes its
next chunk, and committed once K learners have one that no round has used, and after a grace window
(paper, Eq. 3) for the others. A learner may run tau steps past its chunk before it stands until
that round is committed: K = M makes everybody stand for the slowest, K = 1 nobody for anybody.

Chunks of one learner are interrupted as in goodput.py. What waits is not interrupted.
"""

from dataclasses import dataclass

import numpy as np

from diloco_planner.bandwidth import BadSetting
from diloco_planner.goodput_model import Failures
from diloco_simulator.fleets.goodput import Cell, Estimate, Floats, Replicas

WARMUP = 0.1  # share of the rounds that is not counted
JITTER_FLOOR = 0.1  # least share of a mean step time that a draw may take
DONE_S = 1e-9  # of work: less is rounding


@dataclass(frozen=True, slots=True)
class Coupling:
    """How learners keep step; speeds are relative and repeated over the learners."""

    quorum: int = 1  # K
    step_s: float = 1.0  # T, at speed 1
    steps_per_round: int = 1  # H / P
    overlap_steps: int = 2  # tau
    grace_factor: float = 0.8  # gamma
    sync_s: float = 0.0  # transfer, merge and publication of a round
    speeds: tuple[float, ...] = (1.0,)
    jitter: float = 0.0  # standard deviation of a step's time, as a share of it

    def __post_init__(self) -> None:
        if not self.speeds or not all(0 < speed < float("inf") for speed in self.speeds):
            raise BadSetting("speeds must be positive numbers")
        for name in ("quorum", "step_s", "steps_per_round"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadSetting(f"{name} must be above 0")
        for name in ("overlap_steps", "grace_factor", "sync_s", "jitter"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadSetting(f"{name} must be at least 0")

    @property
    def apart(self) -> bool:
        """No learner can ever wait for another one: goodput.py is enough, and far faster."""
        return self.quorum == 1

    def over(self, learners: int) -> Floats:
        """Speeds of `learners`."""
        return np.resize(np.asarray(self.speeds, dtype=np.float64), learners)


@dataclass(frozen=True, slots=True)
class Coupled:
    """Over seeds: shares of time, and learners merged per round."""

    goodput: Estimate
    merged: float


def simulate_rounds(
    cell: Cell,
    failures: Failures,
    coupling: Coupling,
    *,
    seed: int = 0,
    seeds: int = 16,
    rounds: int = 2000,
) -> Coupled:
    """Goodput of a Decoupled `cell` under `coupling`, over `rounds` rounds of each seed.

    Data-parallel is the case of K = M, tau = 0 and one step per round, on the whole of the chips.
    """
    learners = cell.learners
    if not 1 <= coupling.quorum <= learners:
        raise BadSetting(f"quorum must be between 1 and the number of learners ({learners})")
    rng = np.random.default_rng(seed)
    count = seeds * learners
    fleet = Replicas.fresh(
        failures, np.full(count, cell.chips / learners), np.ones(count, dtype=np.bool_), rng
    )
    pace_s = np.tile(coupling.step_s / coupling.over(learners), seeds)
    slack_s = coupling.overlap_steps * coupling.step_s
    everyone = np.arange(count)
    useful = _work(fleet, everyone, pace_s, coupling)
    began, useful_before, merged = np.zeros(count), np.zeros(count), 0
    due = np.zeros(seeds)
    for number in range(rounds):
        ready_SxM = fleet.now.reshape(seeds, learners)
        ordered = np.sort(ready_SxM, axis=1)
        quorum_at = np.maximum(ordered[:, coupling.quorum - 1], due)
        # Eq. 3 with the values of this round in place of moving averages, at most one step.
        left = slack_s - (quorum_at - np.maximum(ordered[:, 0], due)) - coupling.sync_s
        grace = np.clip(coupling.grace_factor * left, 0.0, coupling.step_s)
        closed = np.minimum(quorum_at + grace, np.maximum(ordered[:, -1], quorum_at))
        used = np.flatnonzero((ready_SxM <= closed[:, None]).ravel())
        merged += len(used)
        if number == int(WARMUP * rounds):
            began, useful_before = fleet.now.copy(), useful.copy()
        # A quorum of one is the first there: it waits for nobody, its grace is the syncer's.
        if not coupling.apart:
            adopted = (closed + coupling.sync_s - slack_s)[used // learners]
            fleet.now[used] = np.maximum(fleet.now[used], adopted)
        useful[used] += _work(fleet, used, pace_s[used], coupling)
        due = np.full(seeds, np.inf)
        np.minimum.at(due, used // learners, fleet.now[used])
    share = ((useful - useful_before) / (fleet.now - began)).reshape(seeds, learners)
    return Coupled(Estimate.of(share.mean(axis=1)), merged / (rounds * seeds))


def _work(fleet: Replicas, who: np.typing.NDArray[np.intp], pace_s: Floats, c: Coupling) -> Floats:
    """Let `who` finish one chunk each, through whatever interrupts it; its useful seconds."""
    noise = c.jitter / c.steps_per_round**0.5 * fleet.rng.standard_normal(len(who))
    left = c.steps_per_round * pace_s * np.maximum(1.0 + noise, JITTER_FLOOR)
    useful = np.zeros(len(who))
    active = np.arange(len(who))
    while len(active):
        present = 1.0 - fleet.away(who[active])
        stepped, _, _ = fleet.step(who[active], left[active])
        left[active] -= stepped
        useful[active] += stepped * present
        active = active[left[active] > DONE_S]
    return useful


def lockstep(coupling: Coupling, learners: int, *, seed: int = 0, steps: int = 10_000) -> float:
    """Share of time left of a synchronous job over islands, each step as long as its slowest."""
    rng = np.random.default_rng(seed)
    noise = 1.0 + coupling.jitter * rng.standard_normal((steps, learners))
    step_s = np.maximum(noise, JITTER_FLOOR) / coupling.over(learners)
    return float(step_s.mean() / step_s.max(axis=1).mean())
