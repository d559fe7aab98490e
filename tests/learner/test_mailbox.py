"""The bridge between the threads: bounded, ordered, and never a place to wait."""

import threading

from diloco_learner.edges.clocks import WaitClock
from diloco_learner.edges.mailbox import INBOX_MAX, OUTBOX_MAX, Mailbox


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


def test_beyond_its_limits_it_drops_and_counts() -> None:
    """I12, both ways; what was there before stays."""
    box = Mailbox()
    assert all(box.put(n) for n in range(INBOX_MAX))
    assert not box.put("too many")
    for n in range(OUTBOX_MAX + 2):
        box.post(n)
    assert box.dropped == 3
    assert box.collect() == list(range(OUTBOX_MAX))
    assert box.drain() == list(range(INBOX_MAX))


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
