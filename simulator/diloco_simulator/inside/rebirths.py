"""Whether a run that begins again from what is published had to (I6).

It may do so only where nobody has its state (docs/how-to/recover.md). What could have been gone on
from is looked for when the tape takes the record of it: snapshots of any syncer, run-wide
checkpoints, and syncers that stand by. Only what is certain is judged: what was there, and could be
reached, for longer than whoever begins again has looked for it. So one that has just appeared says
nothing, nor does one that leads to records whose contributions the hub has lost.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_shared.bus.port import Stored
from diloco_shared.checkpoints.checkpoints_io import CheckpointError, RunCheckpoints
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import HEADER_INDEX
from diloco_shared.protocol.messages import (
    ContributionManifest,
    InitManifest,
    TapeCheckpoint,
    TapeInit,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
)
from diloco_shared.protocol.wire import WireError, decode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.inside.observer import Observer
from diloco_simulator.virtual_loop import ORIGIN, Hosted, current
from diloco_simulator.worlds.processes import TWINS, Host
from diloco_syncer.checkpoints.parts_io import written_part
from diloco_syncer.history.follow_io import Follower
from diloco_syncer.history.history import identity, is_of
from diloco_syncer.history.replay import payloads_needed
from diloco_syncer.history.state_search_io import CHECKPOINTS_S
from diloco_syncer.leadership.rebirth import LastResort
from diloco_syncer.snapshots.snapshots_io import META, SNAPSHOTS, SnapshotStore

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# Who looks at the tape's end five times a second, and has not for so many virtual seconds, has met
# trouble on the way.
GAP_S = 2.0
# Between two looks, one of which may have come just before: four requests of a few seconds at most.
LOOK_S = 5.0


@dataclass(slots=True)
class Standing:
    """A process that follows a tape: since when it has been at its end at every look."""

    process: Hosted
    follower: Follower
    since: float
    at: float


class SeenRebirths:
    """Of one world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.placed: dict[Path, float] = {}  # snapshots, and when they were put in their place
        self.complete: dict[tuple[str, int], float] = {}  # run-wide checkpoints, by run and number
        self.standing: dict[str, Standing] = {}  # by the names of processes
        # Of each UP: sequences, ascending, and when the hub took them.
        self.taken: dict[str, tuple[list[int], list[float]]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Until the end of the block what there is to go on from is seen."""
        in_place, catch_up = SnapshotStore._in_place, Follower.catch_up

        def placed(snapshots: SnapshotStore, aside: Path, covers: int) -> Path:
            path = in_place(snapshots, aside, covers)
            self.placed[path] = self._now
            return path

        async def caught_up(follower: Follower) -> bool:
            complete = await catch_up(follower)
            self._follows(follower, complete=complete)
            return complete

        SnapshotStore._in_place = placed  # type: ignore[method-assign, assignment]
        Follower.catch_up = caught_up  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            SnapshotStore._in_place = in_place  # type: ignore[method-assign]
            Follower.catch_up = catch_up  # type: ignore[method-assign]

    @property
    def _now(self) -> float:
        return self.world.loop.now

    def _follows(self, follower: Follower, *, complete: bool) -> None:
        process, now = current(), self._now
        if process is None or not complete:
            return
        known = self.standing.get(process.name)
        anew = known is None or known.follower is not follower or now - known.at > GAP_S
        since = now if known is None or anew else known.since
        self.standing[process.name] = Standing(process, follower, since, now)

    def stored(self, observer: Observer, stream: str, message: Stored) -> None:
        """The hub has taken a message of a run."""
        spec = observer.spec
        if stream == subjects.up_stream(spec.name):
            seqs, times = self.taken.setdefault(stream, ([], []))
            cut = bisect_right(seqs, message.seq - 1)  # UP may have lost its tail
            del seqs[cut:], times[cut:]
            seqs.append(message.seq)
            times.append(self._now)
        elif message.subject in observer.tapes and not observer.made_again:
            shard = observer.tapes[message.subject]
            self._recorded(observer, shard, *observer.records[shard][-1])

    def _recorded(self, observer: Observer, shard: int, seq: int, record: TapeRecord) -> None:
        if isinstance(record, TapeCheckpoint) and record.outcome == "complete":
            self.complete.setdefault((observer.spec.name, record.number), self._now)
        if not isinstance(record, TapeRebirth) or (spec := self._spec_of(record)) is None:
            return
        of = observer.watch.of[shard]
        of.report.looked("I6")
        self.world.found.counts["beginnings again that were judged"] += 1
        for found in Alternatives(self, spec, shard, observer.records[shard][:-1], record).found():
            of.report("I6", f"{record.leader} begins again from what is published, and {found}")

    def _spec_of(self, record: TapeRebirth) -> RunSpec | None:
        """What whoever begins again knows of its run, its id included; None: it was disturbed while
        it looked, or there are two of its name."""
        mine = [m for m in self.world.syncers if m.name == record.leader]
        twins = [m for m in self.world.troubles.twins if m.name == record.leader and m.lives]
        if len(mine) != 1 or twins or (process := mine[0].process) is None or process.frozen:
            return None
        known = self.standing.get(process.name)
        if known is None or known.follower.reborn is None:
            return None
        undisturbed_s = self._now - max(process.started - ORIGIN, process.thawed_at)
        return known.follower.spec if undisturbed_s >= looked_s(known.follower.spec) else None


def looked_s(spec: RunSpec) -> float:
    """For how long whoever begins again has looked for the run's state, in virtual seconds."""
    return LastResort(spec).after_s + LOOK_S


class Alternatives:
    """What one that begins again could have gone on from."""

    def __init__(
        self,
        seen: SeenRebirths,
        spec: RunSpec,
        shard: int,
        tape: list[tuple[int, TapeRecord]],
        record: TapeRebirth,
    ) -> None:
        """`tape`: what came before that record."""
        self.seen, self.world = seen, seen.world
        self.spec, self.shard, self.tape, self.record = spec, shard, tape, record
        self.now = seen.world.loop.now
        self.before = self.now - looked_s(spec)  # what was there by then was seen

    def found(self) -> Iterator[str]:
        """In words."""
        yield from self._standing()
        if self._kept():
            yield from self._snapshots()
            yield from self._checkpoints()

    # --- who stands by -------------------------------------------------------------------------

    def _standing(self) -> Iterator[str]:
        """Processes that have executed all of the tape, and were at its end at every look."""
        tail = (self.tape[-1][0], identity(self.tape[-1][1])) if self.tape else (0, None)
        for machine in self.world.syncers:
            name = "" if machine.process is None else machine.process.name
            known = self.seen.standing.get(name)
            if known is None or machine.name == self.record.leader or known.process.frozen:
                continue
            follower, h = known.follower, known.follower.history
            steady = known.since <= self.before and self.now - known.at <= GAP_S
            mine = (follower.spec.id, follower.tape.shard) == (self.spec.id, self.shard)
            has = follower.store is not None and follower.reborn is None and (h.seq, h.tail) == tail
            if mine and steady and has and not self._two_of(machine):
                yield f"{machine.name} stands by with all of it"

    def _two_of(self, machine: Host) -> bool:
        return any(m.name == machine.name and m.lives for m in self.world.troubles.twins)

    # --- what lies on disks --------------------------------------------------------------------

    def _snapshots(self) -> Iterator[str]:
        below = f"{SNAPSHOTS}/{self.spec.folder}" + (f"/shard-{self.shard}" if self.shard else "")
        for folder in sorted(self.world.folder.glob(f"*/{below}")):
            if folder.relative_to(self.world.folder).parts[0] == TWINS:
                continue
            store = SnapshotStore(folder)
            for covers in store.covers():
                at = self.seen.placed.get(folder / f"snapshot-{covers:012d}", self.now)
                if at <= self.before and self._sound(store, covers) and self._leads_on(covers):
                    yield f"a sound snapshot of record {covers} lies in {folder.parent.parent.name}"

    def _sound(self, store: SnapshotStore, covers: int) -> bool:
        """And of this tape, not of one that the hub has lost."""
        if not store.sound(covers):
            return False
        body = json.loads((store.folder / f"snapshot-{covers:012d}" / META).read_bytes())
        return self._is_of_it(body["meta"]["history"], covers)

    def _is_of_it(self, meta: dict[str, Any], covers: int) -> bool:
        record = next((r for seq, r in self.tape if seq == covers), None)
        return record is not None and is_of(meta, record)

    def _checkpoints(self) -> Iterator[str]:
        """A store that was away for a while may have been so at every look."""
        root, before = str(self.world.folder / "checkpoints"), self.before - CHECKPOINTS_S
        if self.world.disks.store_away_until > before:
            return
        for (run, number), at in sorted(self.seen.complete.items()):
            if run != self.spec.name or at > before:
                continue
            try:
                complete = RunCheckpoints(root).complete(self.spec.folder)
                part = written_part(self.spec, self.shard, root, number) if complete else None
            except (CheckpointError, OSError, ValueError, KeyError):
                continue
            if part is None or not self._is_of_it(part[0], covers := int(part[0]["seq"])):
                continue
            if self._leads_on(covers):
                yield f"checkpoint {number} is whole, of record {covers}"

    # --- and what the hub has of what came after it --------------------------------------------

    def _kept(self) -> bool:
        """Whether the hub has had what it has for as long as whoever begins again has looked: a
        backup may have taken its place meanwhile."""
        return self.world.backups.put_back_at <= self.before

    def _leads_on(self, covers: int) -> bool:
        """Whether all that came after this record can be executed. How a restore or an earlier
        rebirth is, depends on more than the hub's streams: nothing is said of these."""
        after = [(seq, r) for seq, r in self.tape if seq > covers]
        if any(isinstance(r, TapeRestore | TapeRebirth) for _, r in after):
            return False
        name, broker = self.spec.name, self.world.broker
        there = broker.select(
            subjects.tape_stream(name), subjects.tape(name, self.shard), covers + 1
        )
        if [m.seq for m in there if m.seq <= self._end] != [seq for seq, _ in after]:
            return False  # some lie in the archive
        return all(self._has(r, subject) for _, r in after for subject in payloads_needed(r))

    @property
    def _end(self) -> int:
        return self.tape[-1][0] if self.tape else 0

    def _has(self, record: TapeRecord, subject: str) -> bool:
        """Whether UP has what a record names, and had it all the time."""
        up, broker = subjects.up_stream(self.spec.name), self.world.broker
        kind: type[InitManifest] | type[ContributionManifest] = (
            InitManifest if isinstance(record, TapeInit) else ContributionManifest
        )
        verdicts = record.verdicts if isinstance(record, TapeRound) else ()
        digests = {v.digest for v in verdicts if v.subject == subject}
        for stored in broker.select(up, f"{subject}.m", 1):
            try:
                blob = decode(stored.payload, kind).blob
            except WireError:
                continue
            if digests and blob.digest not in digests:
                continue
            chunks = [stored, *broker.select(up, blob.subject, 1)]
            indices = {int(m.headers[HEADER_INDEX]) for m in chunks[1:]}
            if len(indices) >= blob.chunks and all(self._old(up, m.seq) for m in chunks):
                return True
        return False

    def _old(self, up: str, seq: int) -> bool:
        seqs, times = self.seen.taken.get(up, ([], []))
        n = bisect_right(seqs, seq)
        return n > 0 and seqs[n - 1] == seq and times[n - 1] <= self.before
