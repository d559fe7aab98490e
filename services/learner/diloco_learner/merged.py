"""Which contributions of this learner became part of the published parameters.

`last_merged` of a publication decides every contribution to its fragment up to that round: the
one it names was merged, earlier undecided ones were lost or are covered by its later cursor.
"""

from dataclasses import dataclass, field

from diloco_learner.events import AnchorReady, Merged
from diloco_shared.protocol.messages import Cursor

# Undecided contributions per fragment: rounds in flight, and skipped rounds in a row.
UNDECIDED_MAX = 16


@dataclass(slots=True)
class Undecided:
    """Contributions whose fate no publication has told yet."""

    learner: str
    incarnation: int
    cursors: dict[int, dict[int, Cursor | None]] = field(default_factory=dict)

    def contributed(self, fragment: int, round_: int, cursor: Cursor | None) -> None:
        """A contribution was handed out; a later term's to the same round replaces it."""
        rounds = self.cursors.setdefault(fragment, {})
        rounds[round_] = cursor
        if len(rounds) > UNDECIDED_MAX:
            del rounds[min(rounds)]

    def decide(self, anchor: AnchorReady) -> list[Merged]:
        """What the publication tells about this incarnation's contributions."""
        incarnation, round_ = anchor.last_merged.get(self.learner, (-1, -1))
        rounds = self.cursors.get(anchor.fragment)
        if not rounds or incarnation != self.incarnation:
            return []
        merged = [Merged(anchor.fragment, round_, rounds[round_])] if round_ in rounds else []
        self.cursors[anchor.fragment] = {n: c for n, c in rounds.items() if n > round_}
        return merged
