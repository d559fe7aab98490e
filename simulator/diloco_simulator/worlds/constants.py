"""Constants of the product that whole worlds draw anew: limits small enough to be met, other paces.

A limit of thousands is never met in a world of a hundred messages, and a look that always comes
five times a second hides what happens between two looks.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from random import Random
from types import ModuleType
from typing import Any

from diloco_coordinator.runs import assigning_io as assigning
from diloco_coordinator.runs import ending_io as ending
from diloco_coordinator.runs import membership as members
from diloco_learner.data import leasing_io as shards
from diloco_learner.exchange import anchors
from diloco_learner.exchange import downlink_io as downlink
from diloco_learner.hosts import carrying_io as carrying
from diloco_learner.hosts import giving_io as giving
from diloco_learner.hosts import whole
from diloco_learner.recovery import donating
from diloco_learner.training import mailbox_io as mailbox
from diloco_shared.budget import job, overhead
from diloco_shared.bus import blobs, deliveries, stream_kv
from diloco_shared.checkpoints import tape_archive_io as tape_archive
from diloco_shared.process import disk_watch, membership
from diloco_shared.protocol import pace, wire
from diloco_simulator.checkers import heard
from diloco_simulator.worlds import computing, processes
from diloco_syncer.history import archiving_io as archiving
from diloco_syncer.history import follow_io as follow
from diloco_syncer.leadership import candidate_io as candidate
from diloco_syncer.members import admission, roster
from diloco_syncer.messages import inbox_io as inbox
from diloco_syncer.status import announce
from diloco_syncer.status import status_writer_io as status_writer
from diloco_syncer.streams import fullness_io as fullness
from diloco_syncer.streams import purging_io as purging
from diloco_syncer.streams import room


@dataclass(frozen=True, slots=True)
class Drawn:
    """One constant: the values that it may take beside the product's own."""

    module: ModuleType
    name: str
    others: tuple[float, ...]

    @property
    def value(self) -> Any:
        """In force now."""
        return getattr(self.module, self.name)

    @property
    def path(self) -> str:
        """By which a kept world names it."""
        return f"{self.module.__name__}.{self.name}"


