"""Run-wide checkpoints: one consistent cut through syncer and learners (paper section 4).

    wanted ──► mark on the tape ──► captured, announced ──► every live learner's part ──► sealed
                                             └──► not to be written: failed

After Chandy and Lamport: the leader marks its tape and captures its state as of that record; every
publication and beat from then on carries the mark; a learner that meets it keeps its own state
before it adopts anything more. So no part has seen what another part has not yet sent. What was
under way is not kept: publications come again as keyframes, contributions are void with the epoch,
and the ledger counts them.

With several syncer shards the first begins; the others set their mark when a message of a learner
tells of it, before they record a round that it may be part of. A learner may lie: they look for the
mark on the first shard's tape, and record nothing meanwhile. While no learner is there to tell,
they look by themselves. So does one that is over, whose tape takes no mark: nothing that was sent
after the mark is in its state, so that is its part.
A mark has a number that only grows.
The tape may lose a mark, by a power cut or because the hub was put back from a backup; learners
have met it all the same, and parts of it are written. So the first shard begins above all numbers
of which anything lies where checkpoints are.
Pure: the edge writes and looks, and answers with Kept, Sealed, MarkFound and NumberFound.
"""

import math
from collections.abc import Collection

from diloco_shared.protocol.messages import Progress, TapeCheckpoint, TapeRecord
from diloco_shared.protocol.pace import stored_within_s
from diloco_shared.protocol.records import CheckpointState
from diloco_shared.spec.optimizers import inner_state_bytes
from diloco_shared.spec.run import RunSpec
from diloco_syncer.events import (
    Capture,
    Effect,
    FindMark,
    FindNumber,
    Kept,
    MarkFound,
    NumberFound,
    Seal,
    Sealed,
    Tell,
)
from diloco_syncer.history.history import History
from diloco_syncer.members.roster import Roster

# Between two looks of a shard by itself, in seconds: of one that is over until the run is left,
# since its learners may have met a mark and gone, and the first shard waits.
LOOK_S = 10.0


