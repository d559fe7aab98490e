"""How long the train loop spent on anything but its own computation (invariant I8), and since when
this process runs.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class WaitClock:
    """A context manager around every call of the train loop that could wait; adds up seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = self.clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds += self.clock() - self._since


# Where the system does not tell, a process was started when it came here.
_IMPORTED_AT = time.monotonic()


def process_started() -> float:
    """When this process was started, on the monotonic clock (`man proc`: field 22 of stat)."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        after_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot_s
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED_AT
    return time.monotonic() - max(age_s, 0.0)
