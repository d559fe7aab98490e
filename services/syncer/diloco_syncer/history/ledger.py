"""Where every token went (invariant I5), in whole tokens, per fragment, at every instant.

A life (learner, incarnation) numbers its tokens 1, 2, … as it trains on them. Towards each fragment
every one of them is in exactly one class, so that

    processed = merged + refused + overwritten + lost + in flight

- `merged`: a committed round merged it. Counted the first time; final.
- `refused`: no merge has it, and the gate refused a contribution that held it. It stays with the
  learner, so a later round may still merge it; else it remains refused. What a skipped round gave
  back is not refused: it is in flight as before.
- `overwritten`: none of the above, and the learner adopted the fragment after it: left out, too
  late, or never asked. A contribution made before that adoption may still be in a round under way:
  if that round merges it, it moves to merged.
- `lost`: none of the above, and its life is over (a newer one began, it left, it is silent for
  longer than its lease, or the run has ended). A silent one that speaks again has it in flight
  again; a round under way may still merge what it sent before it died.
- `in flight`: everything else: trained on since the last adoption, and nothing decided yet.

Where the numbers come from: verdicts from the tape; how far a life is and where it adopted, from
its progress, which every record repeats as counts. So the ledger is a function of the tape, plus
the newest progress laid over it to look at the present (`with_counts`): a new leader and a replay
get the same numbers. What a process did after its last report is not known to anybody, and is
not processed.

Once a round of a fragment is recorded, nothing below an adoption known by then can be merged any
more: later contributions begin there. That part is settled into totals, and the lives that are
over go with it, so that memory is bounded by the number of learners.

`reread` are the samples, in tokens, that lives which are over read behind the newest of their
steps that any fragment merged: whoever gets the data shard reads them again. The rest of what such
a life lost towards a fragment is skipped for it: another fragment has merged those samples.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Self

from diloco_shared.protocol.messages import (
    COUNT_MAX,
    Cursor,
    LastMerged,
    LifeCount,
    TapeEnd,
    TapeRound,
    Verdict,
)
from diloco_shared.protocol.records import TokenCounts

Spans = list[tuple[int, int]]
Adoptions = tuple[tuple[int, int], ...]  # (fragment, tokens of the life when it adopted it)
# Refused spans of one life and fragment that are not settled. An honest learner has one or two.
SPANS_MAX = 8
# Learners without a life whose newest incarnation is still known. It fences what an older process
# of theirs may still say: one that stood still while so many other learners came and went is let
# in again, and counted as a new life.
NAMES_MAX = 1024
# Lives of one learner that are over and not settled: a round of every fragment settles them.
LIVES_MAX = 16


@dataclass(slots=True)
class Life:
    """One incarnation: what it reported, and per fragment up to which token all is settled."""

    tokens: int
    base_P: list[int]  # tokens at its newest adoption
    mark_P: list[int]
    refused_P: list[Spans]  # above the mark, ascending and disjoint
    merged_to: int = 0  # newest token that any fragment merged
    left: bool = False

    @classmethod
    def new(cls, fragments: int) -> Self:
        return cls(0, [0] * fragments, [0] * fragments, [[] for _ in range(fragments)])

    def copy(self) -> "Life":
        spans_P = [[*spans] for spans in self.refused_P]
        return replace(self, base_P=[*self.base_P], mark_P=[*self.mark_P], refused_P=spans_P)

    def refuse(self, p: int, start: int, stop: int) -> None:
        """A contribution of (start, stop] was refused; claims beyond what is known are cut."""
        start, stop = max(start, self.mark_P[p]), min(stop, self.tokens)
        if start < stop:
            self.refused_P[p] = _joined([*self.refused_P[p], (start, stop)])

    def split(self, p: int, until: int) -> tuple[int, int, int]:
        """(refused, overwritten, open) tokens of what is unsettled up to `until`."""
        mark, base = self.mark_P[p], min(self.base_P[p], until)
        refused = _covered(self.refused_P[p], mark, until)
        overwritten = max(base - mark, 0) - _covered(self.refused_P[p], mark, base)
        return refused, overwritten, until - mark - refused - overwritten

    def pass_mark(self, p: int, mark: int) -> None:
        """Everything up to `mark` is settled."""
        self.mark_P[p] = mark
        spans = self.refused_P[p]
        self.refused_P[p] = [(max(a, mark), b) for a, b in spans if b > mark]


def _joined(spans: Spans) -> Spans:
    """Ascending, disjoint, at most SPANS_MAX: beyond that the newest two become one."""
    joined: Spans = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    while len(joined) > SPANS_MAX:
        last = joined.pop()
        joined[-1] = (joined[-1][0], last[1])
    return joined


def _covered(spans: Spans, start: int, stop: int) -> int:
    return sum(max(0, min(b, stop) - max(a, start)) for a, b in spans)


def _everybody_speaks(learner: str, incarnation: int) -> bool:
    return False


@dataclass(slots=True)
class Ledger:
    """Token counts of P fragments, and how far each of `shards` data shards is merged.

    Mutated by `saw`, `round` and `end`. Counts may come twice and in any order.
    """

    shards: int
    merged_P: list[int]
    refused_P: list[int]
    overwritten_P: list[int]
    lost_P: list[int]
    lives: dict[str, dict[int, Life]] = field(default_factory=dict)
    # Incarnation: of learners with a life, and of the NAMES_MAX whose last one was settled last.
    newest: dict[str, int] = field(default_factory=dict)
    processed_before: int = 0  # by lives that are settled in every fragment
    reread_before: int = 0
    ended: bool = False
    # Data shard -> (passes, sequences): the newest place that is merged in any fragment.
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Fragments whose rounds this ledger sees: of a syncer with several shards, not all.
    owned: tuple[int, ...] = ()

    @classmethod
    def empty(cls, fragments: int, shards: int = 0, owned: tuple[int, ...] | None = None) -> Self:
        zeros = [0] * fragments
        mine = tuple(range(fragments)) if owned is None else owned
        return cls(shards, [*zeros], [*zeros], [*zeros], [*zeros], owned=mine)

    @property
    def fragments(self) -> int:
        return len(self.merged_P)

    # --- write ---------------------------------------------------------------------------------

    def saw(self, count: LifeCount) -> None:
        """A life says how far it is. Nothing is believed of one that is settled for good."""
        life = self._life(count.learner, count.incarnation)
        if life is None:
            return
        life.tokens = max(life.tokens, count.tokens)
        life.left = life.left or count.left
        for p, base in count.adopted:
            if p < self.fragments:
                life.base_P[p] = max(life.base_P[p], min(base, life.tokens))

    def round(self, record: TapeRound) -> None:
        """A round is on the tape: counts, then verdicts, then what is settled by it."""
        p = record.fragment
        for count in record.counts:
            self.saw(count)
        for v in record.verdicts:
            if v.outcome == "merged":
                self._merge(p, v)
            elif v.outcome == "refused" and not v.reason.startswith("skipped"):
                life = self.lives.get(v.learner, {}).get(v.incarnation)
                if life is not None:
                    life.refuse(p, v.tokens_from, v.tokens_to)
        for learner, incarnation, life in list(self._all()):
            over = self._over(learner, incarnation, life)
            self._settle(p, life, life.tokens if over else min(life.base_P[p], life.tokens))
            if over and all(life.mark_P[q] == life.tokens for q in self.owned):
                self._end(learner, incarnation)

    def undo(self, p: int, tokens: int) -> None:
        """What a round merged into fragment `p` is lost with the only syncers that had it."""
        self.merged_P[p] -= tokens
        self.lost_P[p] += tokens

    def end(self, record: TapeEnd) -> None:
        """The run is over: nothing will be merged any more."""
        for count in record.counts:
            self.saw(count)
        self.ended = True

    def resume(self, present: "Ledger", *, own: bool) -> None:
        """Go on from this ledger of a checkpoint, in place of the `present` one.

        The checkpoint's lives are over: learners begin new ones. So are those of the present that
        have trained; one that has not may go on. How often a name was taken is the present's to
        say, and a checkpoint's of the run's `own`, which may be of a history that was lost.
        """
        counted = self._trained() if own else {}
        for learner, incarnation, _ in list(self._all()):
            self._end(learner, incarnation)
        self.ended = False
        self.shards = present.shards
        known = present._trained()
        self.newest = {**counted, **known}  # the present's were settled last
        for learner, incarnation in counted.items():
            self.newest[learner] = max(self.newest[learner], incarnation)
        while len(self.newest) > max(NAMES_MAX, len(known)):
            del self.newest[next(iter(self.newest))]

    def _trained(self) -> dict[str, int]:
        """By learner, its newest life, or the one before if that has not trained."""
        found = dict(self.newest)
        for learner, incarnation, life in self._all():
            if incarnation == found[learner] and not life.tokens:
                found[learner] -= 1  # none of before it goes on
        return found

    def _life(self, learner: str, incarnation: int) -> Life | None:
        """The life, new if it is a newer one; None if it is settled, or unheard of and older."""
        lives = self.lives.get(learner, {})
        if incarnation > self.newest.get(learner, -1):
            self.newest[learner] = incarnation
            self.lives[learner] = lives
            lives[incarnation] = Life.new(self.fragments)
            if len(lives) > LIVES_MAX:
                self._end(learner, min(lives))
        return lives.get(incarnation)

    def settled_to(self, learner: str, incarnation: int, p: int) -> int:
        """Tokens of a life up to which the fate of all is settled, for fragment `p`."""
        life = self.lives.get(learner, {}).get(incarnation)
        return 0 if life is None else life.mark_P[p]

    def _merge(self, p: int, v: Verdict) -> None:
        """A merged contribution: the learner adopted where it begins."""
        life = self._life(v.learner, v.incarnation)
        if life is None:
            return
        life.tokens = max(life.tokens, v.tokens_to)
        life.base_P[p] = max(life.base_P[p], v.tokens_from)
        self._settle(p, life, max(v.tokens_from, life.mark_P[p]))
        self.merged_P[p] += max(v.tokens_to - life.mark_P[p], 0)
        life.pass_mark(p, max(v.tokens_to, life.mark_P[p]))
        life.merged_to = max(life.merged_to, v.tokens_to)
        if v.cursor is not None:
            self.read(v.cursor)

    def read(self, cursor: Cursor) -> None:
        """Samples up to here are part of the published parameters."""
        places = [(shard, (passes + 1, 0)) for shard, passes in cursor.finished]
        for shard, place in [*places, (cursor.shard, (cursor.passes, cursor.sequences))]:
            if shard < self.shards:
                self.places[shard] = max(self.places.get(shard, (0, 0)), place)

    def _settle(self, p: int, life: Life, until: int) -> None:
        if until <= life.mark_P[p]:
            return
        refused, overwritten, rest = life.split(p, until)
        self.refused_P[p] += refused
        self.overwritten_P[p] += overwritten
        self.lost_P[p] += rest  # none, unless the life is over
        life.pass_mark(p, until)

    def _end(self, learner: str, incarnation: int) -> None:
        """A life is over, and all that it did is settled."""
        life = self.lives[learner].pop(incarnation)
        for p in range(self.fragments):
            self._settle(p, life, life.tokens)
        if not self.lives[learner]:
            del self.lives[learner]
            self.newest[learner] = self.newest.pop(learner)  # the last one
            if len(self.newest) - len(self.lives) > NAMES_MAX:
                del self.newest[next(name for name in self.newest if name not in self.lives)]
        self.processed_before += life.tokens
        self.reread_before += life.tokens - min(life.merged_to, life.tokens)

    # --- read ----------------------------------------------------------------------------------

    def _all(self) -> Iterable[tuple[str, int, Life]]:
        for learner, lives in self.lives.items():
            for incarnation, life in lives.items():
                yield learner, incarnation, life

    def _over(self, learner: str, incarnation: int, life: Life) -> bool:
        return life.left or self.ended or incarnation < self.newest[learner]

    @property
    def processed(self) -> int:
        """Tokens that learners are known to have trained on."""
        return self.processed_before + sum(life.tokens for _, _, life in self._all())

    def processed_with(self, counts: Iterable[LifeCount]) -> int:
        """`processed`, knowing these counts as well."""
        more = 0
        for c in counts:
            life = self.lives.get(c.learner, {}).get(c.incarnation)
            more += max(c.tokens - (0 if life is None else life.tokens), 0)
        return self.processed + more

    def with_counts(self, counts: Iterable[LifeCount]) -> Self:
        """A copy that also knows these counts, which are not on the tape yet."""
        # Twice a second: deepcopy would take fifty times as long.
        present = replace(
            self,
            merged_P=[*self.merged_P],
            refused_P=[*self.refused_P],
            overwritten_P=[*self.overwritten_P],
            lost_P=[*self.lost_P],
            lives={m: {n: x.copy() for n, x in of_m.items()} for m, of_m in self.lives.items()},
            newest=dict(self.newest),
            places=dict(self.places),
        )
        for count in counts:
            present.saw(count)
        return present

    def tokens_new(
        self, fragment: int, learner: str, incarnation: int, tokens_from: int, tokens_to: int
    ) -> int:
        """Tokens in (tokens_from, tokens_to] that no merge of `fragment` has counted."""
        life = self.lives.get(learner, {}).get(incarnation)
        if life is None:
            settled = incarnation <= self.newest.get(learner, -1)
            return 0 if settled else max(0, tokens_to - tokens_from)
        return max(0, tokens_to - max(tokens_from, life.mark_P[fragment]))

    def tokens_P(
        self, silent: Callable[[str, int], bool] = _everybody_speaks
    ) -> tuple[TokenCounts, ...]:
        """Every token in its class, per fragment. `silent` tells who has let its lease run out."""
        lives = [
            (life, self._over(learner, incarnation, life) or silent(learner, incarnation))
            for learner, incarnation, life in self._all()
        ]
        return tuple(self._tokens(p, lives) for p in range(self.fragments))

    def _tokens(self, p: int, lives: list[tuple[Life, bool]]) -> TokenCounts:
        refused, overwritten, lost, flying = (
            self.refused_P[p],
            self.overwritten_P[p],
            self.lost_P[p],
            0,
        )
        for life, over in lives:
            more_refused, more_overwritten, rest = life.split(p, life.tokens)
            refused, overwritten = refused + more_refused, overwritten + more_overwritten
            lost, flying = lost + over * rest, flying + (not over) * rest
        return TokenCounts(
            merged=countable(self.merged_P[p]),
            refused=countable(refused),
            overwritten=countable(overwritten),
            lost=countable(lost),
            in_flight=countable(flying),
        )

    def reread(self, silent: Callable[[str, int], bool] = _everybody_speaks) -> int:
        """Tokens of samples that are, or will be, read again because their reader is gone."""
        return self.reread_before + sum(
            life.tokens - min(life.merged_to, life.tokens)
            for learner, incarnation, life in self._all()
            if self._over(learner, incarnation, life) or silent(learner, incarnation)
        )

    # --- snapshots -----------------------------------------------------------------------------

    PLAIN = (
        "shards",
        "merged_P",
        "refused_P",
        "overwritten_P",
        "lost_P",
        "newest",
        "processed_before",
        "reread_before",
        "ended",
    )
    OF_LIFE = ("tokens", "base_P", "mark_P", "refused_P", "merged_to", "left")

    def meta(self) -> dict[str, Any]:
        """Everything, as JSON-ready values; `restore` is the inverse."""
        return {
            **{name: deepcopy(getattr(self, name)) for name in self.PLAIN},
            "owned": list(self.owned),
            "places": [[shard, *place] for shard, place in sorted(self.places.items())],
            "lives": [
                [learner, n, {name: deepcopy(getattr(life, name)) for name in self.OF_LIFE}]
                for learner, n, life in self._all()
            ],
        }

    @classmethod
    def restore(cls, meta: dict[str, Any]) -> Self:
        """The ledger that `meta` was made of; it shares nothing with it."""
        self = cls.empty(len(meta["merged_P"]))
        for name in cls.PLAIN:
            setattr(self, name, deepcopy(meta[name]))
        self.owned = tuple(meta["owned"])
        self.places = {shard: (passes, n) for shard, passes, n in meta["places"]}
        for learner, n, saved in meta["lives"]:
            life = Life(**deepcopy(saved))
            life.refused_P = [[(a, b) for a, b in spans] for spans in life.refused_P]
            self.lives.setdefault(learner, {})[n] = life
        return self


def countable(total: int) -> int:
    """A total as a message can hold it.

    Each of its parts is bounded and the sum is not: whoever shows it must not fail over it.
    """
    return min(total, COUNT_MAX)


def of_run(tokens_P: tuple[TokenCounts, ...], sizes_P: list[int]) -> TokenCounts:
    """The mean over fragments weighted by their number of values, in whole tokens.

    Rounded by largest remainders, so that the classes still add up to what was processed.
    """
    total = sum(sizes_P)
    names = list(TokenCounts.model_fields)
    if not total:
        return TokenCounts(**dict.fromkeys(names, 0))
    sums = {
        name: sum(getattr(t, name) * size for t, size in zip(tokens_P, sizes_P, strict=True))
        for name in names
    }
    whole = {name: value // total for name, value in sums.items()}
    missing = sum(sums.values()) // total - sum(whole.values())
    for name in sorted(names, key=lambda n: (-(sums[n] % total), names.index(n)))[:missing]:
        whole[name] += 1
    return TokenCounts(**whole)


# --------------------------------------------------------------------------------------------------
# What the newest rounds of every fragment merged: should their outcome be lost, it is undone.
#
# A round that is committed is published at once, and the next one of its fragment waits for that.
# So of a syncer that is gone with its disk a version or two are unknown at most.

# Versions remembered per fragment: one that is not published, and more after a change of leaders.
KEPT = 4


@dataclass(slots=True)
class RecentMerges:
    """Of P fragments: (version, round, tokens that it merged first), oldest first."""

    merges_P: list[list[tuple[int, int, int]]] = field(default_factory=list)

    @classmethod
    def of(cls, merges_P: Sequence[Sequence[Sequence[int]]]) -> Self:
        """Inverse of `merges_P` as JSON."""
        return cls([[(m[0], m[1], m[2]) for m in merges] for merges in merges_P])

    def add(self, p: int, version: int, round_: int, tokens: int) -> None:
        """A committed round."""
        self.merges_P[p] = [*self.merges_P[p], (version, round_, tokens)][-KEPT:]

    def undo(self, p: int, version: int) -> tuple[frozenset[int], int]:
        """(rounds, tokens) of the versions above `version`, which are no more."""
        gone = [m for m in self.merges_P[p] if m[0] > version]
        self.merges_P[p] = [m for m in self.merges_P[p] if m[0] <= version]
        return frozenset(m[1] for m in gone), sum(m[2] for m in gone)


def without(rounds: frozenset[int], merged: dict[str, LastMerged]) -> dict[str, LastMerged]:
    """Who was merged last, had there not been these rounds."""
    left: dict[str, LastMerged] = {}
    for learner, (life, newest, before) in merged.items():
        known = [n for n in (newest, before) if n >= 0 and n not in rounds]
        if known:
            left[learner] = (life, known[0], known[1] if len(known) > 1 else -1)
    return left
