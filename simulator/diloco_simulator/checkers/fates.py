"""What became of every token, counted apart from the product: token by token, class by class (I5).

A life (learner, incarnation) numbers its tokens 1, 2, … as it trains on them. Its tokens are a line
for each fragment, and what the tape decides paints a part of that line:

- merged: a committed round names the span; that paints over what was refused.
- refused: a verdict refuses a contribution, unless it only gives back what a skipped round had. A
  claim counts as far as the life is known to be.
- overwritten: below the newest adoption that is known, and not painted. With each round of the
  fragment that becomes final.
- lost: above that, where the life is over. That becomes final with the next round, too.
- in flight: above that, where the life goes on.

How far a life is and where it adopted is known by its word alone: from the counts on the tape, and
from the reports that have reached whoever counts. What a merge names is known as well.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from diloco_shared.protocol.messages import (
    TapeEnd,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
)

Life = tuple[str, int]  # learner, incarnation
# What a life says of itself: tokens in all, those at its newest adoption by fragment, and whether
# it has left.
Word = tuple[Life, int, Mapping[int, int], bool]
# (start, stop, class) of the tokens in (start, stop]: ascending, and disjoint.
Line = tuple[tuple[int, int, str], ...]
CLASSES = ("merged", "refused", "overwritten", "lost", "in_flight")


def painted(line: Line, start: int, stop: int, fate: str, over: tuple[str, ...] = ()) -> Line:
    """The tokens in (start, stop] are in that class now, unless they are in one not named in
    `over`."""
    found: list[tuple[int, int, str]] = []

    def put(a: int, b: int, of: str) -> None:
        if a < b and found and found[-1][1:] == (a, of):
            found[-1] = (found[-1][0], b, of)
        elif a < b:
            found.append((a, b, of))

    bare = start  # below it nothing is left to paint
    for a, b, had in line:
        put(bare, min(a, stop), fate)
        if had in over:
            put(a, min(b, start), had)
            put(max(a, start), min(b, stop), fate)
            put(max(a, stop), b, had)
        else:
            put(a, b, had)
        bare = max(bare, b)
    put(bare, stop, fate)
    return tuple(found)


def within(line: Line, stop: int, fate: str = "") -> int:
    """Painted tokens up to `stop`; of one class, if it is named."""
    spans = ((a, min(b, stop)) for a, b, of in line if fate in ("", of) and a < stop)
    return sum(b - a for a, b in spans)


@dataclass(frozen=True, slots=True)
class Known:
    """How far a life is, as far as somebody knows: all numbers are tokens of that life."""

    tokens: int
    adopted: tuple[int, ...]  # at the newest adoption, per fragment
    left: bool = False

    def hears(self, tokens: int, adopted: Mapping[int, int], left: bool) -> "Known":
        """One more word of it, whatever came first."""
        tokens = max(self.tokens, tokens)
        bases = (max(a, min(adopted.get(p, 0), tokens)) for p, a in enumerate(self.adopted))
        return Known(tokens, tuple(bases), self.left or left)

    def within(self, other: "Known") -> bool:
        """Whether it says no more than the other; that it has left is another matter."""
        pairs = zip((self.tokens, *self.adopted), (other.tokens, *other.adopted), strict=True)
        return all(mine <= theirs for mine, theirs in pairs)


@dataclass(frozen=True)
class Fates:
    """As of one record of a tape. It is never changed: `after` gives that of the next record."""

    fragments: int
    owned: tuple[int, ...]
    lives: Mapping[Life, Known] = field(default_factory=dict)  # of which not all is final
    lines: Mapping[tuple[Life, int], Line] = field(default_factory=dict)  # by life and fragment
    final: Mapping[tuple[Life, int], int] = field(default_factory=dict)  # all is up to this token
    newest: Mapping[str, int] = field(default_factory=dict)  # learner -> incarnation
    ended: bool = False
    # Of lives of which all is final: tokens, and those of each class, per fragment.
    before: int = 0
    settled: tuple[Mapping[str, int], ...] = ()
    # The newest token of a life that a round of any fragment merged; and of lives of which all is
    # final, the tokens behind theirs: whoever has their data next reads those samples again.
    merged_to: Mapping[Life, int] = field(default_factory=dict)
    reread: int = 0
    # (fragment, version) -> tokens that its round merged first.
    made_of: Mapping[tuple[int, int], int] = field(default_factory=dict)
    versions: tuple[int, ...] = ()

    @classmethod
    def none(cls, fragments: int, owned: tuple[int, ...]) -> Self:
        """Of an empty tape."""
        nothing = tuple(dict.fromkeys(CLASSES, 0) for _ in range(fragments))
        return cls(fragments, owned, settled=nothing, versions=(-1,) * fragments)

    # --- what the tape says --------------------------------------------------------------------

    def after(self, record: TapeRecord, mark: "Fates | None" = None) -> "Fates":
        """As of the next record; `mark`: what a restore goes back to."""
        match record:
            case TapeRound():
                return self.hears(words_of(record))._round(record)
            case TapeEnd():
                return replace(self.hears(words_of(record)), ended=True)
            case TapeRebirth():
                return self._reborn(record)
            case TapeRestore() if mark is not None:
                return mark._resumed(self)
            case _:
                return self

    def hears(self, words: Iterable[Word]) -> "Fates":
        """And what lives say of themselves. Of one that is final nothing more is believed, nor of
        one that a newer one of that learner had replaced before it was heard of."""
        lives, newest = dict(self.lives), dict(self.newest)
        for word in sorted(words, key=lambda word: word[0]):
            self._hears(lives, newest, *word)
        return replace(self, lives=lives, newest=newest)

    def _hears(
        self,
        lives: dict[Life, Known],
        newest: dict[str, int],
        life: Life,
        tokens: int,
        adopted: Mapping[int, int],
        left: bool = False,
    ) -> None:
        known = lives.get(life)
        if known is None:
            if life[1] <= newest.get(life[0], -1):
                return
            known, newest[life[0]] = Known(0, (0,) * self.fragments), life[1]
        lives[life] = known.hears(tokens, adopted, left)

    def over(self, life: Life) -> bool:
        """Whether it is known that a life is."""
        return self.ended or self.lives[life].left or life[1] < self.newest.get(life[0], -1)

    def _round(self, r: TapeRound) -> "Fates":
        p, had = r.fragment, self.merged(r.fragment)
        lives, newest = dict(self.lives), dict(self.newest)
        lines, final, merged_to = dict(self.lines), dict(self.final), dict(self.merged_to)
        for v in r.verdicts:
            life = v.learner, v.incarnation
            if v.outcome == "merged":
                self._hears(lives, newest, life, v.tokens_to, {p: v.tokens_from})
                line = lines.get((life, p), ())
                lines[life, p] = painted(line, v.tokens_from, v.tokens_to, "merged", ("refused",))
                final[life, p] = max(final.get((life, p), 0), v.tokens_to)
                merged_to[life] = max(merged_to.get(life, 0), v.tokens_to)
            elif v.outcome == "refused" and not v.reason.startswith("skipped") and life in lives:
                until = min(v.tokens_to, lives[life].tokens)
                line = lines.get((life, p), ())
                lines[life, p] = painted(line, v.tokens_from, until, "refused")
        decided = replace(
            self, lives=lives, newest=newest, lines=lines, final=final, merged_to=merged_to
        )
        for life, known in lives.items():
            over, line = decided.over(life), lines.get((life, p), ())
            line = painted(line, 0, known.adopted[p], "overwritten")
            lines[life, p] = painted(line, 0, known.tokens, "lost") if over else line
            until = known.tokens if over else known.adopted[p]
            final[life, p] = max(final.get((life, p), 0), until)
        if r.outcome == "committed":  # a skipped round stands at the version before it
            made_of = {**self.made_of, (p, r.version): decided.merged(p) - had}
            decided = replace(decided, made_of=made_of, versions=self._at({p: r.version}))
        return decided._closed(
            life
            for life, known in lives.items()
            if decided.over(life)
            and all(final.get((life, q), 0) == known.tokens for q in self.owned)
        )

    def _closed(self, over: Iterable[Life]) -> "Fates":
        """Of these lives all is final."""
        gone = set(over)
        if not gone:
            return self
        settled = tuple(Counter(of_p) for of_p in self.settled)
        for p, of_p in enumerate(settled):
            for life in gone:
                of_p.update(self.classes(life, p, over=True))
        return replace(
            self,
            lives={life: known for life, known in self.lives.items() if life not in gone},
            lines={key: line for key, line in self.lines.items() if key[0] not in gone},
            final={key: until for key, until in self.final.items() if key[0] not in gone},
            before=self.before + sum(self.lives[life].tokens for life in gone),
            settled=settled,
            merged_to={life: n for life, n in self.merged_to.items() if life not in gone},
            reread=self.reread + sum(self.behind(life) for life in gone),
        )

    def _at(self, versions: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(versions.get(p, version) for p, version in enumerate(self.versions))

    def _reborn(self, record: TapeRebirth) -> "Fates":
        """What was committed and never published is no more: its tokens are lost."""
        settled = tuple(Counter(of_p) for of_p in self.settled)
        for p in self.owned:
            gone = range(record.versions[p] + 1, self.versions[p] + 1)
            tokens = sum(self.made_of.get((p, version), 0) for version in gone)
            settled[p].update({"merged": -tokens, "lost": tokens})
        at = {p: record.versions[p] for p in self.owned}
        return replace(self, settled=settled, versions=self._at(at))

    def _resumed(self, present: "Fates") -> "Fates":
        """A restore goes back to here: every life of here is over, and so is one of the present
        that has trained. Here may be a history that was lost, of which the present knows nothing:
        its lives are counted here, and have no more to say."""
        newest = present.trained()
        for learner, n in self.trained().items():
            newest[learner] = max(newest.get(learner, -1), n)
        return replace(self._closed(self.lives), newest=newest, ended=False)

    def trained(self) -> dict[str, int]:
        """The newest life of each learner, or the one before if that has done nothing."""
        newest = dict(self.newest)
        for (learner, n), known in self.lives.items():
            if newest[learner] == n and not known.tokens:
                newest[learner] = n - 1
        return newest

    # --- where tokens are ----------------------------------------------------------------------

    def merged(self, p: int) -> int:
        """Tokens that rounds of a fragment have merged."""
        lines = (line for (_, q), line in self.lines.items() if q == p)
        open_ = sum(b - a for line in lines for a, b, fate in line if fate == "merged")
        return self.settled[p]["merged"] + open_

    def behind(self, life: Life) -> int:
        """Tokens of one life behind the newest that a round merged; none of one not heard of."""
        known = self.lives.get(life)
        return 0 if known is None else max(known.tokens - self.merged_to.get(life, 0), 0)

    def classes(self, life: Life, p: int, *, over: bool) -> dict[str, int]:
        """Tokens of one life that are in each class, towards a fragment."""
        known, line = self.lives[life], self.lines.get((life, p), ())
        counted = {fate: within(line, known.tokens, fate) for fate in CLASSES}
        base = known.adopted[p]
        below = base - within(line, base)
        counted["overwritten"] += below
        rest = known.tokens - below - within(line, known.tokens)
        counted["lost" if over else "in_flight"] += rest
        return counted


def words_of(record: TapeRound | TapeEnd) -> list[Word]:
    """What lives had said when the record was made."""
    return [((c.learner, c.incarnation), c.tokens, dict(c.adopted), c.left) for c in record.counts]
