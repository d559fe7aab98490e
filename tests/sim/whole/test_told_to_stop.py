"""Processes of worlds that are told to stop, as by SIGTERM: what they have is not lost with them.

And each part of such an end is broken once in the product: the world must name it.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from diloco_coordinator.runs import ending_io
from diloco_learner.exchange.evaluations_io import Evaluations
from diloco_learner.recovery.checkpoint_io import LocalCheckpoints
from diloco_learner.training.train import TrainLoop
from diloco_shared.process.membership import Registration
from diloco_shared.protocol.messages import TapeEnd
from diloco_simulator.inside.observer import Observer
from diloco_simulator.troubles import signals
from diloco_simulator.troubles.signals import Signals
from diloco_simulator.worlds import computing, processes
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import SELDOM, Options, seldom
from diloco_simulator.worlds.processes import Host
from diloco_simulator.worlds.world import World, WorldResult, played
from diloco_syncer.leadership.lease_io import LeaseKeeper
from diloco_syncer.members.roster import Roster

# Longer than it takes to exchange one process of each kind once all is well.
CALM = Options.calm(
    learners=2, quorum=1, steps=48, safety_s=8.0, syncers=2, snapshot_every_rounds=3, told_to_stop=1
)
Break = Callable[[pytest.MonkeyPatch], None]


def calm(patch: pytest.MonkeyPatch, *strikes: Callable[[World], object], **changes: Any) -> Any:
    """These strike, 5 virtual seconds after one another, and nothing else before all is well."""

    def plan(self: Signals) -> None:
        for n, strike in enumerate(strikes):
            self.loop.call_later(4.0 + 5.0 * n, strike, self.world)

    patch.setattr(Signals, "plan", plan)
    return played(Case(1, CALM.changed(**changes)))


def leader(world: World) -> Host:
    name = world.observer.reached.leaders[0]
    return next(machine for machine in world.syncers if machine.name == name)


def test_one_of_each_kind_is_told_to_stop_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = calm(monkeypatch)
    assert found.violations == [] and found.rounds > 0
    for state in (
        "told to stop: coordinator",
        "told to stop: leader",
        "told to stop: learner",
        "moments saved at a stop",
        "requests answered at a stop",
        "takeovers after a stop",
        "the last one told: evaluation",
        "processes exchanged once all is well",
    ):
        assert found.counts[state], state
    assert found.looks["stops"] >= 3


def tells(of: Callable[[World], list[Host]], n: int, impatience: float) -> Callable[[World], None]:
    """One of these machines' processes is told to stop, by a supervisor of that patience."""

    def strike(world: World) -> None:
        class Dice(Random):
            def choice(self, _: Any) -> Any:
                return of(world)[n]

            def random(self) -> float:
                return impatience

        world.signals.rng = Dice(1)
        world.signals._strike()

    return strike