class CheckpointDecisions:
    """Of one leader's term: at most one is being made."""

    def __init__(self, spec: RunSpec, history: History, roster: Roster) -> None:
        self.keeping, self.optimizer = spec.keeping, spec.inner.optimizer
        self.history = history
        self.roster = roster
        self.wanted = 0  # newest number that the user asked for
        self.needed: tuple[str, ...] = ()  # checkpoints that may be read again
        self.claims = MarkClaims()  # marks of the first shard's tape that learners say they met
        self.found = 0  # newest mark there, as far as we have looked
        self.held = False  # the run is going back to a checkpoint: no mark is set meanwhile
        self.goes_back = False  # this shard shall, or is doing so: what is to come is of then
        # Newest number at the place of checkpoints; None: nobody has looked since the newest mark.
        self.there: int | None = None
        self.looking = False  # there
        self.number = 0  # of the one that this term makes; 0: none
        self.mark_seq = 0  # of its mark on the tape
        self.invited: dict[str, int] = {}  # learners that trained at the mark -> incarnation
        self.pending: set[str] = set()  # those of them that are awaited
        self.until = 0.0
        self.waited = False  # until then
        self.own_part = False
        self.sealing = False
        self.open = 0  # the mark there of a checkpoint that is being made
        self.gave = (0, 0)  # epoch and number of the newest that this shard, over, gave a part of
        self.given = True  # it lies there
        self.untold = False  # no learner is there that could tell of a mark
        self.look_at = 0.0  # for marks, where nobody tells of them
        self.last_look = ""  # when all shards are over: "due", "begun", then "done"
        # What became of it after the end of the run, whose tape takes no record of it.
        self.ended: tuple[CheckpointState, str] | None = None

    @property
    def making(self) -> bool:
        """Whether this term makes one, and nobody knows yet what becomes of it."""
        open_ = self.history.checkpoint_open and self.history.checkpoint == self.number
        return bool(self.number) and open_ and self.ended is None

    @property
    def owes(self) -> bool:
        """Whether this shard, which is over, may still have to give a part."""
        looks = self.last_look in ("due", "begun")
        return bool(self.history.shard) and (looks or not self.given)

    def all_over(self) -> None:
        """All shards are over: every mark that there will be is on the first tape by now."""
        if self._over:  # else it was stopped before it had a state
            self.last_look, self.look_at = "due", 0.0

    def given_up(self) -> None:
        """The run is over and left."""
        if self.making:
            self.ended = "failed", "the run was over before it was complete"

    @property
    def deadline(self) -> float | None:
        """When `advance` is due at the latest; None once it waits for its own part alone, or for
        what a look finds."""
        waits = self.number and not (self.sealing or self.waited)
        if waits and not self._over:
            return self.until
        return self.look_at if self._looks_itself and not self.claims.looking else None

    @property
    def _over(self) -> bool:
        """Whether this is another shard than the first, with a state, and at its end."""
        h = self.history
        return bool(h.shard and h.initialised and h.outcome)

    @property
    def _looks_itself(self) -> bool:
        """Whether nobody will tell this shard of a mark, be there one."""
        h = self.history
        return self._over or (self.untold and bool(h.shard and h.initialised and not h.outcome))

    def state(self) -> tuple[CheckpointState, str]:
        """For people: (state, why) of the newest."""
        h = self.history
        if not h.checkpoint:
            return "", ""
        if h.checkpoint_open and h.outcome and not self.making:
            return self.ended or ("failed", "the run was over before it was complete")
        if not h.checkpoint_open:
            failed = h.checkpoint_outcome == "failed"
            return "failed" if failed else "complete", h.checkpoint_reason
        waits = (
            f"waiting for {', '.join(sorted(self.pending))}" if self.pending else "being written"
        )
        return "making", waits

    # --- records -------------------------------------------------------------------------------

    def next_record(self, wall: float) -> TapeCheckpoint | None:
        """A mark to set, or the end of one whose leader is gone."""
        h = self.history
        if h.checkpoint_open and self.ended and not h.outcome:
            # A restore took back the end that had forbidden its record.
            return self._record(self.number, *self.ended, wall)
        if h.checkpoint_open and h.checkpoint != self.number:
            return self._record(
                h.checkpoint, "failed", "the leader changed while it was made: ask again", wall
            )
        passed = self.found > h.checkpoint
        if h.checkpoint_open and passed and not self.sealing:
            # The first shard has given it up: its next mark may not wait.
            return self._record(h.checkpoint, "failed", "learners have met the next mark", wall)
        if not self._may_begin:
            return None
        if h.shard:
            if self.found > h.checkpoint:
                return self._record(self.found, "begun", "learners have met its mark", wall)
            return None
        if not (reason := self._due) or self.there is None:
            return None
        number = max(self.wanted, h.checkpoint + 1, self.there + 1)
        return self._record(number, "begun", reason, wall)

    @property
    def _may_begin(self) -> bool:
        h = self.history
        # A part that is being written is of the end that a restore took back: it would come later.
        busy = h.checkpoint_open or self.held or not self.given
        return not (busy or not h.initialised or h.outcome)

    @property
    def _due(self) -> str:
        """Why the first shard shall begin one, or ""."""
        h, every = self.history, self.keeping.run_checkpoint_every_steps
        if self.wanted > h.checkpoint:
            return "as the user asked"
        if every is not None and h.stamp.steps // every > h.checkpoint_steps // every:
            return f"every {every} steps"
        return ""

    @property
    def needed_from(self) -> float:
        """The record from which on the other shards look on the tape; inf while none is needed."""
        return self.mark_seq if self.number else math.inf

    def overdue(self, pending: Collection[TapeRecord]) -> bool:
        """Whether learners have met a mark that is neither on this tape nor on its way there.

        No round may be recorded before it: what they send is of after the cut. Nor may one be
        before it is known whether there is such a mark.
        """
        begun = [r.number for r in pending if isinstance(r, TapeCheckpoint)]
        newest = max(self.claims.newest, self.found)
        return bool(self.history.shard) and newest > max([self.history.checkpoint, *begun])

    def sealed(self, event: Sealed, wall: float) -> TapeCheckpoint | None:
        """The manifest is written, or cannot be: the record that says so."""
        if event.number == self.gave[1] and not self.given:
            self.gave, self.given = (0, 0), True
            self.open = 0  # it is found again with the next look, which there has to be
            self.last_look = self.last_look and "due"
        if event.number != self.number:
            return None
        outcome: CheckpointState = "failed" if event.fault else "complete"
        reason = event.fault or f"parts of {', '.join(event.learners) or 'no learner'}"
        # Should its record come too late for the tape, the run is over.
        self.ended = outcome, reason[:500]
        if self.history.outcome:
            return None
        return self._record(event.number, outcome, reason, wall)

    def _record(self, number: int, outcome: str, reason: str, wall: float) -> TapeCheckpoint:
        return TapeCheckpoint.model_validate(
            {
                "term": self.history.term,
                "number": number,
                "outcome": outcome,
                "reason": reason[:500],
                "at": wall,
            }
        )

    def recorded(self, record: TapeCheckpoint, seq: int, now: float) -> list[Effect]:
        """The tape has it, and so has the history."""
        text = f"checkpoint {record.number} {record.outcome}: {record.reason}"
        data = {"number": record.number, "state": record.outcome}
        told: list[Effect] = [Tell("checkpoint", text[:500], data)]
        if self.history.shard and record.outcome != "failed":
            told = []  # the first shard tells of the whole
        self.ended = None
        if record.outcome != "begun":
            self.number = 0
            return told
        self.number, self.own_part, self.sealing = record.number, False, False
        self.there = None
        self.mark_seq = seq
        self.waited = False
        h, epoch = self.history, self.history.epoch
        self.until = now + self._parts_s
        self.invited = {
            m.learner: m.incarnation
            for m in self.roster.stepping(now, epoch)
            if h.shard == 0  # which waits for the learners' parts, and for those of all shards
        }
        self.pending = set(self.invited)
        return [Capture(record.number, seq, record.reason, record.at), *told]

    # --- parts ---------------------------------------------------------------------------------

    def progress(self, progress: Progress) -> None:
        """A learner tells which mark it has met."""
        self.met(progress.mark, progress.learner)

    def met(self, number: int, learner: str) -> None:
        """A learner that says it had met this mark sent something."""
        if not self.history.shard or number <= max(self.found, self.history.checkpoint):
            return
        self.claims.tell(number, learner)

    def marked(self, event: MarkFound) -> str:
        """What the first shard's tape has; who told of a mark that it has not, "" for nobody."""
        self.found, self.open = max(self.found, event.newest), event.open
        if self.last_look == "begun":
            self.last_look = "done"
        return self.claims.found(self.found)

    def numbered(self, event: NumberFound) -> None:
        """What lies at the place of checkpoints."""
        self.there, self.looking = event.newest, False

    def _look(self, now: float) -> list[Effect]:
        if self.history.shard:
            self.untold = not self.roster.live(now)
            anyway = self._looks_itself and now >= self.look_at
            if not self.claims.look(anyway=anyway):
                return []
            self.look_at = now + LOOK_S
            if self.last_look == "due":
                self.last_look = "begun"
            return [FindMark()]
        if self.looking or self.there is not None or not (self._may_begin and self._due):
            return []
        self.looking = True
        return [FindNumber()]

    def kept(self, event: Kept) -> None:
        """The leader's own part is durable."""
        self.given |= event.number == self.gave[1]
        if event.number == self.number:
            self.own_part = True

    def advance(self, now: float, wall: float) -> list[Effect]:
        """Look for what has to be known; seal once nobody is awaited any more."""
        return [*self._look(now), *self._give(wall), *self._advance(now)]

    def _give(self, wall: float) -> list[Effect]:
        """A part of a mark that the first shard set, and that the tape of one that is over lacks.

        Whoever had met it says so with whatever it sends, and no round was recorded after that.
        """
        writing = not self.given or (self.number and not (self.own_part or self.ended))
        h, mark = self.history, (self.history.epoch, self.open)
        if not self._over or writing or self.goes_back:
            return []
        if self.open <= h.checkpoint or mark == self.gave:
            return []
        self.gave, self.given = mark, False
        return [Capture(self.open, h.seq, "its mark was met", wall)]

    def _advance(self, now: float) -> list[Effect]:
        if not self.number or self.sealing:
            return []
        self.pending = {
            m.learner
            for m in self.roster.live(now)
            if m.learner in self.pending
            and m.incarnation == self.invited[m.learner]
            and (m.progress is None or m.progress.checkpoint < self.number)
        }
        self.waited = now >= self.until
        if not self.own_part or (self.pending and not self.waited):
            return []
        self.sealing = True
        late = {m: f"nothing came within {self._parts_s:.0f} s" for m in sorted(self.pending)}
        return [Seal(self.number, dict(self.invited), late, self.needed)]

    @property
    def _parts_s(self) -> float:
        """Seconds that learners' parts are waited for: nobody begins another checkpoint meanwhile.

        A learner goes straight from the mark to the writing, and gives up sooner by itself.
        """
        return stored_within_s(inner_state_bytes(self.optimizer, self.history.layout))


