"""One bad batch costs one step; many in a row end the learner."""

import itertools
import math
from typing import Any

import pytest
from learner.rig import Rig, anchor, beat, outgoing, run

from diloco_learner.events import (
    Tell,
)
from diloco_learner.training.inner import SKIPS_MAX, Diverged
from diloco_learner.training.train import TrainLoop


def always_bad(loop: TrainLoop, sound: int = 0) -> None:
    """After so many sound ones no step has a loss or a gradient that is a number."""
    step, taken = loop.trainer.step, itertools.count()

    def bad(tokens: Any, rate: float, *, poisoned: bool = False) -> Any:
        return step(tokens, rate, poisoned=next(taken) >= sound)

    loop.trainer.step = bad  # type: ignore[method-assign]


def test_a_poisoned_step_costs_exactly_that_step(rig: Rig) -> None:
    """The `nan` fault: told and counted, and the moments are as good as before."""
    loop, box, _ = rig()
    states: list[bytes] = []
    step = loop.trainer.step

    def remembering(tokens: Any, rate: float, *, poisoned: bool = False) -> Any:
        loop.injected.poison = len(states) == 1  # of the third step
        loss = step(tokens, rate, poisoned=poisoned)
        states.append(bytes(loop.trainer.inner_state()))
        return loss

    loop.trainer.step = remembering  # type: ignore[method-assign]
    box.at = {6: [beat("stopped")]}
    run(loop)
    assert states[2] == states[1] and len(set(states)) == 5
    (told,) = (o.effect for o in outgoing(box, Tell))
    assert isinstance(told, Tell) and told.kind == "step-skipped"
    assert told.data == {"skipped": 1}
    counters, progress = loop.exchange.counters, box.newest_progress()
    assert (counters.step, counters.tokens, counters.skipped) == (6, 6 * 16, 1)
    assert (progress.step, progress.steps_skipped) == (6, 1)
    assert math.isfinite(progress.loss)


def test_steps_that_are_all_skipped_end_the_loop_with_advice(rig: Rig) -> None:
    loop, box, _ = rig()
    before = bytes(loop.trainer.inner_state())
    always_bad(loop)
    with pytest.raises(Diverged, match=r"lower inner\.learning_rate"):
        run(loop)
    told = [o.effect for o in outgoing(box, Tell)]
    assert [t.kind for t in told if isinstance(t, Tell)] == ["step-skipped"]
    # Longer than it takes to adopt every fragment anew; one more step is under way.
    assert loop.skips.in_a_row == max(SKIPS_MAX, loop.spec.algorithm.sync_every_steps) + 1
    assert loop.trainer.inner_state() == before, "nothing of them is in the moments"


@pytest.mark.parametrize("many", [0, 2, 3])
def test_the_last_word_says_how_much_was_adopted_while_steps_were_skipped(
    rig: Rig, many: int
) -> None:
    """Where rounds take longer than H steps, nothing may have been."""
    loop, box, _ = rig()
    news = loop.trainer.initial_fragments()
    box.at = {2: [anchor(0, 1, news[0])]}  # another sound step follows
    box.at |= {5 + p: [anchor(p, 2, news[p])] for p in range(many)}
    always_bad(loop, sound=3)
    with pytest.raises(Diverged, match=rf"\. {many} of 3 fragments were adopted anew meanwhile\."):
        run(loop)


def test_skipped_steps_with_good_ones_between_them_end_nothing(rig: Rig) -> None:
    loop, box, _ = rig()
    step, taken = loop.trainer.step, []

    def mostly_bad(tokens: Any, rate: float, *, poisoned: bool = False) -> Any:
        taken.append(None)
        return step(tokens, rate, poisoned=len(taken) % SKIPS_MAX > 0)

    loop.trainer.step = mostly_bad  # type: ignore[method-assign]
    box.at = {3 * SKIPS_MAX: [beat("stopped")]}
    run(loop)
    assert loop.exchange.counters.skipped > 2 * SKIPS_MAX
    assert len(outgoing(box, Tell)) == 1, "one event a minute at most"
