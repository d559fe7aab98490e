"""A limit of processor time: a world that goes round in circles is ended."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Most worlds take between half a second and five; one in which a run never ends takes twenty.
WORLD_S_MAX = 120.0
# Until whoever swallowed the first one is told again.
AGAIN_S = 1.0


class Circling(KeyboardInterrupt):
    """Of a kind that neither the loop nor the product takes for an error of its own."""


@contextmanager
def limited() -> Iterator[None]:
    """Raises Circling in the block after so much of the processor's time."""

    def stuck(signum: int, frame: FrameType | None) -> None:
        raise Circling("a world goes round in circles")

    before = signal.signal(signal.SIGPROF, stuck)
    signal.setitimer(signal.ITIMER_PROF, WORLD_S_MAX, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