# The package has a function of this name.
STREAMS = import_module("diloco_shared.budget.streams")
CHUNKS = Drawn(blobs, "CHUNK_BYTES", (16, 64))
FETCHED = Drawn(blobs, "FETCH_CHUNKS_MAX", (1, 2))
# Those who count chunks have read it before: what they count must be what is sent.
COUNTED = (Drawn(overhead, "CHUNK_BYTES", ()), Drawn(fullness, "CHUNK_BYTES", ()))
# Streams of a tiny model that are just as large as the product says that they must be: without a
# floor, without room for the layout of a model of a thousand tensors, and with messages counted as
# they are here, where names have a dozen characters and not 63.
ROOM = (
    Drawn(STREAMS, "FLOOR", (1,)),
    Drawn(STREAMS, "ROUND", (540,)),
    Drawn(STREAMS, "ROUND_LEARNER", (380,)),
    Drawn(job, "ASSUMED_TENSORS", (4,)),
    Drawn(overhead, "CHUNK_EXTRA", (200,)),
    Drawn(overhead, "MESSAGE_EXTRA", (80,)),
    Drawn(overhead, "CONTRIBUTION", (440,)),
    Drawn(overhead, "PUBLICATION", (500,)),
    Drawn(overhead, "PUBLICATION_LEARNER", (45,)),
    Drawn(overhead, "INITIAL", (340,)),
    Drawn(overhead, "STATE", (420,)),
    Drawn(room, "MANIFEST_BYTES", (700,)),
    Drawn(room, "TENSOR_BYTES", (60,)),
)
# What headers add to small chunks, as the leader reckons.
FACTOR, HEADERS = Drawn(room, "CHUNKS_FACTOR", ()), 200
# Each is read where it is used, so that setting the module's own name is enough.
LIMITS = (
    Drawn(mailbox, "LOOK_EVERY", (2,)),
    Drawn(mailbox, "INBOX_MAX", (8, 64)),
    Drawn(mailbox, "OUTBOX_MAX", (8,)),
    Drawn(downlink, "INCOMPLETE_MAX", (2,)),
    Drawn(shards, "FINISHED_MAX", (2,)),
    CHUNKS,
    FETCHED,
    Drawn(stream_kv, "_WATCH_LIMIT", (2,)),
    Drawn(follow, "BATCH_RECORDS", (1, 4)),
    Drawn(archiving, "RECORDS_IN_STREAM", (4, 16)),
    Drawn(archiving, "SEGMENT_RECORDS", (3,)),
)
# As these, but from dice of their own, so that those of older seeds are what they were. FETCHES is
# imported by two modules, and each of them reads its own name.
LATER_LIMITS = (
    Drawn(inbox, "FETCHES", (1, 2)),
    Drawn(follow, "FETCHES", (1, 2)),
    Drawn(follow, "BATCH_MANIFESTS", (1, 3)),
    Drawn(downlink, "DOWNLOADS_MAX", (1, 2)),
    Drawn(downlink, "WAITING_MAX", (2, 8)),
    Drawn(anchors, "WAITING_MAX", (1,)),
    Drawn(anchors, "EARLY_MAX", (1,)),
    Drawn(donating, "REQUESTS_MAX", (1, 2)),
    Drawn(admission, "GRANTS_MAX", (1, 3)),
    Drawn(deliveries, "SERVE_LIMIT", (2, 4)),
    Drawn(tape_archive, "WRITTEN_BYTES", (1500,)),
    # In steps: what is computed beside training takes time, and an end may come over it.
    Drawn(computing, "BESIDE_STEPS", (6.0, 30.0)),
)
# Memory of syncers for what learners send, in multiples of the least with which a run can go on. So
# one round's answers always fit, and those of the next ones do not always.
MEMORY = (Drawn(processes, "PAYLOADS_ROOM", (1.0, 1.25, 1.5)),)
# Where payloads are spoilt: for how long whoever fetches one waits for more of it, in seconds. The
# product's own half a minute is nearly as long as anything may go wrong.
SPOILT = (Drawn(pace, "PAUSE_S", (8.0, 12.0)),)
# In seconds. The slower, the more happens in between.
PACES = (
    Drawn(stream_kv, "POLL_S", (12.0,)),
    Drawn(disk_watch, "LOOK_S", (5.0,)),
    Drawn(shards, "LOOK_S", (1.0,)),
    Drawn(candidate, "FOLLOW_S", (1.0,)),
    Drawn(fullness, "LOOK_S", (3.0,)),
    Drawn(purging, "LOOK_S", (3.0,)),
    Drawn(status_writer, "STATUS_S", (2.0,)),
    Drawn(assigning, "SCHEDULE_S", (1.5,)),
    Drawn(ending, "LOOK_S", (2.0,)),
)
# Of islands of several hosts, drawn where a world has some: their last words may be cut off.
ISLANDS = (Drawn(whole, "LAST_WORDS_S", (0.2,)),)
# Where hosts carry their shares: no world lasts long enough for the product's own times; chunks of
# so few bytes that several lie within what one host has of a payload.
CARRIERS = (
    Drawn(carrying, "REST_S", (3.0, 8.0)),
    Drawn(carrying, "CONNECT_AGAIN_S", (1.0, 4.0)),
    Drawn(carrying, "GIVE_AT_ONCE", (1, 2, 16)),
    Drawn(giving, "PATIENCE_S", (7.0, 14.0)),  # longer than a chunk waits for its answer
)
CARRIED = (3, 4, 5)
# In seconds: for how long somebody is silent who is then forgotten, or was told to leave. No world
# lasts as long as the product's own, which are minutes. What the checkers take for gone goes with
# them: earlier than a leader does by as much as a report may be late. Scripted worlds have them. No
# drawn one does, since the checker of classes does not know of each report that comes too late.
WAITS = (
    Drawn(roster, "GONE_S", (25.0,)),
    # Imported by two modules, and each of them reads its own name.
    Drawn(announce, "GONE_S", (25.0,)),
    Drawn(purging, "GONE_S", (25.0,)),
    Drawn(purging, "LEFT_LOOK_S", (3.0,)),
    Drawn(heard, "GONE_S", (14.0,)),
    Drawn(roster, "LEFT_S", (6.0,)),
    Drawn(members, "FORGET_S", (45.0,)),
)
# A hub is far where a message takes so long, in seconds.
FAR_S = 0.3
# Of limits: how often another value is drawn. Of paces: how often all are slow together, which
# also makes a world take less processor time.
OTHER, SLOW = 0.3, 0.8
# How often a world draws any of the later limits.
LATER = 0.4
# How many worlds have syncers with little memory.
LITTLE = 0.15
# How often streams have no more room than they need.
JUST = 0.4

