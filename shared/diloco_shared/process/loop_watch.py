"""Who holds the event loop: how late it wakes, and what it was doing meanwhile.

    watch = LoopWatch()
    tasks.create_task(watch.keep())     # until cancelled
    ...
    detail |= watch.detail()            # for health
    yield from watch.metrics()          # diloco_loop_lag_seconds, diloco_loop_held

While the loop stands still nothing on it can look: a thread does. When the loop has not answered
for `shortest_s` it takes the stack of the loop's thread, which names what holds it. (What holds the
interpreter too, a copy of gigabytes in one call, is seen as soon as it lets go, still in the
function that asked for it.)

Where processors are scarce a loop answers late though nothing held it. So a lag counts if the
loop's thread itself ran for longer than that; or if it stood in something that waits, and neither
it nor the thread that looks was kept from a processor meanwhile.
"""

import asyncio
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diloco_shared import ambient

log = structlog.get_logger()

# Nothing may hold the loop for longer, in seconds: far below a lease, and not felt by people. The
# loop answers as often, and is looked at as often. That costs 0.6 % of a processor.
HELD_S = 0.05
# Between two lines in the log, in seconds.
TOLD_S = 10.0
# "Most of it".
MOST = 0.5
# Functions of the interpreter's own library, and of installed ones that are not ours, do not name
# what held the loop: whoever called them does.
_OURS = f"{os.sep}diloco_"
_FOREIGN = (str(Path(asyncio.__file__).parent.parent), f"{os.sep}site-packages{os.sep}")

UNSEEN = "what ended before it was seen"
# Of the thread that asks; Linux alone tells it.
RUSAGE_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)


