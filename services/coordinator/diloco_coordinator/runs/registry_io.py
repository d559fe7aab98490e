"""What the key-value buckets and the event stream say, mirrored in memory.

Nothing lives here alone: a coordinator that dies, or a second one, loses nothing.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from diloco_coordinator.access import TokenRecord, actor
from diloco_coordinator.runs import events
from diloco_coordinator.runs.history import Histories
from diloco_coordinator.runs.membership import MemberNote, Renewals, Roll, Speeds
from diloco_coordinator.runs.scheduler import Plan
from diloco_coordinator.runs.statuses import Standings, run_id_of
from diloco_shared import ambient
from diloco_shared.bus.port import Bus, Conflict, KeyEntry, Stored, StreamSpec, TooFewNodes
from diloco_shared.bus.repeating import PROMPT, again_and_again, until_done
from diloco_shared.bus.run_streams import ensure_buckets
from diloco_shared.bus.stored_records import event_now, stands_at, tell, write_if
from diloco_shared.process.crash_points import passing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Beat
from diloco_shared.protocol.records import (
    Assignment,
    Event,
    LearnerSpeed,
    MemberRecord,
    RunRecord,
    RunStatus,
)
from diloco_shared.protocol.wire import WireError, decode, encode

log = structlog.get_logger()

T = TypeVar("T")

# The coordinator's own buckets.
NOTES = subjects.NOTES  # <member> -> MemberNote, JSON
TOKENS = subjects.TOKENS  # <name> -> TokenRecord, JSON
REPEATS = subjects.REPEATS  # <digest of an Idempotency-Key> -> what was asked, ids of its run

MIRRORED = (
    NOTES,  # first: they tell what a member was before its key is looked at
    subjects.MEMBERS,
    subjects.RUNS,
    subjects.STATUS,
    subjects.ASSIGNMENTS,
    TOKENS,
)

# Names of revoked tokens whose end is remembered; an echo of their making is late by seconds.
REVOKED_MAX = 1000
# Before what was interrupted is read on, in seconds.
RETRY_S = 0.5


class Registry:
    """A view of the cluster, fed by `watch` and `read_events`."""

    def __init__(self, bus: Bus, *, replicas: int = 1) -> None:
        """`replicas`: copies of buckets and events."""
        self.bus = bus
        self._replicas = replicas
        self.roll = Roll()
        self.renewals = Renewals()
        self.speeds = Speeds()
        self.runs: dict[str, RunRecord] = {}
        self.standings = Standings()
        self.statuses = self.standings.statuses
        self.assignments: dict[str, Assignment] = {}
        self.tokens: dict[str, TokenRecord] = {}
        # One change at a time: noting a token's last use must not bring a revoked one back.
        self._changing_tokens = asyncio.Lock()
        self.revisions: dict[tuple[str, str], int] = {}  # not of members and statuses
        self.plan = Plan((), {}, {})  # of the newest look at who works for what
        self.histories = Histories()
        self.told = events.Events()
        self.changed = asyncio.Condition()
        self.changes = 0  # that were notified
        self.ready = False

    @property
    def events(self) -> deque[tuple[int, Event]]:
        """(sequence, event), oldest first."""
        return self.told.kept

    @property
    def assigned(self) -> dict[str, str]:
        """Member -> run, of those that work for one."""
        return {m: a.run for m, a in self.assignments.items() if a.run and self.holds(a)}

    def holds(self, a: Assignment) -> bool:
        """Whether the run of an assignment is there, and is not a later one of that name."""
        return a.run in self.runs and run_id_of(self.runs[a.run]) == a.run_id

    def wordless_s(self, run: str) -> float:
        """Seconds for which no leader of a run has said anything; 0 while nobody can be heard."""
        if not self.bus.connected:
            self.standings.listening_since = ambient.monotonic()
        return self.standings.wordless_s(run, ambient.monotonic())

    def working(self, run: str) -> list[str]:
        """Living members that say they work for a run, whatever they are assigned to."""
        return sorted(m for m, r in self.roll.living.items() if r.run == run)

    # --- mirror --------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Buckets, events and all that was known are here afterwards; waits for the bus.

        Each request by itself: what is done need not be done again where a later one fails.
        """
        bus, stream, every = self.bus, subjects.EVENTS_STREAM, subjects.EVENTS_FILTER
        buckets, copies = (*subjects.BUCKETS, *subjects.PRIVATE_BUCKETS), self._replicas
        try:
            await ensure_buckets(bus, buckets, renew=True, replicas=copies)
        except TooFewNodes as error:
            raise TooFewNodes(
                f"the hub has no {copies} nodes that could each keep a copy of the buckets "
                f"({error}): see that all its nodes are there, or set DILOCO_REPLICAS=1"
            ) from None
        kept = replace(events_stream(named=bus.named), replicas=copies)
        await _done(lambda: bus.ensure_stream(kept))
        for bucket in MIRRORED:
            for entry in (await self._all_of(bucket)).values():
                await _done(lambda b=bucket, e=entry: self._take(b, e))  # type: ignore[misc]
        living = {subjects.member_of(key) for key in await self._all_of(subjects.MEMBERS)}
        for note in self.roll.absent(living, ambient.wall()):
            await _done(lambda n=note: self._note(n))  # type: ignore[misc]
        last = (await _done(lambda: bus.stream_info(stream))).last_seq
        first = max(1, last - events.EVENTS_MAX + 1)
        for message in await _done(lambda: bus.fetch(stream, every, start_seq=first)):
            self._event(message)
        # The stream's last events may have gone with a run, and readers have their sequences.
        self.told.newest = max(self.told.newest, last)
        self.ready = True

    async def _all_of(self, bucket: str) -> dict[str, KeyEntry]:
        return await _done(lambda: self.bus.kv_all(bucket))

    async def watch(self, bucket: str) -> None:
        """Mirror one bucket, for ever."""

        async def mirror() -> None:
            async with self.bus.kv_watch(bucket) as entries:
                if bucket == subjects.STATUS:
                    self.standings.listening_since = ambient.monotonic()
                await self._gone_meanwhile(bucket)
                async for entry in entries:
                    await self._take(bucket, entry)
                    await self._notify()

        await again_and_again(mirror, f"watch of {bucket}", RETRY_S)

    async def _gone_meanwhile(self, bucket: str) -> None:
        """Let go of keys that are not there any more: a watch tells only of those that it saw.

        One that was interrupted may have had their ends still to tell.
        """
        known: dict[str, Iterable[str]] = {
            subjects.MEMBERS: self.roll.living,
            subjects.RUNS: [key for b, key in self.revisions if b == subjects.RUNS],
            subjects.ASSIGNMENTS: self.assignments,
            TOKENS: self.tokens,
        }
        before = {key: self.revisions.get((bucket, key), 0) for key in known.get(bucket, ())}
        there: Iterable[str] = await self.bus.kv_all(bucket)
        if bucket == subjects.MEMBERS:
            there = {subjects.member_of(key) for key in there}
        for key, revision in before.items():
            # One that was written meanwhile is there again, and the watch brings it.
            if key not in there and self.revisions.get((bucket, key), 0) == revision:
                await self._take(bucket, KeyEntry(key, None, revision))
                await self._notify()
        if bucket == TOKENS:
            self._keep_ends(0)  # a new watch brings no echo of before

    async def read_events(self) -> None:
        """Mirror the event stream, for ever."""

        async def mirror() -> None:
            start = self.told.newest + 1
            stream, every = subjects.EVENTS_STREAM, subjects.EVENTS_FILTER
            async with self.bus.read(stream, every, start_seq=start) as messages:
                async for stored in messages:
                    if self._event(stored):
                        await self._notify()

        await again_and_again(mirror, "reading of events", RETRY_S)

    async def hear_beats(self, subject: str) -> None:
        """What leaders say of runs whose status they cannot write, for ever."""

        async def hear() -> None:
            async with self.bus.subscribe(subject) as deliveries:
                async for delivery in deliveries:
                    try:
                        beat = decode(delivery.payload, Beat)
                    except WireError as error:
                        log.debug("unreadable beat", subject=delivery.subject, error=str(error))
                        continue
                    if self.standings.hear(beat, ambient.monotonic()):
                        self._put_together(beat.run)
                        await self._notify()

        await again_and_again(hear, "hearing of beats", RETRY_S)

    async def hear_speeds(self) -> None:
        """What learners say of their speed, for ever."""

        async def hear() -> None:
            async with self.bus.subscribe(subjects.speed("*", "*")) as deliveries:
                async for delivery in deliveries:
                    try:
                        speed = decode(delivery.payload, LearnerSpeed)
                        stands_at(delivery.subject, subjects.speed(speed.run, speed.learner))
                    except WireError as error:
                        log.debug("unreadable speed", subject=delivery.subject, error=str(error))
                        continue
                    self.speeds.hear(speed, ambient.monotonic())

        await again_and_again(hear, "hearing of speeds", RETRY_S)

    def speed_of(self, learner: str) -> LearnerSpeed | None:
        """Of a learner that lives, for the run that it works for; None if that is not known."""
        note = self.roll.notes.get(learner)
        if note is None or not note.alive:
            return None
        return self.speeds.of(learner, note.record.run, ambient.monotonic())

    async def _notify(self) -> None:
        self.changes += 1
        async with self.changed:
            self.changed.notify_all()

    def _event(self, stored: Stored) -> bool:
        now = ambient.monotonic()
        return self.told.take(stored.seq, stored.subject, stored.payload, now, self.runs)

    async def _take(self, bucket: str, entry: KeyEntry) -> None:
        """What a key says now, unless newer is known."""
        key, value, place = entry.key, entry.value, (bucket, entry.key)
        if entry.anew:
            self.revisions.pop(place, None)
        if entry.anew and bucket == TOKENS:
            self._keep_ends(0)  # tokens that are made now would look like echoes
        if entry.revision < self.revisions.get(place, 0):
            return  # an echo of what was overwritten meanwhile
        if bucket == subjects.MEMBERS and not self._renewed(entry):
            return
        if bucket in (subjects.RUNS, subjects.ASSIGNMENTS, NOTES, TOKENS):
            self.revisions[place] = entry.revision
        if value is None and bucket == TOKENS:
            self.revisions[place] = self.revisions.pop(place)  # the last end of all
            self._keep_ends(REVOKED_MAX)
        elif value is None:
            self.revisions.pop(place, None)
        try:
            await self._set(bucket, key, value)
        except WireError as error:
            if bucket == subjects.RUNS:
                self._gone(key)  # nobody may write over it by what was known before
            log.error("unreadable record", bucket=bucket, key=key, error=str(error))
        except ValidationError as error:
            # Without what was found there: a log shows no token, and no digest of one.
            where = [(".".join(map(str, e["loc"])) or "(whole)", e["msg"]) for e in error.errors()]
            why = "; ".join(f"{place}: {what}" for place, what in where)
            log.error("unreadable record", bucket=bucket, key=key, error=why)

    def _renewed(self, entry: KeyEntry) -> bool:
        """Whether a member's key says something new."""
        member = subjects.member_of(entry.key)
        if entry.value is None:
            self.renewals.end(member)
            return True
        return self.renewals.hear(member, entry.key, entry.revision, ambient.monotonic())

    async def miss(self) -> None:
        """Who has not renewed its key for long is gone, though the key may be there for ever."""
        self.renewals.keep(self.roll.notes)
        for member in self.renewals.overdue():
            note = self.roll.silent(member, ambient.wall())
            if note is not None:
                log.warning("nobody renews the key of a member: it counts as gone", member=member)
                await self._note(note)

    def _keep_ends(self, most: int) -> None:
        """Of revoked tokens: whatever was said of one before must not bring it back."""
        ended = [(b, k) for b, k in self.revisions if b == TOKENS and k not in self.tokens]
        for place in ended[: max(0, len(ended) - most)]:
            del self.revisions[place]

    async def _set(self, bucket: str, key: str, value: bytes | None) -> None:
        match bucket:
            case subjects.MEMBERS:
                if value is None:
                    note = self.roll.silent(subjects.member_of(key), ambient.wall())
                else:
                    record = decode(value, MemberRecord)
                    if not record.stands_at(key):
                        raise WireError(f"of the {record.role} {record.id}")
                    note = self.roll.seen(record, ambient.wall())
                if note is not None and self.ready:
                    await self._note(note)
            case subjects.RUNS if value is not None:
                run = decode(value, RunRecord)
                if key in self.runs and not self.is_run(key, run_id_of(run)):
                    self._gone(key, run.created_at)  # the end of the one before was not heard
                self.runs[key] = run
                self._put_together(key)  # of its id alone
            case subjects.RUNS:
                self._gone(key)
            case subjects.STATUS:
                self._status(key, value)
            case subjects.ASSIGNMENTS:
                self.assignments.pop(key, None)
                if value is not None:
                    self.assignments[key] = decode(value, Assignment)
            case _ if bucket == NOTES:
                self._noted(key, value)
            case _:
                self.tokens.pop(key, None)
                if value is not None:
                    self.tokens[key] = TokenRecord.model_validate_json(value)

    def _status(self, key: str, value: bytes | None) -> None:
        """A shard's status: a run's is made of those of all its shards."""
        found = None if value is None else decode(value, RunStatus)
        run = self.standings.take(key, found, ambient.monotonic())
        whole = self._put_together(run)
        if whole is not None:
            self.histories.add(whole)

    def _put_together(self, run: str) -> RunStatus | None:
        known = self.standings.misfits.copy()
        whole = self.standings.put_together(run, self.runs.get(run))
        for key in self.standings.misfits - known:
            log.error("status left out: it has other fragments than its run", key=key)
        return whole

    def _noted(self, member: str, value: bytes | None) -> None:
        if value is None:
            self.roll.left(member)
            return
        there, note = self.roll.notes.get(member), _note(value)
        if there is None:
            self.roll.restore(note, ambient.wall())
        elif there.drained != note.drained:  # another coordinator was asked
            self.roll.drain(member, note.drained)

    # --- looking -------------------------------------------------------------------------------

    def events_after(self, after: int, run: str = "") -> list[tuple[int, Event]]:
        """Events with a greater sequence, oldest first; of one run, or of all."""
        return self.told.after(after, run)

    def there(self, run: str) -> bool:
        """Whether a run is there for others: submitted as a whole, and not being deleted."""
        return run in self.runs and self.runs[run].phase == "there"

    def forced(self, run: str) -> bool:
        """Whether a run is over by the coordinator's word alone, and its syncers may end it."""
        status = self.statuses.get(run)
        return status is not None and status.forced and self.there(run)

    def over(self, run: str) -> bool:
        """Whether nobody needs to work for a run any more, or yet."""
        if not self.there(run):
            return True
        status = self.statuses.get(run)
        if status is not None:
            return status.settled
        # Stopped before it began; a syncer that was given it has to end it properly.
        return self.runs[run].desired == "stopped" and run not in self.assigned.values()

    # --- writing -------------------------------------------------------------------------------

    async def create_run(self, record: RunRecord) -> None:
        """Conflict if the name is taken. A submission that was cut off holds no name."""
        place = (subjects.RUNS, record.name)
        try:
            revision = await self.bus.kv_create(*place, encode(record))
        except Conflict:
            there = await self.bus.kv_get(*place)
            if there is not None:
                await self._take(subjects.RUNS, there)
            known = self.runs.get(record.name)
            if there is None or known is None or known.phase != "submitting":
                raise
            revision = await self.bus.kv_update(*place, encode(record), there.revision)
        passing("run-record")
        if self._newest(place, revision):
            self.runs[record.name] = record

    async def update_run(self, record: RunRecord) -> None:
        """Replace the record that is mirrored here; Conflict, and a fresh mirror, if it changed."""
        place = (subjects.RUNS, record.name)
        if not self.is_run(record.name, run_id_of(record)):
            raise Conflict(f"{record.name} is another run by now")
        try:
            revision = await self.bus.kv_update(*place, encode(record), self.revisions[place])
        except Conflict:
            if not await self._look_again(*place):
                self._gone(record.name)
            raise
        if record.name in self.runs and self._newest(place, revision):
            self.runs[record.name] = record

    def _newest(self, place: tuple[str, str], revision: int) -> bool:
        """Note what was written here, unless somebody else's newer word came first."""
        if revision < self.revisions.get(place, 0):
            return False
        self.revisions[place] = revision
        return True

    async def _look_again(self, bucket: str, key: str) -> bool:
        """Mirror a key that somebody else wrote; whether there is one."""
        before = self.revisions.get(place := (bucket, key), 0)
        there = await self.bus.kv_get(bucket, key)
        if there is not None:
            anew = self.revisions.get(place, 0) == before > there.revision  # it is no echo
            await self._take(bucket, replace(there, anew=anew))
        return there is not None

    async def look_for_run(self, name: str) -> bool:
        """Whether there is a run of this name on the bus, perhaps not mirrored until now."""
        return await self._look_again(subjects.RUNS, name)

    def is_run(self, run: str, run_id: str) -> bool:
        """Whether that run is there, and is not a later one of its name."""
        return run in self.runs and run_id_of(self.runs[run]) == run_id

    async def remove_run(self, run: str, run_id: str) -> None:
        """Its record, the last of it; nothing where it is another run by now. Conflict where the
        record is another one than was mirrored here: then all of it wants to be deleted again."""
        place = (subjects.RUNS, run)
        try:
            await self.bus.kv_delete(*place, revision=self.revisions.get(place, 0))
        except Conflict:
            if await self._look_again(*place):
                if self.is_run(run, run_id):
                    raise
                return
        self._gone(run)

    def _gone(self, run: str, made_again: float = math.inf) -> None:
        """A run's record is not there any more; `made_again`: when another took its name."""
        record = self.runs.pop(run, None)
        if record is None:
            return
        self.standings.forget(run, run_id_of(record))
        self.histories.forget(run)
        self.told.forget(run, made_again)

    async def assign(self, member: str, run: str, shard: int = 0) -> None:
        """Write an assignment; Conflict if another coordinator did, or the run is gone."""
        place = (subjects.ASSIGNMENTS, member)
        if run and not self.there(run):
            raise Conflict(f"{run} is deleted, or about to be")
        run_id = run_id_of(self.runs[run]) if run else ""
        assignment = Assignment(
            member=member, run=run, run_id=run_id, shard=shard, at=ambient.wall()
        )
        try:
            known = self.revisions.get(place, 0)
            revision = await write_if(self.bus, *place, encode(assignment), known)
        except Conflict:
            if not await self._look_again(*place):
                self.revisions.pop(place, None)
            raise
        if self._newest(place, revision):
            self.assignments[member] = assignment

    async def _note(self, note: MemberNote, *, wish: bool = False) -> None:
        """Write a note; unless it is a `wish` of a user, that of another coordinator's stays."""
        member = note.record.id
        place = (NOTES, member)
        # What this note was made of. The mirror's revision may be another note's by the time that
        # it is written: to follow that one would undo what it says.
        known = self.revisions.get(place, 0)
        while True:
            value = note.model_dump_json().encode()
            try:
                revision = await write_if(self.bus, *place, value, known)
                self.revisions[place] = max(revision, self.revisions.get(place, 0))
                break
            except Conflict:
                entry = await self.bus.kv_get(*place)
                if entry is None or entry.value is None:
                    known = 0
                    continue
                known = entry.revision
                if not wish:
                    with suppress(ValidationError):
                        drained = _note(entry.value).drained
                        note = note.model_copy(update={"drained": drained})
                        if member in self.roll.notes:  # else it was forgotten meanwhile
                            self.roll.drain(member, drained)
        for surplus in self.roll.surplus():
            await self.forget(surplus)

    async def drain(self, member: str, wanted: bool) -> None:
        """Give a known member no more work, or let it have some again."""
        with self.roll.asking(member):
            await self._note(self.roll.drain(member, wanted), wish=True)
        if member in self.roll.notes:  # what another coordinator wrote before may have come since
            self.roll.drain(member, wanted)

    async def forget(self, member: str) -> None:
        """Remove a member that is gone, and its assignment; and its key, if that is still there.

        Should it come back this instant, its key makes a new note, and it is a free member. What a
        user asked of it meanwhile stays, though the deletion is seen before it is answered."""
        forgotten, left = self.roll.notes.get(member), self.renewals.heard.get(member)
        with self.roll.asking(member):
            if left is not None:
                with suppress(Conflict):
                    await self.bus.kv_delete(subjects.MEMBERS, left.key, revision=left.revision)
            await self.bus.kv_delete(subjects.ASSIGNMENTS, member)
            await self.bus.kv_delete(NOTES, member)
        self.assignments.pop(member, None)
        self.revisions.pop((subjects.ASSIGNMENTS, member), None)
        if self.roll.forget(member, forgotten):
            self.revisions.pop((NOTES, member), None)
        else:  # it may have been written down before the deletion
            await self._note(self.roll.notes[member], wish=True)

    async def put_token(self, record: TokenRecord) -> None:
        """Conflict if the name is taken."""
        place = (TOKENS, record.name)
        async with self._changing_tokens:
            revision = await self.bus.kv_create(*place, record.model_dump_json().encode())
            if self._newest(place, revision):
                self.tokens[record.name] = record

    async def update_token(self, known: TokenRecord, changed: TokenRecord) -> None:
        """Replace what is mirrored here; Conflict, and a fresh mirror, if it is another by now."""
        place = (TOKENS, known.name)
        async with self._changing_tokens:
            if self.tokens.get(known.name) != known:
                raise Conflict(f"the token {known.name} changed meanwhile")
            try:
                value = changed.model_dump_json().encode()
                revision = await self.bus.kv_update(*place, value, self.revisions.get(place, 0))
            except Conflict:
                await self._look_again(*place)
                raise
            if self._newest(place, revision):
                self.tokens[known.name] = changed

    async def delete_token(self, name: str) -> None:
        """At once: echoes of its making and of uses, answered or not, may still be on their way."""
        place = (TOKENS, name)
        async with self._changing_tokens:
            token = self.tokens.get(name)
            revision = await self.bus.kv_delete(*place)
            there = self.tokens.get(name)
            # Else another one has the name by now, which another coordinator made.
            if there is None or token is None or there.created_at == token.created_at:
                self.tokens.pop(name, None)
                self.revisions[place] = max(revision, self.revisions.get(place, 0))

    async def tell(self, run: str, kind: str, text: str, data: dict[str, Any]) -> None:
        """Write to the event log; of what a request caused, `data` says whose it was."""
        data = {**data, "actor": who} if (who := actor()) else data
        await tell(self.bus, event_now(run or subjects.CLUSTER, kind, "coordinator", text, data))


def events_stream(*, named: bool) -> StreamSpec:
    """Of events; `named`: every process has credentials of its own."""
    name, captured = subjects.EVENTS_STREAM, (subjects.EVENTS_FILTER,)
    whole = StreamSpec(name, captured, events.EVENTS_BYTES_MAX, drop_oldest=True)
    if not named:
        return whole
    return replace(
        whole,
        synced=False,  # a flood would keep the disk busy that the tape is written to
        bytes_max=events.NAMED_BYTES_MAX,
        subject_messages_max=events.BY_ONE_MAX,
        message_bytes_max=events.EVENT_BYTES_MAX,
    )


def _note(value: bytes) -> MemberNote:
    """As any release wrote it; ValidationError for what is no note."""
    return MemberNote.model_validate_json(value, extra="ignore")


async def _done(what: Callable[[], Awaitable[T]]) -> T:
    return await until_done(what, "the bus", pauses=PROMPT)
