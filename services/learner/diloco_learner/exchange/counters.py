"""What a learner has done since it adopted each fragment (paper section 2: c_steps, c_tokens).

Adoption of a fragment resets that fragment's counters and no others. All counts are exact
integers within one incarnation.
"""

from dataclasses import dataclass, field

from diloco_learner.events import AnchorReady, Merged, Unmerged
from diloco_shared.protocol.messages import Cursor


@dataclass(slots=True)
class Counters:
    """Steps and tokens of one incarnation, and where each of P fragments was adopted.

    A skipped step is a step with its tokens: what it read is read. `adopted_P` holds versions (-1:
    none), `step_at_P`, `tokens_at_P` and `skipped_at_P` the totals at adoption. Whether a step was
    skipped is known one step later: `skipped_at_P` counts that of the adoption once it is known.
    """

    adopted_P: list[int]
    step: int = 0
    tokens: int = 0
    skipped: int = 0  # of the steps, as far as their losses are known
    step_at_P: list[int] = field(init=False)
    tokens_at_P: list[int] = field(init=False)
    skipped_at_P: list[int] = field(init=False)
    newest_skipped: bool = False  # of the steps of which it is known

    def __post_init__(self) -> None:
        self.step_at_P = [self.step] * len(self.adopted_P)
        self.tokens_at_P = [self.tokens] * len(self.adopted_P)
        self.skipped_at_P = [self.skipped] * len(self.adopted_P)

    @property
    def complete(self) -> bool:
        """Whether every fragment is adopted."""
        return min(self.adopted_P) >= 0

    def stepped(self, tokens: int, *, skipped: bool = False) -> None:
        """One inner step on `tokens` tokens is done; whether the one before it was `skipped`."""
        assert tokens >= 0, f"a step of {tokens} tokens"
        for p, step in enumerate(self.step_at_P):
            # It came before the adoption, and is none of those since.
            self.skipped_at_P[p] += skipped and step == self.step
        self.step += 1
        self.tokens += tokens
        self.skipped += skipped
        self.newest_skipped = skipped

    def adopt(self, p: int, version: int) -> None:
        """Fragment `p` is now based on `version`; its counters start again."""
        assert version > self.adopted_P[p], (
            f"fragment {p}: version {version} after {self.adopted_P[p]}"
        )
        self._base(p, version)

    def void(self) -> None:
        """Every adopted version belongs to an older epoch: it counts as none."""
        for p in range(len(self.adopted_P)):
            self._base(p, -1)

    def c_steps(self, p: int) -> int:
        """Inner steps since fragment `p` was adopted; 0 while it is not."""
        return self.step - self.step_at_P[p] if self.adopted_P[p] >= 0 else 0

    def c_tokens(self, p: int) -> int:
        """Tokens processed since fragment `p` was adopted; 0 while it is not."""
        return self.tokens - self.tokens_at_P[p] if self.adopted_P[p] >= 0 else 0

    def c_sound(self, p: int) -> int:
        """Steps since fragment `p` was adopted, without those that did nothing.

        Of the newest step nobody knows yet. It is taken to be as the one before it: who skips all
        its steps has no sound one. A life's very first step is taken to be sound.
        """
        skipped = self.skipped - self.skipped_at_P[p] + self.newest_skipped
        return max(self.c_steps(p) - skipped, 0)

    def covers(self, versions_P: tuple[int, ...]) -> bool:
        """Whether every fragment is adopted at these versions or newer ones."""
        return len(versions_P) == len(self.adopted_P) and all(
            have >= want for have, want in zip(self.adopted_P, versions_P, strict=True)
        )

    def _base(self, p: int, version: int) -> None:
        self.adopted_P[p] = version
        self.step_at_P[p], self.tokens_at_P[p] = self.step, self.tokens
        self.skipped_at_P[p] = self.skipped


# --------------------------------------------------------------------------------------------------
# Marks of run-wide checkpoints: this learner's state is kept before it adopts anything of later.
#
# After Chandy and Lamport: beats and publications carry the newest mark that the syncer had set
# when they were made. The first of either that shows a new mark is where the cut goes through this
# learner.


@dataclass(slots=True)
class Marks:
    """Of one incarnation. Numbers only grow; 0 stands for none."""

    met: int = -1
    due: int = 0  # met, and nothing is kept yet
    settled: int = 0  # the part is durable, or it never will be

    def meet(self, number: int) -> None:
        """A message carries this mark. What was set before this learner began is not its own."""
        if 0 <= self.met < number:
            self.due = number
        self.met = max(self.met, number)

    def take(self) -> int:
        """The mark to keep a part for now; 0 for none."""
        due, self.due = self.due, 0
        return due


# --------------------------------------------------------------------------------------------------
# Which contributions of this learner became part of the published parameters.
#
# A publication decides every contribution to its fragment up to its round: those that
# `last_merged` names were merged, the other undecided ones never will be (their data are lost, or
# covered by the later cursor). A new epoch's first publication decides all of the epochs before.

# Undecided contributions per fragment: rounds in flight, and skipped rounds in a row.
UNDECIDED_MAX = 16


@dataclass(slots=True)
class Undecided:
    """Contributions whose fate no publication has told yet."""

    learner: str
    incarnation: int
    # fragment -> round -> (epoch, cursor)
    sent: dict[int, dict[int, tuple[int, Cursor | None]]] = field(default_factory=dict)

    def contributed(self, fragment: int, round_: int, epoch: int, cursor: Cursor | None) -> None:
        """A contribution was handed out; a later term's to the same round replaces it."""
        rounds = self.sent.setdefault(fragment, {})
        rounds[round_] = (epoch, cursor)
        if len(rounds) > UNDECIDED_MAX:
            del rounds[min(rounds)]

    def decide(self, anchor: AnchorReady) -> list[Merged | Unmerged]:
        """What the publication tells about this incarnation's contributions, oldest first."""
        incarnation, *named = anchor.last_merged.get(self.learner, (-1, -1, -1))
        if incarnation != self.incarnation:
            named = []
        until = max([anchor.round, *named])
        p, decided = anchor.fragment, list[Merged | Unmerged]()
        for n, (epoch, cursor) in sorted(self.sent.get(p, {}).items()):
            if n in named:
                decided.append(Merged(p, n, cursor))
            elif n <= until or epoch < anchor.epoch:
                decided.append(Unmerged(p, n))
            else:
                continue
            del self.sent[p][n]
        return decided
