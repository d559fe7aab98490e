"""Commands: a stop is the leader's to carry out, and the coordinator ends what no leader can end.

What the coordinator shows in a leader's place would hide that the leader ignores the stop. But
whoever led all the time since the stop was wished for, and recorded or showed something when it
must have been at the end, could have ended the run by itself. Only a full tape takes no end.
"""

import math

from diloco_shared.protocol.messages import TapeRebirth, TapeRecord, TapeTerm
from diloco_shared.protocol.records import RunStatus
from diloco_shared.protocol.run_states import OVER
from diloco_simulator.checkers.promises import Report

# A leader has heard of a stop after so long, and given its rounds their time, in virtual seconds;
# the second where messages are lost and links are cut, and a look for what was lost is due again.
KNOWS_S, KNOWS_LATE_S = 15.0, 25.0


class Stops:
    """Of one run."""

    def __init__(self, report: Report, shards: int) -> None:
        self.report = report
        self.wished_at = math.inf
        self.patience_s = KNOWS_S
        # Of each shard: when its newest term began, and when the hub took something of it last.
        self.terms = [0] * shards
        self.led_at = [0.0] * shards
        self.spoke_at = [0.0] * shards
        self.told: set[int] = set()
        self.by_force = False  # the coordinator has ended a shard

    def wished(self, now: float, *, faulty: bool) -> None:
        """The hub has the wish."""
        if self.wished_at == math.inf:
            self.wished_at, self.patience_s = now, KNOWS_LATE_S if faulty else KNOWS_S

    def forget(self) -> None:
        """The hub was put back: it need not have the wish any more."""
        self.wished_at = math.inf

    def record(self, shard: int, record: TapeRecord, now: float) -> None:
        """A shard's tape takes it."""
        if isinstance(record, TapeTerm | TapeRebirth):
            self.terms[shard], self.led_at[shard] = record.term, now
        self.spoke_at[shard] = now

    def shown(self, status: RunStatus, now: float) -> None:
        """A leader shows that it has not ended its shard; one of before says nothing."""
        if status.term == self.terms[status.shard] and status.state not in (*OVER, "full"):
            self.spoke_at[status.shard] = now

    def forced(self, shard: int, ended: str) -> None:
        """The coordinator ends a shard; `ended`: what its tape says of its end."""
        self.by_force = True
        if ended or shard in self.told or self.wished_at == math.inf:
            return
        self.told.add(shard)
        self.report.looked("commands")
        since = max(self.wished_at, self.led_at[shard])
        if self.spoke_at[shard] > since + self.patience_s:
            late_s = self.spoke_at[shard] - since
            self.report(
                "commands",
                f"shard {shard} is ended by force, and its leader was there for {late_s:.0f} s "
                "after the stop",
            )