# --------------------------------------------------------------------------------------------------
# What learners say of the newest mark on the first shard's tape, until it is looked for.
#
# A mark is on the tape before anybody meets it: so what was told before a look began is true, or
# was never true. What is told while one is under way may be of a mark since, and is looked for
# again.
#
# Learners repeat themselves every second, a look may take longer than that, and no round is
# recorded meanwhile. So what was looked for in vain is not looked for again because the same
# learner repeats it. That one may be honest: the checkpoint is over, and its mark in the archive;
# or the tape has lost its end.

# Of learners that are not heard any more; as many as a run has (`roster.MEMBERS_MAX`).
REFUTED_MAX = 512


class MarkClaims:
    """Of one leader's term; as many as there are learners."""

    def __init__(self) -> None:
        self.before: dict[str, int] = {}  # learner -> mark, told before the look
        self.meanwhile: dict[str, int] = {}  # told since it began
        self.looking = False
        self.refuted: dict[str, int] = {}  # learner -> its last claim that was not borne out
        self.wrong = set[str]()  # whose were not by the looks that follow each other now

    @property
    def newest(self) -> int:
        """The newest mark that is told of and not settled; 0: none is."""
        return max([0, *self.before.values(), *self.meanwhile.values()])

    def tell(self, number: int, learner: str) -> None:
        """A learner says that it has met this mark, which is newer than what is known."""
        if number != self.refuted.get(learner) and learner not in self.wrong:
            claims = self.meanwhile if self.looking else self.before
            claims[learner] = max(number, claims.get(learner, 0))

    def look(self, *, anyway: bool = False) -> bool:
        """Whether a look shall begin now; `anyway`: also where nobody tells."""
        begins = (bool(self.before) or anyway) and not self.looking
        self.looking |= begins
        return begins

    def found(self, newest: int) -> str:
        """The look is over: who told of what is not there, "" for nobody."""
        wrong = {learner: n for learner, n in self.before.items() if n > newest}
        self._refute(wrong)
        self.before = {
            learner: n
            for learner, n in self.meanwhile.items()
            if n > newest and learner not in self.wrong
        }
        self.meanwhile, self.looking = {}, False
        if not self.before:
            self.wrong.clear()
        return max(wrong, key=lambda learner: wrong[learner], default="")

    def _refute(self, claims: dict[str, int]) -> None:
        self.wrong |= claims.keys()
        self.refuted |= claims
        while len(self.refuted) > REFUTED_MAX:
            del self.refuted[next(iter(self.refuted))]
