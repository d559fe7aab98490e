"""Which sequences of the training data are merged, by what was seen to be read and by the tape.

A contribution has in it all that its learner had read when it was made. What it says of that is the
product's; here it is counted from the steps of that learner.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from diloco_shared.protocol.messages import TapeEpoch, TapeRecord, TapeRestore, TapeRound
from diloco_simulator.checkers.promises import Mark

if TYPE_CHECKING:
    from diloco_simulator.checkers.data import DataRead

Read = tuple[int, int, int]  # data shard, pass, sequence of that pass
Where = tuple[int, int]  # (passes, sequences): ordered as a shard is read
# Of each shard, when a sequence was merged first, and whether its learner said so: of a shard that
# it had lost by then, and of what it read for want of something else, it says nothing.
Merged = dict[int, dict[Where, tuple[float, bool]]]


class KnownPlace:
    """All that was ever merged, and what need not be: who had read it gave it up, or the hub lost
    the record that had merged it."""

    def __init__(self, size: Callable[[int], int]) -> None:
        self.size = size
        self.merged: set[Read] = set()
        self.excused: set[Read] = set()

    def before(self, where: Read) -> Read:
        """The sequence before this place in its shard."""
        shard, passes, n = where
        return (shard, passes, n - 1) if n else (shard, passes - 1, self.size(shard) - 1)

    def follows(self, where: Read) -> bool:
        """Whether all before this place is known."""
        before = self.before(where)
        return where[1:] == (0, 0) or before in self.merged or before in self.excused


class MergedData:
    """By the tape of one shard of the syncer."""

    def __init__(self, data: "DataRead", shard: int) -> None:
        self.data = data
        self.shard = shard
        self.merged: Merged = {}
        self.upto: dict[str, int] = {}  # sequences of each life
        self.kept: Merged = {}  # of before the tape is read again

    def state(self) -> Merged:
        """For a mark."""
        return {shard: dict(of) for shard, of in self.merged.items()}

    def lost(self) -> None:
        """The tape is about to be read again, as far as it is still there."""
        self.kept, self.merged, self.upto = self.merged, {}, {}

    def read_again(self) -> None:
        """As far as the tape is still there: what only the lost records had merged is excused."""
        self.data.known.excused |= {
            (shard, *where)
            for shard, of in self.kept.items()
            for where in of.keys() - self.merged.get(shard, {}).keys()
        }

    def record(self, record: TapeRecord, mark: Mark | None, now: float) -> None:
        """As the tape takes it, or at 0 where it is read again; `mark`: what a restore goes back
        to."""
        if isinstance(record, TapeRestore) and mark is not None:
            self.merged = {shard: dict(of) for shard, of in mark.data.items()}
            self.upto = {}
            if now:  # else it is read again
                self.data.went_back()
        elif isinstance(record, TapeEpoch):
            # Records were lost: newest rounds whose outcome is lost with them are undone.
            for of in self.merged.values():
                of.update({where: (at, False) for where, (at, _) in of.items()})
        elif isinstance(record, TapeRound):
            for v in record.verdicts:
                if v.outcome == "merged":
                    place = record.fragment, record.round
                    self._merged(f"{v.learner}/{v.incarnation}", v.tokens_to, place, now)

    def _merged(self, life: str, tokens: int, place: tuple[int, int], now: float) -> None:
        data = self.data
        if (reader := data.readers.get(life)) is None:
            return
        first, last = self.upto.get(life, 0), tokens // data.context
        tells = reader.tells.get(place, {})
        before = reader.log[first - 1] if first else None
        for read, own in zip(reader.log[first:last], reader.own[first:last], strict=True):
            if before is None or read != (*before[:2], before[2] + 1):
                self._follows(life, read)
            before, (shard, *rest) = read, read
            where = (rest[0], rest[1])
            # Of a record that is read again it counts when it came first. Of one that was lost,
            # and of what another merges in its place, nobody knew until it came.
            kept_at, _ = self.kept.get(shard, {}).get(where, (now, False))
            said = own and where < tells.get(shard, (0, 0))
            self.merged.setdefault(shard, {}).setdefault(where, (now or kept_at, said))
            data.known.merged.add(read)
        self.upto[life] = max(first, last)

    def _follows(self, life: str, read: Read) -> None:
        """Where somebody begins whose work is merged, all before it is in what the run has."""
        data = self.data
        data.report.looked("data")
        shard, *place = previous = data.known.before(read)
        there = any(tuple(place) in of.merged.get(shard, {}) for of in data.merged)
        if read[1:] != (0, 0) and not there and previous not in data.known.excused:
            data.broken(f"{life} is merged from {read} on, and what comes before it is not")

    def newest(self, shard: int) -> Where:
        """The newest sequence of a data shard that is merged, whoever read it for what."""
        return max(self.merged.get(shard, {}), default=(0, -1))

    def told(self, shard: int, until: float) -> Where:
        """How far a data shard was merged by then, as its readers said."""
        of = self.merged.get(shard, {})
        found = [(passes, n + 1) for (passes, n), (at, said) in of.items() if said and at <= until]
        return max(found, default=(0, 0))
