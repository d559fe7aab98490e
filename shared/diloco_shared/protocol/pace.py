"""How many chunks may be unanswered, how many bytes may go, and how long to wait for them.

On a fast link the window opens within a few answers, and stays where queueing begins to show: more
would add no throughput, but fill the memory of the server, which refuses what all its clients
together have waiting above 128 MiB. On a slow one it stays where queueing alone takes LATENCY_S:
more would delay pings behind it until the connection is taken for dead, and let chunks time out
that are only waiting their turn.

Pure: the caller measures and tells. Slow start and additive increase as in TCP, with latency as
the sign of congestion, since the link below loses nothing.
"""

import math
from dataclasses import dataclass, field

from diloco_shared.protocol.chunks import CHUNK_BYTES

# The window grows while answers take less, and shrinks while they take more than twice this:
# below the 10 s that two missed pings take, and above any round trip.
LATENCY_S = 1.0
# Queueing up to this is no sign of congestion: a server's hiccup, a garbage collection.
HICCUP_S = 0.1
# Nor is less than so many times the quickest answer: one flying, one being stored, one waiting.
_QUEUED = 3.0
# In flight at the beginning: one under way, one being stored.
_START = 2.0
# The time limit is at least this many times the usual latency: queues may double twice.
_SPARE = 4.0
# A silent server gets no more patience than this, whatever it took before.
TIMEOUT_S_MAX = 60.0


@dataclass(slots=True)
class Pace:
    """Mutated only through `answered`, `refused` and `timed_out`."""

    window_max: int
    timeout_s_min: float
    _window: float = field(default=_START, init=False)
    _latency_s: float = field(default=0.0, init=False)
    _quickest_s: float = field(default=LATENCY_S, init=False)
    _timeout_s: float = field(default=0.0, init=False)
    _backed_off_at: float = field(default=-math.inf, init=False)

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
        self._quickest_s = min(self._quickest_s, latency_s)
        enough_s = min(LATENCY_S, max(HICCUP_S, _QUEUED * self._quickest_s))
        if latency_s < enough_s:
            self._window = min(self._window + 1, self.window_max)
        elif latency_s > 2 * enough_s:
            self._window = max(1.0, self._window - 0.5)

    def refused(self) -> None:
        """The server has more waiting than it wants: less at once."""
        self._window = max(1.0, self._window / 2)

    def timed_out(self, sent_at: float, now: float) -> None:
        """A chunk sent at `sent_at` got no answer in time: less at once, and more patience.

        Once per silence: what was under way when the window was last cut met the same one.
        """
        if sent_at < self._backed_off_at:
            return
        self._backed_off_at = now
        self._timeout_s = 2 * self.timeout_s
        self._window = max(1.0, self._window / 2)


# --------------------------------------------------------------------------------------------------
# How many bytes may go now: a token bucket.
#
# Pure: the caller tells the time. A whole chunk may go as soon as anything is left, and its bytes
# are owed afterwards; so over any span of s seconds at most `bytes_per_s` * s plus one burst plus
# one chunk go, whatever the chunks' sizes.

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


# --------------------------------------------------------------------------------------------------
# How long to wait for bytes: the same everywhere, from sizes and from progress.
#
# What moves forward is not given up, however long it takes. What stands still is, once it has stood
# still for longer than the slowest link worth using would explain. Pure numbers.

# The slowest link worth using for one payload, in bytes per second: 0.8 Mbit/s. A model of 1M
# parameters takes 40 s over it.
BYTES_PER_S_MIN = 100_000
# Silence that has other reasons than the link: a server that restarts, a connection that is made
# anew, a process that stands still for a garbage collection or a compilation.
PAUSE_S = 30.0
# Chunks of one payload under way side by side before the first of them lands: two on each of four
# connections, as `pace` begins.
_SIDE_BY_SIDE = 8


def transfer_s(size: int) -> float:
    """Seconds that `size` bytes take on the slowest link worth using."""
    return size / BYTES_PER_S_MIN


def inner_state_s(parameters: int) -> float:
    """Seconds that an inner state takes on that link: two fp32 moments per parameter."""
    return transfer_s(8 * parameters)


def silence_s(chunk_bytes: int = CHUNK_BYTES) -> float:
    """Seconds without one more chunk after which a transfer stands still."""
    return PAUSE_S + transfer_s(_SIDE_BY_SIDE * chunk_bytes)


# --------------------------------------------------------------------------------------------------
# How long to wait for the last evaluation of a run.

# A learner stays so many seconds for the last evaluation, which may be of a large model on much
# held-out text; one that takes longer hangs. The leader stays longer than that (`leader_io`).
LAST_EVALUATION_S = 900.0
# What the member record of one says meanwhile: a coordinator waits for it where no leader does.
LAST_EVALUATION = "makes the last evaluation of the run"

# --------------------------------------------------------------------------------------------------
# How long to wait for a place of checkpoints, which may be a share or a bucket far away.

# What has not ended by then hangs: the slowest place worth keeping a state in takes so many bytes a
# second (a disk of this century takes ten times as many), and a bucket may be away for minutes.
STORED_BYTES_PER_S = 10_000_000
ANSWER_S = 600.0


def stored_within_s(size: int) -> float:
    """Seconds in which so many bytes are written, or read, unless the place hangs."""
    return ANSWER_S + size / STORED_BYTES_PER_S
