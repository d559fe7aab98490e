"""The cluster as one answer shows it: who works for which run, put together once.

The registry makes that anew whenever it is asked. An answer that shows hundreds of members or runs
asks it once, and looks here for each of them.
"""

from typing import Any

from diloco_coordinator.api.views import (
    brief_view,
    full,
    releases,
    run_view,
    speed_views,
    syncer_views,
    unfit,
)
from diloco_coordinator.runs.budgets import used
from diloco_coordinator.runs.membership import MemberNote
from diloco_coordinator.runs.reasons import Why
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared.bus.port import Bus
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import LearnerSpeed, RunRecord, RunStatus

# A member's note and run; the run's status; records it is behind; its speed; why it stays.
Known = tuple[MemberNote, str, RunStatus | None, int | None, LearnerSpeed | None, str]
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
        self.registry = registry
        self.assigned = registry.assigned  # member -> run
        self._members: dict[str, list[str]] = {}
        self._syncers: dict[str, list[dict[str, Any]]] = {}
        for member, run in sorted(self.assigned.items()):
            self._members.setdefault(run, []).append(member)

    def members(self, run: str) -> list[str]:
        """Names of those that work for a run, in their order."""
        return self._members.get(run, [])

    def notes(self, run: str) -> list[MemberNote]:
        """What is known of them."""
        notes = self.registry.roll.notes
        return [notes[m] for m in self.members(run) if m in notes]

    def syncers(self, run: str) -> list[dict[str, Any]]:
        """Views of the syncers of a run, made once."""
        if run not in self._syncers:
            self._syncers[run] = syncer_views(self.notes(run))
        return self._syncers[run]

    def view(self, record: RunRecord, *, brief: bool = False) -> dict[str, Any]:
        """`run_view` of a run, with speeds, releases and budget, or what is `brief` of it; and
        the revision."""
        r, run = self.registry, record.name
        members, notes, syncers = self.members(run), self.notes(run), self.syncers(run)
        status, waiting = r.statuses.get(run), r.plan.waiting.get(run, ())
        # Cut off from the bus it knows how members were, not how they are.
        away = cut_off(r.bus)
        beside = Why("hub-away", away) if away else Why("members-full", full(notes))
        cannot, wordless_s = "" if away else unfit(notes), r.wordless_s(run)
        view = brief_view(record, status, waiting, members, syncers, [beside], cannot, wordless_s)
        if not brief:
            view = run_view(record, status, view)
            view["speeds"] = speed_views(r.speed_of(m) for m in members)
            view["releases"] = releases(notes)
            view["budget"] = used(record, status, [n.record for n in notes])
        view["revision"] = r.revisions.get((subjects.RUNS, run), 0)
        return view

    def known(self, member: str) -> Known:
        """What `member_view` makes of a member that there is: nothing of it changes any more."""
        r = self.registry
        note, run = r.roll.notes[member], self.assigned.get(member, "")
        lag = None
        if note.record.role == "syncer":
            views = self.syncers(run)
            lag = next((s["lag_records"] for s in views if s["id"] == member), None)
        stays = r.plan.staying.get(member, "") if run else ""
        return note, run, r.statuses.get(run), lag, r.speed_of(member), stays
