"""What a report takes from the closed rounds of a run, of which a long one has millions. Pure."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from diloco_cli.lanes import NOBODY, Span, lanes

Rows = Sequence[dict[str, Any]]
T = TypeVar("T")

# Points of one kind in a picture: more than a screen has columns. A page with so many of each of
# four outcomes has some MB, half of which is what draws it.
POINTS_MAX = 4000
# What became of a learner in a round.
OUTCOMES = ("merged", "missed", "refused", "ineligible")


class Thinned(Generic[T]):
    """At most `most` of what comes, evenly spread over it: `kept` is every `every`-th of `seen`."""

    def __init__(self, most: int = POINTS_MAX) -> None:
        self.most, self.every, self.seen = most, 1, 0
        self.kept: list[T] = []

    def add(self, value: T) -> None:
        if self.seen % self.every == 0:
            self.kept.append(value)
        self.seen += 1
        if len(self.kept) > self.most:
            self.kept, self.every = self.kept[::2], 2 * self.every


class Tally:
    """Counters and points of the rounds that were added, oldest first.

    `merged`: who was in a merge, and when last. `asked` and `late`: contributions of all but the
    victim. Of the victim of the first fault: rounds that were committed `while_down`, how many of
    its contributions were merged `since`, and when the first of them was (`back_at`).
    """

    def __init__(self, run: dict[str, Any], events: Rows) -> None:
        found = activities(run, None, events)
        fault = fault_of(events, found)
        self.victim = None if fault is None else str(fault["data"]["target"])
        self.fault_at = float("inf") if fault is None else float(fault["at"])
        lane = found.get(str(self.victim), ())
        steps = (s.began for s in lane if s.activity == "stepping" and s.began > self.fault_at)
        self.returned_at = next(steps, float("inf"))
        self.committed = self.skipped = self.asked = self.late = self.while_down = self.since = 0
        self.back_at: float | None = None
        self.newest_at: float | None = None
        self.merged: dict[str, float] = {}
        self.commits = Thinned[float]()
        # By outcome: when, who, and a sentence.
        self.verdicts = {outcome: Thinned[tuple[float, str, str]]() for outcome in OUTCOMES}

    @classmethod
    def of(cls, run: dict[str, Any], rounds: Iterable[dict[str, Any]], events: Rows) -> "Tally":
        found = cls(run, events)
        for closed in rounds:
            found.add(closed)
        return found

    def add(self, closed: dict[str, Any]) -> None:
        """The next round, as the API tells it."""
        at = self.newest_at = float(closed["at"])
        became = Counter(v["outcome"] for v in closed["verdicts"] if v["learner"] != self.victim)
        # Of who was not asked nothing can be late. A round that was skipped counts too.
        self.asked += became.total() - became["ineligible"]
        self.late += became["missed"]
        for v in closed["verdicts"]:
            point = at, v["learner"], f"round {closed['round']}: {v['reason']}"
            self.verdicts.setdefault(v["outcome"], Thinned()).add(point)
        if closed["outcome"] != "committed":
            self.skipped += 1
            return
        merged = {v["learner"] for v in closed["verdicts"] if v["outcome"] == "merged"}
        self.committed += 1
        self.merged |= dict.fromkeys(merged, at)
        self.commits.add(at)
        if self.fault_at < at < self.returned_at:
            self.while_down += 1
        if at > self.returned_at and self.victim in merged:
            self.since += 1
            self.back_at = at if self.back_at is None else self.back_at


def fault_of(events: Rows, learners: Container[str]) -> dict[str, Any] | None:
    """The first fault that took a learner away, and no syncer: a kill or a hang."""
    applied = (e for e in events if e["kind"] == "fault-applied")
    away = (e for e in applied if e["data"]["kind"] in ("kill", "hang"))
    return next((e for e in away if e["data"]["target"] in learners), None)


def activities(
    run: dict[str, Any],
    newest_at: float | None,
    events: Rows,
    merged: Mapping[str, float] = NOBODY,
) -> dict[str, list[Span]]:
    """Who did what when, up to the newest event, or the newest round if that closed later.

    `merged`: when a contribution of a learner was merged last.
    """
    known = [] if newest_at is None else [newest_at]
    until = max(known + [float(e["at"]) for e in events[-1:]], default=0.0)
    lease_s = float(run["spec"].get("membership", {}).get("lease_s", 0.0))
    return lanes(events, until=until, lease_s=lease_s, merged=merged)
