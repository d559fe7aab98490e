"""I5 in every world: all tokens are accounted for, in the same way by every leader.

Counts what the tape merges by itself, token span by token span, and what learners were seen to do;
compares both with what a leader would show. Looked at whenever the tape grows, and every heartbeat.
"""

from collections import defaultdict
from typing import Any

from diloco_shared.protocol.messages import (
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
)
from diloco_shared.protocol.records import TokenCounts
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.claims import Claims
from diloco_simulator.checkers.promises import Mark, Report


class Spans:
    """Disjoint spans (start, stop] of one life's tokens, in order."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.total = 0  # tokens in all of them

    def add(self, start: int, stop: int) -> int:
        """How many tokens are new."""
        before, joined = self.total, list[tuple[int, int]]()
        for a, b in sorted([*self.spans, (start, stop)]):
            if b <= a:
                continue
            if joined and a <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], b))
            else:
                joined.append((a, b))
        self.spans, self.total = joined, sum(b - a for a, b in joined)
        return self.total - before

    def below(self, limit: int) -> int:
        """Tokens up to `limit`; from the end, where it usually is: asked at every heartbeat."""
        above = 0
        for a, b in reversed(self.spans):
            if b <= limit:
                break
            above += b - max(a, limit)
        return self.total - above


class Tokens:
    """Of one syncer shard, as far as its own fragments go."""

    def __init__(self, report: Report, spec: RunSpec, claims: Claims, shard: int = 0) -> None:
        self.report = report
        self.fragments = spec.algorithm.fragments
        self.owned = spec.algorithm.owned(shard)
        self.claims = claims
        self.begin()

    def begin(self) -> None:
        """From an empty tape."""
        self.spans: dict[tuple[str, int], Spans] = defaultdict(Spans)  # (life, fragment)
        # After each record: tokens that are merged, per fragment.
        self.merged: list[list[int]] = [[0] * self.fragments]
        self.ledgers: dict[int, dict[str, Any]] = {}  # record -> the ledger after it
        # (fragment, version) -> tokens that its round merged first
        self.made_of: dict[tuple[int, int], int] = {}
        self.versions = [-1] * self.fragments

    def record(self, record: TapeRecord, mark: Mark | None = None) -> None:
        """`mark`: what a restore goes back to; all lives of before are over then."""
        merged = list(self.merged[-1])
        if isinstance(record, TapeRestore) and mark is not None:
            merged, self.versions = list(mark.merged), list(mark.versions)
            self.spans.clear()
            self.versions = list(mark.versions)
        if isinstance(record, TapeRebirth):
            for p in self.owned:
                gone = range(record.versions[p] + 1, self.versions[p] + 1)
                merged[p] -= sum(self.made_of.get((p, version), 0) for version in gone)
                self.versions[p] = record.versions[p]
        if isinstance(record, TapeRound):
            p, had = record.fragment, merged[record.fragment]
            for v in record.verdicts:
                if v.outcome == "merged":
                    spans = self.spans[f"{v.learner}/{v.incarnation}", p]
                    merged[p] += spans.add(v.tokens_from, v.tokens_to)
            if record.outcome == "committed":  # a skipped round stands at the version before it
                self.made_of[p, record.version], self.versions[p] = merged[p] - had, record.version
        self.merged.append(merged)

    def lost(self, kept: int) -> None:
        """The tape is about to be read again, up to its record `kept`: later ones never were."""
        ledgers = {seq: ledger for seq, ledger in self.ledgers.items() if seq <= kept}
        self.begin()
        self.ledgers = ledgers

    def ledger(self, leader: str, seq: int, meta: dict[str, Any]) -> None:
        """The ledger of the tape alone: the same for everybody, however they came to it."""
        known = self.ledgers.setdefault(seq, meta)
        if known != meta:
            differing = sorted(k for k in known if known[k] != meta.get(k))
            self.report("I5", f"{leader} has another ledger at record {seq}: {differing}")

    def shown(
        self,
        leader: str,
        seq: int,
        processed: int,
        tokens_P: tuple[TokenCounts, ...],
        *,
        over: bool,
    ) -> None:
        """What a leader tells of every token. `over`: the run has ended."""
        self.report.looked("I5")
        done = sum(work.tokens for work in self.claims.work.values())
        if processed > done:
            self.report("I5", f"{leader} counts {processed} tokens, learners did {done}")
        for p, tokens in enumerate(tokens_P):
            if sum(tokens.model_dump().values()) != processed:
                self.report("I5", f"{leader}: {tokens} of fragment {p} are not {processed}")
            if p not in self.owned:
                continue
            if seq < len(self.merged) and tokens.merged != self.merged[seq][p]:
                self.report(
                    "I5",
                    f"{leader} counts {tokens.merged} tokens of fragment {p} as merged at record "
                    f"{seq}, the tape says {self.merged[seq][p]}",
                )
            if seq == len(self.merged) - 1 and tokens.overwritten > (most := self._below(p)):
                self.report(
                    "I5",
                    f"{leader} counts {tokens.overwritten} tokens of fragment {p} as overwritten, "
                    f"{most} were adopted over",
                )
            if over and tokens.in_flight:
                self.report("I5", f"{leader}: the run is over with {tokens} of fragment {p}")

    def _below(self, p: int) -> int:
        """Unmerged tokens of all lives below their newest adoption of a fragment."""
        below = 0
        for life, work in self.claims.work.items():
            if p in work.bases:
                base = work.bases[p][3]
                merged = self.spans[life, p].below(base)
                below += base - merged
        return below
