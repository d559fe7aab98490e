"""One copy of the inner state at a time, whoever wants it."""

from typing import Any

from learner.rig import Rig, beat, donation, outgoing, run

from diloco_learner.events import (
    DonateSeen,
    GiveState,
    KeepPart,
)
from diloco_learner.exchange.counters import Counters
from diloco_learner.recovery.donating import REQUESTS_MAX, SILENCE_S, DonationRequests


def test_one_copy_of_the_inner_state_is_on_its_way_at_a_time(rig: Rig) -> None:
    """A second newcomer is served once the first copy's memory is free."""
    loop, box, _ = rig()
    donations = {name: donation(name) for name in ("b", "c")}
    box.at = {2: [DonateSeen(d) for d in donations.values()], 9: [beat("stopped")]}
    step, seen = loop.trainer.step, []

    def watching(tokens: Any, rate: float, **more: Any) -> Any:
        sent = [o for o in box._out if isinstance(o.effect, GiveState)]
        seen.append(len(sent))
        if loop.exchange.counters.step == 5:
            sent[0].handle.let_go()
        return step(tokens, rate, **more)

    loop.trainer.step = watching  # type: ignore[method-assign]
    run(loop)
    assert seen == [0, 0, 1, 1, 1, 1, 1, 2, 2]
    first, second = outgoing(box, GiveState)
    assert first.handle.gone and not second.handle.gone


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
