"""Once K contributions are in: how long a round still waits for the rest.

How long its steps take, and how many are at stake, a learner says of itself. Both are believed
within bounds, and ever less often while it does not answer: one that lies costs others little.
"""

from statistics import median_low

from diloco_shared.protocol.messages import ContributionManifest
from diloco_shared.spec.algorithm import Algorithm
from diloco_syncer.members.roster import Member, Roster
from diloco_syncer.rounds.grace import TIMES, Timings, stragglers_s
from diloco_syncer.rounds.round import Round

# Rounds whose pull is remembered, to learn from answers that come too late: those of the last
# half minute and more on a fast run.
PULLED_MAX = 64
# Of its usual time to answer, that a straggler gets: times scatter by about half.
USUAL_MARGIN = 1.5
# Times that a learner's steps may be longer than those of half of the learners: a device of some
# generations ago is about six times slower. Of one that says more, no more is believed.
SLOWER_MAX = 10
# Waits in vain in a row that count: each makes the next one half as likely, and beyond this there
# is none in the life of a run.
IN_VAIN_MAX = 32


class Stragglers:
    """What is known of how long learners take from pull to arrival."""

    def __init__(self, algorithm: Algorithm, roster: Roster, timings: Timings) -> None:
        self.algorithm = algorithm
        self.roster = roster
        self.timings = timings
        # By round, oldest first: when it asked, and its fragment's newest version then.
        self.asked: dict[int, tuple[float, int]] = {}

    def pulled(self, n: int, head: int, now: float) -> None:
        """Round n asks its participants; the newest version of its fragment is `head`."""
        self.asked[n] = now, head
        if len(self.asked) > PULLED_MAX:
            del self.asked[next(iter(self.asked))]

    def answered(self, m: ContributionManifest, now: float) -> None:
        """A contribution is here, in time or not.

        One that builds on what its round published was begun after that round. How long it took
        says nothing of an answer: learners of before 0.3 send such, a step later.
        """
        member, asked = self.roster.members.get(m.learner), self.asked.get(m.round)
        if member is None or asked is None or member.incarnation != m.incarnation:
            return
        pulled_at, head = asked
        if m.base <= head:
            if member.answer.value is None:
                member.in_vain = 0  # those were for what it said of itself; now that is measured
            member.answer.update(now - pulled_at)

    def in_time(self, learner: str) -> None:
        """A round takes its answer."""
        if member := self.roster.members.get(learner):
            member.missed = member.spent = member.in_vain = 0

    def left_out(self, r: Round, learner: str, now: float) -> None:
        """A round closes without its answer, and may have waited for it in vain."""
        member = self.roster.members.get(learner)
        if member is None:
            return
        member.missed += 1
        worth_s = r.worth_s.get(learner, 0.0)
        if worth_s > 0 and now >= r.pulled_at + worth_s:
            member.spent = member.missed
            member.in_vain = min(member.in_vain + 1, IN_VAIN_MAX)

    def slowest_s(self, r: Round, now: float) -> float:
        """Usual seconds of the slowest participant; those unknown take the mean transfer.

        The pull's timeout follows from it: nobody is given less than is worth waiting for.
        """
        members, step_s_max = self.roster.members, self._step_s_max(now)
        there = [members[learner] for learner in r.participants if learner in members]
        known = [self._usual_s(member, step_s_max) for member in there]
        # Learners answer at a step boundary: before there was an answer, no more is known.
        steps = [min(m.progress.step_s, step_s_max) for m in there if m.progress is not None]
        return max([self.timings.transfer.or_zero or max(steps, default=0.0), *known])

    def _step_s_max(self, now: float) -> float:
        """Seconds of a step that a learner is believed to need, whatever it says.

        So many times what half of the learners need; and at least so much that a pull has its
        usual limit for it, so that a slow learner among quick ones can answer one.
        """
        least_s = self.algorithm.pull_timeout_s_max / TIMES
        return max(least_s, SLOWER_MAX * self.roster.usual_step_s(now))

    def misses(self, r: Round) -> dict[str, int]:
        """Of participants that left rounds without an answer, how many in a row but for one.

        A learner gives its upload up when the pull is over. On a slow link none would ever arrive,
        though others are enough for a round each time, and nobody would learn how long one takes.
        """
        there = {learner: self.roster.members.get(learner) for learner in r.participants}
        return {name: m.missed - 1 for name, m in there.items() if m is not None and m.missed}

    def _usual_s(self, member: Member, step_s_max: float) -> float:
        """Seconds from a pull to a learner's answer; 0 where nothing is known."""
        usual_s = member.answer.or_zero
        # What comes too late may never be sent: a step of its own, and a transfer.
        if member.missed and member.progress is not None:
            step_s = min(member.progress.step_s, step_s_max)
            usual_s = max(usual_s, step_s + self.timings.transfer.or_zero)
        return usual_s

    def until(self, r: Round, now: float) -> float:
        """The rest have what Eq. 3 leaves, and no less than an answer takes.

        Learners answer at a step boundary, then transfer: a step and a mean transfer, or two of
        those. Without this part a small tau or a slow link would discard the work of every
        healthy learner but the first K; with it one hung learner still costs only that little.
        """
        step_s, transfer_s = self.roster.step_s(now), self.timings.transfer.or_zero
        slack_s = stragglers_s(
            factor=self.algorithm.grace_factor,
            overlap_steps=self.algorithm.overlap_steps,
            step_s=step_s,
            timings=self.timings,
        )
        answer_s = max(step_s, transfer_s) + transfer_s
        step_s_max = self._step_s_max(now)
        r.worth_s = {m: self._worth_waiting_s(r, m, step_s, step_s_max) for m in r.unanswered}
        return max(r.opened_at + slack_s, r.pulled_at + max([answer_s, *r.worth_s.values()]))

    def _worth_waiting_s(self, r: Round, learner: str, step_s: float, step_s_max: float) -> float:
        """Seconds from the pull in which this straggler usually answers, if that is worth it.

        Waiting costs those that have answered the steps they take meanwhile (adoption overwrites
        them); not waiting costs the straggler its own, this time again if it was left out before:
        so nobody who answers at all is left out for ever. Zero when waiting costs more.

        A wait in vain spends that, and makes the next one half as likely: one that reports and
        never answers in time costs the others ever less.
        """
        member = self.roster.members.get(learner)
        if member is None or member.progress is None:
            return 0.0
        usual_s = self._usual_s(member, step_s_max) * USUAL_MARGIN
        at_stake = min(member.progress.c_steps[r.fragment], self._at_stake_max(r))
        saved_steps = at_stake * (1 + member.missed - member.spent) / 2**member.in_vain
        return usual_s if usual_s * len(r.kept) <= saved_steps * step_s else 0.0

    def _at_stake_max(self, r: Round) -> int:
        """Steps that one contribution can hold, whatever a learner says of its own.

        Those between two versions, as the run has them or those who have answered; so often as
        there are versions that a contribution may be behind. Older work is refused anyway.
        """
        answered = [k.manifest.step_to - k.manifest.step_from for k in r.kept.values()]
        between = max(self.algorithm.sync_every_steps, median_low(answered or [0]))
        return between * (1 + self.algorithm.staleness_max)
