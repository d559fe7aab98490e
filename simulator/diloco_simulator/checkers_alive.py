"""A run never stops silently: what it says of itself while nothing comes of it (liveness).

Judged once the world is healed, from what leaders tell and what their tapes take.
"""

from diloco_shared.protocol.messages import Beat
from diloco_simulator.checkers import Report

# States in which records must follow each other; all others give a reason why nothing happens.
WORKING = frozenset({"running", "finishing"})
# A round of the slowest learner and a few pulls in vain take a quarter of this.
SILENT_S = 120.0


class Alive:
    """Of one syncer shard."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.since = 0.0  # the newest record, or the heal
        self.told = False
        self.limit_s = SILENT_S

    def record(self, now: float) -> None:
        """The tape takes something."""
        self.since = now

    def beat(self, beat: Beat, now: float) -> None:
        """A leader says where the run is, in a healed world."""
        self.report.looked("liveness")
        if beat.state not in WORKING:
            self.since = now
        silent_s = now - self.since
        if silent_s > self.limit_s and not self.told:
            self.told = True
            self.report(
                "liveness",
                f"silent: says {beat.state!r} ({beat.reason}), no record for {silent_s:.0f} s",
            )
