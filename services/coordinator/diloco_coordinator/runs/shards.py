"""One status of a run, made of those that the leaders of its syncer shards write."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from diloco_shared.protocol.messages import RunState
from diloco_shared.protocol.records import RecoveryRecord, RunStatus, TokenCounts
from diloco_shared.protocol.run_states import OVER, SHOWN_FIRST


def merged(parts: Sequence[RunStatus], shards: int) -> RunStatus | None:
    """`parts` by shard, those that are known; None while the first is not.

    Counts are sums; progress is that of the slowest shard; tokens are the mean over all fragments
    weighted by their size, as within a shard. A learner is as the shard shows it that heard of it
    last, and back once the first of them has merged it. What one shard has merged nobody reads
    again: so the least that a shard expects to be. What is known of fragments is of one length in
    all of them (`fitted`).
    """
    if not parts or parts[0].shard:
        return None
    first = parts[0]
    if shards == 1:
        return first
    state, reason = _state(parts, shards)
    refused: Counter[str] = Counter()
    for part in parts:
        refused.update(part.refused)
    tokens = _tokens(parts)
    by_shard = {p.shard: p for p in parts}
    return first.model_copy(
        update={
            "state": state,
            "reason": reason,
            # A shard that is over takes no order any more.
            "quorum": next((p.quorum for p in parts if p.state not in OVER), first.quorum),
            "epoch": max(p.epoch for p in parts),
            "versions": tuple(max(of_p) for of_p in zip(*(p.versions for p in parts), strict=True)),
            "stamp": min((p.stamp for p in parts), key=lambda stamp: stamp.steps),
            "rounds_committed": sum(p.rounds_committed for p in parts),
            "rounds_skipped": sum(p.rounds_skipped for p in parts),
            "contributions_merged": sum(p.contributions_merged for p in parts),
            "refused": dict(refused),
            "alive": _all([p.alive for p in parts]),
            "participating": _all([p.participating for p in parts]),
            "parameters": sum(p.parameters for p in parts),
            "tokens_processed": max(p.tokens_processed for p in parts),
            "tokens_useful": tokens.merged,
            "tokens": tokens,
            "tokens_by_fragment": tuple(
                by_shard.get(p % shards, first).tokens_by_fragment[p]
                for p in range(len(first.tokens_by_fragment))
            ),
            "tokens_reread": min(p.tokens_reread for p in parts),
            "recoveries": _recoveries(parts),
            "learners": _learners(parts),
            "bytes_up": sum(p.bytes_up for p in parts),
            "bytes_down": sum(p.bytes_down for p in parts),
            # One that is over closes no rounds any more.
            "since_round_s": max(
                (p.since_round_s for p in parts if p.state not in OVER), default=first.since_round_s
            ),
            "restores": min(p.restores for p in parts),
            "settled": len(parts) == shards and _settled(parts),
            "forced": any(p.forced for p in parts),
            "at": max(p.at for p in parts),
        }
    )


def fitted(part: RunStatus, fragments: int) -> RunStatus | None:
    """A shard's status with an entry for each fragment of the run; None if it has others."""
    versions = part.versions or (-1,) * fragments
    tokens = part.tokens_by_fragment or (TokenCounts(),) * fragments
    if len(versions) != fragments or len(tokens) != fragments:
        return None
    return part.model_copy(update={"versions": versions, "tokens_by_fragment": tokens})


def _state(parts: Sequence[RunStatus], shards: int) -> tuple[RunState, str]:
    if len(parts) < shards:
        return "waiting", f"{len(parts)} of {shards} syncer shards have a leader"
    if all(p.state in OVER for p in parts):
        ended = next((p for p in parts if p.state == "stopped"), parts[0])
        return ended.state, ended.reason
    for state in SHOWN_FIRST:
        told = next((p for p in parts if p.state == state), None)
        if told is not None:
            return state, f"shard {told.shard}: {told.reason}{_goes_back(parts, told)}"[:500]
    running = next(p for p in parts if p.state not in OVER)
    ending = any(p.state in OVER for p in parts)
    reason = f"{running.reason}{_goes_back(parts, running)}"[:500]
    return ("finishing" if ending else running.state), reason


def _goes_back(parts: Sequence[RunStatus], told: RunStatus) -> str:
    """What a shard has still to go back to, where others have: they say nothing of it."""
    found = ((p, re.search(r"\brestoring [^\s;]+[^;]*", p.reason)) for p in parts if p != told)
    return "".join(f"; shard {p.shard}: {said[0]}" for p, said in found if said)


def _all(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({name for some in names for name in some}))


def _recoveries(parts: Sequence[RunStatus]) -> tuple[RecoveryRecord, ...]:
    """Of each life, that of the shard which merged it first."""
    found: dict[tuple[str, int], RecoveryRecord] = {}
    for record in (r for p in parts for r in p.recoveries):
        key = (record.learner, record.incarnation)
        known = found.setdefault(key, record)
        earlier = record.contributed_at or math.inf
        if earlier < (known.contributed_at or math.inf):
            found[key] = record
    return tuple(sorted(found.values(), key=lambda r: (r.restarted_at, r.learner)))


def _learners(parts: Sequence[RunStatus]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({name for p in parts for name in p.learners}):
        views = [p.learners[name] for p in parts if name in p.learners]
        newest = max(views, key=lambda v: (v.get("incarnation", -1), -v.get("silent_s", 0.0)))
        participating = any(v.get("participating", False) for v in views)
        found[name] = {**newest, "participating": participating}
    return found


def _settled(parts: Sequence[RunStatus]) -> bool:
    """Whether nobody need work for any part any more.

    Of a part that was ended by force learners hear nothing. They do not leave by themselves, and
    the leader of a part that ended well would wait for them for ever.
    """
    if any(p.forced for p in parts):
        return all(p.state in OVER for p in parts)
    return all(p.settled for p in parts)


def _tokens(parts: Sequence[RunStatus]) -> TokenCounts:
    """Weighted by parameters; what rounding and reports on their way leave is in flight."""
    weights = sum(p.parameters for p in parts)
    if not weights:
        return parts[0].tokens

    def mean(name: str) -> int:
        return sum(int(getattr(p.tokens, name)) * p.parameters for p in parts) // weights

    settled = {name: mean(name) for name in ("merged", "refused", "overwritten", "lost")}
    processed = max(p.tokens_processed for p in parts)
    return TokenCounts(**settled, in_flight=max(processed - sum(settled.values()), 0))
