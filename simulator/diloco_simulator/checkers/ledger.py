"""I5 in every world: all tokens are accounted for, in the same way by every leader.

Counts every class by itself, from the tape and from the reports that have reached a leader
(`fates.py`, `heard.py`), and compares it with what that leader would show: class by class, towards
each fragment of its shard, at every heartbeat. That reports are true is checked apart, against what
learners were seen to do (`claims.py`).

Merged, refused and overwritten are known exactly. Of two kinds of lives only bounds are known from
outside, and classes need only lie between them:

- whether a life is lost or in flight for as long as a lease lasts after a leader's link was cut:
  who had spoken lately has a lease anew, and when the link was cut is not known to the leader;
- how far a life is that was silent for minutes and speaks again, as its leader may have taken it
  for gone by then, and believes it no more.

What a process did after its last report is not known to the leader, and nobody asks it for that:
reports are always under way. All that is compared with what was done is that it is not more.
"""

from collections.abc import Iterator
from typing import Any

from diloco_shared.protocol.messages import TapeEnd, TapeRecord, TapeRestore, TapeRound
from diloco_shared.protocol.records import RunStatus, TokenCounts
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.claims import Claims
from diloco_simulator.checkers.fates import CLASSES, Fates, Known, Life, words_of
from diloco_simulator.checkers.heard import Heard
from diloco_simulator.checkers.promises import Mark, Report


class Tokens:
    """Of one syncer shard, as far as its own fragments go."""

    def __init__(self, report: Report, spec: RunSpec, claims: Claims, shard: int = 0) -> None:
        self.report = report
        self.fragments = spec.algorithm.fragments
        self.owned = spec.algorithm.owned(shard)
        self.claims = claims
        self.nothing = Known(0, (0,) * self.fragments)
        self.ledgers: dict[int, dict[str, Any]] = {}  # record -> the ledger after it
        self.begin()

    def begin(self) -> None:
        """From an empty tape."""
        self.fates = [Fates.none(self.fragments, self.owned)]  # after each record

    def record(self, record: TapeRecord, mark: Mark | None = None) -> None:
        """`mark`: what a restore goes back to; all lives of before are over then."""
        back = mark.tokens if isinstance(record, TapeRestore) and mark is not None else None
        self.fates.append(self.fates[-1].after(record, back))

    def lost(self, kept: int) -> None:
        """The tape is about to be read again, up to its record `kept`: later ones never were."""
        self.ledgers = {seq: ledger for seq, ledger in self.ledgers.items() if seq <= kept}
        self.begin()

    def ledger(self, leader: str, seq: int, meta: dict[str, Any]) -> None:
        """The ledger of the tape alone: the same for everybody, however they came to it."""
        known = self.ledgers.setdefault(seq, meta)
        if known != meta:
            differing = sorted(k for k in known if known[k] != meta.get(k))
            self.report("I5", f"{leader} has another ledger at record {seq}: {differing}")

    def shown(self, leader: str, seq: int, status: RunStatus, heard: Heard, now: float) -> None:
        """What a leader that has executed the tape up to record `seq` shows of every token, at
        `now` by its clock."""
        self.report.looked("I5")
        processed = status.tokens_processed
        done = sum(work.tokens for work in self.claims.work.values())
        if processed > done:
            self.report("I5", f"{leader} counts {processed} tokens, learners did {done}")
        counts = Counts(self.fates[seq], heard, now)
        least, most = counts.processed()
        if not least <= processed <= most:
            told = f"{leader} counts {processed} tokens at record {seq}"
            self.report("I5", f"{told}, the tape and its learners told of {_between(least, most)}")
        least, most = counts.reread()
        if not least <= status.tokens_reread <= most:
            told = f"{leader} counts {status.tokens_reread} tokens as read again"
            self.report("I5", f"{told} at record {seq}, there are {_between(least, most)}")
        # Over all fragments there is a mean once their sizes are known.
        mean = [("on average", status.tokens)] if status.parameters else []
        of_p = [(f"of fragment {p}", tokens) for p, tokens in enumerate(status.tokens_by_fragment)]
        for which, tokens in mean + of_p:
            if sum(tokens.model_dump().values()) != processed:
                self.report("I5", f"{leader}: {tokens} {which} are not {processed}")
        for p in self.owned:
            self._compare(f"{leader} at record {seq}", p, status.tokens_by_fragment[p], counts)

    def records(
        self,
        leader: str,
        seq: int,
        record: TapeRound | TapeEnd,
        heard: Heard,
        now: float,
        at: float,
    ) -> None:
        """A leader sends a record that is to follow `seq`, `now`; it was made `at`, by its clock.

        It repeats what lives have told, so that the next leader knows as much. One that has waited
        for the record before it may lack what was told meanwhile.
        """
        self.report.looked("I5")
        taped = self.fates[seq]
        said, most = taped.hears(words_of(record)), taped.hears(heard.words())
        least = taped.hears(heard.earlier(now)) if at == now else taped
        for life, of in said.lives.items():
            known = most.lives.get(life, self.nothing)
            gone = heard.gone(life, now) or heard.replaced(life)
            left = known.left or not of.left or gone
            if not (of.within(known) and left):
                self.report("I5", f"{leader} records {of} of {life}, which has told {known}")
        for life, known in least.lives.items():
            got = said.lives.get(life, self.nothing)
            if not known.within(got) or (known.left and not got.left):
                self.report("I5", f"{leader} records {got} of {life}, which has told {known}")

    def _compare(self, leader: str, p: int, tokens: TokenCounts, counts: "Counts") -> None:
        """Class by class."""
        for fate, (least, most) in counts.classes(p).items():
            said = getattr(tokens, fate)
            if not least <= said <= most:
                self.report(
                    "I5",
                    f"{leader} counts {said} tokens of fragment {p} as {fate}, "
                    f"there are {_between(least, most)}",
                )


