"""What a user has ordered of a run, and whether its tapes have it.

What is shown of a run may be so without anybody's doing: a run that was never paused is not paused
once it is told to go on. So an order is judged by the records that the tapes took since it was
asked for, and by what is shown beside these.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from diloco_shared.protocol.checkpoints import parse_reference
from diloco_shared.protocol.messages import (
    TapeCheckpoint,
    TapeRecord,
    TapeRestore,
    TapeSetting,
)
from diloco_shared.spec.run import RunSpec

if TYPE_CHECKING:
    from diloco_simulator.inside.observer import Observer

View = dict[str, Any]


class Order(Protocol):
    """Of one kind."""

    @property
    def text(self) -> str: ...

    def so(self, records: Sequence[TapeRecord]) -> bool:
        """Whether a shard's tape has it in force."""

    def done(self, since: Sequence[TapeRecord]) -> bool:
        """Whether one of the records since it was asked for brought it about."""

    def shown(self, view: View) -> bool:
        """Whether a user sees that it is so."""


@dataclass(frozen=True, slots=True)
class RunSetting:
    """A pause, its end, a stop, or another quorum."""

    text: str
    name: str  # of the record
    value: int
    at_first: int  # what the run begins with
    shown: Callable[[View], bool]

    def so(self, records: Sequence[TapeRecord]) -> bool:
        return next(_newest(records, self.name), self.at_first) == self.value

    def done(self, since: Sequence[TapeRecord]) -> bool:
        return self.value in _newest(since, self.name)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Of that number, or of a later one: it has come to its end. The first shard's tape says it."""

    number: int

    @property
    def text(self) -> str:
        return f"checkpoint {self.number}"

    def so(self, records: Sequence[TapeRecord]) -> bool:
        return any(self._over(r) for r in records)

    def done(self, since: Sequence[TapeRecord]) -> bool:
        return any(isinstance(r, TapeCheckpoint) and r.number >= self.number for r in since)

    def shown(self, view: View) -> bool:
        return bool(view["status"]["checkpoint"] >= self.number)

    def _over(self, record: TapeRecord) -> bool:
        """Where a mark was lost, no number of before a checkpoint that is gone back to begins."""
        match record:
            case TapeCheckpoint():
                return record.number >= self.number and record.outcome != "begun"
            case TapeRestore():
                return parse_reference(record.source)[2] >= self.number
            case _:
                return False


@dataclass(frozen=True, slots=True)
class Restore:
    """The wish of that serial number is fulfilled, or given up, which its leader shows alike.

    A tape has a record of those alone that were fulfilled.
    """

    text: str
    serial: int

    def so(self, records: Sequence[TapeRecord]) -> bool:
        return True

    def done(self, since: Sequence[TapeRecord]) -> bool:
        return any(isinstance(r, TapeRestore) and r.serial == self.serial for r in since)

    def shown(self, view: View) -> bool:
        return bool(view["status"]["restores"] >= self.serial)


def _newest(records: Sequence[TapeRecord], name: str) -> Iterator[int]:
    """What was set under a name, the newest first."""
    for record in reversed(records):
        if isinstance(record, TapeSetting) and record.name == name:
            yield record.value


@dataclass(slots=True)
class Asked:
    """An order that was accepted."""

    order: Order
    at: float  # when, by the clock of processes
    since: tuple[int, ...]  # how many records each shard's tape had before
    sent_at: float = 0.0  # when it was asked for, in virtual seconds


class Tapes:
    """Of one run, all shards."""

    def __init__(self, observer: "Observer") -> None:
        self.observer = observer

    def counts(self) -> tuple[int, ...]:
        """Records of each."""
        return tuple(len(records) for records in self.observer.records)

    def _of(self, order: Order) -> list[int]:
        """Shards that have to take it: one that is over takes no order any more."""
        shards = range(1 if isinstance(order, Checkpoint) else len(self.observer.records))
        return [n for n in shards if not self.observer.watch.of[n].ended]

    def _records(self, shard: int, since: int = 0) -> list[TapeRecord]:
        return [record for _, record in self.observer.records[shard][since:]]

    def so(self, asked: Asked) -> bool:
        """Whether all of them have it in force."""
        return all(asked.order.so(self._records(n)) for n in self._of(asked.order))

    def done(self, asked: Asked) -> bool:
        """Whether it was brought about since, by any of them."""
        since = enumerate(asked.since)
        return any(asked.order.done(self._records(n, before)) for n, before in since)

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.observer.scene.now

    def replaced(self, kind: str, asked: Asked) -> bool:
        """Whether the hub has had another wish since it was asked for: of two requests that are
        under way at once, the one that is answered last need not be the last to be carried out."""
        wish, at = self.observer.wishes.get(kind, (None, 0.0))
        mine = {"pause": "paused", "resume": "running", "stop": "stopped"}
        order = asked.order
        value = getattr(order, "value", None) if kind == "quorum" else mine.get(order.text)
        return at > asked.sent_at and wish != value

    def too_late(self, asked: Asked) -> bool:
        """Whether a checkpoint was ordered that the first shard's tape did not take before its
        end: it takes none any more."""
        ended = isinstance(asked.order, Checkpoint) and bool(self.observer.watch.of[0].ended)
        return ended and not self.done(asked)

    def begins(self, asked: Asked) -> bool:
        """Whether a checkpoint that was ordered has its mark, or waits for an older one's end."""
        records = self._records(0)
        newest = next((r for r in reversed(records) if isinstance(r, TapeCheckpoint)), None)
        under_way = newest is not None and newest.outcome == "begun"
        return under_way or asked.order.so(records) or asked.order.done(records)

    def quorum(self, spec: RunSpec) -> int:
        """K in force, on the first tape."""
        return next(_newest(self._records(0), "quorum"), spec.algorithm.quorum)
