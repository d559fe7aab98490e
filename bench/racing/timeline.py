"""Figures of one run from the times of its steps; pure. All times are seconds of one clock."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

# A rate is taken over so long: several rounds, so that one round's pause does not count as a fault.
WINDOW_S = 10.0
# What counts as full speed, of the worker's own before the fault.
FULL = 0.9
_LOOK_S = 0.1

Times = Sequence[float]  # ascending


def steps_between(steps: Times, begin: float, end: float) -> int:
    """Steps that ended in [begin, end)."""
    return bisect_left(steps, end) - bisect_left(steps, begin)


def speed(workers: Mapping[str, Times], skipped: int) -> float:
    """Steps per second of all workers, from everybody's `skipped`-th step to the first one's last.

    ValueError when somebody took no more steps than that.
    """
    if min(len(times) for times in workers.values()) <= skipped:
        raise ValueError(f"a worker took no more than {skipped} steps")
    begin = max(times[skipped] for times in workers.values())
    end = min(times[-1] for times in workers.values())
    return sum(steps_between(t, begin, end) for t in workers.values()) / (end - begin)


def full_speed_after(steps: Times, fault: float, end: float) -> float | None:
    """Seconds from the fault until a window at full speed begins; None when none does."""
    before = steps_between(steps, fault - WINDOW_S, fault)
    looks = int((end - WINDOW_S - fault) / _LOOK_S) + 1
    for n in range(max(looks, 0)):
        begin = fault + n * _LOOK_S
        if steps_between(steps, begin, begin + WINDOW_S) >= FULL * before:
            return n * _LOOK_S
    return None


def lost(steps: Times, fault: float, end: float) -> float:
    """Seconds' worth of its steps before the fault that a worker did not take after it."""
    before = steps_between(steps, fault - WINDOW_S, fault) / WINDOW_S
    return (end - fault) - steps_between(steps, fault, end) / before


def longest_pause(steps: Times, fault: float, end: float) -> float:
    """Longest time without a step after the fault, in seconds."""
    inside = [fault, *(t for t in steps if fault <= t < end), end]
    return max(b - a for a, b in pairwise(inside))
