"""Room in UP and STATE that one learner takes from all others, and the leader takes back.

The server sees to it that a site writes in its own names alone, and not how much: rounds and
newcomers are parts of these streams' subjects, so one learner can fill either stream. Both are
budgeted for what honest learners send (diloco_shared/budget/streams.py). Where one of them is
crowded, what is there is counted, and what is more than a learner can have sent honestly goes:

- On UP each live learner has an equal share of the stream, and all others together have one.
- On STATE there is only what the leader asked a donor for, and snapshots of syncers.

Whoever does that loses its own contributions by it, among them some that were merged: a standby
that had not executed their rounds yet takes a snapshot of the leader, as a slow one does.

Only on a hub whose processes have credentials of their own: else anybody may write in any name.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import structlog

from diloco_shared import ambient
from diloco_shared.budget.overhead import initial, layout_bytes
from diloco_shared.bus.repeating import again_and_again
from diloco_shared.numerics.arrays import Layout
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import CHUNK_BYTES
from diloco_syncer.context import RunContext
from diloco_syncer.events import Tell
from diloco_syncer.history.history import History
from diloco_syncer.machine import Machine
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.status.status_writer_io import Showing
from diloco_syncer.streams.purging_io import other_syncers
from diloco_syncer.streams.room import CROWDED

log = structlog.get_logger()

# Between two looks, in seconds: a stream of 64 MiB is filled in less, and emptied again then.
LOOK_S = 1.0
# Messages that are counted at a look, beyond one for each chunk that fits: whoever sends small ones
# is found by those that are counted.
MESSAGES_MAX = 100_000
# Names under which one donor's states are removed one by one at a look.
REMOVED_MAX = 100


def first_set_bytes(history: History) -> int:
    """Of the initial parameters on UP, which one learner sends and another may send again; 0 once
    a snapshot covers them. Of several shards each covers its own, and knows of no other."""
    alone = history.spec.algorithm.shards == 1
    if not history.layout or (alone and history.snapshot_covers):
        return 0
    sizes, layout = Layout.build(history.layout, history.fragments).sizes, history.layout
    return 2 * sum(initial(size, layout_bytes(layout)) for size in sizes)  # as budgeted


def greedy(
    held: Mapping[str, int], limit: int, live: Collection[str], excused: int = 0
) -> dict[str, int]:
    """Learners that hold more of UP than their share, and how much.

    `held`: bytes by subject. `excused`: bytes of initial parameters that one learner may hold.
    """
    first, rest = defaultdict[str, int](int), defaultdict[str, int](int)
    for subject, size in held.items():
        parts = subject.split(".")
        (first if parts[3:4] == ["init"] else rest)[parts[2]] += size
    by = {learner: rest[learner] + max(first[learner] - excused, 0) for learner in {*first, *rest}}
    share = limit // max(len(live), 2)
    found = {learner: size for learner, size in by.items() if learner in live and size > share}
    others = sorted((size, learner) for learner, size in by.items() if learner not in live)
    left = sum(size for size, _ in others)
    while left > share:  # the largest: one that is only gone may have contributed before
        size, learner = others.pop()
        found[learner] = size
        left -= size
    return found


def unasked(
    held: Mapping[str, int],
    limit: int,
    asked: Collection[tuple[str, str]],
    syncers: Collection[str],
) -> dict[str, dict[str, int]]:
    """What of STATE nobody asked for: donor -> filter of subjects -> bytes.

    `asked`: (donor, nonce) of the leader's grants. A state that takes half of the stream, which has
    room for those of all newcomers, is none either.
    """
    states = defaultdict[tuple[str, str, str], int](int)
    for subject, size in held.items():
        donor, newcomer, nonce = [*subject.split("."), "", "", ""][2:5]
        states[donor, newcomer, nonce] += size
    found = defaultdict[str, dict[str, int]](dict)
    for (donor, newcomer, nonce), size in states.items():
        honest = donor in syncers or ((donor, nonce) in asked and size <= limit // 2)
        if not honest:
            found[donor][f"{donor}.{newcomer}.{nonce}.>"] = size
    kept = {d for d, newcomer, nonce in states if f"{d}.{newcomer}.{nonce}.>" not in found[d]}
    return {
        donor: parts if donor in kept else {f"{donor}.>": sum(parts.values())}
        for donor, parts in found.items()
        if parts
    }


class Floods:
    """Of one leader's term; the first shard of a syncer looks for all of them."""

    def __init__(
        self, context: RunContext, machine: Machine, showing: Showing, outbox: Outbox
    ) -> None:
        self.run, self.me, self.shard = context.spec.name, context.me, context.shard
        self.control = context.control
        self.machine = machine
        self.storage = showing.storage
        self.outbox = outbox

    async def keep(self) -> None:
        """Look for ever."""
        if not self.shard and self.control.named:
            await again_and_again(self.look, "who fills streams", LOOK_S)

    async def look(self) -> None:
        """Look once. Raises BusError."""
        for kind, surplus in (("UP", self._up), ("STATE", self._state)):
            use = self.storage.streams.get(kind)
            if use is None or not use.limit or use.bytes <= CROWDED * use.limit:
                continue
            stream = subjects.run_stream(self.run, kind)
            most = MESSAGES_MAX + use.limit // CHUNK_BYTES
            held = await self.control.held(
                stream, f"{kind.lower()}.{self.run}.>", messages_max=most
            )
            for learner, filters in (await surplus(held, use.limit)).items():
                await self._take_back(kind, learner, filters)

    async def _up(self, held: Mapping[str, int], limit: int) -> dict[str, dict[str, int]]:
        excused = first_set_bytes(self.machine.history)
        live = self.machine.roster.names(ambient.monotonic())
        return {
            learner: {f"{learner}.>": size}
            for learner, size in greedy(held, limit, live, excused).items()
        }

    async def _state(self, held: Mapping[str, int], limit: int) -> dict[str, dict[str, int]]:
        syncers = {self.me} | {
            member.id
            for shard in range(self.machine.spec.algorithm.shards)
            for member in await other_syncers(self.control, self.run, shard, self.me)
        }
        grants = self.machine.admission.grants
        asked = {(grant.donor, nonce) for nonce, grant in grants.items()}
        return unasked(held, limit, asked, syncers)

    async def _take_back(self, kind: str, learner: str, filters: Mapping[str, int]) -> None:
        """Purge what is under these filters, and name the learner."""
        stream, size = subjects.run_stream(self.run, kind), sum(filters.values())
        for part in _some(filters):
            await self.control.purge(stream, f"{kind.lower()}.{self.run}.{part}")
        log.warning("flood", stream=kind, learner=learner, bytes=size)
        text = (
            f"{learner} filled {kind} with more than it can have to send ({size} bytes): all of "
            "that is removed; if it goes on, revoke its site"
        )
        data = {"learner": learner, "stream": kind, "bytes": size}
        self.outbox.tell(Tell("flood", text, data))


def _some(filters: Mapping[str, int]) -> Iterator[str]:
    """The largest first; the rest at the next look."""
    yield from sorted(filters, key=lambda f: -filters[f])[:REMOVED_MAX]
