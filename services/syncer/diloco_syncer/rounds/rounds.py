"""Rounds in flight: when one opens, how it moves along, what it becomes (ARCHITECTURE.md, A round).

Holds at most D rounds, in order of n, never two of one fragment. Asks for pulls and merges by
effects; hands finished rounds to the machine as tape records, strictly in order.
"""

from collections.abc import Iterator

from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import COUNT_MAX, ContributionManifest, Pull, TapeRound
from diloco_syncer.events import (
    Append,
    Chosen,
    ContributionSeen,
    Drop,
    Effect,
    Install,
    Malformed,
    Publish,
    Published,
    SendPull,
    Stage,
    Staged,
    StageFailed,
    Unstage,
)
from diloco_syncer.history.history import History
from diloco_syncer.members.roster import Member, Roster
from diloco_syncer.rounds.gate import judge
from diloco_syncer.rounds.grace import Timings, grace_s, pull_timeout_s
from diloco_syncer.rounds.norms import Norm
from diloco_syncer.rounds.quorum import Readiness, explain, ready
from diloco_syncer.rounds.round import Phase, Round, contribution_verdict
from diloco_syncer.rounds.stragglers import Stragglers
from diloco_syncer.streams.room import Room

# A lost pull is resent this often, in seconds: well above a LAN round trip, far below a timeout.
RESEND_S = 0.5
# Faults of what answers somebody else's pull, or comes of another life: refused, and the learner's
# own answer is still awaited. Any other fault is its answer: it gives one to each pull.
NO_ANSWERS = frozenset({"epoch", "term", "incarnation"})
# Why a contribution is refused, or a round ends, of which the merge cannot be computed: the gate
# has missed something.
UNMERGEABLE, UNMERGED = "unmergeable", "the merge failed"
# Why a round ends that waits for silent ones alone.
DESERTED = "those that have not answered are silent"


