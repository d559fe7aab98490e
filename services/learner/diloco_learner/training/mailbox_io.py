"""The bounded bridge between the train thread and the asyncio side. Neither waits for the other.

The train thread takes what has arrived and leaves what goes out at step boundaries: a few
operations on deques, and no system call: waking the other side would give up the interpreter and
wait for it to come back, so that side looks by itself. There are two exceptions: `rest`, where a
learner that may not step sleeps; and steps that take so long that to say when one is over costs
less than to look (`computing_io.Pace`).
"""

import threading
from collections import deque
from typing import Any

from diloco_learner.exchange.arrivals import essence, heavy, repeated

# Arrivals waiting for a step boundary before they are looked through: what a newer one replaces
# goes. With every anchor they are looked through at once: each holds a fragment's values, and a
# process that stood still meets all that was published meanwhile within one step.
LOOK_EVERY = 64
# Beyond this many, what the syncer repeats by itself is dropped. A learner that takes so long to
# reach a step boundary is not live any more.
INBOX_MAX = 4096
# Outgoing pieces of work waiting for the network: contributions are bounded by the rounds in
# flight, all else is rarer. Progress is not among them: only the newest counts.
OUTBOX_MAX = 256


class Mailbox:
    """Single producer and single consumer each way."""

    def __init__(self) -> None:
        self._in: deque[Any] = deque()
        self._out: deque[Any] = deque()
        # A deque, since taking and forgetting must be one operation: the last report of a run
        # may come between the two.
        self._progress: deque[Any] = deque(maxlen=1)
        self._arrived = threading.Event()
        # Held for some operations on `_in`: uncontended it costs no system call.
        self._lock = threading.Lock()
        self._look_at = LOOK_EVERY
        self.dropped = 0

    # --- train thread --------------------------------------------------------------------------

    def drain(self) -> list[Any]:
        """Everything that has arrived, in order."""
        with self._lock:
            items = list(self._in)
            self._in.clear()
            self._look_at = LOOK_EVERY
        return items

    def post(self, item: Any) -> bool:
        """Hand out a piece of work; False (dropped and counted) beyond the limit."""
        if len(self._out) >= OUTBOX_MAX:
            self.dropped += 1
            return False
        self._out.append(item)
        return True

    def progress(self, progress: Any) -> None:
        """Show where the learner stands; replaces what was not sent yet."""
        self._progress.append(progress)

    def rest(self, seconds: float) -> None:
        """Sleep until something arrives, at most `seconds`. Only while no step may be taken."""
        self._arrived.wait(seconds)
        self._arrived.clear()

    # --- asyncio side --------------------------------------------------------------------------

    @property
    def waiting(self) -> tuple[Any, ...]:
        """What the train thread has not taken yet."""
        with self._lock:
            return tuple(self._in)

    def put(self, item: Any) -> bool:
        """Leave something for the train thread; False (and counted) if it is dropped."""
        with self._lock:
            if len(self._in) >= INBOX_MAX and repeated(item):
                # It may be the last of its kind, as the beat that tells of the end is: nobody says
                # that again. So it takes the place of what it replaces.
                kept = essence([*self._in, item])
                if len(kept) > INBOX_MAX:
                    self.dropped += 1
                    return False
                self._in = deque(kept)
            else:
                self._in.append(item)
            if heavy(item) or len(self._in) >= self._look_at:
                self._in = deque(essence(self._in))
                self._look_at = len(self._in) + LOOK_EVERY
        self._arrived.set()
        return True

    def collect(self) -> list[Any]:
        """Everything handed out, in order."""
        items = []
        while self._out:
            items.append(self._out.popleft())
        return items

    @property
    def moved(self) -> bool:
        """Whether there is progress not yet sent."""
        return bool(self._progress)

    def newest_progress(self) -> Any:
        """The progress not yet sent, or None."""
        try:
            return self._progress.popleft()
        except IndexError:
            return None
