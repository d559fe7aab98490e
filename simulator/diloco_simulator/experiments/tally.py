"""What became of learners' time: useful tokens by learner and over time, as the tape books them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from diloco_shared.protocol.messages import Cursor, TapeRecord, TapeRound

# (virtual seconds, useful tokens so far) after each committed round.
Timeline = list[tuple[float, float]]


class Tally:
    """Tokens of a run are the mean over fragments, weighted by size (invariant I5)."""

    def __init__(self, sizes_P: Sequence[int]) -> None:
        self.shares_P = [size / sum(sizes_P) for size in sizes_P]
        self.useful: defaultdict[str, float] = defaultdict(float)  # by learner
        self.steps: Counter[str] = Counter()
        self.cursors: dict[str, Cursor] = {}  # newest merged
        self.timeline: Timeline = []
        self.merges = 0

    def stepped(self, learner: str) -> None:
        """A learner took an inner step."""
        self.steps[learner] += 1

    def record(self, record: TapeRecord, now: float) -> None:
        """The tape takes it at virtual time `now`."""
        if not isinstance(record, TapeRound) or record.outcome != "committed":
            return
        for v in record.verdicts:
            if v.outcome != "merged":
                continue
            self.merges += 1
            self.useful[v.learner] += v.tokens_new * self.shares_P[record.fragment]
            if v.cursor is not None:
                self.cursors[v.learner] = v.cursor
        self.timeline.append((now, sum(self.useful.values())))

    @property
    def merged_per_round(self) -> float:
        """Mean over the rounds that were committed; 0 if none was."""
        return self.merges / len(self.timeline) if self.timeline else 0.0

    def shares(
        self,
        names: Sequence[str],
        *,
        step_s: Callable[[int], float],
        allocated_s: Callable[[int], float],
        tokens_per_step: int,
    ) -> tuple[float, float]:
        """Of allocated time: that of steps whose tokens were merged (goodput), and of all steps."""
        seconds = sum(allocated_s(m) for m in range(len(names)))
        useful = sum(self.useful[n] / tokens_per_step * step_s(m) for m, n in enumerate(names))
        stepped = sum(self.steps[n] * step_s(m) for m, n in enumerate(names))
        return useful / seconds, stepped / seconds


def reached_s(timeline: Sequence[Sequence[float]], tokens: float) -> float:
    """When `tokens` useful tokens were there, linear between rounds; infinity if never."""
    before_s, before = 0.0, 0.0
    for now_s, useful in timeline:
        if useful >= tokens:
            share = (tokens - before) / (useful - before) if useful > before else 1.0
            return before_s + share * (now_s - before_s)
        before_s, before = now_s, useful
    return float("inf")
