"""How many bytes may go now: a token bucket.

Pure: the caller tells the time. A whole chunk may go as soon as anything is left, and its bytes
are owed afterwards; so over any span of s seconds at most `bytes_per_s` * s plus one burst plus one
chunk go, whatever the chunks' sizes.
"""

from dataclasses import dataclass, field

# What may go at once after a silence, in seconds of the rate: shorter than a step of training,
# long enough that a sender woken late loses nothing.
BURST_S = 0.25


@dataclass(slots=True)
class TokenBucket:
    """`bytes_per_s` 0 is no limit. Mutated only through `take`."""

    bytes_per_s: float = 0.0
    _left: float = field(default=0.0, init=False)
    _at: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        if self.bytes_per_s < 0:
            raise ValueError(f"a budget of {self.bytes_per_s} bytes per second is below 0")

    def take(self, size: int, now: float) -> float:
        """Seconds to wait before asking again; 0.0: the `size` bytes may go and are counted."""
        if not self.bytes_per_s:
            return 0.0
        burst = self.bytes_per_s * BURST_S
        self._left = min(burst, self._left + (now - self._at) * self.bytes_per_s)
        self._at = now
        if self._left > 0:
            self._left -= size
            return 0.0
        # One part in a million more: a sum of floats must not end just below what was waited for.
        return (-self._left / self.bytes_per_s) * (1 + 1e-6) + 1e-6
