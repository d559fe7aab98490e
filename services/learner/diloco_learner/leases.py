"""Which data shard to lease next: a pure choice over what the key-value bucket says."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from diloco_shared.protocol.records import ShardLease


def order(shards: int, learner: str, seed: int) -> list[int]:
    """The shards in this learner's own seeded order, so that learners rarely want the same."""
    rng = np.random.default_rng([seed, *learner.encode()])
    return [int(s) for s in rng.permutation(shards)]


def choose(
    leases: Mapping[int, ShardLease],
    wanted: Sequence[int],
    *,
    learner: str,
    incarnation: int,
    live: Collection[str],
    holding: Collection[int],
) -> int | None:
    """The shard to take now, or None if every shard is held by somebody live.

    First this learner's own (of an earlier life, or of this one if the answer to taking it was
    lost): they have a cursor to go on from. Then the least read of the free ones and of those
    whose holder is gone, in the learner's order. `live` must be what the syncer says, and hold
    this learner: one that has only just begun would take everybody for gone.
    """

    def available(shard: int) -> bool:
        lease = leases.get(shard)
        if shard in holding:
            return False
        if lease is None or not lease.holder:
            return True
        if lease.holder == learner:
            return lease.incarnation <= incarnation
        return lease.holder not in live

    if learner not in live:
        return None
    able = [s for s in wanted if available(s)]
    own = [s for s in able if (lease := leases.get(s)) and lease.holder == learner]
    if own:
        return own[0]
    # sorted() is stable: among equally often read shards the learner's order decides.
    fresh = sorted(able, key=lambda s: leases[s].passes if s in leases else 0)
    return fresh[0] if fresh else None


def taken(lease: ShardLease | None, shard: int, learner: str, incarnation: int) -> ShardLease:
    """The lease of `shard` in this learner's hands, from where it was merged up to."""
    return ShardLease(
        shard=shard,
        holder=learner,
        incarnation=incarnation,
        sequences=lease.sequences if lease else 0,
        passes=lease.passes if lease else 0,
    )


def given_back(lease: ShardLease) -> ShardLease:
    """A shard read to its end: free, to be read again from the beginning in another order."""
    return lease.model_copy(
        update={"holder": "", "incarnation": -1, "sequences": 0, "passes": lease.passes + 1}
    )
