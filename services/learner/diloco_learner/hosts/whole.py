"""Whether an island is whole: what process 0 decides of the others, and each of them of process 0.

Who gives no sign of life, whose answer never comes, and who has died ends the island: half of one
never acts. Pure, and for one thread at a time: sockets and threads are `leading_io`'s and
`following_io`'s affair. Simulated worlds play islands with these very rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco_learner.hosts import plan
from diloco_learner.hosts.parts import Buffer

# A sign of life goes out so often, in seconds, and so often it is looked for.
BEAT_S = 0.5
# What one says that has read on meanwhile.
READS = "reads"
# An order that is not taken up by then, or an answer of which nothing more comes: whatever holds
# that host holds the island, unless it reads on. The longest that is none is a compilation.
ORDER_S_MAX = 900.0
# A process that has lost another one is given so many seconds for its last words.
LAST_WORDS_S = 6.0
# Answers that nobody has asked for yet, of each host: rounds in flight are fewer, and whoever
# copies moments asks for one tensor after the other. The oldest one is forgotten above it.
ANSWERS_MAX = 64


class HostLost(ConnectionError):
    """A process of the island is gone, or does not answer: the island ends, and begins again."""


class Over(HostLost):
    """The work is over that an order belongs to: it reaches nobody."""


class OfWork:
    """The connections to the others, as one life for one run has them.

    Whoever still builds or computes for it when it is over, in a thread that nobody can end, must
    not tell the others what they are not prepared for, nor come between orders of the next life.
    """

    def __init__(self, link: Any, work: int) -> None:
        """`link`: as of `hosts.trainer.Link`; `work`: its number, see `WholeIsland.work`."""
        self.link, self.work = link, work

    def check(self) -> None:
        """Raises Over once the work is."""
        self.link.whole.of_work(self.work)

    def tell(self, order: plan.Order, parts: Any = None) -> int:
        """See `hosts.trainer.Link`. Raises Over."""
        number: int = self.link.tell(order, parts, of=self.work)
        return number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


@dataclass(slots=True)
class Hearing:
    """Another process's signs of life, as one hears them that may have stood still itself."""

    limit_s: float
    heard_at: float
    looked_at: float  # the last time this process looked: it does so every BEAT_S

    def heard(self, now: float) -> float:
        """It gave one. By how much later than it should have, in seconds."""
        late_s = 0.0 if self._stood_still(now) else max(now - self.heard_at - BEAT_S, 0.0)
        self.heard_at = now
        return late_s

    def over(self, now: float) -> bool:
        """Look: whether it has been silent for longer than the limit.

        While this process stood still it heard nobody, so that time is no silence of others.
        """
        if self._stood_still(now):
            self.heard_at = min(self.heard_at + now - self.looked_at, now)
        self.looked_at = now
        return now - self.heard_at > self.limit_s

    def _stood_still(self, now: float) -> bool:
        return now - self.looked_at >= 2 * BEAT_S


@dataclass(slots=True)
class ReadOn:
    """Whether a process that follows has read on, of what an order lets it read.

    It says so with its signs of life: of large weights, which all hosts read at once, it may read
    for longer than any order may take that does nothing.
    """

    on: bool = False

    def moved(self) -> None:
        """Some more is read; by any thread."""
        self.on = True

    def taken(self) -> bool:
        """Whether some was since this was asked last."""
        found, self.on = self.on, False
        return found


@dataclass(slots=True)
class Other:
    """One process that follows, as process 0 knows it. `name`: as people do."""

    name: str
    hearing: Hearing
    pace: plan.HostPace = field(default_factory=plan.HostPace)