# What every world has instead of the product's own, since it would take much of the processor's
# time and show nothing: each process parses anew what all of them get, and asks the kernel for the
# memory of the one process that they are.
SHARED_MESSAGES = 4096
SHARED = lru_cache(SHARED_MESSAGES)(wire._decode)
ALWAYS: tuple[tuple[ModuleType, str, Any], ...] = (
    (wire, "_decode", SHARED),
    (membership, "anonymous_bytes", lambda: 100 << 20),
    # Their lengths are those of messages and files, of which a world depends.
    (membership, "own_pid", lambda: 12345),
    (membership, "own_host", lambda: "vm"),
    # Nobody is slow to read what a host is told, and a real thread would tell it at any time.
    (giving, "apart", lambda work: work()),
)


KNOWN = {
    d.path: d
    for d in (
        *(*LIMITS, *LATER_LIMITS, *MEMORY, *SPOILT, *PACES, *WAITS, *ROOM),
        *(*COUNTED, *ISLANDS, *CARRIERS, FACTOR),
    )
}
# What makes sense together alone.
TOGETHER = (
    frozenset(d.path for d in ROOM),
    frozenset(d.path for d in WAITS),
    frozenset(d.path for d in (CHUNKS, *COUNTED, FACTOR)),
)


def together(path: str) -> frozenset[str]:
    """Those that are the product's own only if this one is."""
    return next((group for group in TOGETHER if path in group), frozenset({path}))


def drawn(rng: Random) -> dict[str, float]:
    """What this world changes, by path."""
    values = {d: rng.choice(d.others) for d in LIMITS if rng.random() < OTHER}
    if rng.random() < SLOW:
        values |= {d: rng.choice(d.others) for d in PACES}
    if CHUNKS in values:
        values |= _chunks_of(values[CHUNKS])
    if rng.random() < JUST:
        values |= {d: rng.choice(d.others) for d in ROOM}
    return {d.path: value for d, value in values.items()}


def later(seed: int) -> dict[str, float]:
    """What some worlds change besides, from dice of its own."""
    rng = Random(f"later constants {seed}")
    if rng.random() >= LATER:
        return {}
    return {d.path: rng.choice(d.others) for d in LATER_LIMITS if rng.random() < OTHER}


def of_memory(seed: int) -> dict[str, float]:
    """What syncers with little memory have, from dice of their own."""
    rng = Random(f"memory of syncers {seed}")
    return {d.path: rng.choice(d.others) for d in MEMORY} if rng.random() < LITTLE else {}


def of_spoilt(seed: int) -> dict[str, float]:
    """What a world with spoilt payloads changes besides, from dice of its own."""
    rng = Random(f"constants of spoilt payloads {seed}")
    return {d.path: rng.choice(d.others) for d in SPOILT}


def of_islands(seed: int) -> dict[str, float]:
    """What a world with islands of several hosts changes besides, from dice of its own."""
    rng = Random(f"constants of islands {seed}")
    return {d.path: rng.choice(d.others) for d in ISLANDS if rng.random() < OTHER}


def of_carriers(seed: int) -> dict[str, float]:
    """And one whose islands' hosts carry their shares."""
    rng = Random(f"constants of carriers {seed}")
    values = {d: rng.choice(d.others) for d in CARRIERS} | _chunks_of(rng.choice(CARRIED))
    return {d.path: value for d, value in values.items()}


def bearable(values: dict[str, float], delay_s: float) -> dict[str, float]:
    """Without what leaves a sound learner no time: from a hub as far as `delay_s`, a version in
    chunks of some bytes, one at a time, would take longer than the version lives."""
    few = values.get(CHUNKS.path, math.inf) <= max(CARRIED) and delay_s >= FAR_S
    return {path: value for path, value in values.items() if not few or path != FETCHED.path}


def _chunks_of(size: float) -> dict[Drawn, float]:
    """Of so many bytes, wherever they are counted."""
    return dict.fromkeys((CHUNKS, *COUNTED), size) | {FACTOR: 1 + HEADERS / size}


@contextmanager
def put(values: Mapping[str, float]) -> Iterator[None]:
    """In force until the end of the block."""
    SHARED.cache_clear()  # a world depends on nothing that was played before
    if unknown := sorted(values.keys() - KNOWN.keys()):
        raise ValueError(
            f"no world draws {', '.join(unknown)}: where a module has another name now, write that "
            "into the kept world"
        )
    named = [(KNOWN[path], value) for path, value in values.items()]
    changed = [*ALWAYS, *((d.module, d.name, value) for d, value in named)]
    before = [(module, name, getattr(module, name)) for module, name, _ in changed]
    for module, name, value in changed:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