class Rounds:
    """The rounds of one leader's term."""

    def __init__(self, history: History, roster: Roster) -> None:
        self.history = history
        self.roster = roster
        self.room = Room(history)
        self.algorithm = history.spec.algorithm
        self.timings = Timings()
        self.stragglers = Stragglers(self.algorithm, roster, self.timings)
        self.open: list[Round] = []
        self.last_quorum_reason = ""
        self.suspended = ""  # why no round may open now, though all else would let it
        self.disturbed_at = float("-inf")  # since then nothing kept answers back
        self.over = False  # the end is on the tape, or on its way there
        self.stopped = False  # nothing opens any more: a stop has had its time

    # --- pacing --------------------------------------------------------------------------------

    @property
    def finishing(self) -> bool:
        return self.history.finishing_from >= 0

    @property
    def steps_needed(self) -> int:
        """Inner steps between two openings: H / F, but one at the end; shards begin H / P apart."""
        if self.finishing:
            return 1
        a, first = self.algorithm, not (self.history.next_round or self.open)
        offset = self.history.shard * a.sync_every_steps // a.fragments if first else 0
        return a.steps_per_round + offset

    def advance(self, now: float) -> list[Effect]:
        """Open what is due and move every round as far as `now` allows."""
        while self._open_next(now):
            pass
        return [effect for r in list(self.open) for effect in self._move(r, now)]

    def _open_next(self, now: float) -> bool:
        h = self.history
        n = max(h.next_round, self.open[-1].n + 1 if self.open else 0)
        fragment = h.owned[n % len(h.owned)]
        if h.paused or self.over or self.suspended or self.stopped or not h.initialised:
            return False
        if len(self.open) >= self.algorithm.rounds_in_flight_max:
            return False
        if any(r.fragment == fragment for r in self.open):
            return False
        if self.finishing and n >= h.finishing_from + len(h.owned):
            return False
        stepping = self.roster.stepping(now, h.epoch)
        if not h.enough.answer([m.learner for m in stepping]).enough:
            return False
        if max(m.step - m.pace_from for m in stepping) < self.steps_needed:
            return False
        since = {(m.learner, m.incarnation): m.baseline for m in self.roster.members.values()}
        for m in self.roster.members.values():
            m.round_opened(self.steps_needed)
        self.open.append(Round(n, fragment, now, since))
        return True

    def readiness(self, r: Round, now: float) -> Iterator[Readiness]:
        """Steps of every live, stepping learner since the round before `r` opened."""
        for m in self.roster.stepping(now):
            since = r.since.get((m.learner, m.incarnation), m.baseline)
            yield Readiness(m.learner, m.step - since, now - m.seen_at)

    def _everyone(self, r: Round, now: float) -> bool:
        """Whether nobody who is live has steps to take before the pull."""
        ready = (x.steps >= self.steps_needed for x in self.readiness(r, now))
        return bool(self.roster.stepping(now)) and all(ready)

    # --- phases --------------------------------------------------------------------------------

    def _move(self, r: Round, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if r.phase is Phase.COLLECTING:
            self._collect(r, now)
        if r.phase is Phase.GRACE and (now >= r.grace_until or self._everyone(r, now)):
            effects += self._pull(r, now)
        if r.phase is Phase.PULLING:
            self._without_replaced(r)
            if r.complete or now >= r.deadline:
                effects += self._close(r, now)
            elif self._deserted(r, now):
                effects += self._close(r, now, f"{DESERTED}: ")
            elif now >= r.resend_at:
                effects.append(self._send_pull(r, now))
        return effects

    def _without_replaced(self, r: Round) -> None:
        """A learner's newer life does not answer for the one that was asked: that is not waited
        for. What it has sent before is taken all the same, should it come in time."""
        for learner in r.unanswered:
            self._replaced(r, learner, self.roster.newest(learner))

    @staticmethod
    def _replaced(r: Round, learner: str, newest: int) -> None:
        """Leave an unanswered participant out if a newer life of it speaks."""
        asked = r.participants[learner]
        if newest > asked:
            r.leave_out(learner, asked, "missed", f"incarnation {newest} has taken its place")

    def _deserted(self, r: Round, now: float) -> bool:
        """Whether it waits for silent ones alone, while others could make the next round.

        Without such others there is nothing to win: over a slow link an answer may outlive the
        signs of life of whoever sends it.
        """
        awaited, h = r.unanswered, self.history
        if not all(self.roster.silent(who, r.participants[who], now) for who in awaited):
            return False
        stepping = [m.learner for m in self.roster.stepping(now, h.epoch)]
        return not h.enough.answer(r.kept).enough and h.enough.answer(stepping).enough

    def _collect(self, r: Round, now: float) -> None:
        reached, why = self._quorum(r, now)
        if not reached:
            return
        lease_s = self.roster.lease_s
        r.becomes(Phase.GRACE)
        r.quorum_at, r.quorum_reason = now, why
        self.last_quorum_reason = why
        # A longer wait was for a learner that is no longer live: not a measure of readiness.
        self.timings.quorum.update(min(now - r.opened_at, lease_s))
        window = grace_s(
            factor=self.algorithm.grace_factor,
            overlap_steps=self.algorithm.overlap_steps,
            step_s=self.roster.step_s(now),
            timings=self.timings,
            limit_s=self.algorithm.grace_s_max,
        )
        r.grace_until = now + window

    def _quorum(self, r: Round, now: float) -> tuple[bool, str]:
        """Whether enough are ready, and why or why not."""
        live, steps = tuple(self.readiness(r, now)), self.steps_needed
        answer, suspect_s = self.history.enough.answer(ready(live, steps)), self.roster.lease_s / 2
        why = explain(live, answer, steps_needed=steps, suspect_s=suspect_s)
        return answer.enough, why

    def cut(self, r: Round, now: float, why: str) -> list[Effect]:
        """Wait for nobody any more: what has come is merged if it is enough."""
        if r.phase is Phase.COLLECTING:
            r.quorum_at, r.quorum_reason = now, self._quorum(r, now)[1]
        if r.phase in (Phase.COLLECTING, Phase.GRACE):
            r.pulled_at = now
            return self._skip(r, now, why)
        return self._close(r, now, f"{why}: ") if r.phase is Phase.PULLING else []

    def _pull(self, r: Round, now: float) -> list[Effect]:
        r.becomes(Phase.PULLING)
        r.pulled_at = now
        self.stragglers.pulled(r.n, self.history.versions[r.fragment], now)
        for m in self.roster.live(now):
            why = self._ineligible(m, r.fragment)
            if why:
                r.leave_out(m.learner, m.incarnation, "ineligible", why)
            else:
                r.participants[m.learner] = m.incarnation
        answer = self.history.enough.answer(r.participants)
        if not answer.enough:
            return self._skip(r, now, f"{len(r.participants)} eligible, {answer.needs}")
        r.deadline = now + pull_timeout_s(
            transfer_s=self.stragglers.slowest_s(r, now),
            skips=max(self.history.skips_in_a_row, self._misses(r)),
            least_s=self.algorithm.pull_timeout_s_min,
            limit_s=self.algorithm.pull_timeout_s_max,
        )
        return [self._send_pull(r, now)]

    def _misses(self, r: Round) -> int:
        """Rounds in a row that somebody missed, where the others are enough without it: then the
        round does not wait for so long, and only that learner's upload has the time."""
        misses = self.stragglers.misses(r)
        others = {m: life for m, life in r.participants.items() if m not in misses}
        return max(misses.values(), default=0) if self.history.enough.answer(others).enough else 0

    def _ineligible(self, m: Member, fragment: int) -> str:
        p = m.progress
        if p is None or not m.answers:
            return f"is {p.state if p else 'joining'}"
        if p.epoch != self.history.epoch:
            return f"is in epoch {p.epoch}, the run in {self.history.epoch}"
        if fragment >= len(p.c_steps) or p.c_steps[fragment] < 1:
            return "no step that counts since it adopted the fragment"
        # Whoever holds, to drain or in a pause, has not heard yet that its work was merged.
        if not self.history.ledger.tokens_new(fragment, m.learner, m.incarnation, 0, p.tokens):
            return "no steps since a round merged all that it has done"
        return ""

    def _send_pull(self, r: Round, now: float) -> SendPull:
        r.resend_at = now + RESEND_S
        return SendPull(
            Pull(
                epoch=self.history.epoch,
                term=self.history.term,
                round=r.n,
                fragment=r.fragment,
                participants=tuple(sorted(r.participants)),
                timeout_s=max(r.deadline - now, 0.0),
            )
        )

    def contribution(self, event: ContributionSeen, now: float) -> tuple[str, list[Effect]]:
        """Take in a contribution: (kind of refusal or "", effects). `advance` then goes on."""
        manifest, key = event.manifest, event.manifest.blob.subject
        r = next((r for r in self._pulling if r.n == manifest.round), None)
        if r is None:
            return self._after_all(manifest, now)
        if manifest.learner not in r.participants:
            return "uninvited", [Drop(key)]
        refusal = judge(event, r, self.history, self._step_max(manifest.learner, r))
        known = r.answer(manifest.learner)
        drop: list[Effect] = [] if manifest.learner in r.kept and known == key else [Drop(key)]
        if refusal is not None and refusal.kind in NO_ANSWERS:
            if refusal.kind == "incarnation" and manifest.learner in r.unanswered:
                self._replaced(r, manifest.learner, manifest.incarnation)
            return refusal.kind, drop
        if known:
            return "" if known == key else "second", drop
        self._answered(r, manifest, now)
        if refusal is not None:
            r.refuse(manifest, f"{refusal.kind}: {refusal.reason}")
            return "", drop
        r.keep(manifest, event.norm, self.algorithm.weighting)
        self.stragglers.in_time(manifest.learner)
        self._hurry(r, now)
        return "", []

    def unusable(self, event: Malformed) -> None:
        """A participant's answer was refused before anybody could look into it. No other follows
        it, so the round waits no longer; one that comes in time all the same is taken."""
        h = self.history
        for r in self._pulling:
            place = h.epoch, r.fragment, r.n, h.term
            for learner in r.unanswered:
                if event.answer == subjects.contribution(h.spec.name, learner, *place):
                    why = f"its answer was refused: {event.kind}: {event.reason}"
                    r.leave_out(learner, r.participants[learner], "missed", why[:500])

    def _step_max(self, learner: str, r: Round) -> int:
        """The step that its life here may have reached when it answered, by what it reports itself.

        Its newest report is a lease old at most when it is pulled, and it answers until the
        deadline. Twice what it steps meanwhile, and a round of every fragment for a report that
        is only averaged; so that only who contradicts itself is beyond.
        """
        member = self.roster.members.get(learner)
        if member is None or member.incarnation != r.participants[learner]:
            return COUNT_MAX
        p = member.progress
        if p is None or not p.step_s > 0:
            return COUNT_MAX
        waited_s = self.roster.lease_s + max(r.deadline - r.pulled_at, 0.0)
        steps = min(2 * waited_s / p.step_s, float(COUNT_MAX // 2))
        return p.step + int(steps) + self.algorithm.sync_every_steps

    @property
    def _pulling(self) -> Iterator[Round]:
        return (r for r in self.open if r.phase is Phase.PULLING)

    def _after_all(self, manifest: ContributionManifest, now: float) -> tuple[str, list[Effect]]:
        """Of a round that waits for nobody: too late, or a repeat of what is being merged."""
        key = manifest.blob.subject
        if any(chosen.key == key for r in self.open for chosen in r.chosen):
            return "", []
        self.stragglers.answered(manifest, now)
        return "late", [Drop(key)]

    def _answered(self, r: Round, manifest: ContributionManifest, now: float) -> None:
        """A participant's first answer tells how long its transfer took."""
        if r.pulled_at >= self.disturbed_at:
            self.timings.transfer.update(now - r.pulled_at)
        self.stragglers.answered(manifest, now)

    def disturbed(self, now: float) -> None:
        """The bus was away: how long answers took meanwhile says nothing of what they take."""
        self.disturbed_at = now
        self.stragglers.asked.clear()

    def hurry(self, now: float) -> None:
        """The quorum is another one: what has enough of it now waits for stragglers alone."""
        for r in self._pulling:
            self._hurry(r, now)

    def _hurry(self, r: Round, now: float) -> None:
        if self.history.enough.answer(r.kept).enough:
            r.deadline = min(r.deadline, max(now, self.stragglers.until(r, now)))

    def _close(self, r: Round, now: float, why: str = "") -> list[Effect]:
        r.quorum = self.history.quorum
        for learner in r.unanswered:
            self.stragglers.left_out(r, learner, now)
            r.leave_out(
                learner,
                r.participants[learner],
                "missed",
                f"nothing complete after {now - r.pulled_at:.2f} s",
            )
        return self._refuse_outliers(r) + self._stage(r, now, why)

    def _stage(self, r: Round, now: float, why: str) -> list[Effect]:
        """Merge what is kept of a round, if it is enough."""
        answer = self.history.enough.answer(r.kept)
        if not answer.enough:
            return self._skip(r, now, f"{why}{len(r.kept)} contributions, {answer.needs}")
        if not sum(k.weight for k in r.kept.values()) > 0:
            return self._skip(r, now, "all weights are zero")
        if r.phase is not Phase.STAGING:  # where a merge failed, it is computed once more
            r.becomes(Phase.STAGING)
        r.closed_at = now
        r.chosen = tuple(
            Chosen(
                learner,
                k.manifest.blob.subject,
                k.weight,
                k.manifest.base,
                k.manifest.codec,
                k.manifest.values,
            )
            for learner, k in sorted(r.kept.items())
        )
        h, r.keyframe = self.history, self._keyframe(r)
        r.fraction = h.stamp.fraction
        return [Stage(h.epoch, r.n, r.fragment, r.chosen, r.keyframe, r.fraction)]

    def _keyframe(self, r: Round) -> bool:
        version = self.history.versions[r.fragment] + 1
        regular = self.algorithm.deltas_since(r.fragment, version) == 0
        return regular or self.room.keyframe_due(r.fragment)

    def _refuse_outliers(self, r: Round) -> list[Effect]:
        norms = {
            learner: Norm(k.norm, k.manifest.step_to - k.manifest.step_from)
            for learner, k in r.kept.items()
        }
        effects: list[Effect] = []
        for learner, why in self.history.norms.outliers(r.fragment, norms).items():
            k = r.kept[learner]
            r.refuse(k.manifest, f"outlier: norm per root step {why}", norm=k.norm)
            effects.append(Drop(k.manifest.blob.subject))
        return effects

    def _skip(self, r: Round, now: float, reason: str) -> list[Effect]:
        r.becomes(Phase.READY)
        r.closed_at, r.skip_reason = now, reason
        r.quorum = self.history.quorum
        drops: list[Effect] = [Drop(k.manifest.blob.subject) for k in r.kept.values()]
        for k in list(r.kept.values()):
            r.refuse(k.manifest, f"skipped: {reason}", norm=k.norm)
        return drops

    def staged(self, event: Staged | StageFailed, now: float) -> list[Effect]:
        """The merge of a round is computed, or cannot be."""
        # A round of that number in an earlier epoch is void, and so is its merge.
        of_now = (r for r in self.open if event.epoch == self.history.epoch)
        r = next((r for r in of_now if r.n == event.round and r.phase is Phase.STAGING), None)
        if r is None:
            return [Unstage(event.epoch, event.round)]
        if isinstance(event, StageFailed):
            return self._stage_failed(r, event, now)
        r.becomes(Phase.READY)
        r.staged = event
        return []

    def _stage_failed(self, r: Round, event: StageFailed, now: float) -> list[Effect]:
        """The merge goes on without what is to blame; where nobody knows that, it is skipped."""
        r.chosen = ()
        k = r.kept.get(event.learner)
        if k is None:
            return self._skip(r, now, f"{UNMERGED}: {event.reason}"[:400])
        r.refuse(k.manifest, f"{UNMERGEABLE}: {event.reason}", norm=k.norm)
        return [Drop(k.manifest.blob.subject), *self._stage(r, now, f"{UNMERGED}: ")]

    # --- to the tape ---------------------------------------------------------------------------

    def next_record(self, wall: float) -> Append | None:
        """The record of the earliest unrecorded round, if it is ready."""
        r = next((r for r in self.open if not r.pushed and r.phase is not Phase.PUBLISHING), None)
        if r is None or r.phase is not Phase.READY:
            return None
        r.pushed = True
        h, committed = self.history, r.staged is not None
        counts = self.roster.counts.to_record(h.ledger)
        for learner, k in sorted(r.kept.items()):
            m = k.manifest
            new = h.ledger.tokens_new(
                r.fragment, learner, m.incarnation, m.tokens_from, m.tokens_to
            )
            r.verdicts[learner] = contribution_verdict(
                m, "merged", "in time", norm=k.norm, weight=k.weight, tokens_new=new
            )
        return Append(
            TapeRound(
                epoch=h.epoch,
                term=h.term,
                round=r.n,
                fragment=r.fragment,
                outcome="committed" if committed else "skipped",
                reason=r.skip_reason
                or f"merged {len(r.kept)} contribution" + "s" * (len(r.kept) != 1),
                quorum_reason=r.quorum_reason,
                quorum=r.quorum,
                version=h.versions[r.fragment] + (1 if committed else 0),
                verdicts=tuple(v for _, v in sorted(r.verdicts.items())),
                keyframe=committed and r.keyframe,
                outer_fraction=r.fraction,
                anchor_digest=r.staged.anchor_digest if r.staged else "",
                master_digest=r.staged.master_digest if r.staged else "",
                payload_digest=r.staged.payload_digest if r.staged else "",
                stamp=h.stamp_after(r.n, wall, h.ledger.processed_with(counts)),
                quorum_s=max(r.quorum_at - r.opened_at, 0.0),
                grace_s=max(r.pulled_at - r.quorum_at, 0.0),
                sync_s=max(r.closed_at - r.pulled_at, 0.0),
                at=wall,
                counts=counts,
            )
        )

    def recorded(self, record: TapeRound) -> list[Effect]:
        """The tape has the round (and the history has applied it): put it in force."""
        r = next(r for r in self.open if r.n == record.round)
        if record.outcome == "skipped":
            self.open.remove(r)
            return []
        h, p = self.history, record.fragment
        r.becomes(Phase.PUBLISHING)
        r.publishes = (record.epoch, p, record.version)
        for learner in r.kept:
            member = self.roster.members.get(learner)
            if member is not None:
                member.merged_round = record.round
        publish = Publish(
            round=record.round,
            fragment=p,
            epoch=record.epoch,
            term=record.term,
            version=record.version,
            prev_version=-1 if record.keyframe else record.version - 1,
            participants=tuple(sorted(r.kept)),
            last_merged=dict(h.last_merged[p]),
            stamp=record.stamp,
            checkpoint=h.checkpoint,
        )
        return [Install(record.round, p), publish, *(Drop(c.key) for c in r.chosen)]

    def published(self, event: Published, now: float) -> None:
        """A publication is on DN."""
        self.room.published(event.fragment, keyframe=event.keyframe)
        for r in self.open:
            # An earlier epoch's may come late: the round after it is not published by that.
            if r.publishes == (event.epoch, event.fragment, event.version):
                self.timings.sync.update(now - r.pulled_at)
                self.timings.publish.update(now - r.closed_at)
                self.open.remove(r)
                return

    def abort(self) -> list[Effect]:
        """History restarts, or ends: what is not on the tape is void.

        What is recorded goes on being published; but where history goes back its number is not of
        this history any more, and comes again.
        """
        void = [r for r in self.open if r.phase is not Phase.PUBLISHING]
        self.open = []
        merges = [Unstage(r.staged.epoch, r.n) for r in void if r.staged]
        return [*merges, *(Drop(k.manifest.blob.subject) for r in void for k in r.kept.values())]

    @property
    def deadline(self) -> float | None:
        """When `advance` must be called next for time's sake alone."""
        times = [r.grace_until for r in self.open if r.phase is Phase.GRACE]
        times += [min(r.deadline, r.resend_at) for r in self.open if r.phase is Phase.PULLING]
        return min(times, default=None)
