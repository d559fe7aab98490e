"""What is left of a run on the hub, and on the disks of those who worked for it."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from diloco_learner.work_io import CHECKPOINTS
from diloco_shared.bus.stream_kv import bucket_stream
from diloco_shared.protocol import subjects
from diloco_syncer.snapshots.snapshots_io import SNAPSHOTS

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# That have keys of runs. What a run was told in events may be read for longer.
BUCKETS = (
    subjects.SHARDS,
    subjects.PLACES,
    subjects.INCARNATIONS,
    subjects.LEASES,
    subjects.STATUS,
)
# Whoever stood still has heard of a deletion so many virtual seconds after it goes on.
HEARS_S = 15.0


def left_of(world: "World", run: str) -> list[str]:
    """Streams, keys and folders of all runs of that name."""
    streams = [s for s in subjects.run_streams(run) if world.broker.exists(s)]
    return [*streams, *_keys(world, run), *_folders(world, run)]


def _keys(world: "World", run: str) -> Iterator[str]:
    for bucket in BUCKETS:
        stream, begins = bucket_stream(bucket), f"{subjects.KEYS}.{bucket}."
        there = world.broker.select(stream, ">", 1) if world.broker.exists(stream) else ()
        for message in there:
            key = message.subject.removeprefix(begins)
            # A key that was removed has a message without content.
            if message.payload and key.split(".")[0] == run:
                yield f"{bucket} {key}"


def _folders(world: "World", run: str) -> Iterator[str]:
    """Of machines that are there, and do not stand still: others remove them once they are back."""
    for machine in world.machines:
        process = machine.process
        if process is None or process.silent_since < math.inf:
            continue
        if world.loop.now - process.thawed_at < HEARS_S:
            continue
        for kind in (SNAPSHOTS, CHECKPOINTS):
            for place in sorted((machine.folder / machine.name / kind).glob(f"{run}.*")):
                yield f"{machine.name}: {kind}/{place.name}"
