"""How often a learner's word counts, where nothing but its word stands behind it.

Each learner has some words at once, and gets one back after a time. Two things rest on a word:

An epoch that the tape lacks. After a power cut one learner may be the only one that has what the
tape has lost, so its word alone has to count: whoever went on with another version of the same
number would train on two histories.
But whoever lies could begin epoch after epoch, each of which voids all rounds under way, until no
number is left. An honest life needs such an epoch once for what was lost before this leader began,
and once for each that another syncer shard begins.

A new life. A report with a higher number is one, and costs its sender nothing. Each one has a
place in the next record, and replaces the life before it. A learner that its keeper starts again
and again begins some of them a minute. Pure.
"""

from dataclasses import dataclass, field

# Epochs that a learner may be ahead of the tape: more than any hub loses or any backup is old by. A
# hub that is put back goes on in an epoch whose number counts seconds, from 2026 on.
# From there to the largest number that a message holds is more than anybody's word leads.
EPOCHS_AHEAD_MAX = 1 << 32
# Epochs that one learner's word begins at once, and the seconds after which it may begin another.
AT_ONCE, AGAIN_S = 4, 60.0
# Lives, likewise. Whoever begins more of them is heard again a few seconds later.
LIVES_AT_ONCE, LIFE_AGAIN_S = 8, 5.0


def too_far(epoch: int, of_tape: int) -> bool:
    """Whether nobody can be in that epoch."""
    return epoch > of_tape + EPOCHS_AHEAD_MAX


@dataclass(slots=True)
class Claims:
    """Of one leader's term. As many learners as spoke within a few minutes."""

    at_once: int = AT_ONCE
    again_s: float = AGAIN_S
    # learner -> when all that its word has begun is forgotten
    used_until: dict[str, float] = field(default_factory=dict)

    def counts(self, learner: str, now: float) -> bool:
        """Whether the word of a learner is believed now; it is used up by that."""
        self.used_until = {who: at for who, at in self.used_until.items() if at > now}
        until = self.used_until.get(learner, now) + self.again_s
        if until > now + self.at_once * self.again_s:
            return False
        self.used_until[learner] = until
        return True
