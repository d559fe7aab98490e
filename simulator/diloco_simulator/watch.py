"""What the checkers see of a world: they look on, and never touch the product's state.

Each method is one observation; `violations` says which invariant was broken, when and how.
"""

from collections import defaultdict
from typing import Any

from diloco_shared.protocol.messages import (
    ContributionManifest,
    Pull,
    TapeInit,
    TapeRecord,
    TapeRound,
)
from diloco_simulator.world import World

# Lies about a contribution, each of which the gate must see (I11).
_LIES: tuple[dict[str, Any], ...] = (
    {"config_hash": "f" * 32},
    {"epoch": 7},
    {"term": 99},
    {"incarnation": 99},
    {"values": 1},
    {"codec": "fp32"},
    {"tokens_to": 10**12},
    {"step_to": 0},
)


class Watch:
    """All observations of one world."""

    def __init__(self, world: World, quorum: int) -> None:
        self.world = world
        self.quorum = quorum
        self.violations: list[str] = []
        self.anchors: dict[tuple[int, int, int], str] = {}
        self.adopted_by: dict[tuple[str, int, int, int], int] = {}
        self.tape_versions: dict[tuple[int, int], int] = {}
        self.merged: set[tuple[str, str]] = set()
        self.intervals: dict[tuple[str, int, int], int] = {}
        self.lives: dict[str, int] = defaultdict(lambda: -1)
        self.stops: dict[tuple[str, int], float] = {}
        self.forgiven_at = 0.0  # when the syncer last gave everybody a new lease
        self.lies: set[str] = set()
        self.merged_at: dict[str, float] = {}
        self.pulls: set[tuple[int, int]] = set()
        self.initialised = False
        self.ended = ""
        self.rounds = 0

    def _broken(self, invariant: str, text: str) -> None:
        self.violations.append(f"{invariant} at {self.world.now:.2f} s: {text}")

    # --- anchors -------------------------------------------------------------------------------

    def adopted(
        self, learner: str, incarnation: int, epoch: int, p: int, version: int, digest: str
    ) -> None:
        """I1: what one life adopts only grows within an epoch. I4: and is what all have."""
        key = (learner, incarnation, epoch, p)
        before = self.adopted_by.get(key, -1)
        if version <= before:
            self._broken("I1", f"{learner} adopted version {version} of {p} after {before}")
        self.adopted_by[key] = version
        self.anchor(epoch, p, version, digest, learner)

    def anchor(self, epoch: int, p: int, version: int, digest: str, whose: str) -> None:
        """I4: every copy of an anchor is byte-identical."""
        known = self.anchors.setdefault((epoch, p, version), digest)
        if known != digest:
            self._broken("I4", f"{whose} has another anchor (epoch {epoch}, {p}, {version})")

    # --- the tape ------------------------------------------------------------------------------

    def record(self, seq: int, record: TapeRecord) -> None:
        """Every record as it is committed."""
        match record:
            case TapeInit():
                if self.initialised:
                    self._broken("I1", "a second init record")
                self.initialised = True
            case TapeRound():
                self._round(record)
            case _ if record.kind == "end":
                self.ended = record.outcome

    def _round(self, r: TapeRound) -> None:
        self.rounds += 1
        merged = [v for v in r.verdicts if v.outcome == "merged"]
        self.world.counts["refused"] += sum(v.outcome == "refused" for v in r.verdicts)
        before = self.tape_versions.get((r.epoch, r.fragment), -1)
        grows = r.version > before if r.outcome == "committed" else r.version >= before
        if not grows:
            self._broken("I1", f"round {r.round}: version {r.version} of {r.fragment}")
        self.tape_versions[(r.epoch, r.fragment)] = r.version
        if r.outcome == "committed" and len(merged) < max(r.quorum, 1):
            self._broken("I3", f"round {r.round} merged {len(merged)} of {r.quorum}")
        if r.outcome == "skipped" and merged:
            self._broken("I3", f"round {r.round} was skipped and merged {len(merged)}")
        for v in merged:
            self._merged(r, v.learner, v.incarnation, v.subject, v.digest)
            if v.step_to <= v.step_from or v.subject in self.lies:
                self._broken("I11", f"round {r.round} merged a bad contribution of {v.learner}")

    def _merged(
        self, r: TapeRound, learner: str, incarnation: int, subject: str, digest: str
    ) -> None:
        if (subject, digest) in self.merged:
            self._broken("I2", f"{subject} was merged twice")
        self.merged.add((subject, digest))
        if incarnation < self.lives[learner]:
            self._broken("I10", f"{learner} {incarnation} merged after {self.lives[learner]}")
        self.lives[learner] = incarnation
        self.merged_at[learner] = self.world.now

    # --- learners ------------------------------------------------------------------------------

    def stopped(self, learner: str, incarnation: int, at: float) -> None:
        self.stops[(learner, incarnation)] = at

    def recovered(self, learner: str, incarnation: int, source: str) -> None:
        self.world.counts[f"from {source}"] += 1

    def pulled(self, pull: Pull, participants: dict[str, int], lease_s: float) -> None:
        """I10: nobody silent for a lease is asked, once its last words have arrived.

        A pull that is only sent again was decided earlier.
        """
        if (pull.term, pull.round) in self.pulls:
            return
        self.pulls.add((pull.term, pull.round))
        slow = 12 * self.world.options.delay_s
        for learner, incarnation in participants.items():
            stopped = self.stops.get((learner, incarnation))
            since = max(stopped or 0.0, self.forgiven_at)
            if stopped is not None and self.world.now > since + lease_s + slow:
                self._broken(
                    "I10", f"round {pull.round} pulls {learner}, silent since {stopped:.2f} s"
                )

    def tampered(self, manifest: ContributionManifest, world: World) -> ContributionManifest:
        """Sometimes a contribution that lies; the gate must refuse it."""
        if not world.chance(world.options.garbage, "garbage"):
            return manifest
        lie = world.rng.choice(_LIES)
        self.lies.add(manifest.blob.subject)
        return manifest.model_copy(update=lie)
