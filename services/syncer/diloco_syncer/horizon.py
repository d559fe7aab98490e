"""Up to where UP may be purged once a snapshot covers its rounds.

All that belongs to a round came after the round was first pulled; so what was on UP before the
first pull of any later round belongs to earlier ones, late and orphaned contributions alike.
"""


class Horizon:
    """Of one leader's term: bounded by the rounds between two snapshots."""

    def __init__(self) -> None:
        self.floor: dict[int, int] = {}  # round -> newest sequence on UP at its first pull

    def pulled(self, round_: int, up_seq: int) -> None:
        """A pull of `round_` goes out while `up_seq` is the newest sequence seen on UP."""
        self.floor.setdefault(round_, up_seq)

    def rewound(self, end: int) -> None:
        """UP lost what came after `end`: its sequences come again, for rounds of now."""
        self.floor = {n: min(seq, end) for n, seq in self.floor.items()}

    def below(self, last_round: int, up_seq: int) -> int:
        """Sequence below which everything is of rounds up to `last_round`.

        A round may be skipped without a pull: any later one's pull is the limit then.
        """
        self.floor = {n: seq for n, seq in self.floor.items() if n > last_round}
        return min(self.floor.values(), default=up_seq) + 1
