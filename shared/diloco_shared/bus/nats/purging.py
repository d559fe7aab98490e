"""Removes what matches a filter little by little, so that others are answered in between.

While the server (2.15.1) removes what a filter matches, it answers no question about any stream:
for 0.4 s a gigabyte at best, and ten times as long on a slow machine. It reads each block of its
files (8 MB) that has a match. Where only what is below a sequence goes, it reads the blocks above
it as well: to raise that sequence step by step would read the rest of the stream at each step. It
stops early where a purge says how many are to be kept, so that is how slices are cut here.

The count says nothing of sequences. So slices are cut only as long as there is more to remove than
may come in the meantime; the last ones are removed by their sequence.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from diloco_shared.bus.nats.api import api_call
from diloco_shared.bus.nats.link import NatsLink
from diloco_shared.bus.port import Held, Unavailable

# Removed by one request: 0.04 s at best, and less than half a second on a slow machine.
SLICE_BYTES = 100 << 20
# At least so many messages, of which each may lie in a block of its own.
SLICE_MIN = 16
# Between two requests, in seconds: whoever waits to be answered is.
PAUSE_S = 0.02
# Messages that match and may come after they were counted, before the slice is removed: half a
# gigabyte of chunks. Where nobody says below which sequence, those may go, too. On a fast link to a
# slow server more come: LATE_FACTOR times as many as came between any two counts one by one.
LATE_MAX, LATE_FACTOR = 1024, 2

HeldBelow = Callable[[int, int], Awaitable[dict[str, Held]]]


class Matching(NamedTuple):
    """What of a stream matches a filter."""

    messages: int
    end: int  # of the stream: the sequence behind its newest
    slice: int  # so many of them are removed at once
    counted: bool  # False: there are more subjects than the server tells of


async def matching(link: NatsLink, stream: str, subject: str) -> Matching:
    """Asks the server, which knows it without reading what it keeps."""
    what, body = f"how many messages {stream} has on {subject}", {"subjects_filter": subject}
    answer = await api_call(link, f"STREAM.INFO.{stream}", body, what=what)
    state = answer["state"]
    subjects = state.get("subjects") or {}
    messages = sum(subjects.values())
    # Of the stream's bytes as many as are read at once have so many of these, if they lie evenly.
    some = max(SLICE_MIN, messages * SLICE_BYTES // max(state["bytes"], 1))
    whole = answer.get("total", 0) <= len(subjects)
    return Matching(messages, state["last_seq"] + 1, some, whole)


async def purge_at_once(link: NatsLink, stream: str, subject: str, **which: int) -> int:
    """One request: with `seq` what is below it goes, and with `keep` all but the newest ones."""
    body: dict[str, Any] = {"filter": subject, **which}
    answer = await api_call(link, f"STREAM.PURGE.{stream}", body, what=f"purge {subject}")
    return int(answer["purged"])


async def purge_in_slices(
    link: NatsLink, stream: str, subject: str, below_seq: int | None, held: HeldBelow
) -> int:
    """As `bus.Bus.purge`; `held`: of at most so many below a sequence, what each subject holds.

    What comes meanwhile stays. Raises BusError with part of it removed: Unavailable also when the
    server was started anew meanwhile. It may have lost its newest, and then what came since has
    their sequences.
    """
    there = await matching(link, stream, subject)
    seq = {} if below_seq is None else {"seq": below_seq}
    if there.messages <= there.slice or not there.counted:
        return await purge_at_once(link, stream, subject, **seq)
    cut = _Cut(link, stream, subject, below_seq, there)
    await cut.slices()
    if cut.newer <= cut.slice:  # these are read as well, and stay
        await cut.purge(subject, seq=cut.below)
        return cut.purged
    rest = await held(cut.there.messages, cut.below)
    below = sum(of.messages for of in rest.values())
    if below > cut.slice + cut.late_max:
        # Most of what came later does not match.
        cut.know(cut.there.messages - below)
        await cut.slices()
        rest = await held(cut.there.messages, cut.below)
    for one, of in rest.items():  # alone: nothing is read that lies behind the last one on it
        await cut.purge(one, seq=cut.below)
        if of.messages >= SLICE_MIN:
            await asyncio.sleep(PAUSE_S)
    return cut.purged


class _Cut:
    """One purge under way."""

    def __init__(
        self, link: NatsLink, stream: str, subject: str, below_seq: int | None, there: Matching
    ) -> None:
        self.where = link, stream, subject
        self.life = link.life
        self.there = there
        self.slice = there.slice  # as at first: of ever fewer, ever fewer would make a slice
        self.below = there.end if below_seq is None else below_seq
        self.late_max = 0 if below_seq is None else LATE_MAX
        self.purged = 0
        self.unanswered = False  # a slice was: the server stalls
        self.know(max(there.end - self.below, 0))

    def know(self, newer: int) -> None:
        """That of those counted last at most so many are to stay."""
        self.newer, self.known_at = newer, self.there.end

    async def slices(self) -> None:
        """Remove the oldest, as long as there are surely enough of them."""
        # Others may remove some, too, and then there is an end sooner.
        for _ in range(self.there.messages // self.slice):
            stays = self.newer + self.there.end - self.known_at
            if self.there.messages - stays <= self.slice + self.late_max:
                return
            keep = self.there.messages - self.slice
            await self._slice(keep)
            await asyncio.sleep(PAUSE_S)
            before, self.there = self.there.end, await matching(*self.where)
            if self.there.end < before:
                raise Unavailable(f"{self.where[1]} lost its end")
            if self.late_max:
                self.late_max = max(self.late_max, LATE_FACTOR * (self.there.end - before))
            if not self.there.counted:
                return

    async def _slice(self, keep: int) -> None:
        """All but so many. One that gets no answer is not the end: whoever asked for the purge
        would begin anew, and not know how much comes while this server stalls. The next count says
        it. A second one is the end."""
        try:
            await self.purge(self.where[2], keep=keep)
        except Unavailable:
            if self.unanswered or self.where[0].life != self.life:
                raise
            self.unanswered = True

    async def purge(self, subject: str, **which: int) -> None:
        """One request, of the same life of the server."""
        link, stream, _ = self.where
        if link.life != self.life:
            raise Unavailable(f"the server was started anew: {stream} may have lost its end")
        self.purged += await purge_at_once(link, stream, subject, **which)
