"""The leader lease of one shard: who may lead, and when a holder's silence counts.

    STANDBY --lease free, or its holder silent for a whole period--> (write) --won--> LEADING
    LEADING --another holds it, or no longer fit--> STANDBY

Pure: `handle(event, now)` returns at most one request to make at the key; its answer is the next
event. A standby measures silence on its own clock, from the newest change of the key that it saw;
while the bus does not answer nobody can renew, so such time does not count. A holder trusts its
lease from when it *sent* the renewal, so that it stops before anybody else can begin. Compare and
set on the key's revision decides every race; and were all clocks wrong, the tape is the fence.
"""

from dataclasses import dataclass
from enum import Enum

# A lease is renewed three times in a period: two renewals may be lost.
RENEWALS = 3
# A standby looks ten times in a period: what is given back is found soon, and a gap is noticed.
LOOKS = 10


class Role(Enum):
    STANDBY = "standby"
    LEADING = "leading"


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """What the key says. `holder` is empty when the lease was given back."""

    holder: str
    boot: str  # the process that wrote it
    lock: str  # names the data folder that this process had locked
    revision: int


# --- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Looked:
    """The key as it is now; None: there is none."""

    held: LeaseKey | None


@dataclass(frozen=True, slots=True)
class Written:
    """Our write, sent at `sent_at`, is the key's newest revision."""

    revision: int
    sent_at: float


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Our write came second."""


@dataclass(frozen=True, slots=True)
class Away:
    """No answer: what became of the request is unknown."""


@dataclass(frozen=True, slots=True)
class Fitness:
    """Whether this process could lead at once; `why_not` is empty when it could."""

    why_not: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline has come."""


Event = Looked | Written | LeaseLost | Away | Fitness | Tick


# --- requests ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Look:
    """Read the key; answer with Looked or Away."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write the key if its revision is still `revision` (0: there is no key).

    As ours, or as given back. Answer with Written, Lost or Away.
    """

    revision: int
    give_back: bool = False


Request = Look | Write


class Lease:
    """One process's view of one lease. Mutated only through `handle`."""

    def __init__(self, me: str, boot: str, lock: str, lease_s: float) -> None:
        self.me = me
        self.boot = boot
        self.lock = lock
        self.lease_s = lease_s
        self.role = Role.STANDBY
        self.why_not = "has not read the tape yet"
        self.held: LeaseKey | None = None
        self.sure = False  # `held` is what the last answer said, and nothing unknown came after it
        self.silent_since = 0.0  # since then we listened, and heard nothing of the holder
        self.free_from = 0.0  # from then on a missing key means that nobody leads
        self.blind = False  # the bus did not answer: whoever leads could not renew either
        self.until = 0.0  # end of our own lease
        self.next_at = 0.0  # when to look or to renew
        self.answered_at: float | None = None
        self.asked: Request | None = None  # the one request that is not answered yet

    # --- read ----------------------------------------------------------------------------------

    @property
    def leading(self) -> bool:
        return self.role is Role.LEADING

    @property
    def holder(self) -> str:
        """Who holds it as far as we know; "" for nobody."""
        return "" if self.held is None else self.held.holder

    def lapsed(self, now: float) -> bool:
        """Whether another may lead by now: then open nothing, and say nothing."""
        return not (self.leading and now < self.until)

    @property
    def deadline(self) -> float | None:
        """When Tick is due at the latest; None while an answer is awaited."""
        return None if self.asked is not None else self.next_at

    # --- the door ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Request | None:
        """Apply one event; return the request to make now, if any."""
        match event:
            case Looked():
                self._looked(event.held, now)
            case Written():
                self._written(event, now)
            case LeaseLost():
                self.asked, self.sure, self.next_at = None, False, now
            case Away():
                self.asked, self.sure, self.blind = None, False, True
                self.next_at = now + self.lease_s / LOOKS
            case Fitness():
                self.why_not = event.why_not
            case Tick():
                pass
        if self.asked is not None:
            return None
        self.asked = self._request(now)
        return self.asked

    def _looked(self, held: LeaseKey | None, now: float) -> None:
        self.asked = None
        gap_s = 0.0 if self.answered_at is None else now - self.answered_at
        if self.blind or gap_s > self.lease_s / 2:
            # The bus was away, or this process stood still: we have not been listening.
            self.silent_since, self.free_from = now, now + self.lease_s
        if held != self.held:
            self.silent_since = now
        self.held, self.sure, self.blind, self.answered_at = held, True, False, now
        if self.leading and held is not None and held.boot != self.boot:
            self.role = Role.STANDBY
        # A leader that looked did not know whether its renewal came through: it renews at once.
        self.next_at = now if self.leading else now + self.lease_s / LOOKS

    def _written(self, event: Written, now: float) -> None:
        given_back = isinstance(self.asked, Write) and self.asked.give_back
        self.asked, self.sure, self.answered_at = None, True, now
        self.held = LeaseKey("" if given_back else self.me, self.boot, self.lock, event.revision)
        if given_back:
            self.role, self.next_at = Role.STANDBY, now + self.lease_s / LOOKS
        else:
            self.role, self.until = Role.LEADING, event.sent_at + self.lease_s
            self.next_at = event.sent_at + self.lease_s / RENEWALS

    def _request(self, now: float) -> Request | None:
        if self.why_not:
            self.role = Role.STANDBY
            if self.sure and self.holder and self.held is not None and self.held.boot == self.boot:
                return Write(self.held.revision, give_back=True)
        elif self.sure and (now >= self.next_at if self.leading else self.free(now)):
            return Write(0 if self.held is None else self.held.revision)
        return Look() if now >= self.next_at else None

    def free(self, now: float) -> bool:
        """Whether a standby may take it."""
        if self.held is None:
            return now >= self.free_from
        if not self.held.holder or self.held.lock == self.lock:
            # Given back; or its holder had locked the folder that is ours: it is dead.
            return True
        return now - self.silent_since >= self.lease_s
