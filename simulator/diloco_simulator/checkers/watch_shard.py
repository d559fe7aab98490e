"""The checkers of one syncer shard: what its tape, its leaders and its lease show."""

from bisect import bisect_right
from collections.abc import Sequence

from diloco_shared.protocol.messages import (
    TapeCheckpoint,
    TapeEnd,
    TapeEpoch,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeTerm,
)
from diloco_shared.protocol.records import RunStatus
from diloco_shared.protocol.run_states import needs_in
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.budget import BudgetUsed
from diloco_simulator.checkers.claims import Claims
from diloco_simulator.checkers.cuts import Cuts, Parts
from diloco_simulator.checkers.ledger import Tokens
from diloco_simulator.checkers.limits import Alive, LeaderLimits
from diloco_simulator.checkers.merged_data import MergedData
from diloco_simulator.checkers.numbers import CheckedNumbers
from diloco_simulator.checkers.promises import KnownMembers, LeaderLeases, Mark, Merges, Report
from diloco_syncer.history.history import History, Identity
from diloco_syncer.merging.store import FragmentStore


class OfShard:
    """`numbers`: compute every merge again; keeps all that was ever uploaded."""

    def __init__(
        self,
        report: Report,
        spec: RunSpec,
        shard: int,
        *,
        learners: int,
        claims: Claims,
        parts: Parts,
        data: MergedData,
        numbers: bool,
    ) -> None:
        self.spec = spec
        self.report = report if spec.algorithm.shards == 1 else report.named(f"shard {shard}: ")
        self.ended = ""
        self.rounds = 0
        self.shard = shard
        self.seqs: list[int] = []  # of its records, on the stream
        self.tails: list[Identity] = []  # and which records these are
        self.merges = Merges(self.report, spec, shard)
        self.leases = LeaderLeases(self.report, spec.membership.leader_lease_s)
        self.alive = Alive(self.report)
        self.members = KnownMembers(self.report, spec)
        self.tokens = Tokens(self.report, spec, claims, shard)
        self.budget = BudgetUsed(self.report, spec, self.tokens, shard)
        self.data = data
        self.limits = LeaderLimits(self.report, spec, learners, shard)
        self.numbers = CheckedNumbers(self.report, spec, shard) if numbers else None
        self.cuts = Cuts(self.report, parts, spec.algorithm.owned(shard), self.merges.lost)
        self.committed_at = 0.0  # when the newest round that merges was recorded
        self.ended_at = 0.0  # when the newest end was
        self.terms = 0
        self.epochs: list[tuple[int, float]] = []  # begun because records were lost, and when
        self.restores = 0
        self.rebirths = 0
        self.wish = 0  # serial of the newest restore
        self.source = ""  # that history goes back to; empty: none
        self.skipped_before = False  # for coverage alone

    def number_of(self, seq: int, tail: Identity | None) -> int:
        """The how manieth of this shard's records is at a sequence of the stream that all share.

        0 is before the first one; -1: there is none, or another one than this, since the hub lost
        it.
        """
        n = bisect_right(self.seqs, seq)
        if not n:
            return 0 if seq == 0 else -1
        return n if seq == self.seqs[n - 1] and tail == self.tails[n - 1] else -1

    def record(self, record: TapeRecord, now: float, *, faulty: bool) -> None:
        """Every record as the tape takes it."""
        mark = self._read(record, now)
        self.budget.record(record, mark, now)
        self.alive.record(now)
        if self.numbers is not None:
            self.numbers.record(record, mark)
        match record:
            case TapeCheckpoint(outcome="begun"):
                self.cuts.marked(self._mark(record.number))
            case TapeCheckpoint(outcome="failed") if self.shard == 0:
                self.cuts.parts.failed = record.number
            case TapeRound():
                self.rounds += 1
                if record.outcome == "committed":
                    self.committed_at = now
                self.members.round(record, now, faulty=faulty)
                self.cuts.round(record, self.merges.checkpoint, self.merges.restored)
            case TapeTerm():
                self.terms += 1
                self.members.forgiven_at = now  # whoever leads gives everybody a lease
            case TapeEpoch():
                self.epochs.append((record.epoch, now))
            case TapeRebirth():
                self.rebirths += 1
                self.members.forgiven_at = now
                self.source = ""  # history begins with what is published
            case TapeRestore():
                self.restores, self.ended = self.restores + 1, ""
                self.wish, self.source = record.serial, record.source
            case TapeEnd():
                self.ended, self.ended_at = record.outcome, now

    def _read(self, record: TapeRecord, now: float = 0.0) -> Mark | None:
        """The mark that a restore goes back to."""
        mark = self.cuts.restored(record) if isinstance(record, TapeRestore) else None
        self.merges.record(record, mark)
        self.tokens.record(record, mark)
        self.data.record(record, mark, now)
        return mark

    def shown(self, status: RunStatus) -> None:
        """A leader shows which checkpoints nobody may remove; one of before shows others."""
        if not self.source or status.forced or status.epoch != self.merges.epoch:
            return
        self.report.looked("I6")
        needed = needs_in(status) or ()
        if self.source not in needed:
            text = f"history goes back to {self.source}, and {needed} are said to be needed"
            self.report("I6", text)

    def gives(self, number: int) -> None:
        """It is over, and gives a part of a mark that its tape does not take."""
        self.cuts.marked(self._mark(number))

    def _mark(self, number: int) -> Mark:
        merges = self.merges
        return Mark(
            number,
            merges.epoch,
            tuple(merges.versions),
            tuple(merges.digests),
            merges.next_round,
            self.tokens.fates[-1],
            self.numbers.state if self.numbers is not None else [],
            self.data.state(),
            self.budget.now,
        )

    def lost(self, kept: Sequence[TapeRecord], gone: Sequence[TapeRecord]) -> None:
        """The tape lost its last records: they never were. What is left was checked before."""
        del self.seqs[len(kept) :], self.tails[len(kept) :]
        end = self.seqs[-1] if self.seqs else 0
        for record in gone:
            self.merges.lost.record(record, self.merges.epoch, end)
        self.merges.report = self.report.silent()
        self.merges.begin(self.spec.algorithm.quorum)
        self.tokens.lost(len(kept))
        self.budget.lost(len(kept))
        self.data.lost()
        self.cuts.executed.clear()
        if self.numbers is not None:
            self.numbers.lost(len(kept))
        for record in kept:
            self._read(record)
        self.data.read_again()
        self.merges.report = self.report
        self.ended = self.merges.ended
        back = next((r for r in reversed(kept) if isinstance(r, TapeRestore | TapeRebirth)), None)
        self.source = back.source if isinstance(back, TapeRestore) else ""
        self.wish = next((r.serial for r in reversed(kept) if isinstance(r, TapeRestore)), 0)

    def executed(
        self, who: str, record: TapeRecord, history: History, store: FragmentStore | None
    ) -> None:
        """Somebody has executed a record of the tape."""
        if not isinstance(record, TapeCheckpoint) or store is None:
            return
        if record.outcome == "begun":
            state = store.meta(), store.state_arrays()
            self.cuts.stands(who, record.number, history.meta(), *state)
