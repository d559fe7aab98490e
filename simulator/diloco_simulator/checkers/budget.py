"""How much of its budget a run has used, counted apart from the product (*budget*).

With a budget of steps all is known exactly: every closed round is H * S / P steps of the run, the
first round by which these reach the budget is the last one of the budget, and one more round of
each fragment ends the run. With one of tokens or of seconds bounds are known: no more is used than
learners did, or than time has passed, and no less than the tape tells by itself.
"""

import math
from dataclasses import dataclass, replace

from diloco_shared.protocol.messages import (
    Stamp,
    TapeEnd,
    TapeEpoch,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeSetting,
    TapeTerm,
)
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.ledger import Tokens
from diloco_simulator.checkers.promises import Mark, Report

BUDGET = "budget"
# Shares of a budget are quotients of numbers below a million.
ROUNDING = 1e-9
# So many records beside rounds may be on their way to the tape at once, as I12 has it.
OTHERS = 4


@dataclass(frozen=True, slots=True)
class Used:
    """As of one record of a tape."""

    next_round: int = 0
    # Shares of the budget that were used when a round which is open now may have closed: after each
    # of the newest rounds. None: after a restore it is counted anew, and no round tells it yet.
    shares: tuple[float | None, ...] = (0.0,)
    finishing: int = -1  # the first round behind the budget; -1: not yet
    perhaps: int = -1  # the same, where a restore may have found the budget used
    stopping: bool = False
    cut: bool = False  # by the user, before the budget was used
    term: int = 0
    at: float = 0.0  # of this record, by the clock of whoever led
    since: float = 0.0  # when the first round was made, or earlier, in virtual seconds
    # From the clock of whoever led before the first round to virtual seconds, or more: a record
    # waits before the hub takes it, and where the tape is full it waits for long.
    offset: float = math.inf
    seconds: float = 0.0  # between the records of each term since the first round, together


