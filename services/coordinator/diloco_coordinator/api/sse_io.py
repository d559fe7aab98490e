"""Server-sent events: what happens, as it happens. A slow reader misses states, never events."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi.responses import StreamingResponse

from diloco_coordinator.access import ASKING, Asking, TokenRecord, actor, asker, sees
from diloco_coordinator.api.problems_io import Problem
from diloco_coordinator.api.views import event_view
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared import ambient
from diloco_shared.bus.port import BusError
from diloco_shared.protocol import subjects

# Open streams at once: pages and scripts of a team. Each is a task and a socket.
STREAMS_MAX = 64
# Of one token: whoever holds it leaves places to others, the administrator among them.
STREAMS_OF_ONE_MAX = 16
# A silent stream says something this often, so that proxies keep it open.
KEEP_ALIVE_S = 15.0
# States are sent at most this often: the eye takes in no more.
STATE_S = 0.25


class EventStreams:
    """Opens streams over one registry, up to STREAMS_MAX, and STREAMS_OF_ONE_MAX of a token.

    `good`: whether who asked for one may go on reading it.
    """

    def __init__(
        self, registry: Registry, good: Callable[[Asking | None], bool] = lambda _: True
    ) -> None:
        self.registry = registry
        self.good = good
        self.held: Counter[str] = Counter()  # by name of the token; "" where nobody asked
        self._newest: dict[str, _State] = {}  # by what is looked at

    @property
    def open(self) -> int:
        """How many streams are read."""
        return self.held.total()

    def events(self, after: int, run: str) -> StreamingResponse:
        """Events with a greater sequence than `after`; the sequence is the event's id."""
        return self.opened(self._events(after, run, asker()))

    def states(
        self,
        what: str,
        now: Callable[[], dict[str, Any] | None],
        over: Callable[[dict[str, Any]], bool],
    ) -> StreamingResponse:
        """`now()` at first and whenever it differs, until it is None or `over`.

        `what` names that which all readers of it look at: they share each look.
        """
        return self.opened(self._states(what, now, over))

    def opened(self, chunks: AsyncIterator[str]) -> StreamingResponse:
        """A stream of these chunks, each a whole event. 503 while too many are open, 429 while too
        many of them are of one token."""
        if self.held[actor()] >= STREAMS_OF_ONE_MAX:
            raise _too_many(429, f"{STREAMS_OF_ONE_MAX} of the token {actor()!r}")
        if self.open >= STREAMS_MAX:
            raise _too_many(503, f"{STREAMS_MAX}")
        return StreamingResponse(
            self._counted(chunks, ASKING.get()),
            media_type="text/event-stream",
            # Proxies must pass each piece on as it comes.
            headers={"X-Accel-Buffering": "no"},
        )

    async def _counted(
        self, chunks: AsyncIterator[str], asking: Asking | None
    ) -> AsyncIterator[str]:
        who = asking.actor if asking else ""
        self.held[who] += 1
        try:
            if self.held[who] > STREAMS_OF_ONE_MAX or self.open > STREAMS_MAX:
                return  # many were asked for at once, before the first of them was open
            async for chunk in chunks:
                if not self.good(asking):
                    return  # the token was revoked, or has expired
                yield chunk
        finally:
            self.held -= Counter([who])  # without those that hold none
            # Whoever writes them must know that nobody listens any more: a sample ends its process.
            if (close := getattr(chunks, "aclose", None)) is not None:
                await close()

    async def _events(self, after: int, run: str, token: TokenRecord | None) -> AsyncIterator[str]:
        told = self.registry.told
        lost, asked = told.lost, False
        yield ": open\n\n"
        said_at = ambient.monotonic()
        while True:
            changes = self.registry.changes
            if lost != told.lost:  # other events have the sequences that this reader has read
                lost, after = told.lost, min(after, told.again_from - 1)
            if self.registry.ready and not asked:  # it may have read them before it came here
                with suppress(BusError):  # at the next change
                    after, asked = await going_on(self.registry, after), True
            for seq, event in self.registry.told.after(after, run):
                after = seq
                if not sees(token, event.run):
                    continue
                yield f"id: {seq}\ndata: {json.dumps(event_view(seq, event))}\n\n"
                said_at = ambient.monotonic()
            # Nobody tells once more of what came while this reader was sent the ones before.
            if changes == self.registry.changes and not await self._change(said_at):
                yield ": still here\n\n"
                said_at = ambient.monotonic()

    async def _states(
        self,
        what: str,
        now: Callable[[], dict[str, Any] | None],
        over: Callable[[dict[str, Any]], bool],
    ) -> AsyncIterator[str]:
        last = ""
        said_at = ambient.monotonic()
        while True:
            state = self._state(what, now)
            if state.view is None:
                return
            if state.text != last:
                last = state.text
                yield last
                if over(state.view):
                    return
                said_at = ambient.monotonic()
            # A look of before the newest change may lack it, and nobody tells of it once more.
            elif state.changes == self.registry.changes and not await self._change(said_at):
                yield ": still here\n\n"
                said_at = ambient.monotonic()
            # Whatever happens, and however often: a view is long, and most changes are of others.
            await asyncio.sleep(STATE_S)

    def _state(self, what: str, now: Callable[[], dict[str, Any] | None]) -> "_State":
        """The newest one that was looked at, unless it is old: one for all its readers."""
        at, changes = ambient.monotonic(), self.registry.changes
        known = self._newest.get(what)
        if known is not None and at - known.at < STATE_S:
            return known
        view = now()
        if known is not None and view == known.view:
            text = known.text
        else:
            text = "" if view is None else f"data: {json.dumps(view)}\n\n"
        self._newest = {w: s for w, s in self._newest.items() if at - s.at < STATE_S}
        self._newest[what] = _State(at, changes, view, text)
        return self._newest[what]

    async def _change(self, said_at: float) -> bool:
        """Whether something changed before it is time to say that we are still here.

        Most changes say nothing to a reader: what counts is when it was told something last.
        """
        changed, left_s = self.registry.changed, said_at + KEEP_ALIVE_S - ambient.monotonic()
        try:
            async with asyncio.timeout(max(left_s, 0.0)), changed:
                await changed.wait()
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class _State:
    """A view, as of `at` in monotonic seconds and so many changes, and the event that tells it."""

    at: float
    changes: int
    view: dict[str, Any] | None
    text: str


async def going_on(registry: Registry, after: int, mark: str = "") -> int:
    """The cursor to go on from, for a reader of events that has read up to `after` and asks anew.

    Beyond the newest event that is known here, the stream may have lost its end since: then it is a
    smaller one. Or only this coordinator is behind, cut off or slower than the one that was asked
    before: that the hub knows. Raises BusError where it does not answer. `mark`: of the event at
    `after`, as the reader has read it; "" where it does not say.
    """
    if not registry.ready:
        return after
    if after <= registry.told.newest:
        return registry.told.going_on(after, mark)
    info = await registry.bus.stream_info(subjects.EVENTS_STREAM)
    return after if info.last_seq >= after else registry.told.going_on(after)


def _too_many(status: int, which: str) -> Problem:
    text = f"{which} are open: close some, or ask now and then instead"
    return Problem(status, "Too many open streams", text, headers={"Retry-After": "10"})
