"""The training loop with the real exchange and a real, tiny trainer; no network, no clock."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
from learner.rig import Box, Clock, Rig, anchor, beat, donation, outgoing, pull, run

from diloco_learner.events import (
    AnchorReady,
    BeatSeen,
    Checkpoint,
    Contribute,
    DonateSeen,
    Evaluate,
    Evaluated,
    GiveState,
    Leave,
    Stepped,
)
from diloco_learner.recovery import moments
from diloco_learner.recovery.moments import pack, views
from diloco_learner.training import computing_io
from diloco_learner.training.computing_io import OnThisMachine
from diloco_learner.training.evaluate import Losses, Unwanted
from diloco_learner.training.mailbox_io import Mailbox
from diloco_learner.training.train import (
    Anchored,
    Pause,
    Rest,
    Slowed,
    Stepping,
    ToSend,
    TrainLoop,
)
from diloco_shared.protocol.messages import Stamp

START = Stamp(round=-1, steps=0, fraction=0.0, fraction_per_step=0.001)


def test_steps_are_taken_until_the_run_is_over(rig: Rig) -> None:
    loop, box, _ = rig()
    last = Evaluate(START, (0, 0, 0), final=True)
    box.at = {7: [beat("finished", evaluator="a")], 9: [Evaluated(last)]}
    leave = run(loop)
    assert leave.outcome == "finished"
    assert loop.exchange.counters.step == 7
    assert loop.exchange.counters.tokens == 7 * 16
    kinds = [type(o.effect) for o in box.collect()]
    assert kinds == [Evaluate, Checkpoint, Leave]


def test_a_contribution_is_anchor_minus_parameters_at_the_boundary(rig: Rig) -> None:
    """Even though the steps after it overwrite the buffers it was made from."""
    loop, box, _ = rig()
    anchors = loop.trainer.initial_fragments()
    box.at = {3: [pull(0, 1)], 4: []}
    copies: list[Any] = []
    step = loop.trainer.step

    def remembering(batch: Any, rate: float, **more: Any) -> Any:
        loss = step(batch, rate, **more)
        copies.append(loop.trainer.initial_fragments()[1])
        return loss

    loop.trainer.step = remembering  # type: ignore[method-assign]
    box.at[9] = [beat("stopped")]
    run(loop)
    (sent,) = outgoing(box, Contribute)
    assert isinstance(sent.effect, Contribute)
    assert (sent.effect.step_from, sent.effect.step_to, sent.effect.tokens_to) == (0, 3, 48)
    delta_F = np.frombuffer(sent.handle.fetch()[8:], np.float32)
    np.testing.assert_array_equal(delta_F, anchors[1] - copies[2])


def test_an_anchor_overwrites_its_fragment_and_no_other(rig: Rig) -> None:
    loop, box, _ = rig()
    new_F = np.full(loop.trainer.program.layout.sizes[2], 0.25, np.float32)
    box.at = {2: [anchor(2, 1, new_F), beat("stopped", (0, 0, 1))]}
    before = loop.trainer.initial_fragments()
    run(loop)
    after = loop.trainer.initial_fragments()
    # Taken in and adopted after the second step.
    np.testing.assert_array_equal(after[2], new_F)
    assert not np.array_equal(after[0], before[0])
    assert loop.exchange.counters.adopted_P == [0, 0, 1]
    assert loop.anchors == {}


def mixing(loop: TrainLoop, alpha: float) -> None:
    """It keeps that share of its own parameters from now on."""
    algorithm = loop.spec.algorithm.model_copy(update={"alpha": alpha})
    loop.spec = loop.spec.model_copy(update={"algorithm": algorithm})


def test_a_share_of_ones_own_is_kept_within_an_epoch_alone(rig: Rig) -> None:
    """What was trained on parameters that are void is lost, whatever the share."""
    loop, box, _ = rig()
    mixing(loop, 0.5)
    sizes = loop.trainer.program.layout.sizes
    news = [np.full(n, 0.25, np.float32) for n in sizes]
    kept: list[Any] = []
    adopt = loop.trainer.adopt

    def adopting(p: int, values_F: Any, alpha: float) -> None:
        own_F = loop.trainer.fragment(p)
        adopt(p, values_F, alpha)
        kept.append((p, own_F, loop.trainer.fragment(p)))

    loop.trainer.adopt = adopting  # type: ignore[method-assign]
    epoch = [Anchored(AnchorReady(1, p, 0, 0, START, {}), news[p]) for p in range(3)]
    box.at = {2: [anchor(2, 1, news[2])], 4: epoch}
    box.at[6] = [Anchored(AnchorReady(1, 0, 1, 1, START, {}), news[0])]
    box.at[8] = [BeatSeen(beat("stopped", (1, 0, 0)).beat.model_copy(update={"epoch": 1}))]
    run(loop)
    assert [p for p, _, _ in kept] == [2, 0, 1, 2, 0]
    for n, (p, own_F, mixed_F) in enumerate(kept):
        wanted_F = news[p] if n in (1, 2, 3) else 0.5 * own_F + 0.5 * news[p]
        np.testing.assert_allclose(mixed_F, wanted_F, rtol=1e-5)
        assert not np.allclose(own_F, news[p])


def test_no_share_is_kept_of_parameters_that_no_step_can_be_taken_on(rig: Rig) -> None:
    """They are finite, and their loss is not."""
    loop, box, _ = rig()
    mixing(loop, 0.5)
    news = [np.full(n, 0.25, np.float32) for n in loop.trainer.program.layout.sizes]
    for p, new_F in enumerate(news):
        loop.trainer.adopt(p, np.full_like(new_F, 1e30), 0.0)
        box.at[4 + p] = [anchor(p, 1, new_F)]
    box.at[12] = [beat("stopped", (1, 1, 1))]
    run(loop)
    assert 4 <= loop.skips.total < 8 and loop.skips.in_a_row == 0
    assert all(np.abs(own_F).max() < 2 for own_F in loop.trainer.initial_fragments())


def test_adoption_comes_before_the_answer_to_a_pull(rig: Rig) -> None:
    loop, box, _ = rig()
    new_F = np.zeros(loop.trainer.program.layout.sizes[0], np.float32)
    box.at = {2: [pull(5, 0), anchor(0, 1, new_F)], 6: [beat("stopped", (1, 0, 0))]}
    run(loop)
    (sent,) = outgoing(box, Contribute)
    assert isinstance(sent.effect, Contribute)
    assert sent.effect.base == 1 and sent.effect.step_to == sent.effect.step_from + 1


def test_the_trainer_is_told_what_became_of_contributions(rig: Rig) -> None:
    loop, box, _ = rig()
    decided: list[tuple[int, int, bool]] = []
    loop.trainer.decided = (  # type: ignore[method-assign]
        lambda p, round_, *, merged: decided.append((p, round_, merged))
    )
    new_F = np.zeros(loop.trainer.program.layout.sizes[1], np.float32)
    published = Anchored(AnchorReady(0, 1, 1, 4, START, {"a": (0, 4)}), new_F)
    box.at = {2: [pull(1, 1)], 4: [pull(4, 1)], 6: [published], 8: [beat("stopped", (0, 1, 0))]}
    run(loop)
    assert decided == [(1, 1, False), (1, 4, True)]
    assert [o.effect.round for o in outgoing(box, Contribute)] == [1, 4]


def test_only_a_mailbox_that_blocks_makes_waiting_rise(rig: Rig) -> None:
    """I8: every call that could wait is clocked, and shown in the reports."""
    loop, box, _ = rig()
    box.at = {5: [beat("stopped")]}
    run(loop)
    assert loop.waiting.seconds == 0

    loop, box, _ = rig()
    box.blocks_s = 0.25
    box.at = {5: [beat("stopped")]}
    run(loop)
    assert loop.waiting.seconds == 6 * 0.25
    assert box.newest_progress().wait_s == 5 * 0.25


def test_a_pause_holds_at_a_boundary_and_is_no_waiting(rig: Rig) -> None:
    loop, box, _ = rig()
    box.at = {3: [beat("paused")], 8: [beat("running")], 10: [beat("stopped")]}
    run(loop)
    assert box.rests == 5
    assert loop.paused_s == pytest.approx(1.0)
    assert loop.waiting.seconds == 0
    assert loop.exchange.counters.step == 3 + 2


def test_a_donors_state_is_what_it_was_at_the_boundary(rig: Rig) -> None:
    loop, box, _ = rig()
    box.at = {2: [DonateSeen(donation("b"))], 8: [beat("stopped")]}
    moments: list[bytes] = []
    step = loop.trainer.step

    def remembering(batch: Any, rate: float, **more: Any) -> Any:
        loss = step(batch, rate, **more)
        moments.append(bytes(loop.trainer.inner_state()))
        return loss

    loop.trainer.step = remembering  # type: ignore[method-assign]
    run(loop)
    (sent,) = outgoing(box, GiveState)
    assert sent.handle.data == moments[1]
    other, _, _ = rig()
    other.trainer.load_inner_state(moments[2])
    assert other.trainer.inner_state() == moments[2]


@pytest.mark.parametrize(
    ("slow_factor", "duty_cycle"),
    [(3.0, 1.0), (1.0, 1 / 3), (1.5, 0.5)],
    ids=["fault", "duty", "both"],
)
def test_slow_steps_cost_time_that_is_neither_step_nor_waiting(
    rig: Rig, slow_factor: float, duty_cycle: float
) -> None:
    loop, box, clock = rig()
    step = loop.trainer.step

    def slow(batch: Any, rate: float, **more: Any) -> Any:
        clock.now += 0.5
        return step(batch, rate, **more)

    loop.trainer.step = slow  # type: ignore[method-assign]
    loop.injected.slow_factor, loop.injected.duty_cycle = slow_factor, duty_cycle
    box.at = {4: [beat("stopped")]}
    run(loop)
    assert loop.injected.seconds == pytest.approx(4 * 1.0)
    assert loop.waiting.seconds == 0
    assert box.newest_progress().step_s == pytest.approx(1.5)


def evaluate_between(loop: TrainLoop) -> None:
    """Between two steps, as a run asks for that has no room for it beside them."""
    evaluation = loop.spec.evaluation.model_copy(update={"beside_training": False})
    loop.spec = loop.spec.model_copy(update={"evaluation": evaluation})


@pytest.mark.parametrize("trouble", ["none", "pause", "slow", "evaluation"])
def test_speed_is_that_of_the_steps_whatever_lies_between_them(rig: Rig, trouble: str) -> None:
    """A step takes a second, a quarter of it for its batch of 16 tokens."""
    loop, box, clock = rig()
    evaluate_between(loop)
    step, take, evaluate = loop.trainer.step, loop.batches.take, loop.trainer.evaluate

    def computing(batch: Any, rate: float, **more: Any) -> Any:
        clock.now += 0.75
        return step(batch, rate, **more)

    def reading() -> Any:
        clock.now += 0.25
        return take()

    def long(*args: Any) -> Any:
        clock.now += 100.0
        return evaluate(*args)

    loop.trainer.step = computing  # type: ignore[method-assign]
    loop.batches.take = reading  # type: ignore[method-assign]
    loop.trainer.evaluate = long  # type: ignore[method-assign]
    box.at = {30: [beat("stopped")]}
    if trouble == "pause":
        box.at |= {10: [beat("paused")], 15: [beat("running")]}
    elif trouble == "slow":
        loop.injected.slow_factor = 5.0
    elif trouble == "evaluation":
        box.at |= {10: [beat(evaluator="a")]}
    run(loop)
    assert loop.exchange.counters.step >= 20
    assert (clock.now > 100.0 + 30.0 + 90.0) == (trouble in ("slow", "evaluation"))
    assert loop.speed.window.tokens_per_s == pytest.approx(16.0)
    assert loop.speed.window.data_wait_ratio == pytest.approx(0.25)
    assert loop.speed.data_wait_s == pytest.approx(0.25 * loop.exchange.counters.step)


def test_moments_that_are_no_numbers_are_refused(rig: Rig) -> None:
    """I11: a donor that has diverged, another model, rubbish."""
    well, _, _ = rig()
    before = bytes(well.trainer.inner_state())
    arrays = {k: v.copy() for k, v in views(before).items()}
    max(arrays.values(), key=lambda a: a.size).reshape(-1)[-1] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        well.trainer.check_inner_state(pack(arrays))
    with pytest.raises(ValueError, match="not an inner state"):
        well.trainer.load_inner_state(b"rubbish")
    assert well.trainer.inner_state() == before


def test_a_withdrawn_learner_keeps_its_moments_and_says_good_bye(rig: Rig) -> None:
    loop, box, _ = rig()
    step = loop.trainer.step

    def stopped_at_four(batch: Any, rate: float, **more: Any) -> Any:
        if loop.exchange.counters.step == 3:
            loop.stopping = "the process is told to stop"
        return step(batch, rate, **more)

    loop.trainer.step = stopped_at_four  # type: ignore[method-assign]
    leave = run(loop)
    assert leave == Leave("withdrawn", "the process is told to stop")
    assert box.newest_progress().state == "finished"
    assert [o.effect for o in outgoing(box, Checkpoint)] == [
        Checkpoint(0, 4, (0, 0, 0), final=True)
    ]


def test_the_same_arrivals_give_the_same_bits(rig: Rig) -> None:
    fragments = []
    for _ in range(2):
        loop, box, _ = rig()
        box.at = {3: [pull(0, 1)], 12: [beat("stopped")]}
        run(loop)
        (sent,) = outgoing(box, Contribute)
        fragments.append(sent.handle.fetch())
    assert fragments[0] == fragments[1]


def test_losses_fall_and_lag_by_one_step(rig: Rig) -> None:
    loop, box, _ = rig()
    losses: list[float] = []
    progress = loop.exchange.progress

    def remembering() -> Any:
        losses.append(loop.exchange.loss)
        return progress()

    loop.exchange.progress = remembering  # type: ignore[method-assign]
    box.at = {n: [] for n in range(40)} | {40: [beat("stopped")]}
    box.clock.now += 1
    step = loop.trainer.step

    def ticking(batch: Any, rate: float, **more: Any) -> Any:
        box.clock.now += 1.0
        return step(batch, rate, **more)

    loop.trainer.step = ticking  # type: ignore[method-assign]
    run(loop)
    assert math.isnan(losses[0]) and all(math.isfinite(x) for x in losses[1:])
    assert np.mean(losses[-5:]) < np.mean(losses[1:6])


def evaluated(box: Box) -> list[Any]:
    """What comes of each evaluation that was handed out; an error, where it failed."""
    found: list[Any] = []
    for sent in outgoing(box, Evaluate):
        try:
            found.append(sent.handle(lambda: True))
        except RuntimeError as error:
            found.append(error)
    return found


@pytest.mark.parametrize("beside", [True, False])
def test_what_was_published_then_is_evaluated_beside_steps_or_before_the_next(
    rig: Rig, beside: bool
) -> None:
    loop, box, _ = rig()
    if not beside:
        evaluate_between(loop)
    made: list[int] = []
    evaluate = loop.trainer.evaluate

    def counted(*args: Any) -> Any:
        made.append(loop.exchange.counters.step)
        return evaluate(*args)

    loop.trainer.evaluate = counted  # type: ignore[method-assign]
    wanted = evaluate(loop.trainer.published(), loop.held_out)
    new_F = np.full(loop.trainer.program.layout.sizes[2], 0.25, np.float32)
    box.at = {1: [beat(evaluator="a")], 4: [anchor(2, 1, new_F)], 6: [beat("stopped", (0, 0, 1))]}
    run(loop)
    assert made == ([] if beside else [1])
    assert evaluated(box) == [wanted]


def test_an_evaluation_that_fails_between_two_steps_ends_nothing(rig: Rig) -> None:
    loop, box, _ = rig()
    evaluate_between(loop)

    def fails(*args: Any) -> Any:
        raise RuntimeError("no room")

    loop.trainer.evaluate = fails  # type: ignore[method-assign]
    box.at = {1: [beat(evaluator="a")], 6: [beat("stopped")]}
    assert run(loop).outcome == "stopped"
    assert loop.exchange.counters.step == 6
    (failure,) = evaluated(box)
    assert str(failure) == "no room"


def batch_after_batch(loop: TrainLoop, batch: Callable[[], None]) -> None:
    """Its evaluations, of three batches each."""

    def evaluate(published: Any, held: Any, wanted: Callable[[], bool]) -> Losses:
        for _ in range(3):
            if not wanted():
                raise Unwanted
            batch()
        return Losses(1.0)

    evaluate_between(loop)
    loop.trainer.evaluate = evaluate  # type: ignore[method-assign,assignment]


def test_each_batch_of_an_evaluation_between_two_steps_counts_as_a_boundary(rig: Rig) -> None:
    """Else a long one is taken for a thread that hangs, and its process ends."""
    loop, box, clock = rig()
    told: list[Any] = []

    def batch() -> None:
        told.append(box.newest_progress())
        clock.now += 600.0

    batch_after_batch(loop, batch)
    box.at = {1: [beat(evaluator="a")], 6: [beat("stopped")]}
    run(loop)
    assert [p and p.step for p in told[1:]] == [1, 1]


def test_an_evaluation_between_two_steps_is_broken_off_when_the_learner_is_told_to_stop(
    rig: Rig,
) -> None:
    loop, box, _ = rig()
    batches: list[int] = []

    def batch() -> None:
        batches.append(1)
        loop.stopping = "the process is told to stop"

    batch_after_batch(loop, batch)
    box.at = {1: [beat(evaluator="a")]}
    assert run(loop).outcome == "withdrawn"
    assert len(batches) == 1 and loop.exchange.counters.step == 1


async def test_long_steps_say_when_they_have_handed_something_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To look takes time from the core that computes, and to say it as well."""
    monkeypatch.setattr(computing_io, "RARELY_S", 1000.0)
    machine, box, goes_on = OnThisMachine(), Mailbox(), threading.Event()

    class Turns:
        left, waiting = Leave("finished", ""), nullcontext()

        def turns(self) -> Iterator[Pause]:
            for n, long_s in enumerate((0.0, 0.0, computing_io.QUICK_S, 0.0)):
                time.sleep(long_s)  # what is told of a step is how long it took
                box.post(n)
                yield Stepping()
                if long_s:
                    goes_on.wait()

    ended = asyncio.ensure_future(machine.train(cast(TrainLoop, Turns()), box))
    found: list[int] = []
    async with asyncio.timeout(30):
        while 2 not in found:
            await machine.handed(0.005)
            found += box.collect()
        machine.turned.clear()  # it may have been looked for while the steps were quick
        waiting = asyncio.ensure_future(machine.handed(0.005))
        await asyncio.sleep(0.1)
        assert not waiting.done(), "nothing was handed out since"
        monkeypatch.setattr(computing_io, "RARELY_S", 0.01)
        waiting.cancel()
        await machine.handed(0.005)  # something may be, without a word
        goes_on.set()
        await ended
    assert found == [0, 1, 2] and box.collect() == [3]


