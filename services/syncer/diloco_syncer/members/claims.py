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
and again begins some of them a minute.

And of each kind of event a learner brings about some at once, and one more after a time. Pure.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from diloco_syncer.events import Tell

# Epochs that a learner may be ahead of the tape: more than any hub loses or any backup is old by. A
# hub that is put back goes on in an epoch whose number counts seconds, from 2026 on.
# From there to the largest number that a message holds is more than anybody's word leads.
EPOCHS_AHEAD_MAX = 1 << 32
# Epochs that one learner's word begins at once, and the seconds after which it may begin another.
AT_ONCE, AGAIN_S = 4, 60.0
# Lives, likewise. Whoever begins more of them is heard again a few seconds later.
LIVES_AT_ONCE, LIFE_AGAIN_S = 8, 5.0
# Learners, or kinds of words of them, that are remembered at once: several of each learner that a
# run may have. While there are more, no new one is believed.
WORDS_MAX = 8192


def too_far(epoch: int, of_tape: int) -> bool:
    """Whether nobody can be in that epoch."""
    return epoch > of_tape + EPOCHS_AHEAD_MAX


@dataclass(slots=True)
class Claims:
    """Of one process or term. As many learners as spoke within a few minutes."""

    at_once: int = AT_ONCE
    again_s: float = AGAIN_S
    # learner -> when all that its word has begun is forgotten
    used_until: dict[str, float] = field(default_factory=dict)

    def counts(self, learner: str, now: float) -> bool:
        """Whether the word of a learner is believed now; it is used up by that."""
        self.used_until = {who: at for who, at in self.used_until.items() if at > now}
        until = self.used_until.get(learner, now) + self.again_s
        full = learner not in self.used_until and len(self.used_until) >= WORDS_MAX
        if full or until > now + self.at_once * self.again_s:
            return False
        self.used_until[learner] = until
        return True


# --------------------------------------------------------------------------------------------------
# How much is told of one learner: its joins, its silences and the like cost it nothing, and must
# not push others' events out of the log through the leader's mouth.

# Kinds of events that one learner alone can bring about.
ABOUT_ONE = frozenset(
    {"flood", "join", "join-refused", "learner-alive", "learner-lost", "learner-seen"}
)
# Events of one kind about one learner at once, and the seconds after which there is one more. An
# honest machine that is taken away every few minutes stays below that.
TOLD_AT_ONCE, TOLD_AGAIN_S = 16, 120.0


@dataclass(slots=True)
class Telling:
    """Of one process, about all learners of a run.

    That a learner is lost, and that it is alive again, are a pair: pages take whoever was told lost
    for down until it is told alive. So the second is told where the first was, and nowhere else.
    """

    words: Claims = field(default_factory=lambda: Claims(TOLD_AT_ONCE, TOLD_AGAIN_S))
    # "kind learner" -> events left out since the last one that was told
    left_out: Counter[str] = field(default_factory=Counter)
    # Learners that are lost -> None where that was told; else what is to be told, and from when on.
    # As many as words are remembered; whoever is forgotten is told of as if it was never lost.
    lost: dict[str, tuple[Tell, float] | None] = field(default_factory=dict)

    def take(self, tell: Tell, now: float) -> Tell | None:
        """What is told of it; None for nothing."""
        learner = tell.data.get("learner")
        if tell.kind not in ABOUT_ONE or not isinstance(learner, str):
            return tell
        if tell.kind == "learner-alive" and learner in self.lost:
            told = self.lost.pop(learner) is None
        else:
            told = self.words.counts(f"{tell.kind} {learner}", now)
        if tell.kind == "learner-lost":
            self._is_lost(learner, None if told else (tell, now + TOLD_AGAIN_S))
        if told:
            return self._told(tell, learner)
        self._leave_out(tell, learner)
        return None

    def due(self, now: float) -> list[Tell]:
        """Losses that were left out and still hold: there are words for them again."""
        waiting = [(who, kept) for who, kept in self.lost.items() if kept and kept[1] <= now]
        told = list[Tell]()
        for learner, (tell, _) in waiting:
            if self.words.counts(f"{tell.kind} {learner}", now):
                self.lost[learner] = None
                self.left_out[f"{tell.kind} {learner}"] -= 1  # this one
                told.append(self._told(tell, learner))
            else:
                self.lost[learner] = (tell, now + TOLD_AGAIN_S)
        return told

    def _is_lost(self, learner: str, kept: tuple[Tell, float] | None) -> None:
        if learner in self.lost and self.lost[learner] is None:
            return  # it is known as lost already
        self.lost[learner] = kept
        if len(self.lost) > WORDS_MAX:
            del self.lost[next(iter(self.lost))]

    def _leave_out(self, tell: Tell, learner: str) -> None:
        self.left_out[f"{tell.kind} {learner}"] += 1
        if len(self.left_out) > WORDS_MAX:
            del self.left_out[next(iter(self.left_out))]

    def _told(self, tell: Tell, learner: str) -> Tell:
        left_out = self.left_out.pop(f"{tell.kind} {learner}", 0)
        if left_out <= 0:
            return tell
        return replace(tell, text=f"{tell.text} ({left_out} such events before it were left out)")
