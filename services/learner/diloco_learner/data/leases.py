"""Which data shard to lease next: a pure choice over what the key-value bucket says."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from diloco_shared.protocol.records import ShardLease

Where = tuple[int, int]  # (passes, sequences): ordered as a shard is read


def order(shards: int, learner: str, seed: int) -> list[int]:
    """The shards in this learner's own seeded order, so that learners rarely want the same."""
    rng = np.random.default_rng([seed, *learner.encode()])
    return [int(s) for s in rng.permutation(shards)]


def place(leases: Mapping[int, ShardLease], merged: Mapping[int, Where], shard: int) -> Where:
    """Where to read a shard from: behind what is merged, not before where its holder began."""
    lease = leases.get(shard)
    return max(lease.began if lease else (0, 0), merged.get(shard, (0, 0)))


def choose(
    leases: Mapping[int, ShardLease],
    merged: Mapping[int, Where],
    wanted: Sequence[int],
    *,
    learner: str,
    incarnation: int,
    live: Collection[str],
    holding: Collection[int],
) -> int | None:
    """The shard to take now, or None if every shard is held by somebody live.

    First this learner's own (of an earlier life, or of this one if the answer to taking it was
    lost), the one it was in the middle of before all others. Then the least read of the free ones
    and of those whose holder is gone, in the learner's order. `live` must be what the syncer says,
    and hold this learner: one that has only just begun would take everybody for gone.
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
    # sorted() is stable: among equally often read shards the learner's order decides.
    own = [s for s in able if (lease := leases.get(s)) and lease.holder == learner]
    begun = sorted(own, key=lambda s: place(leases, merged, s)[1] == 0)
    fresh = sorted(able, key=lambda s: place(leases, merged, s)[0])
    return next(iter([*begun, *fresh]), None)


def taken(shard: int, learner: str, incarnation: int, where: Where) -> ShardLease:
    """The lease of `shard` in this learner's hands, to be read from `where`."""
    passes, sequences = where
    return ShardLease(
        shard=shard, holder=learner, incarnation=incarnation, sequences=sequences, passes=passes
    )


def given_back(shard: int, passes: int) -> ShardLease:
    """A shard whose pass `passes` is read and merged: free, to be read again in another order."""
    return ShardLease(shard=shard, holder="", incarnation=-1, sequences=0, passes=passes + 1)