@dataclass(frozen=True, slots=True)
class Hold:
    """The loop was held for so many seconds, by `function (file:line)`."""

    seconds: float
    by: str
    pages: int = 0  # that it waited for: they had to be read from disk

    def __str__(self) -> str:
        waited = f", which waited for {self.pages} pages from disk" if self.pages else ""
        return f"the event loop was held for {self.seconds:.2f} s by {self.by}{waited}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The loop's thread at a moment: seconds by the clock, on a processor, queued for one; pages
    that it waited for because they were on disk alone."""

    at: float
    ran_s: float
    queued_s: float
    pages: int = 0


@dataclass(frozen=True, slots=True)
class Sight:
    """What the looking thread found of one lag."""

    by: str = ""  # "": it did not get to look
    idle: bool = False  # the loop itself waited: for a processor, then
    late_s: float = 0.0  # how late the looks were


def judged(before: Answer, now: Answer, sight: Sight, shortest_s: float = HELD_S) -> Hold | None:
    """What the time between two answers was: a hold, or None where nothing held the loop."""
    lag_s = now.at - before.at - shortest_s
    if lag_s <= shortest_s:
        return None
    ran_s = now.ran_s - before.ran_s
    ran = ran_s > shortest_s
    starved = max(now.queued_s - before.queued_s, sight.late_s) >= MOST * lag_s
    if not ran and (starved or sight.idle or not sight.by):
        return None
    # Of a lag that was mostly a wait for a processor, what ran is to blame for its own part.
    seconds = ran_s if ran and starved and ran_s < MOST * lag_s else lag_s
    by = sight.by if sight.by and not sight.idle else UNSEEN
    return Hold(seconds, by, now.pages - before.pages)


class LoopWatch:
    """Of the loop that `keep` runs in; `detail` and `metrics` may be asked from any thread."""

    def __init__(
        self, tell: Callable[[Hold], None] | None = None, shortest_s: float = HELD_S
    ) -> None:
        """`shortest_s`: what held it for no longer is not counted; see HELD_S."""
        self.tell = tell or _log
        self.shortest_s = shortest_s
        self.worst = Hold(0.0, "")
        self.held = 0  # times
        self.held_s = 0.0  # all of them together
        self.told_at = -TOLD_S
        self.ended = threading.Event()
        # Written by the loop, read by the thread.
        self.answer = Answer(0.0, 0.0, 0.0)
        # Written by the thread, between two answers of the loop.
        self.sight = Sight()

    async def keep(self) -> None:
        """For ever."""
        with _Queued(threading.get_native_id()) as queued:
            self.answer = _answer(queued)
            # Not one of the loop's own threads: those may all be busy just then.
            looking = threading.Thread(
                target=self._look, args=(threading.get_ident(),), name="loop-watch", daemon=True
            )
            looking.start()
            try:
                while True:
                    await asyncio.sleep(self.shortest_s)
                    self._answered(_answer(queued))
            finally:
                self.ended.set()

    def _answered(self, now: Answer) -> None:
        hold = judged(self.answer, now, self.sight, self.shortest_s)
        self.answer, self.sight = now, Sight()
        if hold is None:
            return
        self.held, self.held_s = self.held + 1, self.held_s + hold.seconds
        if hold.seconds > self.worst.seconds:
            self.worst = hold
        if now.at - self.told_at >= TOLD_S:
            self.told_at = now.at
            self.tell(hold)

    # --- in a thread ---------------------------------------------------------------------------

    def _look(self, loop_thread: int) -> None:
        looked, every_s = ambient.monotonic(), self.shortest_s
        while not self.ended.wait(every_s):
            now = ambient.monotonic()
            late_s, looked = max(now - looked - every_s, 0.0), now
            answer, sight = self.answer, self.sight
            by, idle = sight.by, sight.idle
            if not by and now - answer.at - every_s > every_s:
                frame = sys._current_frames().get(loop_thread)
                by, idle = _named(frame), _is_idle(frame)
                del frame
            if self.answer is answer:
                self.sight = Sight(by, idle, sight.late_s + late_s)

    # --- shown ---------------------------------------------------------------------------------

    def detail(self) -> dict[str, Any]:
        """For health: the worst there was."""
        return {
            "loop_lag_max_s": round(self.worst.seconds, 3),
            "loop_lag_by": self.worst.by,
            "loop_held": self.held,
        }

    def metrics(self) -> Iterator[Metric]:
        """The worst by name, how often there was one, and how long in all."""
        worst = GaugeMetricFamily(
            "diloco_loop_lag_seconds",
            f"Longest time that the event loop was held, if above {self.shortest_s} s, and by what",
            labels=["by"],
        )
        worst.add_metric([self.worst.by], self.worst.seconds)
        yield worst
        yield CounterMetricFamily(
            "diloco_loop_held",
            f"Times that the event loop was held for over {self.shortest_s} s",
            self.held,
        )
        yield CounterMetricFamily(
            "diloco_loop_held_seconds", "Seconds of those together", self.held_s
        )


class _Queued:
    """How long a thread has waited for a processor, as Linux counts it; nothing elsewhere."""

    def __init__(self, native_id: int) -> None:
        self.handle = -1
        with suppress(OSError):
            self.handle = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY)

    def __enter__(self) -> "_Queued":
        return self

    def __exit__(self, *_: object) -> None:
        if self.handle >= 0:
            os.close(self.handle)

    def seconds(self) -> float:
        try:
            return int(os.pread(self.handle, 100, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0


def _answer(queued: _Queued) -> Answer:
    pages = resource.getrusage(RUSAGE_THREAD).ru_majflt if RUSAGE_THREAD is not None else 0
    return Answer(ambient.monotonic(), time.thread_time(), queued.seconds(), pages)


def _named(frame: FrameType | None) -> str:
    """The innermost function that is ours, else the innermost: `function (file:line)`."""
    found = innermost = frame
    while found is not None and _is_foreign(found.f_code.co_filename):
        found = found.f_back
    found = found or innermost
    if found is None:
        return ""
    return f"{found.f_code.co_name} ({Path(found.f_code.co_filename).name}:{found.f_lineno})"


def _is_foreign(file: str) -> bool:
    return _OURS not in file and any(part in file for part in _FOREIGN)


def _is_idle(frame: FrameType | None) -> bool:
    """Whether a loop waits for something to do: asyncio's in a selector, uvloop's in no frame."""
    if frame is None:
        return True
    file = Path(frame.f_code.co_filename).name
    return file == "selectors.py" or (file == "runners.py" and frame.f_code.co_name == "run")


def _log(hold: Hold) -> None:
    log.warning(str(hold), seconds=round(hold.seconds, 3), by=hold.by)
