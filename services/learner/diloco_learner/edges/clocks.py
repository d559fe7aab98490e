"""How long the train loop spent on anything but its own computation (invariant I8)."""

import time
from collections.abc import Callable
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
