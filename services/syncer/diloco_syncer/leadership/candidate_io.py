"""One syncer's part in one run: stands by, leads when the lease is its own, stands by again."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog

from diloco_shared.budget import assumed, limits
from diloco_shared.bus.repeating import until_done
from diloco_shared.bus.run_streams import ensure_run_streams
from diloco_shared.bus.stored_records import event_now, tell
from diloco_shared.checkpoints.tape_archive_io import archives_of
from diloco_shared.process.crash_points import passing
from diloco_shared.process.faults import in_a_task, leaves
from diloco_shared.protocol import subjects
from diloco_syncer.context import RunContext
from diloco_syncer.history.follow_io import Follower, Purged, Recovered, Replaced
from diloco_syncer.history.state_search_io import RETRY_S, StateSearch
from diloco_syncer.history.tape_io import Deposed, Tape, TapeReplaced
from diloco_syncer.leadership.leader_io import Leader
from diloco_syncer.leadership.lease_io import LeaseKeeper
from diloco_syncer.snapshots.finding_io import Finder
from diloco_syncer.snapshots.handover_io import SnapshotSender
from diloco_syncer.status.status_writer_io import over_elsewhere, shown_over

log = structlog.get_logger()

# Between two looks at the tape's end, in seconds: a standby is at most that far behind, and one
# small request.
FOLLOW_S = 0.2

# A snapshot of a history that is lost is broken off. For so many seconds it is waited for one that
# is being put in place all the same, which takes a few writes of a folder: whoever begins anew
# looks once at what is there.
QUIET_S = 10.0

# (state, reason, newest record executed): what the member record shows; "": state as before.
Show = Callable[[str, str, int], None]


class Candidate:
    """`run` returns the run's outcome; it raises what only a fresh process can mend."""

    def __init__(self, context: RunContext, keeper: LeaseKeeper, show: Show) -> None:
        self.context = context
        self.spec, self.shard, self.me = context.spec, context.shard, context.me
        self.control, self.data, self.snapshots = context.control, context.data, context.snapshots
        self.keeper = keeper
        self.show = show
        self.finder = Finder(
            self.spec,
            self.shard,
            context.folder,
            self.snapshots,
            context.checkpoint_root,
            context.checkpoint_places,
        )
        self.leader: Leader | None = None

    async def run(self) -> str:
        """Until the run is over; the lease is given back on every way out."""
        needed = limits(assumed(self.spec))
        await until_done(
            lambda: ensure_run_streams(
                self.control, self.spec.name, needed, replicas=self.spec.keeping.replicas
            ),
            "streams of the run",
        )
        try:
            # Together: should the lease's keeper die, this process may not go on without it.
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self.keeper.keep()), tasks.create_task(self._give())]
                outcome = await self._take_part()
                for task in beside:
                    task.cancel()
            return outcome
        finally:
            await self.keeper.give_back()

    async def _take_part(self) -> str:
        while True:
            outcome = await self._lead(await self._stand_by())
            if outcome:
                return outcome

    async def _give(self) -> None:
        """A snapshot to any syncer that asks this one, whether it leads or not; for ever."""
        where = subjects.snapshot_wish_to(self.spec.name, self.shard, self.me)
        sender = SnapshotSender(self.context, where)
        await until_done(sender.send, "wishes for snapshots")

    # --- leading -------------------------------------------------------------------------------

    async def _lead(self, place: tuple[Tape, Recovered]) -> str:
        """Lead until the run is over ("" when deposed: whoever leads now knows more)."""
        tape, recovered = place
        passing("takeover")
        self.show("leading", "", recovered.history.seq)
        self.leader = Leader(
            self.context, tape, self.keeper, recovered, lambda seq: self.show("", "", seq)
        )
        deposed: BaseException | None = None
        replaced = False  # the hub may have been put back
        try:
            return await in_a_task(self.leader.run())
        except* Deposed as group:
            ends = leaves(group)
            # The lease may be another's then as well, and may be read before the tape.
            replaced = tape.replaceable or any(isinstance(end, TapeReplaced) for end in ends)
            deposed = ends[0]
            if replaced:
                self.leader.numbers.break_off()
        finally:
            # What ended it keeps its frames for a while; a standby loads a store of its own next.
            self.leader.numbers.store = None
            self.leader = None
        if replaced:
            await self._quiet()
        # Nothing of this term is kept: the next life begins at the snapshot and the tape.
        self.keeper.fit("deposed, reads the tape again")
        await self.tell("deposed", f"{self.me} stops leading and stands by: {deposed}")
        return ""

    # --- standing by ---------------------------------------------------------------------------

    async def _stand_by(self) -> tuple[Tape, Recovered]:
        """Follow the tape until this process holds the lease and has executed all of it."""
        self.show("catching up", "", 0)
        stuck = StateSearch(self.context, self.keeper, self._follower, self.show, self.tell)
        while True:
            follower = self._follower()
            try:
                await until_done(follower.load, "the tape")
                return await self._follow_on(follower, stuck)
            except Replaced as fault:
                log.warning("the hub was put back: reads the tape again", reason=str(fault))
                await self._quiet()
                self.show("catching up", "", 0)
                continue
            except (ValueError, OSError) as fault:
                # The same snapshot and the same records would end here again; a repaired folder,
                # or a newer snapshot, would not.
                await stuck.unfit(str(fault), str(fault), follower.history.seq)
            # This is not left to `until_done`: a new follower begins, and it is shown why.
            await asyncio.sleep(10 * RETRY_S)

    async def _follow_on(self, follower: Follower, stuck: StateSearch) -> tuple[Tape, Recovered]:
        """As far as the tape can be executed, and from another place where it cannot."""
        try:
            while True:
                try:
                    return follower.tape, await self._follow(follower)
                except Purged as fault:
                    follower = await stuck.way_on(follower, fault)
        finally:
            follower.own.break_off()

    async def _quiet(self) -> None:
        """Once no snapshot is being put in place, or for long enough."""
        if not await asyncio.to_thread(self.snapshots.quiet, QUIET_S):
            log.warning("a snapshot that was broken off is still being written")

    def _follower(self) -> Follower:
        archive = archives_of(self.spec, self.context.checkpoint_root)[self.shard]
        shards = self.spec.algorithm.shards
        threads = self.context.place_threads
        tape = Tape(
            self.control, self.spec.name, self.shard, archive, shards=shards, threads=threads
        )
        return Follower(self.spec, self.data, tape, self.finder, lambda: self.keeper.leading)

    async def _follow(self, follower: Follower) -> Recovered:
        pauses = (RETRY_S / 4, RETRY_S / 4)
        while True:
            found = await until_done(partial(self._look, follower), "the tape", pauses=pauses)
            if found is not None:
                return found

    async def _look(self, follower: Follower) -> Recovered | None:
        """Executes what is new on the tape. Returns None unless that was all of it and this
        process leads. Raises BusError."""
        keeper = self.keeper
        leading = keeper.leading
        keeper.changed.clear()
        complete = await follower.catch_up()
        over = bool(follower.history.outcome) and await self._end_is_shown()
        if complete and leading and keeper.leading:
            return await follower.recovered()
        seq = follower.history.seq
        if not complete:
            self.show("", "", seq)
            return None
        # Whoever led knows who did what until the end: a successor would show less.
        keeper.fit("the run is over" if over else "")
        self.show("standby", "", seq)
        if not keeper.leading:
            with suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_S):
                    await keeper.changed.wait()
        return None

    async def _end_is_shown(self) -> bool:
        """By all shards: until then a learner that returns needs a leader of each."""
        own = await shown_over(self.control, self.spec, self.shard)
        return own and await over_elsewhere(self.control, self.spec, self.shard)

    async def tell(self, kind: str, text: str) -> None:
        """Write to the event log."""
        log.info(kind, text=text)
        event = event_now(self.spec.name, kind, self.me, text, {"syncer": self.me})
        await tell(self.control, event)
