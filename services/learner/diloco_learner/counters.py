"""What a learner has done since it adopted each fragment (paper section 2: c_steps, c_tokens).

Adoption of a fragment resets that fragment's counters and no others. All counts are exact
integers within one incarnation.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Steps and tokens of one incarnation, and where each of P fragments was adopted.

    A skipped step is a step with its tokens: what it read is read. `adopted_P` holds versions (-1:
    none), `step_at_P` and `tokens_at_P` the totals at adoption.
    """

    adopted_P: list[int]
    step: int = 0
    tokens: int = 0
    skipped: int = 0  # of the steps, as far as their losses are known
    step_at_P: list[int] = field(init=False)
    tokens_at_P: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.step_at_P = [self.step] * len(self.adopted_P)
        self.tokens_at_P = [self.tokens] * len(self.adopted_P)

    @property
    def complete(self) -> bool:
        """Whether every fragment is adopted."""
        return min(self.adopted_P) >= 0

    def stepped(self, tokens: int) -> None:
        """One inner step on `tokens` tokens is done."""
        assert tokens >= 0, f"a step of {tokens} tokens"
        self.step += 1
        self.tokens += tokens

    def adopt(self, p: int, version: int) -> None:
        """Fragment `p` is now based on `version`; its counters start again."""
        assert version > self.adopted_P[p], (
            f"fragment {p}: version {version} after {self.adopted_P[p]}"
        )
        self._base(p, version)

    def void(self) -> None:
        """Every adopted version belongs to an older epoch: it counts as none."""
        for p in range(len(self.adopted_P)):
            self._base(p, -1)

    def c_steps(self, p: int) -> int:
        """Inner steps since fragment `p` was adopted; 0 while it is not."""
        return self.step - self.step_at_P[p] if self.adopted_P[p] >= 0 else 0

    def c_tokens(self, p: int) -> int:
        """Tokens processed since fragment `p` was adopted; 0 while it is not."""
        return self.tokens - self.tokens_at_P[p] if self.adopted_P[p] >= 0 else 0

    def covers(self, versions_P: tuple[int, ...]) -> bool:
        """Whether every fragment is adopted at these versions or newer ones."""
        return len(versions_P) == len(self.adopted_P) and all(
            have >= want for have, want in zip(self.adopted_P, versions_P, strict=True)
        )

    def _base(self, p: int, version: int) -> None:
        self.adopted_P[p] = version
        self.step_at_P[p], self.tokens_at_P[p] = self.step, self.tokens
