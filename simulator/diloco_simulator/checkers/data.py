"""Which training data are read (promise `data`): by whom, from where on, and how often.

Known from outside are the leases of data shards as the hub takes them, the tape, and which
sequences each step of a learner is given: in worlds every sequence says which one it is. Nothing is
taken from the product's own counts of what was read. It promises (docs/how-to/models.md and
recover.md):

- Nobody takes a data shard from a learner that is said to live.
- Whoever leases a shard reads it from where its lease says, sequence after sequence, to its end.
- A lease begins right behind what is merged. So nothing before it was left out: somebody has read
  it, and what follows it is merged. And what was merged by then is not read again.
- A contribution says exactly how far its learner has read.
- A shard is leased for another pass only when none is free that was read less often.
- A learner reads with others, or reads its own shards once more, only while no shard is free.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from diloco_learner.events import Contribute
from diloco_shared.protocol.records import ShardLease
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.merged_data import KnownPlace, MergedData, Read, Where
from diloco_simulator.checkers.promises import Report

# What is merged is told within this time to whoever takes a shard, in virtual seconds: a leader
# that cannot tell it is replaced by one that tells it first.
TOLD_S = 30.0
# A shard that is free for longer is seen by whoever looks for one. A look takes as long as its
# slowest answer, and begins again where there is none.
SEEN_S = 30.0
# A hub that was put back has the places of its backup, until a leader has read the tape again and
# tells the places that the tape has.
PUT_BACK_S = 60.0
# A beat may be under way so long, and the leader's next one lets as long wait for it. By one that
# came before, learners act for two heartbeats.
BEAT_S, BEATS = 2.0, 2
# By a word of who is gone that is older nobody takes a shard, once it has no lease of a learner any
# more: it was sought, and the hub asked, perhaps in vain and by who stood still.
OLD_S = 60.0
# A leader that goes back to a checkpoint gives the data shards back as they were then, and then
# writes down that it goes back: after answers of the hub that may take that long.
GOING_BACK_S = 60.0
# Nobody leads who has said nothing for so long. Where processes have credentials of their own, the
# leader gives the leases.
SILENT_S = 10.0
# Shards that one process holds at most.
HELD_MAX = 16


@dataclass(slots=True, eq=False)
class Lease:
    """Of a data shard, as the hub has it."""

    record: ShardLease
    since: float
    led_since: float = math.inf  # then
    begun: bool = False  # its holder has read something of it
    ended: int = -1  # newest pass that its holder has read to its end under it
    loaded: bool = False  # from a backup: nobody knows what was done under it
    # Its holder read the shard without one, and may until it hears of this: nobody knows when.
    shared: bool = False

    @property
    def life(self) -> str:
        """Who holds it; "" where it is free."""
        return f"{self.record.holder}/{self.record.incarnation}" if self.record.holder else ""


@dataclass(slots=True)
class Led:
    """A shard of the syncer, by one leader who speaks."""

    term: int
    since: float
    until: float = -math.inf  # when it spoke last


@dataclass(slots=True)
class Stretch:
    """Sequences that one life reads after each other."""

    shard: int
    passes: int
    next: int
    since: float
    lease: Lease | None  # None: it reads without one
    again: bool = False  # for want of another shard


@dataclass(slots=True)
class Reader:
    """One life."""

    stretch: Stretch | None = None
    log: list[Read] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)  # by a lease, and not for want of another shard
    # By fragment and round of its contributions: shards of which they tell, and how far.
    tells: dict[tuple[int, int], dict[int, Where]] = field(default_factory=dict)

    @property
    def reads_its_own(self) -> bool:
        """What it reads now is its next data by its lease."""
        now = self.stretch
        return now is not None and now.lease is not None and not now.again


class DataRead:
    """Of one run."""

    def __init__(
        self,
        report: Report,
        spec: RunSpec,
        size: Callable[[int], int],
        reached: Callable[[str, str], None],
    ) -> None:
        """`size`: sequences of a data shard; `reached` is told of what is worth counting."""
        self.report = report
        self.size = size
        self.reached = partial(reached, "data shards:")
        self.shards = spec.data.virtual_shards
        self.context = spec.model.context_tokens
        self.beat_s = BEAT_S + BEATS * spec.membership.heartbeat_s
        self.readers: dict[str, Reader] = {}
        self.leases: dict[int, Lease] = {}
        # (life, shard, pass) that it leased, or kept on a hub that was put back, read to its end.
        self.at_end = set[tuple[str, int, int]]()
        self.free_since = dict.fromkeys(range(self.shards), 0.0)
        self.known = KnownPlace(size)
        self.merged = [MergedData(self, n) for n in range(spec.algorithm.shards)]
        self.beats: deque[tuple[float, frozenset[str]]] = deque(maxlen=4096)
        self.leaders: dict[int, Led] = {}  # of each shard of the syncer that was ever led
        self.doubted: list[tuple[float, str, ShardLease]] = []  # takeovers that a beat must explain
        # What was read again, unless the run is going back; and when.
        self.again: list[tuple[float, str]] = []
        self.healed_at = math.inf
        self.put_back_at = -math.inf

    def broken(self, text: str) -> None:
        self.report("data", text)

    # --- leases, as the hub takes them -----------------------------------------------------------

    def put_back(self, leases: Iterable[ShardLease], now: float) -> None:
        """The hub was, from a backup, which has these."""
        self.put_back_at = now
        self.leases = {record.shard: Lease(record, now, loaded=True) for record in leases}
        for lease in self.leases.values():
            self._ended(lease)
        held = {shard for shard, lease in self.leases.items() if lease.life}
        self.free_since = {s: math.inf if s in held else now for s in self.free_since}
        self.doubted.clear()

    def leased(self, record: ShardLease, now: float) -> None:
        """The hub takes a lease, or that a shard is free."""
        self.report.looked("data")
        shard, was = record.shard, self.leases.get(record.shard)
        self._follows(record, was)
        if was is not None and was.record.holder and record.holder:
            self._taken_over(was, record, now)
        if record.holder:
            self._in_order(record, was, now)
        lease = self.leases[shard] = Lease(record, now, self._led_since(now))
        self._ended(lease)
        reads = self.readers.get(lease.life, Reader()).stretch
        # Also one that it had lost, as to a run that goes back: it reads on for want of another.
        lost = was is not None and was.life != lease.life
        if reads is not None and reads.shard == shard:
            lease.shared = reads.lease is None or lost
        if record.holder:
            self.free_since[shard] = math.inf
            held = sum(other.life == lease.life for other in self.leases.values())
            if held > HELD_MAX:
                self.broken(f"{lease.life} holds {held} data shards")
        elif self.free_since[shard] == math.inf:
            self.free_since[shard] = now

    def _ended(self, lease: Lease) -> None:
        passes, sequences = lease.record.began
        if lease.record.holder and sequences == self.size(lease.record.shard):
            self.at_end.add((lease.life, lease.record.shard, passes))

    def _follows(self, record: ShardLease, was: Lease | None) -> None:
        """It begins behind what is merged, or what its holder gives up after it was read."""
        where = record.shard, record.passes, record.sequences
        if self.known.follows(where):
            return
        if was is not None and was.life and not record.holder:
            before = self.known.before(where)
            if before in self.readers.get(was.life, Reader()).log:
                self.known.excused.add(before)
                self.reached("given up unmerged")
                return
        self.broken(f"a lease of data shard {_at(where)} leaves out what nobody had merged")

    def _taken_over(self, was: Lease, record: ShardLease, now: float) -> None:
        """Only from who is silent, and by no older life."""
        before = was.record
        self.reached(f"taken from {'who was gone' if before.holder != record.holder else 'itself'}")
        if before.holder == record.holder:
            if record.incarnation < before.incarnation:
                self.broken(f"{was.life} loses data shard {record.shard} to an older life")
        elif not self._said_gone(before.holder, max(was.since - self.beat_s, now - OLD_S)):
            self.doubted.append((now, before.holder, record))

    def _said_gone(self, learner: str, since: float) -> bool:
        return any(learner not in live for at, live in self.beats if at >= since)

    def beat(self, live: Collection[str], now: float, shard: int = 0, term: int = 1) -> None:
        """The leader of a shard of the syncer says who lives."""
        led = self.leaders.get(shard)
        if led is None or led.term != term or now - led.until > SILENT_S:
            led = self.leaders[shard] = Led(term, now)
        led.until = now
        self.beats.append((now, frozenset(live)))
        self.look(now)
        waiting, self.doubted = self.doubted, []
        for at, learner, record in waiting:
            if learner not in live:
                continue
            if now <= at + BEAT_S:
                self.doubted.append((at, learner, record))
            else:
                self.broken(
                    f"{record.holder} takes data shard {record.shard} from {learner}, which lives"
                )

    def _led_since(self, now: float) -> float:
        """Since when every shard of the syncer is led by whoever leads it; infinite: it is not."""
        led = self.leaders.values()
        whole = len(led) == len(self.merged) and all(now - of.until <= SILENT_S for of in led)
        return max(of.since for of in led) if whole else math.inf

    def _in_order(self, record: ShardLease, was: Lease | None, now: float) -> None:
        """What is read least comes first, of all that is free; but a learner's own before that."""
        if was is not None and was.record.holder == record.holder:
            return
        for shard, since in self.free_since.items():
            if shard == record.shard or now - since <= SEEN_S or self._gave_up(record, shard):
                continue
            if (passes := self._passes(shard)) < record.passes:
                what = f"data shard {record.shard} in pass {record.passes}"
                free = f"data shard {shard} was free in pass {passes}"
                self.broken(f"{record.holder} reads {what}, and {free}")
                return

    def _gave_up(self, record: ShardLease, shard: int) -> bool:
        """Whether this life has read that one and gave it up: it knows it as read."""
        reader = self.readers.get(f"{record.holder}/{record.incarnation}", Reader())
        return any(read[0] == shard and read[1] >= self._passes(shard) for read in reader.log)

    def _passes(self, shard: int) -> int:
        lease = self.leases.get(shard)
        merged = max(of.newest(shard) for of in self.merged)
        passes = merged[0] + (merged[1] == self.size(shard) - 1)
        return max(0 if lease is None else lease.record.passes, passes)

    def _told(self, shard: int, until: float) -> Where:
        """How far a shard was merged, in any shard of the syncer."""
        passes, n = max(merged.told(shard, until) for merged in self.merged)
        return (passes + 1, 0) if n == self.size(shard) else (passes, n)

    # --- what is read ----------------------------------------------------------------------------

    def reads(self, life: str, sequences: Sequence[Read], now: float, *, able: bool) -> None:
        """A step of a life is given these; `able`: it has gone on for a while, and is to stay."""
        self.report.looked("data")
        reader = self.readers.setdefault(life, Reader())
        for read in sequences:
            self._reads(life, reader, read, now)
            reader.log.append(read)
            reader.own.append(reader.reads_its_own)
        stretch = reader.stretch
        if stretch is not None and able:
            self._for_want(life, stretch, now)

    def _reads(self, life: str, reader: Reader, read: Read, now: float) -> None:
        shard, passes, n = read
        stretch, lease = reader.stretch, self.leases.get(shard)
        goes_on = stretch is not None and (shard, passes, n) == (
            stretch.shard,
            stretch.passes,
            stretch.next,
        )
        mine = lease if lease is not None and lease.life == life and not lease.shared else None
        if not goes_on or (stretch is not None and stretch.lease is None and mine is not None):
            if stretch is not None and not goes_on:
                self._leaves(life, stretch)
            reader.stretch = stretch = self._begins(life, read, mine, now)
        assert stretch is not None
        stretch.next = n + 1
        if stretch.next == self.size(shard) and stretch.lease is not None:
            stretch.lease.ended = passes

    def _leaves(self, life: str, stretch: Stretch) -> None:
        """It reads on somewhere else: at the end alone, as long as it has the lease."""
        lease = stretch.lease
        if lease is None or stretch.again or stretch.next == self.size(stretch.shard):
            return
        # Of a lease that a backup had, it may have read all before, and read it once more since.
        if lease.loaded:
            return
        if self.leases.get(stretch.shard) is lease:
            where = _at((stretch.shard, stretch.passes, stretch.next))
            self.broken(f"{life} leaves data shard {where}, which it has leased")
        else:
            self.reached("left when its lease was lost")

    def _begins(self, life: str, read: Read, lease: Lease | None, now: float) -> Stretch:
        shard, passes, n = read
        stretch = Stretch(shard, passes, n, now, lease)
        if lease is None:
            self.reached("read without a lease")
            return stretch
        at = lease.record.passes, lease.record.sequences
        if not lease.begun and (passes, n) == at:
            lease.begun = True
            self.reached("read for another time" if passes else "read for the first time")
            self._not_twice(life, read, lease, now)
            return stretch
        if (passes, n) == at or (n == 0 and at == (passes - 1, self.size(shard))):
            self.reached("begun twice" if lease.begun else "begun behind an end")
            lease.begun, stretch.again = True, (passes, n) != at
            return stretch
        ended = lease.ended if lease.begun or at[1] < self.size(shard) else at[0]
        stretch.again = n == 0 and passes == ended + 1 and ended >= at[0]
        self.reached("read once more for want of another")
        if not (stretch.again or lease.loaded):
            self.broken(f"{life} reads data shard {_at(read)}, its lease begins at {at}")
        lease.begun = True
        return stretch

    def _not_twice(self, life: str, read: Read, lease: Lease, now: float) -> None:
        if lease.since - self.put_back_at <= PUT_BACK_S or lease.since < lease.led_since + TOLD_S:
            return
        told = self._told(read[0], lease.since - TOLD_S)
        if read[1:] < told:
            text = f"{life} reads data shard {_at(read)} again, which is merged up to {told}"
            self.again.append((now, text))

    def went_back(self) -> None:
        """The tape says so."""
        self.again.clear()

    def look(self, now: float) -> None:
        """At what nobody has explained by now."""
        for _, text in [found for found in self.again if found[0] <= now - GOING_BACK_S]:
            self.broken(text)
        self.again = [found for found in self.again if found[0] > now - GOING_BACK_S]

    def _for_want(self, life: str, stretch: Stretch, now: float) -> None:
        """It reads what others read, or its own once more: only while nothing is free."""
        lease = self.leases.get(stretch.shard)
        mine = lease is not None and lease.life == life
        if mine and not stretch.again:
            return
        leased_at = 0.0 if mine or lease is None else lease.since
        since = max(stretch.since, self.healed_at, self._led_since(now), leased_at)
        free = [s for s, free_since in self.free_since.items() if now - free_since > SEEN_S]
        if now - since > SEEN_S and free:
            where = _at((stretch.shard, stretch.passes, stretch.next))
            how = "once more" if mine else "without a lease"
            self.broken(f"{life} reads data shard {where} {how}, and data shard {free[0]} is free")

    # --- what is contributed ---------------------------------------------------------------------

    def contributed(self, life: str, c: Contribute) -> None:
        """A contribution says how far its learner has read, and not further."""
        self.report.looked("data")
        reader = self.readers.get(life, Reader())
        mine = {shard for shard, lease in self.leases.items() if lease.life == life}
        if c.cursor is None or not reader.log:
            self.broken(f"{life} answers round {c.round}, and has read nothing")
            return
        shard, passes, n = reader.log[-1]
        said, done = (c.cursor.shard, c.cursor.passes, c.cursor.sequences), (shard, passes, n + 1)
        if said != done:
            where = f"reads on data shard {_at(said)}, and that is {_at(done)}"
            self.broken(f"{life} says in round {c.round} that it {where}")
        for finished, of in c.cursor.finished:
            self._finished(life, reader, finished, of)
        told = {finished: (of + 1, 0) for finished, of in c.cursor.finished}
        told[shard] = max(told.get(shard, (0, 0)), said[1:])
        place = c.fragment, c.round
        reader.tells[place] = {of: upto for of, upto in told.items() if of in mine}

    def _finished(self, life: str, reader: Reader, shard: int, passes: int) -> None:
        last = shard, passes, self.size(shard) - 1
        if last not in reader.log and (life, shard, passes) not in self.at_end:
            self.broken(
                f"{life} says that it has read data shard {shard} to its end in pass {passes}"
            )


class UnknownData(DataRead):
    """Of a run whose sequences do not say which they are: nothing is looked at."""

    def put_back(self, leases: Iterable[ShardLease], now: float) -> None:
        pass

    def leased(self, record: ShardLease, now: float) -> None:
        pass

    def beat(self, live: Collection[str], now: float, shard: int = 0, term: int = 1) -> None:
        pass

    def reads(self, life: str, sequences: Sequence[Read], now: float, *, able: bool) -> None:
        pass

    def contributed(self, life: str, c: Contribute) -> None:
        pass


def _at(where: Read) -> str:
    shard, passes, n = where
    return f"{shard} from {n} in pass {passes}"
