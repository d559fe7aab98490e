"""Learners and rounds in which the fate of every single token is kept, beside the ledger."""

import json
from dataclasses import dataclass, field
from typing import Any

from diloco_shared.protocol.messages import LifeCount, Stamp, TapeEnd, TapeRound, Verdict
from diloco_shared.protocol.records import TokenCounts
from diloco_syncer.history.counts import Counts
from diloco_syncer.history.ledger import Ledger

P = 2
PER_STEP = 3
STAMP = Stamp(round=0, steps=0, fraction=0.0, fraction_per_step=0.0)


def verdict(learner: str, outcome: str, start: int, stop: int, **over: Any) -> Verdict:
    fields: dict[str, Any] = {"incarnation": 0, "reason": "because"}
    return Verdict(
        learner=learner,
        outcome=outcome,  # type: ignore[arg-type]
        tokens_from=start,
        tokens_to=stop,
        **{**fields, **over},
    )


def record(n: int, verdicts: list[Verdict], counts: tuple[LifeCount, ...] = ()) -> TapeRound:
    committed = any(v.outcome == "merged" for v in verdicts)
    return TapeRound(
        epoch=0,
        term=1,
        round=n,
        fragment=n % P,
        outcome="committed" if committed else "skipped",
        reason="",
        quorum_reason="",
        quorum=1,
        version=0,
        verdicts=tuple(verdicts),
        keyframe=False,
        anchor_digest="",
        master_digest="",
        payload_digest="",
        stamp=STAMP,
        quorum_s=0.0,
        grace_s=0.0,
        sync_s=0.0,
        at=0.0,
        counts=counts,
    )


def end(counts: tuple[LifeCount, ...] = ()) -> TapeEnd:
    return TapeEnd(term=1, outcome="finished", reason="", versions=(), at=0.0, counts=counts)


# --- a plain model -------------------------------------------------------------------------------


@dataclass
class Known:
    """What is known of a life: on the tape, or heard by the leader."""

    tokens: int = 0
    base: list[int] = field(default_factory=lambda: [0] * P)
    left: bool = False

    def hear(self, tokens: int, base: list[int], left: bool) -> None:
        self.tokens = max(self.tokens, tokens)
        self.base = [max(a, b) for a, b in zip(self.base, base, strict=True)]
        self.left = self.left or left


@dataclass
class Truth:
    """A process as it is."""

    learner: str
    incarnation: int
    tokens: int = 0
    base: list[int] = field(default_factory=lambda: [0] * P)
    left: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.learner, self.incarnation


