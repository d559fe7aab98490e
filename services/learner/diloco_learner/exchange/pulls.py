"""Which pulls a learner still owes an answer: each (epoch, term, round) is answered once (I2)."""

from dataclasses import dataclass, field

from diloco_shared.protocol.messages import Pull
from diloco_shared.spec.algorithm import Algorithm

# Pulls waiting for a step boundary: twice the rounds that a syncer keeps in flight, and so many at
# least. All of those rounds may be open at once, and of those before some repeats may come late.
# So many at most: a run may allow any number in flight, and has 512 fragments at most.
PENDING_MIN, PENDING_MAX = 8, 1024
# Rounds remembered as answered: rounds are pulled in order, so a repeat is never far behind. Those
# in flight may be answered in another order: so many times as many as may wait.
ANSWERED_TIMES = 8


def pending_max(rounds_in_flight: int) -> int:
    """Pulls of one syncer shard that may wait for a step boundary."""
    return max(PENDING_MIN, min(2 * rounds_in_flight, PENDING_MAX))


@dataclass(slots=True)
class OpenPull:
    """A pull and the time (same clock as `now`) at which its round is over."""

    pull: Pull
    deadline: float


@dataclass(slots=True)
class Pulls:
    """Pulls of the newest leadership (epoch, term) seen."""

    learner: str
    epoch: int
    fragments: int
    pending_max: int
    term: int = -1
    pending: dict[int, OpenPull] = field(default_factory=dict)  # by round
    answered: dict[int, None] = field(default_factory=dict)  # rounds, oldest first
    over: int = -1  # no round up to this one is answered any more

    def lead(self, epoch: int, term: int) -> None:
        """A leader speaks. What an older one asked for can no longer be committed."""
        if (epoch, term) <= (self.epoch, self.term):
            return
        self.epoch, self.term, self.over = epoch, term, -1
        self.pending.clear()
        self.answered.clear()

    def ask(self, pull: Pull, now: float) -> str:
        """Note a pull that this learner owes an answer; why not, or ""."""
        if pull.epoch != self.epoch:
            return "pull of another epoch"
        if pull.term < self.term:
            return "pull of a deposed leader"
        if pull.fragment >= self.fragments:
            return "pull of an unknown fragment"
        self.lead(pull.epoch, pull.term)
        if self.learner not in pull.participants:
            return "pull of others"
        if pull.round in self.answered:
            return "pull answered before"
        if pull.round <= self.over:
            return "pull of a round that is over"
        deadline = now + pull.timeout_s
        known = self.pending.get(pull.round)
        if known is not None:
            # A repeat carries the time left, counted from its own receipt.
            known.deadline = min(known.deadline, deadline)
            return ""
        self.pending[pull.round] = OpenPull(pull, deadline)
        if len(self.pending) > self.pending_max:
            del self.pending[min(self.pending)]
        return ""

    def owed(self, now: float) -> list[OpenPull]:
        """Pulls that can be answered now, in order of rounds; those that are over are dropped."""
        for n in [n for n, p in self.pending.items() if now >= p.deadline]:
            del self.pending[n]
        return [self.pending[n] for n in sorted(self.pending)]

    def close(self, round_: int) -> None:
        """Rounds up to this one are over: an answer to one of them would be dropped."""
        self.over = max(self.over, round_)
        for n in [n for n in self.pending if n <= self.over]:
            del self.pending[n]

    def answer(self, round_: int) -> None:
        """The contribution to `round_` is handed out."""
        assert round_ not in self.answered and round_ > self.over, f"round {round_} again"
        del self.pending[round_]
        self.answered[round_] = None
        if len(self.answered) > ANSWERED_TIMES * self.pending_max:
            oldest = min(self.answered)
            del self.answered[oldest]
            self.close(oldest)


class AllPulls:
    """Pulls of every syncer shard: each numbers its rounds and terms by itself."""

    def __init__(self, learner: str, epoch: int, algorithm: Algorithm) -> None:
        most = pending_max(algorithm.rounds_in_flight_max)
        shards = range(algorithm.shards)
        self.of = [Pulls(learner, epoch, algorithm.fragments, most) for _ in shards]

    def lead(self, epoch: int, terms: tuple[int, ...]) -> None:
        """The leaders of all shards speak, in their order."""
        for pulls, term in zip(self.of, terms, strict=True):
            pulls.lead(epoch, term)

    def deposed(self, epoch: int, terms: tuple[int, ...]) -> bool:
        """Whether a newer leader than one of these was heard of."""
        pairs = zip(self.of, terms, strict=True)
        return any((epoch, term) < (pulls.epoch, pulls.term) for pulls, term in pairs)

    def ask(self, pull: Pull, now: float) -> str:
        return self.of[pull.fragment % len(self.of)].ask(pull, now)

    @property
    def pending(self) -> list[OpenPull]:
        """Those that wait for a step boundary."""
        return [pending for pulls in self.of for pending in pulls.pending.values()]

    @property
    def answered(self) -> list[int]:
        """Rounds remembered as answered."""
        return [round_ for pulls in self.of for round_ in pulls.answered]

    def owed(self, now: float) -> list[OpenPull]:
        """Pulls that can be answered now."""
        return [pending for pulls in self.of for pending in pulls.owed(now)]

    def close(self, fragment: int, round_: int) -> None:
        """Rounds up to this one are over, of the shard that owns the fragment."""
        self.of[fragment % len(self.of)].close(round_)

    def answer(self, pull: Pull) -> None:
        self.of[pull.fragment % len(self.of)].answer(pull.round)
