"""One syncer's part in one run: stands by, leads when the lease is its own, stands by again."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from diloco_shared.config import RunSpec
from diloco_shared.edges.bus import Bus, BusError, StreamSpec, Unavailable
from diloco_shared.edges.crash_points import passing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Event as EventRecord
from diloco_shared.protocol.wire import encode
from diloco_syncer.edges.follow import Follower, Purged, Recovered
from diloco_syncer.edges.handover import NoSnapshot, fetch_snapshot
from diloco_syncer.edges.leader import Leader
from diloco_syncer.edges.lease import LeaseKeeper
from diloco_syncer.edges.outbox import until_done
from diloco_syncer.edges.showing import over_elsewhere, shown_over
from diloco_syncer.edges.snapshots import SNAPSHOTS, SnapshotStore
from diloco_syncer.edges.tape import Deposed, Tape

log = structlog.get_logger()

# Between two looks at the tape's end, in seconds: a standby is at most that far behind, and one
# small request.
FOLLOW_S = 0.2
# Before the bus, or the leader for a snapshot, is asked again, in seconds.
RETRY_S = 2.0

# (state, reason, newest record executed): what the member record shows; "": state as before.
Show = Callable[[str, str, int], None]


class Candidate:
    """`run` returns the run's outcome; it raises what only a fresh process can mend."""

    def __init__(
        self,
        spec: RunSpec,
        keeper: LeaseKeeper,
        control: Bus,
        data: Bus,
        folder: Path,
        show: Show,
        *,
        payload_bytes_max: int,
        checkpoint_root: str,
        shard: int = 0,
    ) -> None:
        self.spec = spec
        self.me = keeper.lease.me
        self.keeper = keeper
        self.control = control
        self.data = data
        self.shard = shard
        own = folder / SNAPSHOTS / spec.folder
        self.snapshots = SnapshotStore(own / f"shard-{shard}" if shard else own)
        self.show = show
        self.payload_bytes_max = payload_bytes_max
        self.checkpoint_root = spec.keeping.run_checkpoint_root or checkpoint_root
        self.leader: Leader | None = None

    async def run(self) -> str:
        """Until the run is over; the lease is given back on every way out."""
        limit = self.spec.keeping.stream_bytes_max
        for name, captured in subjects.run_streams(self.spec.name).items():
            stream = StreamSpec(name, (captured,), limit)
            await until_done(lambda s=stream: self.control.ensure_stream(s))  # type: ignore[misc]
        keeping = asyncio.create_task(self.keeper.keep())
        try:
            while True:
                outcome = await self._lead(await self._stand_by())
                if outcome:
                    return outcome
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self.keeper.give_back()

    # --- leading -------------------------------------------------------------------------------

    async def _lead(self, place: tuple[Tape, Recovered]) -> str:
        """Lead until the run is over ("" when deposed: whoever leads now knows more)."""
        tape, recovered = place
        passing("takeover")
        self.show("leading", "", recovered.history.seq)
        self.leader = Leader(
            self.spec,
            self.me,
            self.control,
            self.data,
            tape,
            self.snapshots,
            self.keeper,
            recovered,
            lambda seq: self.show("", "", seq),
            payload_bytes_max=self.payload_bytes_max,
            checkpoint_root=self.checkpoint_root,
        )
        deposed: BaseException | None = None
        try:
            return await self.leader.run()
        except* Deposed as group:
            deposed = group
        finally:
            self.leader = None
        while isinstance(deposed, BaseExceptionGroup):
            deposed = deposed.exceptions[0]
        # Nothing of this term is kept: the next life begins at the snapshot and the tape.
        self.keeper.fit("deposed, reads the tape again")
        await self.tell("deposed", f"{self.me} stops leading and stands by: {deposed}")
        return ""

    # --- standing by ---------------------------------------------------------------------------

    async def _stand_by(self) -> tuple[Tape, Recovered]:
        """Follow the tape until this process holds the lease and has executed all of it."""
        told = ""
        self.show("catching up", "", 0)
        while True:
            tape = Tape(self.control, self.spec.name, self.shard)
            follower = Follower(self.spec, self.data, tape, self.snapshots, self.checkpoint_root)
            try:
                await follower.load()
                return tape, await self._follow(follower)
            except Purged as fault:
                seq, why = follower.history.seq, str(fault)
                why = await self._fetch_snapshot(seq, why)
                pause_s = RETRY_S if why else 0.0
            except (ValueError, OSError) as fault:
                # The same snapshot and the same records would end here again; a repaired folder,
                # or a newer snapshot, would not.
                seq, why, pause_s = follower.history.seq, str(fault), 10 * RETRY_S
            if why:
                self.keeper.fit(f"ineligible: {why}"[:400])
                self.show("ineligible", why, seq)
                if why != told:
                    await self.tell("standby-unfit", f"{self.me} cannot lead: {why}")
                told = why
            await asyncio.sleep(pause_s)

    async def _follow(self, follower: Follower) -> Recovered:
        keeper = self.keeper
        while True:
            leading = keeper.leading
            keeper.changed.clear()
            try:
                complete = await follower.catch_up()
                over = bool(follower.history.outcome) and await self._end_is_shown()
                if complete and leading and keeper.leading:
                    return await follower.recovered()
            except BusError as error:
                log.debug("standby: bus away", error=str(error))
                await asyncio.sleep(RETRY_S / 4)
                continue
            seq = follower.history.seq
            if not complete:
                self.show("", "", seq)
                continue
            # Whoever led knows who did what until the end: a successor would show less.
            keeper.fit("the run is over" if over else "")
            self.show("standby", "", seq)
            if not keeper.leading:
                with suppress(TimeoutError):
                    async with asyncio.timeout(FOLLOW_S):
                        await keeper.changed.wait()

    async def _end_is_shown(self) -> bool:
        """By all shards: until then a learner that returns needs a leader of each."""
        own = await shown_over(self.control, self.spec.name, self.shard)
        return own and await over_elsewhere(self.control, self.spec, self.shard)

    async def _fetch_snapshot(self, after: int, why: str) -> str:
        """Get one from the leader; why there is none, or "" """
        self.show("catching up", f"{why}; asks the leader for a snapshot", after)
        try:
            covers = await fetch_snapshot(
                self.spec.name,
                self.shard,
                self.me,
                self.control,
                self.data,
                self.snapshots,
                after=after,
            )
        except Unavailable as error:
            return f"{why}, and no leader answers that could send a snapshot ({error})"
        except (NoSnapshot, BusError, OSError, ValueError) as error:
            return f"{why}, and no snapshot: {error}"
        await self.tell("snapshot-fetched", f"{self.me} has a snapshot of record {covers}")
        return ""

    async def tell(self, kind: str, text: str) -> None:
        """Write to the event log; shown, never acted on, so that a failure is only logged."""
        log.info(kind, text=text)
        event = EventRecord(
            run=self.spec.name,
            kind=kind,
            source=self.me,
            text=text[:500],
            data={"syncer": self.me},
            at=time.time(),
        )
        try:
            await self.control.append(subjects.event(event.run, kind), encode(event))
        except BusError as error:
            log.warning("event not written", kind=kind, error=str(error))