def test_supervisors_may_not_wait_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone learner goes on with what it had saved, whoever else is killed or told twice."""
    monkeypatch.setattr(signals, "IMPATIENT_S", (0.0, 0.1))
    monkeypatch.setattr(signals, "AWAY_S", (0.5, 1.0))

    def stands_by(world: World) -> list[Host]:
        reached = world.observer.reached
        return [m for m in world.syncers if reached.role(m.name) == "standby"]

    found = calm(
        monkeypatch,
        tells(lambda world: world.learners, 0, 1.0),
        tells(stands_by, 0, signals.KILLS),
        tells(lambda world: world.learners, 0, 0.0),
        learners=1,
        safety_s=24.0,
        delay_s=0.2,
    )
    assert found.violations == []
    for state in (
        "told to stop: standby",
        "told to stop: killed before its end",
        "told to stop: told twice",
        "moments of before a stop",
    ):
        assert found.counts[state], state


def test_a_learner_that_does_not_reach_the_hub_ends_in_time_and_has_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_a_hub(world: World) -> None:
        world.net.away = True
        world.loop.call_later(20.0, setattr, world.net, "away", False)

    found = calm(
        monkeypatch,
        without_a_hub,
        tells(lambda world: world.learners, 0, 1.0),
        learners=1,
        safety_s=30.0,
    )
    assert found.violations == [] and found.counts["told to stop: learner"] >= 1
    assert found.counts["moments of before a stop"]


def test_one_that_stands_by_evaluates_when_the_evaluator_is_told_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(computing, "BESIDE_STEPS", 40.0)
    told = list[str]()

    def evaluates(machine: Host) -> bool:
        loop = getattr(getattr(machine.app, "work", None), "train_loop", None)
        of = None if loop is None else loop.exchange.evaluating
        return of is not None and of.last is not None and not of.over

    def watch(world: World) -> None:
        busy = [m for m in world.learners if evaluates(m)]
        if busy and not told:
            told.append(busy[0].name)
            world.signals.tell(busy[0], 60.0)
        world.loop.call_later(0.1, watch, world)

    found = calm(monkeypatch, watch)
    assert found.violations == [] and told
    assert found.counts["the last one told: evaluation-failed"] == 1, "of it"
    assert found.counts["the last one told: evaluation"] == 1, "of the other"


@pytest.mark.parametrize("named", [False, True])
def test_a_last_evaluation_that_nobody_tells_is_seen(
    named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = calm(monkeypatch, named=named)
    assert found.violations == [] and found.counts["the last one told: evaluation"] == 1
    monkeypatch.setattr(Evaluations, "_told", AsyncMock())
    (broken,) = calm(monkeypatch, named=named).violations
    assert broken.startswith("liveness") and "no last evaluation" in broken


def dies_after_the_end(patch: pytest.MonkeyPatch, after_s: float) -> Callable[[World], object]:
    """The leader, so long after the end is on the tape, and for minutes."""
    recorded = Observer._recorded

    def strike(world: World) -> None:
        def record(observer: Observer, shard: int, message: Any) -> None:
            recorded(observer, shard, message)
            if isinstance(observer.records[shard][-1][1], TapeEnd):
                world.loop.call_later(after_s, lambda: world.crash(leader(world), 300.0))

        patch.setattr(Observer, "_recorded", record)

    return strike


# Before anybody has heard of the end; and when a last evaluation is under way.
AT_ONCE_S, OVER_IT_S = 0.0, 15.0


@pytest.mark.parametrize("after_s", [AT_ONCE_S, OVER_IT_S])
def test_a_last_evaluation_outlives_the_leader(
    after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "BESIDE_STEPS", 60.0)
    found = calm(monkeypatch, dies_after_the_end(monkeypatch, after_s))
    assert found.violations == []
    assert found.counts["the last one told: evaluation"]
    assert not found.counts["the last one told: evaluation-failed"]


def test_an_end_that_is_settled_before_learners_can_speak_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Roster, "expected", lambda self, now: [])
    (broken,) = calm(monkeypatch, dies_after_the_end(monkeypatch, AT_ONCE_S)).violations
    assert "left, and no last evaluation was told" in broken


def test_an_end_that_is_settled_over_the_last_evaluation_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(computing, "BESIDE_STEPS", 60.0)
    monkeypatch.setattr(ending_io, "_is_evaluated", lambda registry, run: False)
    (broken,) = calm(monkeypatch, dies_after_the_end(monkeypatch, OVER_IT_S)).violations
    assert broken.endswith("is dismissed over the last evaluation")


def test_a_checkpoint_that_was_begun_before_all_was_well_may_still_be_slow() -> None:
    options = Options.calm(disk_s=15.0)
    world = SimpleNamespace(healed_at=60.0, options=options, disks=SimpleNamespace(full_until={}))
    signals: Any = SimpleNamespace(world=world)
    machine: Any = SimpleNamespace(host="learner-2")
    slow_s = partial(Signals._slow_s, signals, machine)
    assert slow_s(59.0) == 15.0
    assert slow_s(64.3) == 15.0  # begun at 55 s, for example
    assert slow_s(75.0) == 0.0


def test_told_are_those_of_some_seeds() -> None:
    """From dice of their own, and none in a calm world."""
    drawn = ["told_to_stop" in seldom(seed) for seed in range(400)]
    rate = SELDOM["told_to_stop"].share
    assert 0.7 * rate * 400 < sum(drawn) < 1.3 * rate * 400
    assert not Options.calm().told_to_stop


# --------------------------------------------------------------------------------------------------
# Broken ends.


def of_moments(patch: pytest.MonkeyPatch) -> None:
    """A learner leaves without saving them."""
    perform = TrainLoop._perform

    def but_the_last(self: TrainLoop, effect: Any) -> None:
        if not getattr(effect, "final", False):
            perform(self, effect)

    patch.setattr(TrainLoop, "_perform", but_the_last)


def of_what_was_saved(patch: pytest.MonkeyPatch) -> None:
    """Its next life takes the checkpoint before."""
    complete = LocalCheckpoints._complete

    def older(self: LocalCheckpoints) -> Any:
        found = complete(self)
        return {n: path for n, path in found.items() if n != max(found)}

    load = LocalCheckpoints.load

    def loaded(self: LocalCheckpoints, check: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(LocalCheckpoints, "_complete", older)
            return load(self, check)

    patch.setattr(LocalCheckpoints, "load", loaded)


def of_leases(patch: pytest.MonkeyPatch) -> None:
    async def kept(self: LeaseKeeper) -> None:
        """It runs out by itself."""

    patch.setattr(LeaseKeeper, "give_back", kept)


def of_members(patch: pytest.MonkeyPatch) -> None:
    async def stays(self: Registration) -> None:
        """Its key runs out by itself."""

    patch.setattr(Registration, "leave", stays)


def of_ends(patch: pytest.MonkeyPatch) -> None:
    leave = Registration.leave

    async def late(self: Registration) -> None:
        await asyncio.sleep(60.0)
        await leave(self)

    patch.setattr(Registration, "leave", late)


def of_answers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(processes, "ANSWERS_S", 0.0)


FAULTS: dict[str, tuple[Break, str, dict[str, Any]]] = {
    "moments that are not saved": (of_moments, "and leaves with checkpoint", {}),
    "older moments than were saved": (of_what_was_saved, "goes on with other", {"learners": 1}),
    "leases that are kept": (of_leases, "has the lease", {}),
    "members that do not leave": (of_members, "is a member for as long", {}),
    "ends that never come": (of_ends, "s ago, and lives", {}),
    "requests that are left open": (of_answers, "leaves a request open", {}),
}


@pytest.mark.whole
@pytest.mark.parametrize("fault", FAULTS)
def test_an_end_that_loses_something_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, says, changes = FAULTS[fault]
    breaks(monkeypatch)
    found: WorldResult = calm(monkeypatch, **changes)
    stops = [v for v in found.violations if v.startswith("stops at ")]
    assert any(says in v for v in stops), found.violations[:5]
