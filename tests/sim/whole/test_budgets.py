"""A run uses its budget, all of it, and every step has the rate of where the run is.

The product is broken in one place, a calm world is played, and the promise must be named: *budget*,
or *rates*.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diloco_learner.exchange.exchange import Exchange
from diloco_learner.training import train
from diloco_shared.protocol.messages import Stamp
from diloco_simulator.worlds import watched_run
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played
from diloco_syncer.events import Effect, Stage
from diloco_syncer.history import history
from diloco_syncer.rounds import rounds

CALM = Options.calm(learners=2, quorum=1, steps=36, safety_s=20.0)
# It goes back to a checkpoint, once.
BACK = {"checkpoint_every_steps": 6, "restores": 1}
Break = Callable[[pytest.MonkeyPatch], None]


def calm(changes: dict[str, Any]) -> WorldResult:
    return played(Case(1, CALM.changed(**changes)))


def stamped(change: Callable[[Stamp], Stamp]) -> Break:
    """What is said of the progress is another one."""
    after = history.stamp_after

    def other(*args: Any, **kwargs: Any) -> Stamp:
        return change(after(*args, **kwargs))

    return lambda patch: patch.setattr(history, "stamp_after", other)


def used(factor: float) -> Break:
    """So many times as much of the budget."""
    return stamped(
        lambda stamp: stamp.model_copy(
            update={
                "fraction": min(factor * stamp.fraction, 1.0),
                "fraction_per_step": factor * stamp.fraction_per_step,
            }
        )
    )


def of_steps(stamp: Stamp) -> Stamp:
    return stamp.model_copy(update={"steps": stamp.steps + 1})


def of_outer_steps(patch: pytest.MonkeyPatch) -> None:
    """They settle as at the end of the budget, and the record says so."""
    close = rounds.Rounds._close

    def at_the_end(self: rounds.Rounds, r: Any, now: float, why: str = "") -> list[Effect]:
        effects = close(self, r, now, why)
        r.fraction = 1.0
        return [replace(e, fraction=1.0) if isinstance(e, Stage) else e for e in effects]

    patch.setattr(rounds.Rounds, "_close", at_the_end)


def of_ends(patch: pytest.MonkeyPatch) -> None:
    """The last round of one fragment is left out."""

    def early(self: history.History) -> None:
        if self.finishing_from < 0:
            self.finishing_from = self.next_round - 1

    patch.setattr(history.History, "_finish", early)


def of_rates(patch: pytest.MonkeyPatch) -> None:
    rate = train.inner_rate
    patch.setattr(train, "inner_rate", lambda *args: 2 * rate(*args))


def of_own_progress(patch: pytest.MonkeyPatch) -> None:
    """A learner's place on the schedule is how far it is itself."""
    patch.setattr(Exchange, "position", lambda self: (self.counters.step, self.counters.step / 36))


def of_what_is_adopted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "_progressed", lambda self, stamp: None)


FAULTS: dict[str, tuple[Break, dict[str, Any]]] = {
    "twice as much is used": (used(2.0), {}),
    "twice as many tokens are used": (used(2.0), {"budget": "tokens"}),
    "half as many tokens are used": (used(0.5), {"budget": "tokens"}),
    "twice as many seconds are used": (used(2.0), {"budget": "seconds"}),
    "half as many seconds are used": (used(0.5), {"budget": "seconds"}),
    "other steps": (stamped(of_steps), {"budget": "tokens"}),
    "outer steps of the end": (of_outer_steps, {}),
    "an end before the last round of a fragment": (of_ends, {}),
    "twice the rate": (of_rates, {}),
    "a rate of a learner's own": (of_own_progress, {"speeds": (1.0, 0.5)}),
    "a rate that stays": (of_what_is_adopted, {}),
}


@pytest.mark.whole
@pytest.mark.parametrize(
    "changes",
    [
        {},
        BACK,
        {"budget": "tokens", **BACK},
        {"budget": "seconds", **BACK},
        {"shards": 2, "fragments": 4, "speeds": (1.0, 0.5)},
        {"stop": True, "steps": 300, "safety_s": 5.0},
    ],
)
def test_a_sound_run_uses_its_budget(changes: dict[str, Any]) -> None:
    found = calm(changes)
    assert found.violations == []
    assert found.looks["budget"] and found.looks["rates"]


@pytest.mark.parametrize("fault", FAULTS)
def test_another_use_of_the_budget_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, changes = FAULTS[fault]
    monkeypatch.setattr(watched_run, "LIVENESS_S", 120.0)
    breaks(monkeypatch)
    violations = calm(changes).violations
    promise = "rates" if "rate" in fault.split() else "budget"
    assert any(v.startswith(f"{promise} at ") for v in violations), violations[:5]
