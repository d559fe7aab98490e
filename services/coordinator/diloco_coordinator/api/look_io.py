"""Who works for which run, put together once for one answer.

The registry makes that anew whenever it is asked. An answer that shows hundreds of members or runs
asks it once, and looks here for each of them.
"""

from typing import Any

from diloco_coordinator.api.views import syncer_views
from diloco_coordinator.runs.membership import MemberNote
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared.bus.port import Bus

# Beside what was heard last, while nothing new can come.
CUT_OFF = "the coordinator cannot reach the message server, and this is what it heard last"


def cut_off(bus: Bus) -> str:
    """Why what is shown of the cluster may be old by now; "" while it is news."""
    if not bus.connected:
        return CUT_OFF
    return f"{bus.ails}, and this is what the coordinator heard last" if bus.ails else ""


class Look:
    """The cluster at one moment: not to be kept for a second answer."""

    def __init__(self, registry: Registry) -> None:
        self.assigned = registry.assigned  # member -> run
        self._notes = registry.roll.notes
        self._members: dict[str, list[str]] = {}
        self._syncers: dict[str, list[dict[str, Any]]] = {}
        for member, run in sorted(self.assigned.items()):
            self._members.setdefault(run, []).append(member)

    def members(self, run: str) -> list[str]:
        """Names of those that work for a run, in their order."""
        return self._members.get(run, [])

    def notes(self, run: str) -> list[MemberNote]:
        """What is known of them."""
        return [self._notes[m] for m in self.members(run) if m in self._notes]

    def syncers(self, run: str) -> list[dict[str, Any]]:
        """Views of the syncers of a run, made once."""
        if run not in self._syncers:
            self._syncers[run] = syncer_views(self.notes(run))
        return self._syncers[run]

    def lag_records(self, syncer: str) -> int | None:
        """How many tape records a syncer is behind the one that leads; None if nobody can say."""
        views = self.syncers(self.assigned.get(syncer, ""))
        return next((s["lag_records"] for s in views if s["id"] == syncer), None)
