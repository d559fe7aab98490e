"""Arrivals that wait for a learner: which of them a newer one replaces, and which come again.

Anchors are whole values, not differences: the newest of a fragment is enough to begin with. While a
learner trains, the newest two are kept: each names the last two rounds that merged a contribution
of this learner, and three may be published within a long step. Beats are the state of the run, of
which the newest counts. Pulls and requests for inner state are repeated by the syncer. Everything
else is told once, by this very process, and must not be lost; there is at most one of it per donor,
grant, part or fragment.
"""

from collections.abc import Hashable, Iterable
from typing import Any

from diloco_learner.events import (
    AnchorReady,
    BeatSeen,
    DonateSeen,
    InitMoved,
    PublicationMoved,
    PullSeen,
    StateMoved,
)

# Of each fragment, kept for a learner that trains.
ANCHORS = 2


def repeated(event: Any) -> bool:
    """Whether somebody says it again if it is lost."""
    moves = StateMoved | InitMoved | PublicationMoved
    return isinstance(event, BeatSeen | PullSeen | DonateSeen | moves)


def heavy(event: Any) -> bool:
    """Whether it holds a fragment's values: how many of those wait is bounded one by one."""
    return isinstance(getattr(event, "ready", event), AnchorReady)


def essence(events: Iterable[Any], anchors: int = ANCHORS) -> list[Any]:
    """`events` in their order, without those that newer ones replace.

    `anchors`: so many of each fragment are kept.
    """
    kept: list[Any] = []
    counts: dict[Hashable, int] = {}
    for event in reversed(list(events)):
        key, limit = _kind(event, anchors)
        if key is not None:
            counts[key] = counts.get(key, 0) + 1
            if counts[key] > limit:
                continue
        kept.append(event)
    return kept[::-1]


def _kind(event: Any, anchors: int) -> tuple[Hashable | None, int]:
    """What it is one of, and how many of those are worth keeping."""
    ready = getattr(event, "ready", event)  # an anchor with its values
    match ready:
        case AnchorReady():
            return ("anchor", ready.fragment), anchors
        case BeatSeen():
            return "beat", 1
        case PullSeen():
            pull = ready.pull
            return ("pull", pull.epoch, pull.term, pull.fragment, pull.round), 1
        case DonateSeen():
            return ("donate", ready.donate.nonce), 1
        case StateMoved():
            return ("state", ready.nonce), 1
        case InitMoved():
            return "init", 1
        case PublicationMoved():
            return "publication", 1
    return None, 0