class WholeIsland:
    """The island as process 0 sees it, from the moment at which all are there."""

    def __init__(self) -> None:
        self.others: dict[int, Other] = {}
        self.told = 0  # orders
        self.work = 0  # lives for runs that this island has begun or left
        self.prepared = False  # for the run that it works for now
        self.came: dict[tuple[int, int], Buffer] = {}  # answers by (order, host)
        self.lost = ""  # why the island ends
        self.stopped_by = ""  # the host that was told to stop, and told this one
        self.closing = False  # process 0 ends in order
        self.stragglers = plan.Stragglers()

    def begins(self, names: Mapping[int, str], silence_s: float, now: float) -> None:
        """All are there: who they are, and how long one may be silent."""
        self.others = {n: Other(name, Hearing(silence_s, now, now)) for n, name in names.items()}

    # --- orders --------------------------------------------------------------------------------

    def tells(self, order: plan.Order, now: float, of: int | None = None) -> tuple[int, bytes]:
        """The next order of the plan: its number, and what goes out to all. Raises HostLost.

        `of`: the work that it belongs to. Raises Over once that is.
        """
        self.check()
        if of is not None:
            self.of_work(of)
        self.prepared = self.prepared or isinstance(order, plan.Prepare)
        self.told += 1
        for other in self.others.values():
            other.pace.told(self.told, now, step=isinstance(order, plan.Step))
        return self.told, plan.encode(self.told, order)

    def of_work(self, number: int) -> None:
        """Raises Over unless that is the work of now."""
        if number != self.work:
            raise Over("the work for this run is over")

    def begins_work(self) -> int:
        """A life for a run begins, perhaps after another one for the same run: its number. What
        still computes for the one before tells nobody anything from now on."""
        self.work += 1
        return self.work

    def leaves(self) -> bool:
        """The work for a run is over. Whether the others have to be told."""
        prepared, self.prepared = self.prepared, False
        self.work += 1
        return prepared

    def gave(self, index: int, number: int, data: Buffer, fault: str = "") -> None:
        """What a host gives for an order; or why it could not get ready for a run, which is no
        reason to end."""
        self.came[number, index] = f"{self._name(index)}: {fault}".encode() if fault else data
        mine = sorted(key for key in self.came if key[1] == index)
        for key in mine[:-ANSWERS_MAX]:
            del self.came[key]

    def answers(self, number: int) -> Mapping[int, Buffer] | None:
        """What every host gave for that order, once; None until all have. Raises HostLost.

        Also where all had given it when one was lost: an island that is not whole does not act.
        """
        self.check()
        if any((number, index) not in self.came for index in self.others):
            return None
        return {index: self.came.pop((number, index)) for index in self.others}

    def awaited(self, number: int) -> list[int]:
        """Hosts that have not given anything for that order."""
        return [index for index in self.others if (number, index) not in self.came]

    def moved_at(self, index: int) -> float:
        """When a host has read on last, as far as it has said so."""
        return self.others[index].pace.moved_at

    def never_came(self, number: int, patience_s: float = ORDER_S_MAX) -> str:
        """Why the island ends where answers to an order were waited for in vain."""
        late = [self._name(index) for index in self.awaited(number)]
        return f"{', '.join(late)} gave nothing for order {number} in {patience_s:.0f} s"

    def check(self) -> None:
        """Raises HostLost unless the island is whole."""
        if self.lost:
            raise HostLost(self.lost)

    # --- what comes ----------------------------------------------------------------------------

    def hears(self, index: int, values: tuple[Any, ...], now: float) -> str:
        """What a host says on the connection of its signs of life; why the island ends, or ""."""
        what, *more = values
        other = self.others[index]
        # A host that stood still in the middle of a step shows only so.
        self.stragglers.late(other.name, other.hearing.heard(now))
        if what == "taken":
            number, waited_s = more
            self.stragglers.late(other.name, other.pace.taken(int(number), float(waited_s), now))
        elif what == READS:
            other.pace.moved_at = now
        elif what == "failed":
            return f"{other.name} failed: {more[0]}"
        elif what == "stop" and not self.closing:
            self.stopped_by = self.stopped_by or other.name
        return ""

    def looks(self, now: float) -> str:
        """Every BEAT_S: why the island ends, or ""."""
        silent = [o for o in self.others.values() if o.hearing.over(now)]
        if silent:
            return f"{silent[0].name} is gone: {silence(silent[0].hearing.limit_s)}"
        for other in self.others.values():
            if (behind_s := other.pace.behind_s(now)) > ORDER_S_MAX:
                return f"{other.name} has not taken up an order for {behind_s:.0f} s"
        return ""

    def lose(self, why: str) -> bool:
        """The island is not whole any more; False where that is known, or it ends anyway."""
        if self.lost or self.closing:
            return False
        self.lost = f"{why}. The island ends, and is whole again once all are started anew"
        return True

    def _name(self, index: int) -> str:
        return self.others[index].name

    # --- what is shown -------------------------------------------------------------------------

    def shown(self) -> dict[str, dict[str, float]]:
        """By host: how late it takes up steps, and how long it waits for them."""
        return {
            o.name: {"late_s": round(o.pace.late_s, 6), "waited_s": round(o.pace.waited_s, 6)}
            for o in self.others.values()
        }

    def straggling(self, now: float) -> str:
        """What to tell of hosts that keep the others waiting, or ""."""
        return self.stragglers.tell(now)


def silence(limit_s: float) -> str:
    """Why one that gave no sign of life counts as gone."""
    return f"no sign of life for {limit_s:.1f} s"