class World:
    """Learners and rounds, token by token; beside it the ledger of a leader and one of the tape."""

    def __init__(self) -> None:
        self.now = {name: Truth(name, 0) for name in "ab"}
        self.taped: dict[tuple[str, int], Known] = {}
        self.heard: dict[tuple[str, int], Known] = {}
        self.merged: list[set[tuple[str, int, int]]] = [set() for _ in range(P)]
        self.refused: list[set[tuple[str, int, int]]] = [set() for _ in range(P)]
        self.silent: set[str] = set()
        self.ended = False
        self.n = 0
        self.sent: dict[str, tuple[int, int, int]] = {}  # learner -> (incarnation, from, to)
        self.ledger = Ledger.empty(P)
        self.counts = Counts()
        self.tape: list[TapeRound | TapeEnd] = []

    # --- what happens --------------------------------------------------------------------------

    def step(self, t: Truth, arg: int) -> None:
        t.tokens += PER_STEP * (not t.left)

    def report(self, t: Truth, arg: int) -> None:
        self.heard.setdefault(t.key, Known()).hear(t.tokens, t.base, t.left)
        count = LifeCount(
            learner=t.learner,
            incarnation=t.incarnation,
            tokens=t.tokens,
            adopted=tuple(enumerate(t.base)),
            left=t.left,
        )
        known = self.counts.heard.get(t.key)
        assert known is None or known.tokens <= count.tokens
        self.counts.heard[t.key] = count

    def adopt(self, t: Truth, arg: int) -> None:
        if not t.left:
            t.base[arg % P] = t.tokens

    def contribute(self, t: Truth, arg: int) -> None:
        """To the round that is open; each is answered once."""
        p = self.n % P
        if t.learner not in self.sent and t.tokens > t.base[p] and not t.left:
            self.sent[t.learner] = (t.incarnation, t.base[p], t.tokens)

    def die(self, t: Truth, arg: int) -> None:
        self.now[t.learner] = Truth(t.learner, t.incarnation + 1)

    def leave(self, t: Truth, arg: int) -> None:
        t.left = True

    def hush(self, t: Truth, arg: int) -> None:
        self.silent ^= {t.learner}

    def failover(self, t: Truth, arg: int) -> None:
        """A leader with the tape, by way of a snapshot, and nothing else."""
        saved = json.loads(json.dumps(self.ledger.meta()))
        self.ledger, self.counts = Ledger.restore(saved), Counts()
        self.heard.clear()

    def close(self, t: Truth, arg: int) -> None:
        """The round is recorded; what became of each contribution is drawn from `arg`."""
        p, verdicts = self.n % P, []
        newest = self._newest()
        for name, (incarnation, start, stop) in sorted(self.sent.items()):
            arg, fate = divmod(arg, 4)
            if incarnation < newest.get(name, -1) and (name, incarnation) not in self.taped:
                fate = 3  # nobody ever heard of that life, which a newer one has replaced
            if fate == 0:
                verdicts.append(verdict(name, "merged", start, stop, incarnation=incarnation))
            elif fate == 1:
                lie = 1000 if arg % 5 == 0 else 0  # a gate refuses what claims too much
                verdicts.append(
                    verdict(name, "refused", start, stop + lie, incarnation=incarnation)
                )
            elif fate == 2:
                why = {"incarnation": incarnation, "reason": "skipped: too few"}
                verdicts.append(verdict(name, "refused", start, stop, **why))
        self._record(record(self.n, verdicts, self.counts.to_record(self.ledger)))
        self.sent.clear()
        self.n += 1
        for v in verdicts:
            key, life = (v.learner, v.incarnation), range(v.tokens_from + 1, v.tokens_to + 1)
            if v.outcome == "merged":
                base = [v.tokens_from if q == p else 0 for q in range(P)]
                self.taped.setdefault(key, Known()).hear(v.tokens_to, base, False)
                self.merged[p] |= {(*key, token) for token in life}
            elif not v.reason.startswith("skipped") and key in self.taped:
                until = self.taped[key].tokens
                self.refused[p] |= {(*key, token) for token in life if token <= until}

    def finish(self, t: Truth, arg: int) -> None:
        if arg % 7 == 0:
            self.ended = True
            self._record(end(self.counts.to_record(self.ledger)))

    def _record(self, r: TapeRound | TapeEnd) -> None:
        for key, k in self.heard.items():
            self.taped.setdefault(key, Known()).hear(k.tokens, k.base, k.left)
        self.tape.append(r)
        apply(self.ledger, r)

    # --- where the tokens are ------------------------------------------------------------------

    def _newest(self) -> dict[str, int]:
        newest: dict[str, int] = {}
        for learner, incarnation in [*self.taped, *self.heard]:
            newest[learner] = max(newest.get(learner, -1), incarnation)
        return newest

    def model(self) -> tuple[TokenCounts, ...]:
        newest = self._newest()
        found = [dict.fromkeys(TokenCounts.model_fields, 0) for _ in range(P)]
        for key in {*self.taped, *self.heard}:
            known = Known()
            for k in (self.taped.get(key), self.heard.get(key)):
                if k is not None:
                    known.hear(k.tokens, k.base, k.left)
            over = known.left or self.ended or key[1] < newest[key[0]] or key[0] in self.silent
            for p in range(P):
                for token in range(1, known.tokens + 1):
                    found[p][self._class(p, key, token, known.base[p], over)] += 1
        return tuple(TokenCounts(**f) for f in found)

    def reread(self) -> int:
        """Tokens of lives that are over, behind the newest one that any fragment merged."""
        newest, taken, found = self._newest(), set().union(*self.merged), 0
        for key in {*self.taped, *self.heard}:
            knows = [k for k in (self.taped.get(key), self.heard.get(key)) if k is not None]
            left = any(k.left for k in knows)
            if left or self.ended or key[1] < newest[key[0]] or key[0] in self.silent:
                merged_to = max((token for *of, token in taken if tuple(of) == key), default=0)
                found += max(k.tokens for k in knows) - merged_to
        return found

    def _class(self, p: int, key: tuple[str, int], token: int, base: int, over: bool) -> str:
        if (*key, token) in self.merged[p]:
            return "merged"
        if (*key, token) in self.refused[p]:
            return "refused"
        if token <= base:
            return "overwritten"
        return "lost" if over else "in_flight"

    def check(self) -> None:
        present = self.ledger.with_counts(self.counts.unrecorded(self.ledger))
        counted = present.tokens_P(lambda learner, incarnation: learner in self.silent)
        assert counted == self.model()
        assert present.reread(lambda learner, _: learner in self.silent) == self.reread()
        for tokens in counted:
            assert sum(tokens.model_dump().values()) == present.processed


def apply(ledger: Ledger, r: TapeRound | TapeEnd) -> None:
    if isinstance(r, TapeRound):
        ledger.round(r)
    else:
        ledger.end(r)