def _between(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} to {most}"


class Counts:
    """Where every token is, as far as a leader can know: between (least, most) of each class."""

    def __init__(self, taped: Fates, heard: Heard, now: float) -> None:
        words = heard.words()
        self.all = taped.hears(words)
        # As if nobody had believed those who may have been taken for gone.
        self.least = taped.hears(w for w in words if w[0] not in heard.doubted)
        self.heard = heard
        self.now = now

    def processed(self) -> tuple[int, int]:
        """Tokens that learners have trained on."""
        of = (fates.before + sum(k.tokens for k in fates.lives.values()) for fates in self._both)
        least, *most = of
        return least, max(most, default=least)

    @property
    def _both(self) -> tuple[Fates, ...]:
        return (self.least, self.all) if self.heard.doubted else (self.all,)

    def classes(self, p: int) -> dict[str, tuple[int, int]]:
        """Towards a fragment."""
        found = {fate: (n, n) for fate, n in self.all.settled[p].items()}
        for life in self.all.lives:
            known = self._of(life, p)
            for fate in CLASSES:
                least, most = found[fate]
                of_life = [counts[fate] for counts in known]
                found[fate] = least + min(of_life), most + max(of_life)
        return found

    def reread(self) -> tuple[int, int]:
        """Tokens of samples that are read again, as their reader is gone."""
        least = most = self.all.reread
        for life in self.all.lives:
            of_life = [fates.behind(life) if over else 0 for fates, over in self._ways(life)]
            least, most = least + min(of_life), most + max(of_life)
        return least, most

    def _of(self, life: Life, p: int) -> list[dict[str, int]]:
        """All that may be true of a life, towards a fragment."""
        nothing = dict.fromkeys(CLASSES, 0)
        return [
            fates.classes(life, p, over=over) if life in fates.lives else nothing
            for fates, over in self._ways(life)
        ]

    def _ways(self, life: Life) -> Iterator[tuple[Fates, bool]]:
        """What may be known of a life, and whether it is over then."""
        silent = self.heard.silent(life, self.now)
        for fates in self._both:
            # Who was taken for gone is over, whatever it says.
            certain = (life in fates.lives and fates.over(life)) or silent
            gone = life in self.heard.doubted or self.heard.gone(life, self.now)
            if gone and not certain:
                certain = None
            for over in (False, True) if certain is None else (certain,):
                yield fates, over
