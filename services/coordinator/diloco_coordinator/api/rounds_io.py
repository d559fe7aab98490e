"""/v1/runs/{run}/rounds: closed rounds as the tape has them, a page at a time.

A record tells of every learner. With hundreds of them it has a hundred kilobytes and more, and it
takes tens of milliseconds to read it and to write it down. So that is done in threads, for a few
records at a time, and an answer is bounded in bytes as well as in rounds.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from diloco_coordinator.api.auth_io import Guard
from diloco_coordinator.api.problems_io import Problem, spec_of
from diloco_coordinator.api.runs_io import After, Limit, Runs
from diloco_coordinator.api.views import round_json
from diloco_shared.bus.port import NoStream, Stored, Unavailable
from diloco_shared.checkpoints.checkpoints_io import CheckpointError
from diloco_shared.checkpoints.tape_archive_io import TapeArchive, archives_of, read_tape
from diloco_shared.checkpoints.vault_io import VaultError
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeRecord, TapeRound
from diloco_shared.protocol.wire import WireError, decode_tape, name_of
from diloco_shared.spec.run import RunSpec

Newest = Annotated[int, Query(ge=0, le=1000)]
# Tape records fetched at first, and at once at most; and bytes of them, as far as one can tell by
# those before.
FETCH_FIRST, FETCH_MAX, FETCH_BYTES = 32, 256, 8 << 20
# Records that a thread reads before others have their turn, and before it is seen whether whoever
# asked is still there.
AT_ONCE = 4
# Of an answer, unless its only round is larger: some twenty rounds of 512 learners.
ANSWER_BYTES_MAX = 4 << 20


class Page:
    """Rounds of one answer, as JSON, until it is full."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.more = False  # whether a round was left out
        self._rounds: list[bytes] = []
        self._bytes, self._last = 0, 0

    def take(self, seq: int, text: bytes) -> bool:
        """Whether there was room for it. The first one always has room."""
        large = self._bytes + len(text) > ANSWER_BYTES_MAX and bool(self._rounds)
        self.more = large or len(self._rounds) == self.limit
        if not self.more:
            self._rounds.append(text)
            self._bytes, self._last = self._bytes + len(text), seq
        return not self.more

    def json(self) -> bytes:
        """`next` is set if a round was left out: its cursor is the last one that was not."""
        last = b"%d" % self._last if self.more else b"null"
        return b'{"rounds":[' + b",".join(self._rounds) + b'],"next":' + last + b"}"


class Rounds:
    """The route, beside those of runs."""

    def __init__(self, runs: Runs, guard: Guard) -> None:
        self.runs = runs
        self.router = APIRouter(prefix="/v1/runs", tags=["runs"])
        self.router.add_api_route(
            "/{run}/rounds",
            self.rounds,
            methods=["GET"],
            response_model=dict[str, Any],
            **guard.look,
        )

    async def rounds(
        self, request: Request, run: str, after: After = 0, limit: Limit = 100, newest: Newest = 0
    ) -> Response:
        """Closed rounds after tape sequence `after`: who was merged, who was not, and why.

        Of all syncer shards, as they were recorded; each numbers its rounds by itself. With
        `newest` the newest so many of them alone, if they are more. An answer ends after about
        4 MB: wherever rounds follow, `next` is the cursor to go on with.
        """
        spec, page = spec_of(self.runs.record(run)), Page(limit)
        tape = Tape(self.runs, spec, await self._archives(spec))
        start = await self._before_newest(request, tape, after, newest) if newest else after
        async with contextlib.aclosing(self._records(request, tape, start)) as pieces:
            async for stored in pieces:
                found = await asyncio.to_thread(_closed, run, stored)
                if not all(page.take(seq, text) for seq, text in found):
                    break
        return Response(page.json(), media_type="application/json")

    async def _records(
        self, request: Request, tape: "Tape", after: int
    ) -> AsyncGenerator[Sequence[Stored], None]:
        """Those after a sequence, AT_ONCE at a time, as long as somebody waits for them."""
        count = FETCH_FIRST
        while stored := await tape.read(after, count):
            for at in range(0, len(stored), AT_ONCE):
                if await request.is_disconnected():
                    return
                yield stored[at : at + AT_ONCE]
            if len(stored) < count:
                return
            after = stored[-1].seq
            each = sum(len(s.payload) for s in stored) // len(stored)
            count = max(AT_ONCE, min(FETCH_MAX, FETCH_BYTES // max(each, 1)))

    async def _before_newest(self, request: Request, tape: "Tape", after: int, newest: int) -> int:
        """The sequence behind which the newest rounds are, so many of them; at least `after`.

        From the tape's end back: by its number alone nobody knows where a round is. Other records
        lie between, and the shards of a run share one tape.
        """
        end = await tape.end()
        while end > after and not await request.is_disconnected():
            begin = max(after, end - min(newest + AT_ONCE, FETCH_FIRST))
            stored = await tape.read(begin, end - begin)
            # What cannot be read counts as well: whoever reads on is told of it.
            rounds = [s.seq for s in stored if s.seq <= end and name_of(s.payload) in _COUNTED]
            if len(rounds) >= newest:
                return rounds[-newest] - 1
            newest, end = newest - len(rounds), begin
        return after

    async def _archives(self, spec: RunSpec) -> list[TapeArchive]:
        with _problems():
            return archives_of(spec, await self.runs.root_of(spec))


class Tape:
    """A run's tape of all shards, from the stream and the archive, as one request reads it.

    Its archives are made once: whoever reads on in one has each segment fetched and unpacked once.
    """

    def __init__(self, runs: Runs, spec: RunSpec, archives: Sequence[TapeArchive]) -> None:
        self.bus, self.ask = runs.registry.bus, runs.vaults.plainly
        self.run, self.archives = spec.name, archives
        self.stream = subjects.tape_stream(spec.name)

    async def end(self) -> int:
        """The newest sequence; 0 where there is none yet."""
        try:
            info = await self.bus.stream_info(self.stream)
        except NoStream:
            return 0
        return info.last_seq

    async def read(self, after: int, limit: int) -> list[Stored]:
        """The first so many records after a sequence."""
        archives, ask = self.archives, self.ask
        try:
            with _problems():
                return await read_tape(
                    self.bus, self.run, archives, after=after, limit=limit, ask=ask
                )
        except Unavailable:
            # A missing stream looks like a missing server, unless one asks for its sizes.
            with contextlib.suppress(NoStream):
                await self.bus.stream_info(self.stream)
                raise
            return []  # no syncer has taken the run yet: it has no tape


@contextlib.contextmanager
def _problems() -> Iterator[None]:
    """What the place of an archive says of what is wrong, as an answer."""
    try:
        yield
    except (CheckpointError, VaultError) as error:
        raise Problem(503, "The tape's archive cannot be read", str(error)) from None


_COUNTED = (TapeRound.__name__, "")


def _closed(run: str, records: Sequence[Stored]) -> list[tuple[int, bytes]]:
    """Sequence and JSON of those that are closed rounds."""
    found = []
    for stored in records:
        record = _record(run, stored)
        if isinstance(record, TapeRound):
            shard = int(stored.subject.rpartition(".")[2])
            found.append((stored.seq, round_json(stored.seq, shard, record)))
    return found


def _record(run: str, stored: Stored) -> TapeRecord:
    """409 for one that another release wrote."""
    try:
        return decode_tape(stored.payload)
    except WireError as error:
        text = f"record {stored.seq} of the tape of {run!r} cannot be read by this release: {error}"
        raise Problem(409, "Written by another release", text) from None
