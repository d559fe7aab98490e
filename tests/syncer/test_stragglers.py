"""How long a round waits for whoever has not answered yet."""

from types import SimpleNamespace
from typing import Any

from syncer.conftest import spec

from diloco_syncer.rounds.grace import Timings
from diloco_syncer.rounds.stragglers import Stragglers


def test_whoever_was_left_out_is_given_a_step_of_its_own() -> None:
    """Its step lasts longer than four transfers: asked for no longer, it would never answer."""
    slow = SimpleNamespace(
        answer=SimpleNamespace(or_zero=0.0), missed=0, progress=SimpleNamespace(step_s=16.0)
    )
    roster: Any = SimpleNamespace(members={"slow": slow})
    timings = Timings()
    timings.transfer.update(2.5)
    stragglers = Stragglers(spec().algorithm, roster, timings)
    asked: Any = SimpleNamespace(participants={"slow": 0, "gone": 0})
    assert stragglers.slowest_s(asked) == 2.5, "nothing is known of it yet"
    slow.missed = 1
    assert stragglers.slowest_s(asked) == 18.5
    slow.answer.or_zero = 30.0
    assert stragglers.slowest_s(asked) == 30.0