async def test_quick_steps_are_looked_at_and_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    pace, slept = computing_io.StepPace(lambda: said.append("over")), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    now = iter((1.0, 1.01, 1.06, 1.1, 1.11))
    monkeypatch.setattr(computing_io.ambient, "monotonic", lambda: next(now))
    monkeypatch.setattr(computing_io.asyncio, "sleep", sleep)
    turns: list[Pause] = [Stepping(), Stepping(), Slowed(0.0), Stepping(), Rest(0.1), Stepping()]
    looked = pace.of(iter(turns))
    counts = [(next(looked), len(said))[1] for _ in turns]
    assert counts == [0, 0, 0, 1, 2, 2]
    machine = OnThisMachine()
    for machine.pace.step_s in (0.0, 0.01, 0.048):
        await machine.handed(0.005)
    assert slept == pytest.approx([0.005, 0.005, 0.006])


class Hosts:
    """Of an island that writes its checkpoints by all of them; the first one is not taken."""

    def __init__(self, loop: TrainLoop) -> None:
        self.loop = loop
        self.begun: list[tuple[int, bool]] = []
        self.dropped: list[int] = []

    def begin(self, epoch: int, step: int, *, final: bool = False) -> int:
        assert step == self.loop.exchange.counters.step, "before the next one overwrites it"
        self.begun.append((step, final))
        return step

    def let_go(self, kept: int) -> None:
        self.dropped.append(kept)


