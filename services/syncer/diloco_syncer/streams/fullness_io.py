"""What is full: a stream, or the hub's disk, found out from what is refused or not answered.

A nats-server (2.15.1, measured on ext4 and tmpfs) whose disk is full answers no append to a stream
that it could not write, while it goes on answering requests and giving what it has. Such a stream
stays so when there is room again, until the server is started anew: whoever owns the server does
that (hub/watch.py). What tells it from a slow link is a purge that matches nothing: the
server then says what it cannot write. JetStream's own limit (max_file_store) is an error reply
instead, and passes by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from diloco_shared import ambient
from diloco_shared.budget.terms import shown
from diloco_shared.bus.port import NoStream, Refused, Stored, StreamFull, Unavailable
from diloco_shared.bus.repeating import again_and_again
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import CHUNK_BYTES
from diloco_shared.spec.codecs import bytes_of
from diloco_syncer.context import RunContext
from diloco_syncer.events import Event, Full, StreamSeen
from diloco_syncer.history.replay import rewound
from diloco_syncer.history.tape_io import Tape
from diloco_syncer.machine import Machine
from diloco_syncer.merging.published_io import parsed, publications, without_chunks
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.streams.storage_io import Storage

log = structlog.get_logger()

# Between two looks, in seconds: a full stream is named within five, and four small requests.
LOOK_S = 1.0
# Refused for this long in seconds, it is full: shorter is what a purge on its way takes.
FULL_S = 2.0
# Nothing moved for this long, that is since the look before: the server is asked what it cannot
# write. It only says so where a write has failed, so asking too early names nothing wrongly.
STALLED_S = 0.5
# An append that is answered at all is answered sooner; in seconds.
TRIED_S = 1.0
# Between two lines in the log about what is still full.
SAY_S = 60.0


@dataclass(frozen=True, slots=True)
class Signs:
    """What other parts of a leader are asked about at every look.

    `pulling`: whether contributions are awaited. `lapsed`: whether the lease is not renewed.
    `waits`: whether UP has yet to let go what a snapshot covers.
    """

    pulling: Callable[[], bool]
    lapsed: Callable[[], bool]
    waits: Callable[[], bool]


class Fullness:
    """Of one leader's term."""

    def __init__(
        self,
        context: RunContext,
        machine: Machine,
        outbox: Outbox,
        tape: Tape,
        storage: Storage,
        put: Callable[[Event], None],
        signs: Signs,
    ) -> None:
        self.spec, self.me, self.control = context.spec, context.me, context.control
        self.machine, self.room = machine, machine.room
        self.outbox = outbox
        self.tape = tape
        self.storage = storage
        self.put = put
        self.pulling, self.lapsed, self.waits = signs.pulling, signs.lapsed, signs.waits
        self.since: dict[str, float] = {}  # place -> since when it looks full
        self.unwritten: list[str] = []  # streams, as the server said
        self.said_at = 0.0
        # Manifests of an earlier leader whose chunks are gone; None: not looked for yet.
        self.torn: set[str] | None = None
        self.moved: dict[str, tuple[int, float]] = {}  # subject or stream -> progress, since when

    async def keep(self) -> None:
        """Look for ever."""
        await again_and_again(lambda: self.look(ambient.monotonic()), "what is full", LOOK_S)

    async def look(self, now: float) -> None:
        """Look once. Raises BusError."""
        waits = self.waits()
        await self.storage.look()
        waits |= self.waits()  # what was purged meanwhile may have been counted before
        for kind, use in self.storage.streams.items():
            self.put(StreamSeen(kind, use.bytes, use.limit, kind == "UP" and waits))
        self._judge("DN", self._publications(), now)
        self._judge("TAPE", self._tape(), now)
        self._judge("UP", self._contributions(), now)
        await self._disk(now)
        await self._lost()
        if self.room.full and now - self.said_at > SAY_S:
            self.said_at = now
            log.warning("full", reason=self.room.reason)

    # --- streams -------------------------------------------------------------------------------

    def _publications(self) -> str:
        full = [p.full for p in self.outbox.sending.values() if p.full]
        return self._named("DN", full[0], "a keyframe", self.room.keyframe_bytes) if full else ""

    def _tape(self) -> str:
        full = self.tape.progress.full
        if not full:
            refused = self.tape.progress.trouble
            return f"TAPE takes no record: {refused}" if refused else ""
        _, _, why_not = full.partition("; ")
        named = self._named("TAPE", full, "a record", 0)
        return f"{named} ({why_not})" if why_not else named

    def _contributions(self) -> str:
        """Learners' puts are refused: not even a chunk has room, or none of theirs ever will."""
        use, needed = self.storage.streams.get("UP"), self.room.contribution_bytes
        if use is None or not use.limit or not needed:
            return ""
        if why := self._initial_parameters(use.limit):
            return why
        short = use.limit - use.bytes < min(needed, CHUNK_BYTES) or use.limit < needed
        return self._named("UP", "maximum bytes", "a contribution", needed) if short else ""

    def _initial_parameters(self, limit: int) -> str:
        """A set of them never has room: known as soon as learners tell how large their model is."""
        size = bytes_of("fp32", self.machine.admission.layouts.parameters())
        if self.machine.history.initialised or size <= limit:
            return ""
        return self._named("UP", "maximum bytes", "a set of initial parameters", size)

    def _named(self, kind: str, text: str, what: str, needed: int) -> str:
        if "maximum bytes" not in text:
            return (
                f"the hub's storage is used up, {kind} takes nothing more ({text}): raise "
                "max_file_store of the message server, or free disk on the hub"
            )
        use = self.storage.streams.get(kind)
        held = f"{shown(use.bytes)} of {shown(use.limit)} used" if use else "all of it used"
        need = f", {what} needs {shown(needed)}" if needed else ""
        if kind in self.storage.bounded:
            mend = (
                "keeping.stream_bytes_max keeps it smaller than the run needs. After flood revoke "
                "that site, and without it"
            )
        else:
            mend = (
                "After no-room raise max_file_store of the message server, after flood revoke that "
                "site, and without either"
            )
        return (
            f"{kind} is full: {held}{need}: see 'diloco events {self.spec.name}'. {mend} raise "
            "this stream's limit with 'nats stream edit' (docs/how-to/deploy.md)"
        )

    def _judge(self, place: str, reason: str, now: float, after_s: float = FULL_S) -> None:
        """Full once it has looked so for a while; over as soon as it does not."""
        known = place in self.room.full
        if not reason:
            self.since.pop(place, None)
            if known:
                self.put(Full(place, ""))
        elif now - self.since.setdefault(place, now) >= after_s:
            if not known:
                log.warning("full", place=place, reason=reason)
                self.said_at = now
            self.put(Full(place, reason))

    # --- the hub's disk -------------------------------------------------------------------------

    async def _disk(self, now: float) -> None:
        """Ask what cannot be written where writes stand still."""
        # What could not be written is asked about until it can be: no round may be waiting for it.
        asked = dict.fromkeys([*self.unwritten, *self._stalled(now)])
        told = {kind: await self._unwritten(kind) for kind in asked}
        if not any(told.values()) and self.lapsed() and not await self._takes():
            told["STATE"] = await self._unwritten("STATE")
        self.unwritten = [kind for kind, why in told.items() if why]
        reasons = [told[kind] for kind in self.unwritten]
        self._judge("hub", reasons[0] if reasons else "", now, after_s=0.0)

    def _stalled(self, now: float) -> list[str]:
        stalled: list[str] = []
        sending = self.outbox.sending
        self.moved = {k: v for k, v in self.moved.items() if k in sending or k == "UP"}
        for subject, progress in sending.items():
            if not progress.full and self._still(subject, progress.stored, now):
                stalled.append("DN")
        since = self.tape.appending_since
        if since and not self.tape.progress.full and now - since > STALLED_S:
            stalled.append("TAPE")
        newest = self.storage.last_seqs.get("UP", 0)
        if self.pulling() and self._still("UP", newest, now):
            stalled.append("UP")
        return list(dict.fromkeys(stalled))

    def _still(self, name: str, progress: int, now: float) -> bool:
        """Whether nothing has moved for a while."""
        was, since = self.moved.get(name, (-1, now))
        if progress != was:
            self.moved[name] = (progress, now)
            return False
        return now - since > STALLED_S

    async def _takes(self) -> bool:
        """Whether a stream of the run takes a message, which goes again.

        Between two rounds the lease may be all that stands still. Of its bucket the server tells a
        leader nothing, for whoever may ask that may empty it.
        """
        stream = subjects.state_stream(self.spec.name)
        subject = subjects.state(self.spec.name, self.me, "none", "none")
        try:
            await self.control.append(subject, b"", timeout_s=TRIED_S)
            await self.control.purge(stream, subject)
        except (Unavailable, Refused):  # it may be taken in memory alone
            return False
        except StreamFull:  # of this stream, or of the hub's storage: an answer, and no lost write
            return True
        return True

    async def _unwritten(self, kind: str) -> str:
        """What the server says that it cannot write; "" when it can."""
        stream = subjects.run_stream(self.spec.name, kind)
        try:
            await self.control.purge(stream, f"{kind.lower()}.{self.spec.name}.none.none.none")
        except NoStream:
            return ""
        except Refused as error:
            return (
                f"the hub's disk is full, {kind} cannot be written ({error}): free disk there. "
                "keep_hub, 'diloco up' and the image then start the message server anew; without "
                "them do so yourself"
            )
        return ""

    async def _lost(self) -> None:
        """Whether DN lost what it had acknowledged; then it is to be published again."""
        if self.machine.leading and await self._doubted():
            await self._look_through()

    async def _doubted(self) -> bool:
        """Whether something on DN may be lost: what is lost is the end of the stream."""
        known = self.outbox.acknowledged
        newest = known.newest
        if not known.doubted and newest is not None:
            found = await self.control.last(subjects.dn_stream(self.spec.name), newest[1])
            # Another takes its place while we ask: then it is not lost.
            known.doubted |= found is None and newest == known.newest
        return known.doubted

    async def _torn(self, mine: Sequence[Stored]) -> set[str]:
        """Manifests whose chunks the server lost before it took them: the leader before this one
        died before it put those again. That can only be what it had under way. (`mine`: of earlier
        leaders.) This one's own are put again by itself."""
        if self.torn is None:
            newest = sorted(mine, key=lambda stored: stored.seq)[-self.outbox.under_way_max :]
            self.torn = await without_chunks(self.spec.name, self.outbox.data, newest)
        return self.torn

    async def _look_through(self) -> None:
        """All of this epoch that is on DN."""
        h, known = self.machine.history, self.outbox.acknowledged
        published, life = self.machine.published, self.outbox.data.life
        stored = await self.control.fetch(
            subjects.dn_stream(self.spec.name), f"dn.{self.spec.name}.{h.epoch}.*.*.*.m"
        )
        there = [(parts, s) for parts, s in parsed(stored) if parts.fragment in h.owned]
        mine = [s for _, s in there]
        known.found(max(((s.seq, s.subject) for s in mine), default=None), life)
        torn = await self._torn([s for parts, s in there if parts.term < h.term or h.outcome])
        mine = [s for s in mine if s.subject not in torn]
        if published != self.machine.published or h is not self.machine.history:
            known.doubted = True  # something went on meanwhile: the next look tells
            return
        lost = rewound(h, published, publications(mine))
        if lost is not None:
            log.warning("DN lost what it had acknowledged", published=published, found=lost)
            self.put(lost)
