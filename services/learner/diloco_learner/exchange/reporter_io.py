"""Tells the syncer where the learner stands: the newest progress, and heartbeats in between."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from diloco_learner.context import RunContext
from diloco_learner.exchange.anchors import AnchorBook
from diloco_learner.recovery.recovery import Recovery, before_training, recovery_times
from diloco_learner.training.mailbox_io import Mailbox
from diloco_shared import ambient
from diloco_shared.bus.port import BusError
from diloco_shared.process.chaos import FaultAgent
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Progress, SocketBytes
from diloco_shared.protocol.records import LearnerSpeed
from diloco_shared.protocol.wire import WireError, encode

log = structlog.get_logger()

# Progress messages a second at most: a nano step takes 10 ms, and newer ones replace older.
PROGRESS_S = 0.02
# Between two words of how fast it trains, in seconds: people look about as often.
SPEED_S = 2.0
# Heartbeats may repeat a report for this many seconds (a batch of an evaluation, or a compilation),
# and for longer where a learner's state is large: between two steps all of it may come from the
# other hosts of an island, which join it over a network that carries so many bytes a second at
# least. Then the train thread hangs, and only a new process can help.
STUCK_S, STATE_BYTES_PER_S = 900.0, 50_000_000


class NoStepBoundary(Exception):
    """The train thread has not come to a step boundary for very long."""


class Reporter:
    """Sends while recovering, training and leaving; `last` is what the train thread said last."""

    def __init__(
        self,
        context: RunContext,
        mailbox: Mailbox,
        book: AnchorBook,
        faults: FaultAgent,
        sockets: Callable[[], SocketBytes],
    ) -> None:
        self.spec, self.bus = context.spec, context.control
        self.learner, self.incarnation = context.me, context.incarnation
        self.mailbox = mailbox
        self.book = book
        self.faults = faults
        self.sockets = sockets
        self.moved = asyncio.Event()
        self.last: Progress | None = None
        self.recovery: Recovery | None = None
        self.started_at = ambient.started()
        self.stepping_at: float | None = None
        self.state_bytes = 0  # of the optimizer's state, once it is known

    def look(self) -> None:
        """Have progress sent, if there is any that was not."""
        if self.mailbox.moved:
            self.moved.set()

    async def newest(self) -> None:
        """Send the newest progress, and let faults know the step, for ever."""
        while True:
            await self.moved.wait()
            self.moved.clear()
            await self.flush()
            await asyncio.sleep(PROGRESS_S)

    async def flush(self) -> None:
        """Send what was not sent yet."""
        progress = self.mailbox.newest_progress()
        if progress is None:
            return
        self.last = progress
        self.faults.stepped(progress.step)
        await self._send(progress)

    async def heartbeats(self) -> None:
        """While recovering, compiling or evaluating: still here, for ever. Raises Stuck."""
        every_s = self.spec.membership.heartbeat_s
        stuck_s = STUCK_S + self.state_bytes / STATE_BYTES_PER_S
        sent: Progress | None = None
        repeats = 0
        while True:
            await asyncio.sleep(every_s)
            repeats = repeats + 1 if self.last is not None and self.last is sent else 0
            if repeats * every_s > stuck_s:
                raise NoStepBoundary(
                    f"no step boundary for {stuck_s:.0f} s: the process starts anew"
                )
            if self.last is None:
                await self._send(
                    before_training(
                        self.learner,
                        self.incarnation,
                        self.book.epoch,
                        self.book.versions,
                        self.recovery.restore(self.book.epoch) if self.recovery else 0,
                    )
                )
            elif repeats:
                await self._send(self.last)
            sent = self.last

    async def speeds(self, look: Callable[[], LearnerSpeed | None]) -> None:
        """Tell people how fast it trains, for ever; nothing where `look` knows nothing."""
        while (speed := look()) is not None:
            subject = subjects.speed(speed.run, speed.learner)
            try:
                await self.bus.publish(subject, encode(speed))
            except (BusError, WireError) as error:
                log.debug("speed not sent", error=str(error))
            await asyncio.sleep(SPEED_S)

    async def _send(self, progress: Progress) -> None:
        try:
            await self.bus.publish(
                subjects.progress(self.spec.name, self.learner),
                encode(progress.model_copy(update=self._of_process())),
            )
        except (BusError, WireError) as error:
            log.debug("progress not sent", error=str(error))

    def _of_process(self) -> dict[str, Any]:
        """What the train thread does not know."""
        known: dict[str, Any] = {"sockets": self.sockets(), "run_id": self.spec.id}
        if self.recovery is not None:
            known["recovery"] = recovery_times(
                self.recovery, self.started_at, self.stepping_at, ambient.monotonic()
            )
        return known
