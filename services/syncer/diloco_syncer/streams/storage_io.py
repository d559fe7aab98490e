"""What the run's streams hold against what they may, and limits that grow with the run.

Read every few seconds: shown in the run's status, and raised when learners tell of a larger model,
more of them join than the run was submitted for, or a run that ends by the clock makes more rounds
than were assumed. No limit is raised above `keeping.stream_bytes_max`: the run then goes on with
what it has, as where the hub has no more room.
"""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from diloco_shared.budget import Size, assumed, flying, limits, roomy
from diloco_shared.budget.terms import shown
from diloco_shared.bus.port import Bus, BusError, StreamFull
from diloco_shared.bus.repeating import left_undone
from diloco_shared.bus.run_streams import ensure_run_streams
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import StreamUse
from diloco_shared.spec.run import RunSpec
from diloco_syncer.events import Tell

log = structlog.get_logger()


class Storage:
    """Of one leader's term. `streams`: kind (subjects.STREAM_KINDS) -> as it was last seen."""

    def __init__(
        self, spec: RunSpec, control: Bus, size: Callable[[], Size], tell: Callable[[Tell], None]
    ) -> None:
        self.spec = spec
        self.control = control
        self.size = size
        self.tell = tell
        self.streams: dict[str, StreamUse] = {}
        self.last_seqs: dict[str, int] = {}  # kind -> newest sequence seen
        self.budgeted = Size()  # what `needed` is for: only ever more
        self.needed: dict[str, int] = {}
        self.limits: dict[str, int] = {}  # and what the streams may have of that
        self.flying = 0  # bytes that rounds in flight may add to UP; 0: not known yet
        self.told: Size | None = None  # of what it was told that there is no room
        self.told_bound: Size | None = None  # and that the run's own bound leaves none

    @property
    def bounded(self) -> dict[str, StreamUse]:
        """Streams that `keeping.stream_bytes_max` keeps smaller than the run needs them."""
        return {
            kind: use
            for kind, use in self.streams.items()
            if kind in self.needed and self.limits[kind] <= use.limit < self.needed[kind]
        }

    async def look(self) -> None:
        """Look once; what the bus does not tell stays as it was."""
        # Together: a server that answers nothing keeps one look waiting, not one a stream.
        await asyncio.gather(*(self._see(kind) for kind in subjects.STREAM_KINDS))
        await self._grow()

    async def _see(self, kind: str) -> None:
        with left_undone(f"look at {kind}"):
            info = await self.control.stream_info(subjects.run_stream(self.spec.name, kind))
            self.last_seqs[kind] = info.last_seq
            self.streams[kind] = StreamUse(bytes=info.bytes, limit=info.bytes_max)

    async def _grow(self) -> None:
        """Raise what is too small for the run as it is now."""
        size = self.budgeted.at_least(self.size())
        if size != self.budgeted or not self.needed:
            job = assumed(self.spec, **size._asdict())
            self.budgeted, self.needed, self.limits = size, roomy(job), limits(job)
            self.flying = flying(job)
        self._tell_of_bound()
        small = {k: u for k, u in self.streams.items() if 0 < u.limit < self.limits[k]}
        if not small:
            return
        try:
            wanted = {kind: self.limits[kind] for kind in small}
            copies = self.spec.keeping.replicas
            await ensure_run_streams(self.control, self.spec.name, wanted, replicas=copies)
        except StreamFull as error:
            if self.told != self.budgeted:
                self.told = self.budgeted
                self._tell_too_small(small, str(error))
        except BusError as error:
            log.debug("limits not raised yet", error=str(error))

    def _tell_of_bound(self) -> None:
        """Once for each size of the run: no look changes anything, but another size does."""
        bounded = self.bounded
        if not bounded or self.told_bound == self.budgeted:
            return
        self.told_bound = self.budgeted
        most = max(self.needed[kind] for kind in bounded)
        why = (
            f"keeping.stream_bytes_max ({self.spec.keeping.stream_bytes_max}) allows no more. The "
            "run goes on with what there is. Should one of them be full, raise its limit with "
            f"'nats stream edit' (docs/how-to/deploy.md). A run of this size needs {most}"
        )
        self._tell_too_small(bounded, why)

    def _tell_too_small(self, small: Mapping[str, StreamUse], why: str) -> None:
        have = [f"{k} {shown(u.limit)} of {shown(self.needed[k])}" for k, u in small.items()]
        self.tell(Tell("no-room", f"streams stay too small ({', '.join(have)}): {why}"[:500]))
