"""Of arrivals that wait, a newer one replaces what it makes superfluous, and nothing else."""

from types import SimpleNamespace
from typing import Any

from learner.desk import anchor, beat, pull
from learner.rig import donation

from diloco_learner.events import DonateSeen, InitMoved, PublicationMoved, StateMoved, StateSeen
from diloco_learner.exchange.arrivals import ANCHORS, essence, heavy, repeated


def test_of_each_fragment_the_newest_two_anchors_are_kept() -> None:
    old = [anchor(p, version) for version in range(5) for p in (0, 1)]
    assert essence(old) == old[-2 * ANCHORS :]
    with_values = [SimpleNamespace(ready=ready, values=None) for ready in old]
    assert essence(with_values) == with_values[-2 * ANCHORS :], "with their values or without"


def test_what_is_said_again_is_kept_once_in_the_order_of_the_newest() -> None:
    beats, donate = [beat(), beat()], DonateSeen(donation("b"))
    moved = [StateMoved("b", "n"), InitMoved(), PublicationMoved()]
    waiting: list[Any] = [beats[0], pull(1), donate, *moved]
    waiting += [beats[1], pull(1), pull(2), donate, *moved]
    kept = essence(waiting)
    assert kept == waiting[6:]
    assert kept[0] is beats[1] and all(repeated(event) for event in kept)
    others = [DonateSeen(donation("c")), StateMoved("c", "m")]
    assert essence([*waiting, *others]) == [*waiting[6:], *others]


def test_what_is_told_once_is_never_left_out() -> None:
    told = [StateSeen("b", "n"), StateSeen("b", "n"), beat(), StateSeen("b", "n")]
    assert essence(told) == told
    assert [repeated(event) for event in told] == [False, False, True, False]


def test_only_anchors_hold_values() -> None:
    assert heavy(anchor(0, 1)) and heavy(SimpleNamespace(ready=anchor(0, 1)))
    assert not heavy(beat()) and not heavy(StateSeen("b", "n"))
