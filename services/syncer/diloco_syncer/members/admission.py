"""Who may work for the run, and from whom a newcomer gets its inner state (paper section 4)."""

from diloco_shared.protocol.messages import Donate, Grant, Join
from diloco_shared.spec.algorithm import MEMBERS_MAX
from diloco_shared.spec.run import RunSpec, shared_keys
from diloco_syncer.events import Effect, SendDonate, SendGrant, Tell
from diloco_syncer.history.history import History
from diloco_syncer.members.claims import Claims
from diloco_syncer.members.donations import Donations, choose_donor, donation_s
from diloco_syncer.members.layouts import Layouts
from diloco_syncer.members.roster import Member, Roster

# Grants remembered for repeated joins: two of each learner that a run may have, so that nobody's
# joins push out another one's.
GRANTS_EACH, GRANTS_MAX = 2, 2 * MEMBERS_MAX
# Donors that a newcomer is given at once: all that it tries, and some for its next life. It gets
# one back after as long as a donation may take, and all of them once its work is merged. And after
# an hour in any case: a large model's donation may take days, and pods die and come back each hour.
DONORS_AT_ONCE, DONOR_AGAIN_S_MAX = 8, 3600.0
# Grants remembered to know which states were asked for: more of each learner than STATE, which is
# made for a few newcomers, has room for. Whoever fills it may not have honest donors accused.
ASKED_EACH = 2 * DONORS_AT_ONCE
ASKED_MAX = ASKED_EACH * MEMBERS_MAX


