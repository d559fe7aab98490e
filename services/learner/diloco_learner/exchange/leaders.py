"""What the leaders of all syncer shards say, put together: to a learner they are one syncer.

Versions come from whoever owns the fragment, progress is that of the slowest, and the run is over
once it is for all. Terms are kept apart where they fence (`Beat.terms`); their sum grows with each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diloco_shared.protocol.messages import Beat, Grant, Restored, RunState, Stamp
from diloco_shared.protocol.run_states import SHOWN_FIRST
from diloco_shared.spec.algorithm import Algorithm

# --------------------------------------------------------------------------------------------------
# Which beats count: those of the newest leader, in the order in which it sent them.


def is_final(beat: Beat) -> bool:
    """Nothing more is opened."""
    return beat.state in ("finished", "stopped")


def unborn(beat: Beat, algorithm: Algorithm, known: Callable[[int], bool]) -> bool:
    """Whether nothing was ever published of some syncer shard: not by its leader's account, nor is
    any of its fragments `known` to this learner in the beat's epoch.

    Of several shards one may lose its first parameters, while the others keep theirs.
    """
    return any(
        all(beat.versions[p] < 0 and not known(p) for p in algorithm.owned(shard))
        for shard in range(algorithm.shards)
    )


def outdated(beat: Beat, known: Beat | None, *, fragments: int, deposed: bool) -> str:
    """Why a beat changes nothing beside the newest `known` one; or "".

    `deposed`: a newer leader than the one that sent it was heard of.
    """
    if len(beat.versions) != fragments:
        return "beat of another layout"
    if deposed:
        return "beat of a deposed leader"
    if known is None or (beat.epoch, beat.term) != (known.epoch, known.term):
        return ""
    # Core messages may overtake each other; a leader's versions only grow, and its end is final.
    overtaken = any(v < k for v, k in zip(beat.versions, known.versions, strict=True))
    if overtaken or (is_final(known) and not is_final(beat)):
        return "beat overtaken by a newer one"
    return ""


@dataclass(slots=True)
class Leaders:
    """Of S shards, as one learner hears them."""

    learner: str
    shards: int
    beats: dict[int, Beat] = field(default_factory=dict)  # newest of each
    grants: dict[int, Grant] = field(default_factory=dict)  # of the newest attempt

    def beat(self, beat: Beat) -> Beat | None:
        """The beat of all; None until every leader was heard, or for one that is outdated."""
        if self.shards == 1:
            return beat
        known = self.beats.get(beat.shard)
        if beat.shard >= self.shards or (known is not None and _is_older(beat, known)):
            return None
        self.beats[beat.shard] = beat
        if len(self.beats) < self.shards:
            return None
        beats = [self.beats[s] for s in range(self.shards)]
        epoch = max(b.epoch for b in beats)
        told = _tells(beats)
        # Of an older epoch nothing counts: its shard is about to follow, perhaps, on a hub that was
        # put back from a backup, with a lower term.
        now = [b if b.epoch == epoch else None for b in beats]
        terms = tuple(0 if b is None else b.term for b in now)
        asked = any(b.initializer == self.learner for b in beats)
        return told.model_copy(
            update={
                "shard": 0,
                "epoch": epoch,
                "term": sum(terms),
                "terms": terms,
                "state": _state(beats),
                "versions": self._versions(now),
                "stamp": slowest([b.stamp for b in beats]),
                "live": tuple(sorted({m for b in beats for m in b.live})),
                "initializer": self.learner if asked else told.initializer,
                "evaluator": beats[0].evaluator,
                "evaluated": beats[0].evaluated,
                "incarnations": _newest(beats),
                "checkpoint": max(b.checkpoint for b in beats),
                "restored": _latest([b.restored for b in beats]),
            }
        )

    def grant(self, grant: Grant) -> Grant | None:
        """The grant of all: once every shard has accepted in one epoch, or one has refused."""
        if self.shards == 1 or not grant.accepted:
            return grant
        attempt = (grant.learner, grant.incarnation, grant.nonce)
        self.grants = {
            s: g for s, g in self.grants.items() if (g.learner, g.incarnation, g.nonce) == attempt
        }
        if grant.shard < self.shards:
            self.grants[grant.shard] = grant
        if len(self.grants) < self.shards or len({g.epoch for g in self.grants.values()}) > 1:
            return None  # asked again, each shard answers as it stands then
        grants = [self.grants[s] for s in range(self.shards)]
        return grants[0].model_copy(
            update={
                "term": sum(g.term for g in grants),
                "versions": self._versions(grants),
                "stamp": slowest([g.stamp for g in grants]),
                "restored": _latest([g.restored for g in grants]),
            }
        )

    def _versions(self, of: Sequence[Beat | Grant | None]) -> tuple[int, ...]:
        """Of each fragment, what its owner says; -1 where that says nothing."""
        fragments = max(len(m.versions) for m in of if m is not None)
        owners = [of[p % self.shards] for p in range(fragments)]
        return tuple(-1 if m is None else m.versions[p] for p, m in enumerate(owners))


def slowest(stamps: Sequence[Stamp]) -> Stamp:
    """Progress of the run: the least of its shards'."""
    return min(stamps, key=lambda stamp: stamp.steps)


def _is_older(beat: Beat, known: Beat) -> bool:
    if len(beat.versions) != len(known.versions):
        return True
    deposed = (beat.epoch, beat.term) < (known.epoch, known.term)
    return bool(outdated(beat, known, fragments=len(known.versions), deposed=deposed))


def _tells(beats: Sequence[Beat]) -> Beat:
    """The one whose state and reason are those of the run."""
    state = _state(beats)
    return next((b for b in beats if b.state == state), beats[0])


def _state(beats: Sequence[Beat]) -> RunState:
    states = {b.state for b in beats}
    # One that is behind with an epoch has its last versions in that one still to publish.
    if all(is_final(b) for b in beats) and len({b.epoch for b in beats}) == 1:
        return "stopped" if "stopped" in states else "finished"
    if any(is_final(b) for b in beats):
        states.add("finishing")
    return next((s for s in SHOWN_FIRST if s in states), "running")


def _newest(beats: Sequence[Beat]) -> dict[str, int]:
    known: dict[str, int] = {}
    for b in beats:
        for learner, incarnation in b.incarnations.items():
            known[learner] = max(known.get(learner, -1), incarnation)
    return known


def _latest(restored: Sequence[Restored | None]) -> Restored | None:
    there = [r for r in restored if r is not None]
    return max(there, key=lambda r: r.epoch, default=None)
