"""What the API has told about one run so far, fetched piece by piece."""

from dataclasses import dataclass, field
from typing import Any

from diloco_cli.api import rounds_or_why
from diloco_client import Client
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
    unread: str = ""  # why the newest rounds could not be read

    def look(self, client: Client) -> None:
        """Fetch what is new; raises what the client raises."""
        run = client.run(self.name)
        if self.run and run.get("created_at") != self.run.get("created_at"):
            self.rounds, self.events = [], []  # it was deleted, and another one has its name
        self.run = run
        if self.status:  # before that there is no tape
            known = self.rounds[-1]["seq"] if self.rounds else 0
            # A few are asked for by their number: of a long run only all others take as long.
            newest = self.rounds_max if self.rounds_max < ROUNDS_MAX else 0
            more, self.unread = rounds_or_why(
                lambda: client.rounds(self.name, after=known, newest=newest)
            )
            self.rounds += more
        after = self.events[-1]["seq"] if self.events else 0
        told = client.events(self.name, after=after)
        if told and told[0]["seq"] <= after:
            self.events = []  # the hub was put back, say: they are counted anew
        self.events += readable(told)
        del self.rounds[: -self.rounds_max]
        del self.events[:-EVENTS_MAX]

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