class Admission:
    """Answers joins; idempotent per nonce."""

    def __init__(self, spec: RunSpec, history: History, roster: Roster) -> None:
        self.spec = spec
        self.history = history
        self.roster = roster
        self.donations = Donations()
        self.grants: dict[str, Grant] = {}  # by nonce, the newest last
        self.asked: dict[str, Grant] = {}  # likewise, those that name a donor
        self.given = Claims(DONORS_AT_ONCE)  # donors, to newcomers
        # newcomer -> which work of it was merged last, when it was given one
        self.given_at: dict[str, tuple[int, int]] = {}
        self.layouts = Layouts(spec, history)

    def due(self, now: float) -> list[Effect]:
        """Requests to donors that are to be sent (again) now."""
        return [SendDonate(d) for d in self.donations.due(self.roster, now)]

    def join(self, join: Join, now: float) -> list[Effect]:
        """Answer a join: with a grant that names its donor, or with one that says why not.

        A repeat of a join that was granted gets the same grant again. One of a life that is over
        gets no answer: a beat tells it so.
        """
        if self.roster.over(join.learner, join.incarnation, now):
            return []  # not refused for good: a beat tells it to begin a new life
        self._hear_layout(join, now)
        cached = self.grants.get(join.nonce)
        asked = (join.learner, join.incarnation)
        why = self._refuses(join, now)
        # Not to one that a newer incarnation has replaced since.
        current = cached is not None and cached.epoch == self.history.epoch
        if not why and cached and current and (cached.learner, cached.incarnation) == asked:
            return [SendGrant(cached)]
        if why:
            return [
                SendGrant(self._grant(join, "", accepted=False, reason=why[:500])),
                Tell("join-refused", f"{join.learner}: {why}"[:500], {"learner": join.learner}),
            ]
        if self.roster.too_soon(join.learner, join.incarnation, now):
            return []  # an honest one asks again within a second, and is let in a little later
        self.roster.join(join.learner, join.incarnation, join.nonce, now)
        donor, reason = self._donor(join, now)
        grant = self._grant(join, donor.learner if donor else "", accepted=True, reason=reason)
        _remember(self.grants, grant, GRANTS_EACH, GRANTS_MAX)
        if grant.donor:
            _remember(self.asked, grant, ASKED_EACH, ASKED_MAX)
        if donor is not None:
            self.donations.ask(
                Donate(
                    donor=donor.learner,
                    donor_incarnation=donor.incarnation,
                    newcomer=join.learner,
                    newcomer_incarnation=join.incarnation,
                    nonce=join.nonce,
                    epoch=self.history.epoch,
                    versions=tuple(self.history.versions),
                ),
                sum(self.history.sizes_P),
                now,
            )
        return [
            SendGrant(grant),
            Tell(
                "join",
                f"{join.learner} joined (life {join.incarnation}); {reason}",
                {"learner": join.learner, "donor": grant.donor},
            ),
        ]

    def _donor(self, join: Join, now: float) -> tuple[Member | None, str]:
        """Who gives a newcomer its inner state, and what is said of that."""
        # One shard names a donor for all: the learner puts the grants together.
        if not self.history.initialised or self.history.shard:
            return None, self._whence("")
        donor = choose_donor(
            self.history,
            self.roster,
            join.learner,
            join.failed_donors,
            now,
            self.donations.donors,
        )
        if donor is None:
            return None, self._whence("")
        merged = self._merged(join.learner)
        if merged > self.given_at.get(join.learner, merged):
            self.given.used_until.pop(join.learner, None)  # it has used what it was given
        self.given.again_s = min(donation_s(sum(self.history.sizes_P)), DONOR_AGAIN_S_MAX)
        if not self.given.counts(join.learner, now):
            return None, f"it has asked for {DONORS_AT_ONCE} optimizer states, and used none"
        left = self.given.used_until.keys()
        self.given_at = {m: at for m, at in self.given_at.items() if m in left}
        self.given_at[join.learner] = merged
        return donor, self._whence(donor.learner)

    def _merged(self, learner: str) -> tuple[int, int]:
        """Of its newest work that was merged: which life did it, and in which round it was."""
        found = [of_p[learner] for of_p in self.history.last_merged if learner in of_p]
        return max(((life, newest) for life, newest, _ in found), default=(-1, -1))

    def states(self) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
        """(donor, nonce) of states that somebody waits for, and of those that were asked for and
        nobody waits for any more."""
        awaited = {(d.donate.donor, d.donate.nonce) for d in self.donations.under_way.values()}
        asked = {(grant.donor, nonce) for nonce, grant in self.asked.items()}
        return awaited, asked - awaited

    def using(self, now: float) -> set[str]:
        """Learners that train, and to whom nobody is asked to send a state: whatever was sent to
        them is in use, or of no use. Not those of whom nothing is heard: of one that comes back,
        the first word may be late."""
        live, awaiting = self.roster.live(now), self.donations.under_way
        return {m.learner for m in live if m.stepping and m.learner not in awaiting}

    def _whence(self, donor: str) -> str:
        """Who gives a newcomer the state of its optimizer."""
        if self.history.shard:
            return "the leader of shard 0 says who gives it its optimizer state"
        if donor:
            return f"{donor} gives it its optimizer state"
        return "no other learner can give it its optimizer state"

    def _hear_layout(self, join: Join, now: float) -> None:
        """Of whoever has the run's configuration otherwise."""
        theirs = dict(join.config)
        layout = theirs.pop("layout", "")
        if not differing_keys(shared_keys(self.spec), theirs):
            there = self.roster.names(now)
            self.layouts.hear(join.learner, layout, join.parameters, now, there)

    def _refuses(self, join: Join, now: float) -> str:
        # Where others' shards go on, they need learners: whose grant is of all shards.
        if self.history.outcome and self.spec.algorithm.shards == 1:
            return f"the run is over ({self.history.outcome})"
        if self.roster.full(join.learner, now):
            return f"the run has {MEMBERS_MAX} learners: as many as it can take"
        ours = shared_keys(self.spec) | {"layout": self.layouts.digest()}
        differing = differing_keys(ours, join.config)
        if differing:
            return "the configuration differs: " + "; ".join(differing[:5])
        return ""

    def _grant(self, join: Join, donor: str, *, accepted: bool, reason: str) -> Grant:
        h = self.history
        return Grant(
            learner=join.learner,
            incarnation=join.incarnation,
            nonce=join.nonce,
            accepted=accepted,
            reason=reason,
            epoch=h.epoch,
            term=h.term,
            versions=tuple(h.versions),
            donor=donor,
            stamp=h.stamp,
            restored=h.restored,
            shard=h.shard,
        )


def _remember(grants: dict[str, Grant], grant: Grant, each: int, most: int) -> None:
    """Of a learner the newest count, `each` of them."""
    grants.pop(grant.nonce, None)
    of_it = [nonce for nonce, g in grants.items() if g.learner == grant.learner]
    for nonce in of_it[: max(len(of_it) - each + 1, 0)]:
        del grants[nonce]
    while len(grants) >= most:
        del grants[next(iter(grants))]
    grants[grant.nonce] = grant


def differing_keys(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Sorted descriptions `path: ours X, theirs Y` of every difference."""
    return [
        f"{key}: here {ours.get(key, 'absent')}, there {theirs.get(key, 'absent')}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]
