"""How long the train loop spent on anything but its own computation (invariant I8)."""

import time
from types import TracebackType


class WaitClock:
    """A context manager around every call of the train loop that could wait; adds up seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds += time.perf_counter() - self._since
