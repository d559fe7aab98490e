"""Whether UP still has what its leader saw there.

A power cut takes the newest of a stream that is not synced. What the tape names may be gone then,
and the stream's sequences come again: for contributions of now, chunks before manifests. So once
the server has begun a new life, nothing is purged before it is known where UP ended.
"""

from collections import deque
from collections.abc import Callable, Sequence

import structlog

from diloco_shared.bus.port import Bus
from diloco_shared.bus.repeating import again_and_again
from diloco_shared.protocol import subjects

log = structlog.get_logger()

# Manifests that are remembered: some minutes of a hundred learners, and ten questions to find the
# newest that is there. Of a longer loss it is only known that it is longer.
SEEN_MAX = 1024
# Between two looks, in seconds: nothing is asked unless the server has begun a new life.
LOOK_S = 1.0


class Tail:
    """Of one leader's term: the newest manifests that it saw, in one life of the server.

    `covered`: the sequence below which a snapshot covers everything. `lost`: told the sequence
    after which nothing is known to be there any more, and whether something was lost for certain.
    """

    def __init__(
        self,
        data: Bus,
        run: str,
        covered: Callable[[], int],
        lost: Callable[[int, bool], None],
    ) -> None:
        self.data = data
        self.stream = subjects.up_stream(run)
        self.covered = covered
        self.lost = lost
        self.seen = deque[tuple[int, str]](maxlen=SEEN_MAX)  # sequences rise, and subjects
        self.life = data.life  # of the server, in which they were seen
        self.doubted = False

    @property
    def sure(self) -> bool:
        """Whether UP is as it was seen. A hub of several nodes loses nothing with one of them; and
        where all of them were lost, the tape is another one (`Tape.still_ours`)."""
        return self.data.several_nodes or (self.life == self.data.life and not self.doubted)

    def saw(self, seq: int, subject: str) -> None:
        """A manifest is there. In a new life it may have the place of one that is lost."""
        self.doubted |= bool(self.seen) and seq <= self.seen[-1][0]
        if self.sure:
            self.seen.append((seq, subject))

    async def keep(self) -> None:
        """Look for ever."""
        await again_and_again(self.look, "where UP ends", LOOK_S)

    async def look(self) -> None:
        """Find out where UP ended, unless that is known. Raises BusError."""
        if self.sure:
            return
        life, covered = self.data.life, self.covered()
        needed = [(seq, subject) for seq, subject in self.seen if seq >= covered]
        end = await self._end(needed)
        if certain := bool(needed) and end < needed[-1][0]:
            log.warning("UP lost what it had acknowledged", after=end, seen=needed[-1][0])
        self.seen = deque((s for s in self.seen if s[0] <= end), maxlen=SEEN_MAX)
        self.life, self.doubted = life, False
        if certain or not needed:
            self.lost(end, certain)

    async def _end(self, seen: Sequence[tuple[int, str]]) -> int:
        """The newest sequence of these that is there; 0: none is. What is lost is the end."""
        there, gone = 0, len(seen)  # all before `there` are, none from `gone` on
        while there < gone:
            middle = gone - 1 if gone == len(seen) else (there + gone) // 2
            if await self._has(*seen[middle]):
                there = middle + 1
            else:
                gone = middle
        return seen[there - 1][0] if there else 0

    async def _has(self, seq: int, subject: str) -> bool:
        found = await self.data.fetch(self.stream, subject, start_seq=seq, limit=1)
        return bool(found) and found[0].seq == seq
