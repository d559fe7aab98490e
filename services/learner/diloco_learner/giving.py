"""Requests for this learner's inner state: each nonce is served once, when it can be."""

from collections import deque
from dataclasses import dataclass, field

from diloco_learner.counters import Counters
from diloco_shared.protocol.messages import Donate

# Newcomers waiting for their turn: more than restart within one lease.
REQUESTS_MAX = 8
# The syncer repeats a request every second: after this long without one it is settled elsewhere.
SILENCE_S = 10.0
# Nonces remembered as served: a repeat comes within seconds.
SERVED_MAX = 64


@dataclass(slots=True)
class Request:
    """A request and when it was last repeated."""

    donate: Donate
    seen_at: float


@dataclass(slots=True)
class Giving:
    """At most one request per newcomer."""

    learner: str
    incarnation: int
    requests: dict[str, Request] = field(default_factory=dict)  # by newcomer
    served: deque[str] = field(default_factory=lambda: deque(maxlen=SERVED_MAX))

    def ask(self, donate: Donate, now: float) -> str:
        """Note a request; why not, or ""."""
        if (donate.donor, donate.donor_incarnation) != (self.learner, self.incarnation):
            return "request to another donor"
        if donate.newcomer == self.learner:
            return "request by this learner itself"
        if donate.nonce in self.served:
            return "request served before"
        self.requests[donate.newcomer] = Request(donate, now)
        if len(self.requests) > REQUESTS_MAX:
            del self.requests[min(self.requests, key=lambda n: self.requests[n].seen_at)]
        return ""

    def due(self, epoch: int, counters: Counters, now: float) -> Donate | None:
        """The oldest request that can be served from the state as it is now; it counts as served.

        A learner that has not itself trained since it began gives nothing: its moments may be
        fresh, and a fresh initialisation must never become the source of a running run.
        """
        if not self.requests or counters.step < 1:
            return None
        for newcomer, request in list(self.requests.items()):
            if now - request.seen_at > SILENCE_S:
                del self.requests[newcomer]
            elif request.donate.epoch == epoch and counters.covers(request.donate.versions):
                del self.requests[newcomer]
                self.served.append(request.donate.nonce)
                return request.donate
        return None
