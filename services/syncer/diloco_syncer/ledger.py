"""Where every token went (invariant I5), in whole tokens per fragment.

A learner's step counts as merged once per fragment, the first time; a contribution that begins
before the last merged one ended adds only its new part. Bounded by the number of learners: an
incarnation that is over never merges again.
"""

from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(slots=True)
class Ledger:
    """Token counts of one shard's fragments."""

    merged_P: list[int]
    # Per fragment: learner -> (incarnation, cumulative tokens merged up to).
    marks_P: list[dict[str, tuple[int, int]]]
    # learner -> (incarnation, cumulative tokens processed).
    current: dict[str, tuple[int, int]] = field(default_factory=dict)
    processed_before: int = 0  # by incarnations that are over

    @classmethod
    def empty(cls, fragments: int) -> Self:
        return cls([0] * fragments, [{} for _ in range(fragments)])

    def tokens_new(
        self, fragment: int, learner: str, incarnation: int, tokens_from: int, tokens_to: int
    ) -> int:
        """Tokens in (tokens_from, tokens_to] that no merge of `fragment` has counted."""
        marked_incarnation, marked_to = self.marks_P[fragment].get(learner, (-1, 0))
        if marked_incarnation == incarnation:
            tokens_from = max(tokens_from, marked_to)
        return max(0, tokens_to - tokens_from)

    def merge(
        self, fragment: int, learner: str, incarnation: int, tokens_from: int, tokens_to: int
    ) -> None:
        """Count a merged contribution."""
        self.merged_P[fragment] += self.tokens_new(
            fragment, learner, incarnation, tokens_from, tokens_to
        )
        marked_incarnation, marked_to = self.marks_P[fragment].get(learner, (-1, 0))
        if marked_incarnation == incarnation:
            tokens_to = max(tokens_to, marked_to)  # a mark never goes back: no token counts twice
        self.marks_P[fragment][learner] = (incarnation, tokens_to)
        self.saw(learner, incarnation, tokens_to)

    def saw(self, learner: str, incarnation: int, tokens: int) -> None:
        """A learner reports `tokens` processed so far in its incarnation."""
        known, counted = self.current.get(learner, (incarnation, 0))
        if incarnation < known:
            return
        if incarnation > known:
            self.processed_before += counted
            counted = 0
        self.current[learner] = (incarnation, max(counted, tokens))

    @property
    def processed(self) -> int:
        """Tokens that learners are known to have trained on."""
        return self.processed_before + sum(tokens for _, tokens in self.current.values())

    def useful(self, sizes_P: list[int]) -> int:
        """Merged tokens: the mean over fragments weighted by their number of values."""
        total = sum(sizes_P)
        if not total:
            return 0
        return sum(n * size for n, size in zip(self.merged_P, sizes_P, strict=True)) // total

    def meta(self) -> dict[str, Any]:
        return {
            "merged": list(self.merged_P),
            "marks": [{k: list(v) for k, v in marks.items()} for marks in self.marks_P],
            "current": {k: list(v) for k, v in self.current.items()},
            "before": self.processed_before,
        }

    @classmethod
    def restore(cls, meta: dict[str, Any]) -> Self:
        return cls(
            list(meta["merged"]),
            [{k: (v[0], v[1]) for k, v in marks.items()} for marks in meta["marks"]],
            {k: (v[0], v[1]) for k, v in meta["current"].items()},
            meta["before"],
        )
