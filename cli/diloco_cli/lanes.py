"""What each learner was doing when, told from the events of a run: a pure function.

joining ──began──► stepping ──killed, lost──► down ──join──► recovering ──recovered──► stepping
                      ├──hang──► hung ──healed──► stepping
                      ├──the run is paused──► paused ──it goes on──► stepping
                      └──leave──► (nothing follows)

Who would begin to step while the run is paused is paused at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from diloco_shared.protocol.telling import OF_LANES

Activity = Literal["joining", "stepping", "paused", "down", "recovering", "hung"]


@dataclass(frozen=True, slots=True)
class Span:
    """One learner doing one thing from `began` to `ended`, in seconds since 1970."""

    learner: str
    activity: Activity
    began: float
    ended: float


class _Lane:
    """One learner's spans so far; the last one is open until the next change."""

    def __init__(self, learner: str) -> None:
        self.learner = learner
        self.spans: list[Span] = []
        self.left = False

    @property
    def now(self) -> str:
        return "" if self.left or not self.spans else self.spans[-1].activity

    def becomes(self, activity: Activity, at: float) -> None:
        if self.now == activity:
            return
        self.ends(at)
        self.left = False
        self.spans.append(Span(self.learner, activity, at, at))

    def ends(self, at: float) -> None:
        """The open span goes no further than `at`, and never backwards."""
        if self.spans and not self.left:
            last = self.spans[-1]
            self.spans[-1] = replace(last, ended=max(at, last.began))


def lanes(
    events: Sequence[dict[str, Any]], *, until: float, lease_s: float = 0.0
) -> dict[str, list[Span]]:
    """Spans per learner, in order, up to `until`.

    A learner that is lost without a known fault has been silent for `lease_s` seconds already.
    """
    found: dict[str, _Lane] = {}
    able: Activity = "stepping"  # what a learner does that is able to step
    for event in events:
        if event["kind"] not in OF_LANES:
            continue
        if event["kind"] == "setting" and event["data"].get("name") == "paused":
            able = "paused" if event["data"]["value"] else "stepping"
            _pause(found.values(), able, float(event["at"]))
        learner = _learner_of(event)
        if learner:
            lane = found.setdefault(learner, _Lane(learner))
            _apply(lane, event, lease_s, able)
    for lane in found.values():
        lane.ends(until)
    return {name: lane.spans for name, lane in sorted(found.items()) if lane.spans}


def _learner_of(event: dict[str, Any]) -> str:
    """Whom an event is about; empty for events that change nobody's activity."""
    match event["kind"]:
        case "join" | "learner-lost" | "learner-alive" | "began" | "recovered":
            return str(event["data"].get("learner", ""))
        case "fault-applied" | "fault-healed":
            return str(event["data"]["target"])
        case "leave":
            return str(event["source"])
    return ""


def _pause(lanes: Iterable[_Lane], able: Activity, at: float) -> None:
    """Who steps holds while the run is paused, and steps again when it goes on."""
    for lane in lanes:
        if lane.now in ("stepping", "paused"):
            lane.becomes(able, at)


def _apply(lane: _Lane, event: dict[str, Any], lease_s: float, able: Activity) -> None:
    at = float(event["at"])
    match event["kind"]:
        case "join":
            lane.becomes("recovering" if lane.spans else "joining", at)
        case "began" | "recovered":
            lane.becomes(able, at)
        case "fault-applied" if lane.spans and event["data"]["kind"] == "kill":
            lane.becomes("down", at)
        case "fault-applied" if lane.spans and event["data"]["kind"] == "hang":
            lane.becomes("hung", at)
        case "fault-healed" if lane.now == "hung":
            lane.becomes(able, at)
        case "learner-lost" if lane.now in ("stepping", "paused", "joining", "recovering"):
            lane.becomes("down", max(at - lease_s, lane.spans[-1].began))
        case "learner-alive" if lane.now == "down":
            lane.becomes(able, at)  # the same life: a new one joins first
        case "leave":
            lane.ends(at)
            lane.left = True