def test_while_the_own_disk_hangs_nothing_is_copied_for_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy takes memory and time, only to be refused. The next one is made once it answers; and
    the last one is no copy."""
    loop, box, _ = rig()
    loop.exchange.handing.every = 3
    loop.disk_hangs = lambda: 4 <= loop.exchange.counters.step < 9
    post = box.post

    def arrives(item: ToSend) -> bool:
        if isinstance(item.handle, moments.Handed):
            item.handle.let_go()
        return post(item)

    monkeypatch.setattr(box, "post", arrives)
    box.at = {13: [beat("stopped")]}
    run(loop)
    assert [o.effect.step for o in outgoing(box, Checkpoint)] == [3, 9, 12, 13]


def test_checkpoints_that_hosts_write_are_begun_when_due_and_hold_up_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, box, _ = rig()
    loop.exchange.handing.every = 3
    loop.shared = hosts = Hosts(loop)
    post = box.post

    def full_at_first(item: ToSend) -> bool:
        return item.handle != 3 and post(item)

    monkeypatch.setattr(box, "post", full_at_first)
    box.at = {10: [beat("stopped")]}
    run(loop)
    assert hosts.begun == [(3, False), (6, False), (9, False), (10, True)]
    assert hosts.dropped == [3]
    assert [o.handle for o in outgoing(box, Checkpoint)] == [6, 9, 10]


class Handed:
    """A loss that a device is still at work on."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.until = clock, clock.now + seconds

    def is_ready(self) -> bool:
        return self.clock.now >= self.until

    def __float__(self) -> float:
        self.clock.now = max(self.clock.now, self.until)
        return 2.5


def test_a_step_that_a_device_has_only_taken_up_has_no_time(rig: Rig) -> None:
    """A syncer took it for the speed of the run's fastest learner, and waited for nobody."""
    loop, box, clock = rig()
    told: list[float] = []
    take, busy_until = loop.trainer.step, clock.now

    def step(*given: Any, **more: Any) -> Handed:
        nonlocal busy_until
        take(*given, **more)
        clock.now += 0.005
        busy_until = max(busy_until, clock.now) + 3.0
        return Handed(clock, busy_until - clock.now)

    loop.trainer.step = step  # type: ignore[method-assign,assignment]
    handle = loop.exchange.handle

    def heard(event: Any, now: float) -> Any:
        told.extend([event.step_s] if isinstance(event, Stepped) else [])
        return handle(event, now)

    loop.exchange.handle = heard  # type: ignore[method-assign]
    box.at = {4: [beat("finished")]}
    run(loop)
    assert told[0] == 0.0 and loop.exchange.step_s > 2.0
    assert told[1:] == pytest.approx([3.0] * len(told[1:]), abs=0.01)
