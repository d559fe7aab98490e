"""An auditor of a whole world: what `diloco tape verify` and `diloco tape replay` say of its run.

Both read only what the hub and the disks have. A hub may have lost a contribution that it had
acknowledged, and nothing else is excused by that. It may have purged one for a snapshot whose
record it has lost since, or which its backup does not have. Lost disks may lack the snapshots from
which a replay could begin. What the hub has ever had, the checkers keep: with that the product
executes the whole tape once more (I9).
"""

from typing import TYPE_CHECKING

from diloco_shared.checkpoints.checkpoints_io import CheckpointError, RunCheckpoints
from diloco_shared.checkpoints.tape_archive_io import TapeReader, archives_of
from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import ShardPart
from diloco_shared.protocol.messages import AHEAD, TapeEpoch
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.history import audit_io as audit
from diloco_syncer.snapshots.snapshots_io import SNAPSHOTS

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World


async def audited(world: "World", spec: RunSpec) -> None:
    """Every shard's tape of a run that is over. `spec` has the run's id."""
    if not world.broker.exists(subjects.tape_stream(spec.name)):
        return
    bus, root = MemoryBus(world.broker, "an auditor"), str(world.folder / "checkpoints")
    counts = world.found.counts
    lacks = world.broker.lacks.get(subjects.up_stream(spec.name), set())
    end = (await bus.stream_info(subjects.tape_stream(spec.name))).last_seq
    for shard, archive in enumerate(archives_of(spec, root)):
        records = TapeReader(bus, spec.name, archive, end)
        verified = await audit.verify(spec, bus, records, root, shard)
        counts["audits"] += 1
        counts["restores whose checkpoint was removed"] += bool(verified.removed)
        # A backup has the tape of one moment, and UP of a later one, which may lack what a snapshot
        # covered meanwhile: until the first snapshot of those who go on from it.
        # And a snapshot whose record the hub has lost had let UP be purged, as far as it covers.
        lost = world.observers[spec.name].watch.of[shard].merges.lost
        covered = max(await _put_back(records) - 1, lost.covers)
        faults = [f for f in verified.faults if not (f.purged and f.seq <= covered)]
        counts["faults of what the hub has lost"] += sum(_of(lacks, f) for f in faults)
        faults = [f for f in faults if not _of(lacks, f)]
        if faults:
            world.broken("audit", f"shard {shard}: {faults[0]}")
        where = f"*/{SNAPSHOTS}/{spec.folder}" + (f"/shard-{shard}" if shard else "")
        folders = sorted(world.folder.glob(where))
        replayed = await audit.reexecute(spec, bus, records, folders, root, shard)
        counts["merges executed again"] += replayed.rounds
        begun = replayed.began_at or replayed.records
        if (fault := replayed.fault) is not None and begun and not _of(lacks, fault):
            world.broken("audit", f"shard {shard} is not the same again: {fault}")
        _executed(world, spec, shard, root)
    _checkpoints_are_whole(world, spec, root)


async def _put_back(records: TapeReader) -> int:
    """The newest record with which a hub was put back; 0: there is none."""
    newest = epoch = 0
    async for seq, record in records.after(0):
        if isinstance(record, TapeEpoch) and record.epoch >= epoch + AHEAD:
            newest = seq
        epoch = max(epoch, getattr(record, "epoch", 0))
    return newest


def _of(lacks: set[str], fault: audit.TapeDifference) -> bool:
    """Whether it is of a contribution, its chunks or its manifest, that the hub has lost."""
    return not lacks.isdisjoint({fault.subject, f"{fault.subject}.m"})


def _executed(world: "World", spec: RunSpec, shard: int, root: str) -> None:
    """All of a shard's tape, with all that the hub ever had."""
    observer = world.observers[spec.name]
    of, tape = observer.watch.of[shard], [record for _, record in observer.records[shard]]
    if of.numbers is not None and not observer.made_again:
        whole = of.numbers.execute(spec, tape, of.executed, root)
        world.found.counts["tapes that could be executed again in part alone"] += not whole


def _checkpoints_are_whole(world: "World", spec: RunSpec, root: str) -> None:
    """What is listed as complete has the part of every shard."""
    there = RunCheckpoints(root)
    for ref in there.complete(spec.folder):
        try:
            for stored in there.manifest(ref)[0].shards:
                for _ in there.blobs(ref, there.part(ref, stored, ShardPart)):
                    pass
        except CheckpointError as error:
            world.broken("audit", str(error))
