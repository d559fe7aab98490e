"""Leaving a run that goes on without wasting work: step no more, but answer pulls a little longer.

A learner that drains holds at a step boundary. Every fragment whose round comes round takes what
it has done since it adopted it; adopting the result leaves nothing unmerged. Once that is so
for every fragment (H steps of the others), it leaves.
"""

from dataclasses import dataclass

from diloco_learner.exchange.counters import Counters
from diloco_shared.protocol.messages import Beat

# At least this long, and this many times what H own steps take: the others may be slower.
DRAIN_S_MIN, DRAIN_TIMES = 60.0, 3.0
# States of a run in which rounds are merged, or shall be as soon as there is room.
MERGING = ("running", "finishing", "full", "stuck")
# States that may be over in a moment: others are late, or a new leader has not heard of all yet.
LACKING = ("starved", "waiting")
NEVER = float("inf")


@dataclass(slots=True)
class Draining:
    """Nothing is asked for until `begin`.

    `lease_s`: how long a starved run is waited for. One whose others are only late is starved for
    a moment; after a lease they are evicted.
    """

    lease_s: float
    reason: str = ""
    until: float = NEVER
    starved_until: float = NEVER  # the end of patience with a run that is starved now

    @property
    def deadline(self) -> float:
        """When to look again at the latest."""
        return min(self.until, self.starved_until)

    def begin(self, reason: str, now: float, round_s: float) -> None:
        """`round_s`: seconds in which every fragment comes round."""
        self.reason = reason
        self.until = now + max(DRAIN_S_MIN, DRAIN_TIMES * round_s)

    def over(self, beat: Beat | None, counters: Counters, now: float) -> str:
        """Why to leave now; "" while there is something to wait for, or no wish to leave."""
        if not self.reason:
            return ""
        fragments = range(len(counters.adopted_P))
        unmerged = sum(counters.c_sound(p) > 0 for p in fragments)
        if not unmerged:
            return f"{self.reason}: none of its work is left unmerged"
        # One that has just begun may not have heard its syncer yet.
        state = beat.state if beat else ""
        if state not in LACKING:
            self.starved_until = NEVER
        elif self.starved_until == NEVER:
            self.starved_until = now + self.lease_s
        if state not in (*MERGING, *LACKING, "") or now >= self.starved_until:
            why = f"the run is {state}"
        elif now >= self.until:
            why = "no round came for them in time" if beat else "there is no syncer"
        else:
            return ""
        return f"{self.reason}: work on {unmerged} fragments is lost, {why}"
