"""How many chunks may be unanswered at a time, and how long one may take.

On a fast link the window opens within a few answers. On a slow one it stays where queueing alone
takes LATENCY_S: more would add no throughput, but delay pings and heartbeats behind it until the
connection is taken for dead, and let chunks time out that are only waiting their turn.

Pure: the caller measures and tells. Slow start and additive increase as in TCP, with latency as
the sign of congestion, since the link below loses nothing.
"""

from dataclasses import dataclass, field

# The window grows while answers take less, and shrinks while they take more than twice this:
# below the 10 s that two missed pings take, and above any round trip.
LATENCY_S = 1.0
# In flight at the beginning: one under way, one being stored.
_START = 2.0
# The time limit is at least this many times the usual latency: queues may double twice.
_SPARE = 4.0
# A silent server gets no more patience than this, whatever it took before.
TIMEOUT_S_MAX = 60.0


@dataclass(slots=True)
class Pace:
    """Mutated only through `answered` and `timed_out`."""

    window_max: int
    timeout_s_min: float
    _window: float = field(default=_START, init=False)
    _latency_s: float = field(default=0.0, init=False)
    _timeout_s: float = field(default=0.0, init=False)

    @property
    def window(self) -> int:
        """Chunks that may be unanswered now, 1 to `window_max`."""
        return max(1, min(self.window_max, int(self._window)))

    @property
    def timeout_s(self) -> float:
        """Seconds to wait for an answer now."""
        wanted = max(self.timeout_s_min, self._timeout_s, _SPARE * self._latency_s)
        return min(wanted, max(TIMEOUT_S_MAX, self.timeout_s_min))

    def answered(self, latency_s: float) -> None:
        """A chunk was stored `latency_s` seconds after it was handed to the bus."""
        self._timeout_s = 0.0
        self._latency_s += (latency_s - self._latency_s) * (0.25 if self._latency_s else 1.0)
        if latency_s < LATENCY_S:
            self._window = min(self._window + 1, self.window_max)
        elif latency_s > 2 * LATENCY_S:
            self._window = max(1.0, self._window - 0.5)

    def timed_out(self) -> None:
        """A chunk got no answer in time: less at once, and more patience."""
        self._timeout_s = 2 * self.timeout_s
        self._window = max(1.0, self._window / 2)
