"""A standby that cannot execute the tape: it looks for the run's state everywhere else.

A snapshot on this machine, of the leader or of another syncer; a run-wide checkpoint; and when all
that is in vain for long enough, the published parameters.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import structlog

from diloco_shared import ambient
from diloco_shared.bus.port import BusError, Unavailable
from diloco_shared.bus.repeating import left_undone
from diloco_shared.bus.stored_records import readable_at
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord
from diloco_syncer.context import RunContext
from diloco_syncer.history.follow_io import Damaged, Follower, Purged, Replaced
from diloco_syncer.history.history import History
from diloco_syncer.history.tape_io import Unread
from diloco_syncer.leadership.lease_io import LeaseKeeper
from diloco_syncer.leadership.rebirth import LastResort
from diloco_syncer.merging.published_io import Unpublished
from diloco_syncer.snapshots.handover_io import NoSnapshot, fetch_snapshot
from diloco_syncer.streams.purging_io import other_syncers

log = structlog.get_logger()

# Before everybody is asked again, in seconds.
RETRY_S = 2.0
# Between two looks at the run-wide checkpoints, in seconds: their root may be a bucket that counts.
CHECKPOINTS_S = 20.0
# What a syncer is to one that is stuck, by the state that its member record shows.
KINDS = {"leading": "leading", "standby": "fit", "ineligible": "unfit"}

Tell = Callable[[str, str], Awaitable[None]]
# (state, reason, newest record known)
Show = Callable[[str, str, int], None]


@dataclass(frozen=True, slots=True)
class Peers:
    """The other living syncers of the shard, by what they show."""

    leading: tuple[str, ...]
    fit: tuple[str, ...]
    coming: tuple[str, ...]
    unfit: tuple[str, ...]

    @property
    def askable(self) -> tuple[str, ...]:
        """All but the leader, which was asked before; those first that have most."""
        return (*self.fit, *self.coming, *self.unfit)


class StateSearch:
    """Of one candidate. `fresh` makes a follower that has begun with nothing."""

    def __init__(
        self,
        context: RunContext,
        keeper: LeaseKeeper,
        fresh: Callable[[], Follower],
        show: Show,
        tell: Tell,
    ) -> None:
        self.spec, self.shard, self.me = context.spec, context.shard, context.me
        self.control, self.data = context.control, context.data
        self.keeper = keeper
        self.fresh = fresh
        self.show = show
        self.tell = tell
        self.last_resort = LastResort(self.spec)
        self.checkpoints_at = 0.0
        self.told = ""
        self.walked: History | None = None  # as far as the tape was read to begin again

    async def way_on(self, follower: Follower, fault: Purged) -> Follower:
        """A follower that can go on, once there is one; until then the reason is shown.

        One that is left behind keeps no store: two of them are twice what a syncer needs.
        """
        if not isinstance(fault, Unread):  # that one may still go on by itself
            follower.let_go()
        found = await self._way_on(follower, fault)
        if found is not follower:
            follower.let_go()
        # Else its reason would stand until it has caught up, and UP would not wait for it.
        self.show("catching up", "", found.history.seq)
        return found

    async def _way_on(self, follower: Follower, fault: Purged) -> Follower:
        seq, anew = follower.history.seq, False  # whether the server has begun a new life since
        while True:
            store = ambient.monotonic() >= self.checkpoints_at  # its turn to be asked
            with left_undone("look back at the tape"):
                anew = await follower.look_back() or anew
            found, why = await self._newer(seq), ""
            if found is None:
                # Those who live first: they have more, and a store that hangs is long waited for.
                why = await self._ask_for_snapshot(seq)
                found = await self._newer(seq, checkpoints=store)
            if found is not None:
                return found
            why = why or "the snapshot that was sent is of records that the tape has lost"
            again = isinstance(fault, Damaged) or (store and isinstance(fault, Unread))
            if (again or anew) and await self._readable(follower):
                if isinstance(fault, Unread):
                    return follower
                # A hub that was put back has it. This follower has let go of its store.
                raise Replaced(f"what was gone is there again: {fault}")
            text = f"{fault}, and {why}"
            not_yet = await self._why_not_begin_again(seq)
            if not not_yet:
                reborn = self.fresh()
                not_yet = await self._begin_again(reborn, follower.history, str(fault))
                if not not_yet:
                    return reborn
            await self.unfit(f"{text}: {not_yet}", text, seq)
            await asyncio.sleep(RETRY_S)

    async def unfit(self, why: str, gist: str, seq: int) -> None:
        """Show that this process cannot lead; tell it once, as long as `gist` is the same."""
        self.keeper.fit(f"ineligible: {why}"[:400])
        self.show("ineligible", why, seq)
        if gist != self.told:
            self.told = gist
            await self.tell("standby-unfit", f"{self.me} cannot lead: {why}")

    # --- snapshots -----------------------------------------------------------------------------

    async def _newer(self, after: int, *, checkpoints: bool = False) -> Follower | None:
        if checkpoints:
            self.checkpoints_at = ambient.monotonic() + CHECKPOINTS_S
        follower = self.fresh()
        try:
            if await follower.load_newer(after, checkpoints=checkpoints):
                return follower
        except (BusError, OSError, ValueError, KeyError) as error:
            log.warning("no use of what lies here", error=str(error))
        return None

    async def _ask_for_snapshot(self, after: int) -> str:
        """Get one from the leader, else from any other syncer; why there is none, or "" """
        why, covers = await self._ask(after)
        if not why:
            return await self._got(covers)
        try:
            peers = (await self._peers()).askable
        except BusError as error:
            return f"{why}; other syncers are not known ({error})"
        for peer in peers:
            not_this, covers = await self._ask(after, peer)
            if not not_this:
                return await self._got(covers)
        return why

    async def _got(self, covers: int) -> str:
        await self.tell("snapshot-fetched", f"{self.me} has a snapshot of record {covers}")
        return ""

    async def _ask(self, after: int, peer: str = "") -> tuple[str, int]:
        """(why not, what it covers) of the leader, or of a peer."""
        snapshots = self.fresh().finder.snapshots
        try:
            return "", await fetch_snapshot(
                self.spec.name,
                self.shard,
                self.me,
                self.control,
                self.data,
                snapshots,
                after=after,
                of=peer,
            )
        except Unavailable as error:
            return f"no leader answers that could send a snapshot ({error})", 0
        except (NoSnapshot, BusError, OSError, ValueError) as error:
            return f"no snapshot: {error}", 0

    async def _readable(self, follower: Follower) -> bool:
        try:
            return await follower.readable()
        except BusError:
            return False

    # --- the last resort -----------------------------------------------------------------------

    async def _why_not_begin_again(self, seq: int) -> str:
        try:
            peers, asked = await self._peers(), await self._asked(seq)
        except BusError as error:
            self.last_resort.blind(ambient.monotonic())
            return f"the bus does not answer: {error}"
        return self.last_resort.look(
            ambient.monotonic(),
            leader=self.keeper.elsewhere,
            fit=(*peers.leading, *peers.fit),
            coming=peers.coming,
            asked=asked,
        )

    async def _peers(self) -> Peers:
        kinds: dict[str, list[str]] = {"leading": [], "fit": [], "coming": [], "unfit": []}
        for m in await other_syncers(self.control, self.spec.name, self.shard, self.me):
            kinds[KINDS.get(m.state, "coming")].append(m.id)
        return Peers(**{kind: tuple(sorted(ids)) for kind, ids in kinds.items()})

    async def _asked(self, seq: int) -> bool:
        """Whether the user wants it, having seen all that is on the tape; or wants a stop."""
        record = await readable_at(self.control, subjects.RUNS, self.spec.name, RunRecord)
        if record is None:
            return False
        if record.desired == "stopped":
            return True
        tail = await self.data.last(
            subjects.tape_stream(self.spec.name), subjects.tape(self.spec.name, self.shard)
        )
        return tail is not None and 0 < tail.seq <= record.begin_again

    async def _begin_again(self, follower: Follower, known: History, why: str) -> str:
        """Give it what is published, and what the tape says after `known`; why not, or "" """
        # Not "catching up": two that read at the same time would wait for each other for ever.
        self.show("ineligible", f"{why}; reads what is published", known.seq)
        executed, further = known.seq, self.walked
        if further is not None and further.seq > known.seq:
            known = further  # of an attempt that ended on the way: a tape takes hours to walk
        try:
            await follower.begin_again(known, why, partial(self._reads, why, executed))
        except Replaced:
            self.walked = None
            raise
        except (Unpublished, Purged, BusError) as error:
            self.walked = follower.history
            return f"it cannot begin again: {error}"
        # Reading took its time: whoever came back meanwhile has more.
        not_yet = await self._why_not_begin_again(follower.history.seq)
        self.walked = follower.history if not_yet else None
        return not_yet

    def _reads(self, why: str, executed: int, seq: int, end: int) -> None:
        """Show how far it is."""
        text = f"reads record {seq} of {end} of the tape, and then what is published: {why}"
        self.show("ineligible", text, executed)
