"""Who gives inner state to whom, asked again until the newcomer trains (paper section 4)."""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from diloco_shared.protocol.messages import Donate
from diloco_shared.protocol.pace import inner_state_s
from diloco_syncer.history.history import History
from diloco_syncer.members.roster import Member, Roster

# A donor that missed the request is asked again after this many seconds.
REPEAT_S = 1.0
# A newcomer that lives and does not train is waited for: for this many seconds, and those that an
# inner state takes.
LIMIT_S = 120.0


def donation_s(parameters: int) -> float:
    """For so many seconds a newcomer is waited for, at most."""
    return LIMIT_S + inner_state_s(parameters)


@dataclass(slots=True)
class Donation:
    """A request under way."""

    donate: Donate
    until: float  # its donor is asked again
    repeat_at: float  # inf: not any more


@dataclass(slots=True)
class Donations:
    """At most one request per newcomer.

    Its state is awaited until the newcomer trains, asks anew or is gone: one that moves slowly may
    take longer than its donor is asked for it, and it is the newcomer that gives it up.
    """

    under_way: dict[str, Donation] = field(default_factory=dict)

    def ask(self, donate: Donate, parameters: int, now: float) -> None:
        self.under_way[donate.newcomer] = Donation(donate, now + donation_s(parameters), now)

    def due(self, roster: Roster, now: float) -> list[Donate]:
        """Requests to send now; those that are settled are forgotten."""
        sent = []
        for newcomer, d in list(self.under_way.items()):
            member = roster.members.get(newcomer)
            settled = (
                member is None
                or member.incarnation != d.donate.newcomer_incarnation
                or member.stepping
            )
            if settled:
                del self.under_way[newcomer]
            elif now >= d.until:
                d.repeat_at = math.inf
            elif now >= d.repeat_at:
                d.repeat_at = now + REPEAT_S
                sent.append(d.donate)
        return sent

    @property
    def donors(self) -> list[str]:
        """Who gives, or may still be giving, once per request."""
        return [d.donate.donor for d in self.under_way.values()]

    @property
    def deadline(self) -> float | None:
        asked = [d.repeat_at for d in self.under_way.values() if d.repeat_at < math.inf]
        return min(asked, default=None)


def choose_donor(
    history: History,
    roster: Roster,
    newcomer: str,
    failed: tuple[str, ...],
    now: float,
    busy: Collection[str] = (),
) -> Member | None:
    """A live, stepping learner of this epoch that holds every fragment; the last merged first.

    Several newcomers at once get different donors: `busy` names who is asked already, once per
    request. None if nobody healthy is left: never one that has not itself trained on this run.
    """

    def healthy(m: Member) -> bool:
        p = m.progress
        return (
            m.learner != newcomer
            and m.learner not in failed
            and p is not None
            and m.stepping
            and p.epoch == history.epoch
            and p.step > 0
            and bool(p.adopted)
            and min(p.adopted) >= 0
        )

    able = [m for m in roster.live(now) if healthy(m)]
    asked = Counter(busy)
    return max(able, key=lambda m: (-asked[m.learner], m.merged_round, m.learner), default=None)
