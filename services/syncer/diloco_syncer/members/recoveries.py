"""How learners came back, or came new to a running run: the phases of each, for people to see.

    lost ──► detected ──► joined ──► donor chosen ──► transferred ──► stepping ──► first merge
                 restarted ──┘

Put together from what a learner tells of its own process (offsets from its start, which need no
common clock), from silence, and from the tape. Shown, never acted on.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco_shared.protocol.messages import Progress, TapeRound
from diloco_shared.protocol.records import RecoveryRecord
from diloco_syncer.events import Tell
from diloco_syncer.history.history import History

# Shown at once; older ones are in the events.
RECOVERIES_MAX = 32
# Times of closed rounds kept: a process that takes longer than these to be merged has no count.
ROUNDS_MAX = 4096


@dataclass(slots=True)
class Recoveries:
    """The newest ones of this leader's term, once the run has parameters; in wall clock seconds."""

    history: History | None = None
    shown: dict[tuple[str, int], RecoveryRecord] = field(default_factory=dict)
    # learner -> (incarnation, last heard, silence noticed or 0)
    heard: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    rounds: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS_MAX))
    complete_since: float = float("inf")  # every round closed since then is in `rounds`

    def spoke(self, progress: Progress, at: float) -> None:
        """A report of a learner's newest life."""
        learner, incarnation = progress.learner, progress.incarnation
        known = self.heard.get(learner)
        self.heard[learner] = (incarnation, at, 0.0)
        key = (learner, incarnation)
        began = known is None or known[0] < incarnation
        if began and (self.history is None or self.history.initialised) and progress.step == 0:
            lost_at, noticed_at = known[1:] if known else (0.0, 0.0)
            self.shown[key] = RecoveryRecord(
                learner=learner,
                incarnation=incarnation,
                lost_at=lost_at,
                detected_at=noticed_at or (at if known else 0.0),
            )
            if len(self.shown) > RECOVERIES_MAX:
                del self.shown[next(iter(self.shown))]
        if key in self.shown and not self.shown[key].contributed_at:
            self.shown[key] = _with_times(self.shown[key], progress, at)

    def silent(self, learner: str, at: float) -> None:
        """A learner's lease ran out."""
        if learner in self.heard:
            incarnation, heard_at, _ = self.heard[learner]
            self.heard[learner] = (incarnation, heard_at, at)

    def forget(self, learner: str) -> None:
        """A learner is gone for good: should it come back, it counts as new."""
        self.heard.pop(learner, None)

    def closed(self, record: TapeRound) -> Iterator[Tell]:
        """A round is on the tape; tells of everybody whom it merged for the first time."""
        self.complete_since = min(self.complete_since, record.at)
        self.rounds.append(record.at)
        if len(self.rounds) == ROUNDS_MAX:
            self.complete_since = self.rounds[0]
        for v in record.verdicts:
            found = self.shown.get((v.learner, v.incarnation))
            if v.outcome != "merged" or found is None or found.contributed_at:
                continue
            rounds = self._since(found.restarted_at)
            done = found.model_copy(update={"contributed_at": record.at, "rounds": rounds})
            self.shown[(v.learner, v.incarnation)] = done
            took = f", {rounds} rounds after its process started" if rounds >= 0 else ""
            who, where = f"{v.learner} (life {v.incarnation})", f"round {record.round}{took}"
            text = f"the first work of {who} was merged, in {where}"
            yield Tell("returned", text, done.model_dump())

    def _since(self, restarted_at: float) -> int:
        if not restarted_at or restarted_at < self.complete_since:
            return -1
        return sum(at > restarted_at for at in self.rounds)


def _with_times(record: RecoveryRecord, progress: Progress, at: float) -> RecoveryRecord:
    """What the process says of itself, on the syncer's clock; times once known do not move."""
    t = progress.recovery
    if t is None:
        return record
    started_at = record.restarted_at or max(at - t.age_s, 0.0)

    def when(offset_s: float | None) -> float:
        return 0.0 if offset_s is None else started_at + offset_s

    return record.model_copy(
        update={
            "restarted_at": started_at,
            "joined_at": when(t.granted_s),
            "donor_at": when(t.donor_s),
            "transferred_at": when(t.settled_s),
            "stepping_at": when(t.stepping_s),
            "donor": t.donor,
            "source": t.source,
            "attempts": t.attempts,
        }
    )
