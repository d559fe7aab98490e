"""Does a series of measurements grow? A rule that outliers and the teeth of a saw do not fool."""

import statistics
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from diloco_shared.budget.overhead import ROUND, ROUND_LEARNER
from diloco_shared.budget.streams import RECORDS_IN_STREAM

# (seconds since the beginning, value, age of its process or of the stack in seconds)
Series = list[tuple[float, float, float]]

# Lives younger than this are still starting, in seconds.
WARM_S = 60.0
# Learners of a soak. And what lies on a tape before any of it is archived: so many records, each as
# large as its budget says. It is twice what records of short names take, so that there is room for
# those that no snapshot covers, and for those that a standby has yet to read.
LEARNERS = 3
TAPE_BYTES = RECORDS_IN_STREAM * (ROUND + LEARNERS * ROUND_LEARNER)
# What may come and go, by kind of series, and why.
SLACK = {
    "rss": 48 << 20,  # one round's contributions, an evaluation's batch, allocator's leftovers
    # A lane is opened once more payloads are under way together than before, twelve a process at
    # most, and kept; the server keeps those of a cut link until it has pinged twice.
    "connections": 20,
    "files open": 12,  # block files of streams that are written and read just now
    "stream TAPE-": TAPE_BYTES,  # before "stream", which it begins with
    "stream": 24 << 20,  # contributions and deltas between two snapshots, or keyframes
    "files on disk": 80,  # checkpoints of many small files, made and removed
    "bytes on disk": 96 << 20,  # block files of the message server are freed whole
}
SHARE = 0.1
# Not judged: a log that is bounded by its stream's limit, and fills up to that.
LOGS = ("stream EVENTS",)
# Fewer points say nothing.
POINTS_MIN = 8


def slope(points: Series) -> float:
    """Theil-Sen: the median slope of all pairs, per second."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0


def verdicts(series: Mapping[str, Series]) -> list[dict[str, Any]]:
    """One row per series that has enough points: how much it grew, and the bound."""
    rows = []
    for name, points in sorted(series.items()):
        if name.startswith(LOGS) or not points:
            continue
        kind = next(k for k in SLACK if name.startswith(k))
        begin = points[-1][0] / 3
        late = [p for p in points if p[0] >= begin and (kind != "rss" or p[2] >= WARM_S)]
        if len(late) < POINTS_MIN:
            continue
        middle = statistics.median(value for _, value, _ in late)
        grew = slope(late) * (late[-1][0] - begin)
        bound = max(SHARE * middle, SLACK[kind])
        rows.append(
            {
                "series": name,
                "points": len(late),
                "median": middle,
                "largest": max(value for _, value, _ in late),
                "grew": grew,
                "bound": bound,
                "flat": grew <= bound,
            }
        )
    return rows
