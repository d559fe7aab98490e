"""Beginning again: no syncer has the run's state, so what DN has of it becomes the state.

The tape can still be read: counters, ledger, norms and settings follow from its records, whatever
became of the payloads. Lost are outer momentum, the error of quantisation that no publication has
carried yet, and a round that was committed and never published. Pure: the edge looks and reads.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol.messages import PublicationManifest, TapeRebirth
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_syncer.merging.store import FragmentStore, Shelf, Values, in_memory

if TYPE_CHECKING:
    from diloco_syncer.history.history import History

# Whoever still has the state takes the lease within one period, and shows that it has it.
LEASES_LEAST = 4
# Publications of one fragment that are tried, best first: of all that DN has since a keyframe,
# several terms and the epoch before included.
TARGETS_MAX = 64


@dataclass(frozen=True, slots=True)
class Reborn:
    """What the state is to be."""

    epoch: int
    versions: tuple[int, ...]  # -1: another shard's
    anchor_digests: tuple[str, ...]
    reason: str


class LastResort:
    """When a syncer that finds no snapshot anywhere may begin again."""

    def __init__(self, spec: RunSpec) -> None:
        self.run = spec.name
        self.by_itself = spec.keeping.begin_again == "automatic"
        self.least_s = LEASES_LEAST * spec.membership.leader_lease_s
        self.after_s = max(spec.keeping.begin_again_after_s, self.least_s)
        self.since = math.inf  # nobody was seen that may have the state
        self.blind_since = math.inf  # nobody could be seen
        self.back_at = -math.inf  # the bus was there again

    def blind(self, now: float) -> None:
        """Nobody can be seen: until the next look that is no time without others."""
        self.blind_since = min(self.blind_since, now)

    def look(
        self, now: float, *, leader: str, fit: Collection[str], coming: Collection[str], asked: bool
    ) -> str:
        """Why not yet; "" to begin again now.

        `leader` holds the lease, `fit` syncers stand by, `coming` ones may be fit soon: any of them
        may have more than what is published. `asked`: the user does not wait for the last kind.
        """
        if self.blind_since < math.inf:
            # Who comes back with the bus may have the state, and needs a while to say so.
            self.since += now - self.blind_since
            self.blind_since, self.back_at = math.inf, now
        better = [leader] if leader else [*fit, *([] if asked else coming)]
        if better:
            self.since = math.inf
            return f"waits for {', '.join(sorted(better))}, which may have its state"
        self.since = min(self.since, now)
        if not (asked or self.by_itself):
            return (
                f"'diloco begin-again {self.run}' begins a new epoch from the published "
                "parameters: only outer momentum, and what was not yet published, is lost"
            )
        until = self.since + (self.least_s if asked else self.after_s)
        left_s = max(until, self.back_at + self.least_s) - now
        if left_s > 0:
            return (
                f"in {math.ceil(left_s)} s it begins a new epoch from the published parameters, "
                "unless a syncer with its state comes back"
            )
        return ""


def chains(
    history: "History", p: int, manifests: Iterable[PublicationManifest], recorded: str = ""
) -> list[tuple[PublicationManifest, ...]]:
    """Publications that make an anchor of fragment `p`, a keyframe first; the best anchor first.

    That is the tape's own head; else the newest version of the newest epoch, but none of before the
    newest restore: its user went back from there, and other fragments may be of after it.
    `recorded`: only what makes the anchor of this digest, which the tape names.
    """
    head = history.versions[p], history.anchor_digests[p]
    back = history.restored
    mine = [
        m
        for m in manifests
        if (m.fragment, m.values, m.config_hash) == (p, history.sizes_P[p], history.config_hash)
    ]
    mine.sort(
        key=lambda m: ((m.version, m.anchor_digest) == head, m.epoch, m.version, m.term),
        reverse=True,
    )

    def counts(m: PublicationManifest) -> bool:
        if recorded:
            return m.anchor_digest == recorded
        return back is None or m.epoch >= back.epoch or (m.version, m.anchor_digest) == head

    targets = [m for m in mine if counts(m)][:TARGETS_MAX]
    found = (_chain(target, mine) for target in targets)
    return [chain for chain in found if chain]


def _chain(
    target: PublicationManifest, mine: list[PublicationManifest]
) -> tuple[PublicationManifest, ...]:
    """Back to the keyframe; empty if something between is gone."""
    chain = [target]
    while (m := chain[-1]).prev_version >= 0:
        place = m.epoch, m.prev_version
        before = [b for b in mine if (b.epoch, b.version) == place]
        if not before:
            return ()
        chain.append(max(before, key=lambda b: (b.prev_version < 0, b.term)))
    return tuple(reversed(chain))


def decoded(m: PublicationManifest, payload: bytes, before: Values | None) -> Values:
    """The anchor that a publication makes; `before`: what a delta adds to.

    Raises ValueError when it is not what was published.
    """
    anchor_F: Values = codec.decode(m.codec, payload, m.values)
    if m.prev_version >= 0:
        assert before is not None, "a delta without what it adds to"
        with np.errstate(all="ignore"):
            anchor_F = before + anchor_F
    if digest_array(anchor_F) != m.anchor_digest:
        raise ValueError(f"{m.blob.subject} does not make the anchor {m.anchor_digest}")
    return anchor_F


def reborn(
    history: "History", found: Mapping[int, PublicationManifest], epoch: int, reason: str
) -> Reborn:
    """`found`: of every fragment owned, the publication that it goes on from. `epoch`: the newest
    that anything on DN is of."""
    versions, digests = [-1] * history.fragments, [""] * history.fragments
    for p, m in found.items():
        versions[p], digests[p] = m.version, m.anchor_digest
    return Reborn(max(history.epoch, epoch) + 1, tuple(versions), tuple(digests), reason[:400])


def record(history: "History", reborn: Reborn, leader: str, at: float) -> TapeRebirth:
    """What puts it in force."""
    return TapeRebirth(
        epoch=reborn.epoch,
        term=history.term + 1,
        leader=leader,
        versions=reborn.versions,
        anchor_digests=reborn.anchor_digests,
        reason=reborn.reason,
        at=at,
    )


def told(history: "History", of: TapeRebirth) -> str:
    """For people."""
    versions = ", ".join(str(of.versions[p]) for p in history.owned)
    return (
        f"epoch {of.epoch} begins with the published parameters (versions {versions}), outer "
        f"momentum from zero: {of.reason}"
    )


def reborn_store(
    history: "History",
    versions: tuple[int, ...],
    anchors: Mapping[int, Values],
    shelf: Shelf = in_memory,
) -> FragmentStore:
    """Master and anchor of every fragment owned are what was published; outer state is fresh."""
    layout = Layout.build(history.layout, history.fragments)
    values = [anchors[p] if p in history.owned else None for p in range(history.fragments)]
    store = FragmentStore.init(layout, history.spec.algorithm, values, shelf)
    for p in history.owned:
        store.fragments[p] = replace(store.fragments[p], version=versions[p])
    return store
