"""One copy of the inner state at a time, whoever wants it."""

from types import SimpleNamespace
from typing import Any

from learner.rig import Rig, beat, donation, outgoing, run

from diloco_learner.events import (
    DonateSeen,
    GiveState,
    KeepPart,
)
from diloco_learner.exchange.counters import Counters
from diloco_learner.recovery.donating import (
    GIVEN_MAX,
    REQUESTS_MAX,
    SILENCE_S,
    DonationRequests,
    Handing,
)
from diloco_learner.training.mailbox_io import Mailbox
from diloco_learner.work_io import Work


def test_newcomers_share_the_copy_that_is_on_its_way(rig: Rig) -> None:
    """None waits for another, and nobody frees what another still sends."""
    loop, box, _ = rig()
    names = ["b", "c", "d"]
    box.at = {2: [DonateSeen(donation(name)) for name in names], 9: [beat("stopped")]}
    step, seen = loop.trainer.step, []

    def watching(tokens: Any, rate: float, **more: Any) -> Any:
        sent = [o for o in box._out if isinstance(o.effect, GiveState)]
        seen.append(len(sent))
        if loop.exchange.counters.step == 3:
            for one in sent:
                assert not one.handle.gone
                one.handle.let_go()
        return step(tokens, rate, **more)

    loop.trainer.step = watching  # type: ignore[method-assign]
    run(loop)
    assert seen == [0, 0, 1, 2, 3, 3, 3, 3, 3]
    first, second, third = outgoing(box, GiveState)
    assert first.handle is second.handle and first.handle.gone
    assert third.handle is not first.handle and not third.handle.gone, "a copy of its own"
    assert [o.effect.step for o in (first, second, third)] == [2, 2, 4]


def test_a_newcomer_does_not_wait_for_a_checkpoint_to_be_written(rig: Rig) -> None:
    """To a bucket it takes minutes; whoever waits for moments begins without them before."""
    loop, box, _ = rig()
    box.at = {
        0: [beat(checkpoint=1)],
        2: [beat(checkpoint=2)],
        4: [DonateSeen(donation("b"))],
        6: [beat("stopped", checkpoint=2)],
    }
    run(loop)
    kept, given = (o for o in box.collect() if isinstance(o.effect, GiveState | KeepPart))
    assert given.handle is kept.handle
    assert given.effect == GiveState(donation("b"), (0, 0, 0), 2), "when the copy was made"
    given.handle.let_go()
    assert not kept.handle.gone


def test_a_copy_is_given_to_so_many_newcomers_and_then_it_goes() -> None:
    """Newcomers that never cease would keep it, and ever older moments were given."""
    handing, counters = Handing(DonationRequests("a", 0), 10), Counters([0, 0, 0], step=1)
    given = []
    for n in range(GIVEN_MAX + 1):
        handing.donations.ask(donation(f"n{n}"), 0.0)
        given += handing.give(0, counters, 0.0)
        counters.step += 1
    assert [g.step for g in given] == [1] * GIVEN_MAX
    handing.gone()
    (late,) = handing.give(0, counters, 0.0)
    assert late.step == counters.step


def test_what_was_kept_before_a_learner_trained_or_in_another_epoch_is_not_given() -> None:
    """Its moments may be fresh; and versions of another epoch say nothing in this one."""
    handing, counters = Handing(DonationRequests("a", 0), 10), Counters([0, 0, 0])
    handing.donations.ask(donation("b"), 0.0)
    handing.marks.due = 1
    assert handing.part(0, counters)
    counters.step = 3
    assert not handing.give(0, counters, 0.0), "of before its first step"
    handing.gone()
    handing.marks.due = 2
    assert handing.part(1, counters)
    assert not handing.give(0, counters, 0.0), "of another epoch"
    handing.gone()
    assert handing.give(0, counters, 0.0)


def test_a_part_shares_the_copy_that_is_on_its_way(rig: Rig) -> None:
    """It was made before the mark: the cut needs no second one."""
    loop, box, _ = rig()
    box.at = {
        0: [beat(checkpoint=1)],
        2: [DonateSeen(donation("b"))],
        4: [beat(checkpoint=2)],
        6: [beat("stopped", checkpoint=2)],
    }
    run(loop)
    given, kept = (o for o in box.collect() if isinstance(o.effect, GiveState | KeepPart))
    assert given.handle is kept.handle
    assert kept.effect == KeepPart(2, 0, 2, (0, 0, 0))
    kept.handle.let_go()
    assert not given.handle.gone
    given.handle.let_go()
    assert given.handle.gone


def test_as_many_newcomers_as_fit_wait_and_then_the_one_silent_longest_does_not() -> None:
    requests = DonationRequests("a", 0)
    for n in range(REQUESTS_MAX):
        assert requests.ask(donation(f"n{n}"), float(n)) == ""
    assert len(requests.requests) == REQUESTS_MAX
    requests.ask(donation("late"), 100.0)
    assert len(requests.requests) == REQUESTS_MAX and "n0" not in requests.requests


def test_a_newcomer_that_asks_no_more_is_forgotten() -> None:
    requests, counters = DonationRequests("a", 0), Counters([0, 0, 0], step=1)
    requests.ask(donation("b"), 0.0)
    assert requests.due(7, counters, SILENCE_S) is None and requests.requests, "of another epoch"
    assert requests.due(7, counters, SILENCE_S + 0.1) is None and not requests.requests


def test_what_ends_a_donation_is_heard_where_it_is_sent() -> None:
    asked: list[Any] = []
    up = SimpleNamespace(asked=asked.append, outlived=asked.append)
    work: Any = SimpleNamespace(train_loop=0, mailbox=Mailbox(), up=up)
    Work._put(work, DonateSeen(donation("b")))
    Work._put(work, beat(incarnations={"b": 2}))
    assert asked == [donation("b"), {"b": 2}]
