"""Constants of the product that whole worlds draw anew: limits small enough to be met, other paces.

A limit of thousands is never met in a world of a hundred messages, and a look that always comes
five times a second hides what happens between two looks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from types import ModuleType

from diloco_coordinator.edges import assigning, ending
from diloco_learner.edges import downlink, mailbox, shards
from diloco_shared.edges import blobs, disk_watch, stream_kv
from diloco_syncer.edges import candidate, follow, fullness, purging


@dataclass(frozen=True, slots=True)
class Drawn:
    """One constant: the values that it may take beside the product's own."""

    module: ModuleType
    name: str
    others: tuple[float, ...]


# Each is read where it is used, so that setting the module's own name is enough.
LIMITS = (
    Drawn(mailbox, "LOOK_EVERY", (2,)),
    Drawn(mailbox, "INBOX_MAX", (8, 64)),
    Drawn(mailbox, "OUTBOX_MAX", (8,)),
    Drawn(downlink, "INCOMPLETE_MAX", (2,)),
    Drawn(shards, "FINISHED_MAX", (2,)),
    Drawn(blobs, "CHUNK_BYTES", (16, 64)),
    Drawn(blobs, "FETCH_CHUNKS_MAX", (1, 2)),
    Drawn(stream_kv, "_WATCH_LIMIT", (2,)),
    Drawn(follow, "BATCH_RECORDS", (1, 4)),
)
# In seconds. The slower, the more happens in between.
PACES = (
    Drawn(stream_kv, "POLL_S", (12.0,)),
    Drawn(disk_watch, "LOOK_S", (5.0,)),
    Drawn(shards, "LOOK_S", (1.0,)),
    Drawn(candidate, "FOLLOW_S", (1.0,)),
    Drawn(fullness, "LOOK_S", (3.0,)),
    Drawn(purging, "LOOK_S", (3.0,)),
    Drawn(assigning, "SCHEDULE_S", (1.5,)),
    Drawn(ending, "LOOK_S", (2.0,)),
)
# Of limits: how often another value is drawn. Of paces: how often all are slow together, which
# also makes a world take less processor time.
OTHER, SLOW = 0.3, 0.8


def drawn(rng: Random) -> dict[Drawn, float]:
    """What this world changes."""
    values = {d: rng.choice(d.others) for d in LIMITS if rng.random() < OTHER}
    if rng.random() < SLOW:
        values |= {d: rng.choice(d.others) for d in PACES}
    return values


@contextmanager
def put(values: dict[Drawn, float]) -> Iterator[None]:
    """In force until the end of the block."""
    before = {d: getattr(d.module, d.name) for d in values}
    for d, value in values.items():
        setattr(d.module, d.name, value)
    try:
        yield
    finally:
        for d, value in before.items():
            setattr(d.module, d.name, value)
