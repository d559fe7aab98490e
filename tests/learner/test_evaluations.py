"""Evaluations beside training: steps go on, one at a time, the last one before the leave."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from learner.contexts import learner
from waiting import until

from diloco_learner.events import Evaluate, Evaluated
from diloco_learner.exchange.evaluations_io import Evaluations
from diloco_learner.training.computing_io import OnThisMachine
from diloco_learner.training.evaluate import Losses, Unwanted, always
from diloco_learner.training.train import ToSend, Work, carried_out
from diloco_learner.training.trainer import Trainer
from diloco_shared.protocol.messages import Stamp
from diloco_shared.reach.local import Reach
from diloco_simulator.hub.broker import MemoryBroker

T = TypeVar("T")


class Gated(OnThisMachine):
    """Whose evaluations begin, and then wait for the test."""

    def __init__(self) -> None:
        super().__init__(Reach(Path("/")))
        self.begun = 0
        self.gate = asyncio.Event()

    async def beside(self, work: Callable[[], T]) -> T:
        self.begun += 1
        await self.gate.wait()
        return await super().beside(work)


def effect(steps: int, *, final: bool = False) -> Evaluate:
    stamp = Stamp(round=steps, steps=steps, fraction=0.1, fraction_per_step=0.1)
    return Evaluate(stamp, (steps, steps), final)


def gives(loss: float, **each: float) -> Work:
    return lambda wanted: Losses(loss, each)


class Desk:
    """Evaluations that are carried out when the test says so, and what comes of them."""

    def __init__(self, *, evaluated: bool = False) -> None:
        self.computing = Gated()
        self.told: list[tuple[str, str, dict[str, Any]]] = []
        self.put: list[object] = []
        self.it = Evaluations(self.computing, self.tell, self.put.append, evaluated=evaluated)

    async def tell(self, kind: str, text: str, data: dict[str, Any]) -> None:
        self.told.append((kind, text, data))

    async def __aenter__(self) -> "Desk":
        self.serving = asyncio.create_task(self.it.serve())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        await self.it.end()

    async def made(self, count: int) -> None:
        await until(lambda: len(self.put) == count)

    @property
    def steps(self) -> list[int]:
        return [data["steps"] for _, _, data in self.told]


async def test_one_that_is_due_while_another_runs_is_left_out_and_holds_nothing() -> None:
    """It would hold a set of anchors, and newer ones would lie beside them."""

    class Anchors:
        """They can be looked for."""

    def work(anchors: Anchors) -> Work:
        return lambda wanted: Losses(float(anchors is None))

    async with Desk() as desk:
        desk.it.take(ToSend(effect(0), gives(4.0)))
        for steps in (4, 8):  # before the first one begins, and while it is under way
            anchors = Anchors()
            held = weakref.ref(anchors)
            desk.it.take(ToSend(effect(steps), work(anchors)))
            del anchors
            assert held() is None
            await until(lambda: desk.computing.begun == 1)
        desk.computing.gate.set()
        await desk.made(1)
        await until(lambda: not desk.it.busy)
        desk.it.take(ToSend(effect(12), gives(3.0)))
        await desk.made(2)
        assert desk.steps == [0, 12]
        assert [data.get("skipped") for _, _, data in desk.told] == [1, 1]


async def test_of_those_that_are_over_a_newer_one_replaces_one_that_waits_to_be_told() -> None:
    async with Desk(evaluated=True) as desk:
        desk.it.take(ToSend(effect(0), gives(4.0)))
        await until(lambda: desk.computing.begun == 1)
        for steps in (8, 16, 24):
            desk.it.take(ToSend(effect(steps), gives(3.0)))
        desk.computing.gate.set()
        await desk.made(2)
        assert desk.steps == [0, 24]
        assert [data.get("skipped") for _, _, data in desk.told] == [None, 2]
        assert desk.put == [Evaluated(effect(0)), Evaluated(effect(24))]


async def test_a_final_one_waits_and_is_never_replaced() -> None:
    async with Desk() as desk:
        desk.it.take(ToSend(effect(0), gives(4.0)))
        await until(lambda: desk.computing.begun == 1)
        desk.it.take(ToSend(effect(16, final=True), gives(3.0)))
        desk.it.take(ToSend(effect(24), gives(9.0)))
        assert [kept.effect for kept in desk.it.waiting] == [effect(16, final=True)]
        desk.computing.gate.set()
        await desk.made(2)
        assert desk.steps == [0, 16]


async def test_a_final_one_is_never_replaced_by_one_that_is_over() -> None:
    async with Desk(evaluated=True) as desk:
        desk.it.take(ToSend(effect(0), gives(4.0)))
        await until(lambda: desk.computing.begun == 1)
        desk.it.take(ToSend(effect(8), gives(3.5)))
        desk.it.take(ToSend(effect(16, final=True), gives(3.0)))
        desk.it.take(ToSend(effect(24), gives(9.0)))
        desk.it.take(ToSend(effect(32), gives(8.0)))
        assert len(desk.it.waiting) == 2
        desk.computing.gate.set()
        await desk.made(3)
        assert desk.steps == [0, 16, 32]


async def test_what_is_told_of_a_mixture_has_the_loss_of_each_corpus() -> None:
    async with Desk() as desk:
        desk.computing.gate.set()
        desk.it.take(ToSend(effect(16), gives(2.0)))
        await desk.made(1)
        desk.it.take(ToSend(effect(24), gives(2.0, code=1.5, talk=2.25, none=float("inf"))))
        await desk.made(2)
        (_, plain, one), (_, text, two) = desk.told
        assert "each" not in one and plain.endswith("after 16 steps of the run")
        assert two["each"] == {"code": 1.5, "talk": 2.25}
        assert text.endswith("(code 1.5000, talk 2.2500)")


async def test_what_fails_is_told_and_the_next_one_is_made() -> None:
    def full(wanted: Callable[[], bool]) -> Losses:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    async with Desk() as desk:
        desk.computing.gate.set()
        for count, work in enumerate((full, gives(float("nan")), gives(2.0)), 1):
            desk.it.take(ToSend(effect(8, final=work is full), work))
            await desk.made(count)
        kinds = [kind for kind, _, _ in desk.told]
        assert kinds == ["evaluation-failed", "evaluation-failed", "evaluation"]
        assert "the last evaluation, after 8 steps of the run, failed: " in desk.told[0][1]
        assert "RESOURCE_EXHAUSTED" in desk.told[0][1] and desk.told[0][2]["final"]
        assert "not a finite number" in desk.told[1][1]
        assert [type(event) for event in desk.put] == [Evaluated] * 3


async def test_an_evaluation_that_failed_holds_nothing() -> None:
    class Parameters:
        """They can be looked for."""

    seen: list[weakref.ref[Parameters]] = []

    def full(wanted: Callable[[], bool]) -> Losses:
        params = Parameters()
        seen.append(weakref.ref(params))
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    gc.disable()  # which would only help later
    try:
        async with Desk() as desk:
            desk.computing.gate.set()
            desk.it.take(ToSend(effect(8), full))
            await desk.made(1)
            await until(lambda: seen[0]() is None)
        with pytest.raises(RuntimeError):
            carried_out(full, always)(always)
        assert seen[1]() is None
    finally:
        gc.enable()


async def test_who_leaves_gives_up_what_is_under_way_and_waits_until_it_is_over() -> None:
    begun, over = threading.Event(), threading.Event()

    def long(wanted: Callable[[], bool]) -> Losses:
        begun.set()
        while wanted():
            pass
        over.set()
        raise Unwanted

    async with Desk() as desk:
        desk.computing.gate.set()
        desk.it.take(ToSend(effect(8), long))
        await until(begun.is_set)
        desk.it.take(ToSend(effect(16), gives(1.0)))
        desk.serving.cancel()
        await desk.it.end()
        assert over.is_set()
        assert desk.told == desk.put == [] and not desk.it.waiting


async def test_a_thread_of_its_own_carries_it_out() -> None:
    machine = OnThisMachine()
    assert await machine.beside(threading.current_thread) is not threading.current_thread()

    def fails() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await machine.beside(fails)


# --- a whole learner ------------------------------------------------------------------------------


def stepping(p: Any) -> bool:
    return p.state == "stepping" and p.step > 0


async def test_steps_go_on_during_an_evaluation_and_a_learner_leaves_after_the_last_one(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    computing = Gated()
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a", computing):
        await syncer.bootstrap("a")
        syncer.fields = {"evaluator": "a"}
        await syncer.reported("a", stepping)
        await until(lambda: computing.begun == 1)
        at = await syncer.reported("a", stepping)
        await syncer.merge(0, ("a",))
        await syncer.reported("a", lambda p: p.step > at.step + 20 and p.adopted[0] == 1)
        assert await syncer.events("evaluation") == []
        computing.gate.set()
        await told(syncer, "evaluation")
        (first,) = await syncer.events("evaluation")
        assert list(first.data["versions"]) == [0, 0, 0], "as it was when it was due"
        assert np.isfinite(first.data["val_loss"]) and not first.data["final"]

        computing.gate.clear()
        syncer.state = "finished"
        await until(lambda: computing.begun == 2)
        for _ in range(3):
            seen = len(syncer.progress["a"])
            await until(lambda seen=seen: len(syncer.progress["a"]) > seen)
            assert syncer.progress["a"][-1].state == "stepping", "it must not be replaced"
        computing.gate.set()
        await syncer.reported("a", lambda p: p.state == "finished")
        last = (await syncer.events("evaluation"))[-1]
        assert last.data["final"] and list(last.data["versions"]) == syncer.versions


async def test_a_model_that_cannot_be_evaluated_is_trained_on(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Losses:
        raise RuntimeError("no room on the device")

    monkeypatch.setattr(Trainer, "evaluate", fails)
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a"):
        await syncer.bootstrap("a")
        syncer.fields = {"evaluator": "a"}
        await told(syncer, "evaluation-failed")
        at = await syncer.reported("a", stepping)
        await syncer.reported("a", lambda p: p.step > at.step + 5)
        syncer.state = "finished"
        await syncer.reported("a", lambda p: p.state == "finished")
        failed = await syncer.events("evaluation-failed")
        assert [event.data["final"] for event in failed] == [False, True]
        assert "no room on the device" in failed[0].text


async def told(syncer: Any, kind: str) -> None:
    await until(lambda: syncer.events(kind), f"an event {kind}")
