"""What each learner was doing when, told from the events of a run: a pure function.

joining ──began──► stepping ──killed, lost──► down ──join──► recovering ──recovered──► stepping
                      ├──hang──► hung ──healed──► stepping
                      ├──the run is paused──► paused ──it goes on──► stepping
                      └──leave──► (nothing follows)

Who would begin to step while the run is paused is paused at once.

Of a long run the oldest events are gone, and a learner's first one that is left tells what it did
before: whoever is lost was stepping. Of whom no event is left, though it was merged since, nothing
happened: it has stepped all along. So lanes begin with the oldest event that is left.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

Activity = Literal["joining", "stepping", "paused", "down", "recovering", "hung"]
NOBODY: Mapping[str, float] = MappingProxyType({})


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

    def of(self, learner: str) -> "_Lane":
        """The same of another learner."""
        lane = _Lane(learner)
        lane.spans = [replace(span, learner=learner) for span in self.spans]
        return lane

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
    events: Sequence[dict[str, Any]],
    *,
    until: float,
    lease_s: float = 0.0,
    merged: Mapping[str, float] = NOBODY,
) -> dict[str, list[Span]]:
    """Spans per learner, in order, up to `until`.

    A learner that is lost without a known fault has been silent for `lease_s` seconds already.
    `merged`: when a contribution of a learner was merged last, in seconds since 1970.
    """
    told = _told(events)
    since = float(told[0]["at"]) if told else until
    learners = _named(told) | {*merged}
    found: dict[str, _Lane] = {}
    able, quiet = _able(told), _Lane("")  # `quiet`: as of a learner to which nothing happens
    quiet.becomes(able, since)
    for event in told:
        at = float(event["at"])
        if _pauses(event):
            able = "paused" if event["data"]["value"] else "stepping"
            _pause([quiet, *found.values()], able, at)
            continue
        learner = _learner_of(event)
        if learner not in found:
            known = learner in learners and at > since
            found[learner] = _begun(learner, event, quiet) if known else _Lane(learner)
        _apply(found[learner], event, lease_s, able)
    for learner in (name for name, at in merged.items() if name not in found and at > since):
        found[learner] = quiet.of(learner)
    for lane in found.values():
        lane.ends(until)
    return {name: lane.spans for name, lane in sorted(found.items()) if lane.spans}


def whole(events: Iterable[dict[str, Any]], merged: Iterable[str]) -> bool:
    """Whether a run's events begin with its beginning: what happens to each learner first is that
    it joins."""
    first: dict[str, str] = {}
    about = [event for event in _told(events) if _learner_of(event)]
    for event in about:
        first.setdefault(_learner_of(event), event["kind"])
    return all(first.get(learner) == "join" for learner in {*_named(about), *merged})


def _told(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that change what somebody does.

    Without the first report of a learner that comes before it joins, as on a busy machine: what
    happens to it first is that it joins.
    """
    told = [event for event in events if _learner_of(event) or _pauses(event)]
    first: dict[str, dict[str, Any]] = {}
    early, followed = set[int](), set[str]()
    for event in told:
        learner = _learner_of(event)
        if learner in followed or first.setdefault(learner, event) is event:
            continue
        followed.add(learner)
        if (first[learner]["kind"], event["kind"]) == ("learner-alive", "join"):
            early.add(id(first[learner]))
    return [event for event in told if id(event) not in early]


def _named(told: Iterable[dict[str, Any]]) -> set[str]:
    """Learners, and no syncers, which have faults too."""
    return {str(e["data"]["learner"]) for e in told if e["data"].get("learner")}


def _pauses(event: dict[str, Any]) -> bool:
    """Whether it tells that the run is paused, or goes on."""
    return bool(event["kind"] == "setting" and event["data"].get("name") == "paused")


def _able(told: Iterable[dict[str, Any]]) -> Activity:
    """What a learner that is able to step did before these events."""
    first = next(filter(_pauses, told), None)
    return "paused" if first and not first["data"]["value"] else "stepping"


def _begun(learner: str, event: dict[str, Any], quiet: _Lane) -> _Lane:
    """The lane of a learner up to `event`, the first one that is left of it: empty where that one
    joins it, of which nobody knows whether it had been there before."""
    before: Activity
    match event["kind"]:
        case "learner-lost" | "leave" | "fault-applied":
            return quiet.of(learner)
        case "began":
            before = "joining"
        case "recovered":
            before = "recovering"
        case "learner-alive":
            before = "down"
        case "fault-healed" if event["data"]["kind"] == "hang":
            before = "hung"
        case _:
            return _Lane(learner)
    lane = _Lane(learner)
    lane.becomes(before, quiet.spans[0].began)
    return lane


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
