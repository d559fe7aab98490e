"""What the API has told about one run so far, fetched piece by piece."""

from dataclasses import dataclass, field
from typing import Any

from diloco_cli.api import Unread, rounds_or_why
from diloco_client import Client, Cursor
from diloco_client.answers import BEGINNING
from diloco_shared.protocol.telling import readable

# Kept for charts and lanes: an hour or more of the liveliest run; the oldest go first.
ROUNDS_MAX = 20_000
# A view shows the newest round alone. Several kB each, and as long as a cluster is up.
ROUNDS_VIEWED = 1
EVENTS_MAX = 20_000


@dataclass(slots=True)
class Seen:
    """Call `look` now and then; a server that does not answer changes nothing."""

    name: str
    run: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    rounds_max: int = ROUNDS_MAX
    unread: Unread | None = None  # why the newest rounds could not be read
    cursor: Cursor = BEGINNING  # how far events were read

    def look(self, client: Client) -> None:
        """Fetch what is new; raises what the client raises."""
        run = client.run(self.name)
        if self.run and run.get("created_at") != self.run.get("created_at"):
            self._forget()  # it was deleted, and another one has its name
        elif _went_back(self.status, run.get("status") or {}):
            self.rounds = []
        self.run = run
        self._look_for_events(client)
        self._look_for_rounds(client)

    def _forget(self) -> None:
        self.rounds, self.events, self.cursor = [], [], BEGINNING

    def _look_for_events(self, client: Client) -> None:
        told = client.events_since(self.name, self.cursor)
        if told.again:
            self._forget()  # the hub was put back, say: events and rounds are counted anew
        self.cursor = told.cursor
        self.events += readable(told.events)
        del self.events[:-EVENTS_MAX]

    def _look_for_rounds(self, client: Client) -> None:
        self.unread = None
        if not self.status:
            return  # before that there is no tape
        known = self.rounds[-1]["seq"] if self.rounds else 0
        # A few are asked for by their number: of a long run only all others take as long.
        newest = self.rounds_max if self.rounds_max < ROUNDS_MAX else 0
        more, self.unread = rounds_or_why(
            lambda: client.rounds(self.name, after=known, newest=newest)
        )
        self.rounds += more
        del self.rounds[: -self.rounds_max]

    @property
    def status(self) -> dict[str, Any]:
        """The syncer's view; empty before it has one."""
        return self.run.get("status") or {}

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [e["data"] for e in self.events if e["kind"] == "evaluation"]

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.run.get("state") in ("finished", "stopped")


def _went_back(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether rounds that were read may be lost: the hub was put back, say, and the run with it.

    Then other rounds have their numbers on the tape, and nobody tells of these to whoever asks for
    what follows the lost ones.
    """
    epoch, committed = "epoch", "rounds_committed"
    if not before or not now or now.get(epoch) != before.get(epoch):
        return bool(before)
    return int(now.get(committed, 0)) < int(before.get(committed, 0))
