"""When a dead process is started again: at once at first, ever later if it keeps dying."""

from dataclasses import dataclass

# First and longest pause before a restart, in seconds.
PAUSE_S, PAUSE_S_MAX = 0.2, 10.0
# A process that lived this long was well: its next restart is prompt again.
WELL_S = 20.0
# Exits in a row, each soon after a start, after which people are told that it does not work.
LOOP = 5


@dataclass(slots=True)
class Restarts:
    """The history of one supervised process."""

    started_at: float = 0.0
    in_a_row: int = 0
    total: int = 0

    def started(self, now: float) -> None:
        self.started_at = now

    def died(self, now: float) -> float:
        """Seconds to wait before starting it again."""
        self.total += 1
        self.in_a_row = 1 if now - self.started_at >= WELL_S else self.in_a_row + 1
        return float(min(PAUSE_S * 2 ** (self.in_a_row - 1), PAUSE_S_MAX))

    @property
    def looping(self) -> bool:
        return self.in_a_row >= LOOP
