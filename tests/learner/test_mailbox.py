"""The bridge between the threads: bounded, ordered, and never a place to wait."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from learner.desk import beat

from diloco_learner.events import AnchorReady, BeatSeen, DonateSeen, PartSettled
from diloco_learner.recovery.recoverer_io import RecoveryArrivals
from diloco_learner.training.computing_io import WaitClock
from diloco_learner.training.mailbox_io import INBOX_MAX, OUTBOX_MAX, Mailbox
from diloco_learner.work_io import Work
from diloco_shared.protocol.messages import Donate, Stamp


def test_arrivals_come_out_in_order_and_once() -> None:
    box = Mailbox()
    for n in range(5):
        assert box.put(n)
    assert box.drain() == [0, 1, 2, 3, 4]
    assert box.drain() == []


def test_only_the_newest_progress_counts() -> None:
    box = Mailbox()
    box.progress("old")
    box.progress("new")
    assert box.newest_progress() == "new"
    assert box.newest_progress() is None


def ask(n: int) -> DonateSeen:
    return DonateSeen(
        Donate(
            donor="a",
            donor_incarnation=0,
            newcomer="b",
            newcomer_incarnation=0,
            nonce=f"n{n}",
            epoch=0,
            versions=(),
        )
    )


def anchored(version: int, fragment: int = 0) -> AnchorReady:
    stamp = Stamp(round=0, steps=0, fraction=0.0, fraction_per_step=0.1)
    return AnchorReady(0, fragment, version, version, stamp, {})


def test_beyond_its_limits_it_drops_and_counts() -> None:
    """I12, both ways; what was there before stays, and so does what nobody says again."""
    box = Mailbox()
    assert all(box.put(ask(n)) for n in range(INBOX_MAX))
    assert not box.put(ask(-1))
    assert box.put(PartSettled(1))
    for n in range(OUTBOX_MAX + 2):
        box.post(n)
    assert box.dropped == 3
    assert box.collect() == list(range(OUTBOX_MAX))
    assert box.drain() == [*(ask(n) for n in range(INBOX_MAX)), PartSettled(1)]


def test_the_newest_beat_is_kept_however_full_it_is() -> None:
    """It may be the one that tells of the end, after which nobody speaks."""
    box, old, new = Mailbox(), BeatSeen(beat()), BeatSeen(beat(state="stopped"))
    assert box.put(old)
    assert all(box.put(ask(n)) for n in range(INBOX_MAX - 1))
    assert not box.put(ask(-1))
    assert box.put(new)
    assert box.drain() == [*(ask(n) for n in range(INBOX_MAX - 1)), new]


@pytest.mark.parametrize("queue", [Mailbox, RecoveryArrivals])
def test_anchors_that_wait_for_long_do_not_pile_up(
    queue: type[Mailbox] | type[RecoveryArrivals],
) -> None:
    """Each holds a fragment's values: of every fragment the newest two are kept, in their order.

    Of one that recovers, the newest.
    """
    box, kept = queue(), 2 if queue is Mailbox else 1
    put = box.put if isinstance(box, Mailbox) else box.leave
    most = 0
    for version in range(1000):
        put(anchored(version))
        put(anchored(version, fragment=1))
        put(PartSettled(version // 500))
        waiting = box.waiting if isinstance(box, Mailbox) else box._queue
        most = max(most, sum(isinstance(x, AnchorReady) for x in waiting))
    assert most == 2 * kept
    items = (
        box.drain() if isinstance(box, Mailbox) else [box.get_nowait() for _ in range(box.qsize())]
    )
    assert [x for x in items if x == PartSettled(0)] == 500 * [PartSettled(0)]
    anchors = [x for x in items if isinstance(x, AnchorReady)]
    assert anchors == [anchored(v, p) for v in (998, 999)[-kept:] for p in (0, 1)]


def test_rest_ends_when_something_arrives() -> None:
    box = Mailbox()
    rested = threading.Event()

    def body() -> None:
        box.rest(60)
        rested.set()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    box.put("a beat")
    assert rested.wait(30)
    thread.join()
    assert box.drain() == ["a beat"]


def test_an_arrival_before_the_rest_is_not_slept_over() -> None:
    box = Mailbox()
    box.put("a beat")
    box.rest(60)
    assert box.drain() == ["a beat"]


def test_the_clock_adds_up_what_lies_between_in_and_out() -> None:
    time = iter([10.0, 12.5, 20.0, 20.25])
    clock = WaitClock(lambda: next(time))
    with clock:
        pass
    with clock:
        pass
    assert clock.seconds == 2.75


def test_a_learner_whose_mailbox_is_full_drops_what_comes_again_and_lives() -> None:
    box = Mailbox()
    up = SimpleNamespace(asked=lambda donate: None, outlived=lambda lives: None)
    work: Any = SimpleNamespace(train_loop="trains", mailbox=box, up=up)
    asked = [ask(n) for n in range(INBOX_MAX + 1)]
    for event in asked:
        Work._put(work, event)
    assert box.dropped == 1 and box.drain() == asked[:-1]