class BudgetUsed:
    """Of one syncer shard."""

    def __init__(self, report: Report, spec: RunSpec, tokens: Tokens, shard: int = 0) -> None:
        a = spec.algorithm
        self.report = report
        self.budget = spec.budget
        self.tokens = tokens
        self.owned = len(a.owned(shard))
        self.each = a.sync_every_steps * a.shards // a.fragments  # steps of a round
        self.in_flight = a.rounds_in_flight_max
        steps = self.budget.steps
        self.rounds = 0 if steps is None else math.ceil(steps / self.each)
        self.states = [Used()]  # after each record

    @property
    def now(self) -> Used:
        """After the newest record."""
        return self.states[-1]

    def lost(self, kept: int) -> None:
        """The tape lost all but its first records."""
        del self.states[kept + 1 :]

    def record(self, record: TapeRecord, mark: Mark | None, now: float) -> None:
        """A record as the hub takes it; `mark`: what a restore goes back to."""
        used = self._passed(record, now)
        match record:
            case TapeRound():
                used = self._round(record, used, now)
            case TapeRestore() if mark is not None:
                used = self._back(record, mark, used)
            case TapeSetting(name="stopping"):
                cut = used.finishing < 0
                finishing = used.next_round if cut else used.finishing
                used = replace(used, stopping=True, cut=used.cut or cut, finishing=finishing)
            case TapeEnd():
                self._end(record, used)
        self.states.append(used)

    def _passed(self, record: TapeRecord, now: float) -> Used:
        """How long a run went on, by its records: those of two clocks are not compared."""
        used = self.now
        term = getattr(record, "term", 0)
        begins = isinstance(record, TapeTerm | TapeRebirth)
        begins = begins or (isinstance(record, TapeEpoch) and term > used.term)
        if used.next_round == 0:
            offset = min(math.inf if begins else used.offset, now - record.at)
            first = isinstance(record, TapeRound)
            since = min(used.since, record.at + offset) if first else now
            used = replace(used, since=since, offset=offset)
        more = 0.0 if begins or used.next_round == 0 else record.at - used.at
        term = max(term, used.term) if begins else used.term
        return replace(used, at=record.at, seconds=used.seconds + more, term=term)

    def _back(self, record: TapeRestore, mark: Mark, used: Used) -> Used:
        then: Used = mark.budget
        n = then.next_round
        share: float | None = min(n / self.rounds, 1.0) if self.rounds else None
        over = used.stopping or then.finishing >= 0 or share == 1.0
        return replace(
            then,
            shares=(share if n else 0.0,),
            finishing=n if over else -1,
            perhaps=-1 if self.rounds else n,
            stopping=used.stopping,
            cut=used.stopping and then.finishing < 0 and share != 1.0,
            term=used.term,
            at=record.at,
        )

    # --- a round -------------------------------------------------------------------------------

    def _round(self, r: TapeRound, used: Used, now: float) -> Used:
        self.report.looked(BUDGET)
        self._stamped(r.round, r.stamp)
        if self.rounds:
            self._of_steps(r.round, r.stamp)
        else:
            least, most = self._bounds(used, now)
            if not least - ROUNDING <= r.stamp.fraction <= most + ROUNDING:
                self._broken(r, f"{r.stamp.fraction:.6f} is used, it is {least:.6f} to {most:.6f}")
        known = [share for share in used.shares if share is not None]
        near = any(abs(share - r.outer_fraction) <= ROUNDING for share in known)
        # A skipped round steps nowhere.
        if r.outcome == "committed" and not near and len(known) == len(used.shares):
            before = ", ".join(f"{share:.6f}" for share in known)
            self._broken(r, f"its outer step is at {r.outer_fraction:.6f}, before it were {before}")
        if 0 <= used.finishing <= r.round - self.owned:
            self._broken(r, f"the last one is {used.finishing + self.owned - 1}")
        reached = used.finishing < 0 and r.stamp.fraction >= 1.0
        return replace(
            used,
            next_round=r.round + 1,
            shares=(*used.shares, r.stamp.fraction)[-self.in_flight :],
            finishing=r.round + 1 if reached else used.finishing,
        )

    def _broken(self, r: TapeRound, why: str) -> None:
        self.report(BUDGET, f"round {r.round}: {why}")

    def _stamped(self, n: int, stamp: Stamp) -> None:
        if (stamp.round, stamp.steps) != (n, (n + 1) * self.each):
            said = f"round {stamp.round} at {stamp.steps} steps"
            self.report(BUDGET, f"round {n} of {self.each} steps each is stamped as {said}")

    def _of_steps(self, n: int, stamp: Stamp) -> None:
        share, each = min((n + 1) / self.rounds, 1.0), 1 / (self.rounds * self.each)
        said = stamp.fraction, stamp.fraction_per_step
        if max(abs(said[0] - share), abs(said[1] - each)) > ROUNDING:
            self.report(BUDGET, f"round {n} of {self.rounds} says {said}, not {(share, each)}")

    def _bounds(self, used: Used, now: float) -> tuple[float, float]:
        """Of the share that is used: (least, most). A record may have been made when those of the
        rounds before it, which were in flight as well, were on their way to the tape."""
        if (tokens := self.budget.tokens) is not None:
            taped = self.tokens.fates[-2 - self.in_flight - OTHERS : -1]
            least: float = min(
                of.before + sum(known.tokens for known in of.lives.values()) for of in taped
            )
            most: float = sum(work.tokens for work in self.tokens.claims.work.values())
            return min(least / tokens, 1.0), min(most / tokens, 1.0)
        seconds = self.budget.seconds
        assert seconds is not None
        # Time counts from the first round on, once that is recorded.
        passed_s = used.seconds if used.next_round >= self.in_flight else 0.0
        return min(passed_s / seconds, 1.0), min((now - used.since) / seconds, 1.0)

    # --- the end -------------------------------------------------------------------------------

    def _end(self, record: TapeEnd, used: Used) -> None:
        self.report.looked(BUDGET)
        if record.outcome != "finished":
            if not used.stopping:
                self.report(BUDGET, f"the run is {record.outcome}, and nobody stopped it")
            return
        ends = [first + self.owned for first in (used.finishing, used.perhaps) if first >= 0]
        # A stop may be on its way to the tape while the end is decided.
        if used.next_round not in ends or used.cut:
            due = f"round {ends[0]}" if ends else "its budget is used"
            self.report(BUDGET, f"the run ends before round {used.next_round}, not before {due}")
