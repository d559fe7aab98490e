"""Which contributions of this learner became part of the published parameters.

A publication decides every contribution to its fragment up to its round: those that
`last_merged` names were merged, the other undecided ones never will be (their data are lost, or
covered by the later cursor). A new epoch's first publication decides all of the epochs before.
"""

from dataclasses import dataclass, field

from diloco_learner.events import AnchorReady, Merged, Unmerged
from diloco_shared.protocol.messages import Cursor

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
