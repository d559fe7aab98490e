"""Whether a learner begins another life in a run that it has left, and what is left of the old."""

import asyncio
import gc
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from learner.contexts import learner
from waiting import until

from diloco_learner import app as app_module
from diloco_learner.app import UNFIT_RETRY_S_MAX, Learner
from diloco_learner.events import Leave
from diloco_learner.settings import Settings
from diloco_learner.training import computing_io
from diloco_learner.training.computing_io import OnThisMachine
from diloco_shared.process.membership import DataFolder
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


@pytest.mark.parametrize(
    ("name", "id_", "again"),
    [
        ("r", "mine", True),
        ("", "", False),
        ("other", "mine", False),
        ("r", "submitted anew", False),
    ],
)
async def test_one_that_is_assigned_elsewhere_does_not_begin_again_after_a_restore(
    tmp_path: Path, spec: RunSpec, name: str, id_: str, again: bool
) -> None:
    """It was told to leave before: nobody tells the newer life."""
    folder, bus = DataFolder(tmp_path, "a"), MemoryBus(MemoryBroker(), "a")
    app = Learner(Settings(id="a", data=tmp_path), bus, bus, folder)
    app.assigned = name, spec.id if id_ == "mine" else id_
    async with asyncio.timeout(5.0):
        assert await app._begins_again(Leave("restored", "epoch 1"), spec) is again
    await bus.close()
    folder.release()


@pytest.mark.parametrize("leave", [Leave("restored", "epoch 1"), Leave("superseded", ""), None])
async def test_one_that_was_told_to_end_begins_no_other_life(
    tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch, leave: Leave | None
) -> None:
    """Also where it is given the same run again before it has ended: that waits for its end."""
    folder, bus = DataFolder(tmp_path, "a"), MemoryBus(MemoryBroker(), "a")
    app = Learner(Settings(id="a", data=tmp_path), bus, bus, folder)
    app.assigned, attempts = (spec.name, spec.id), list[int]()

    async def attempt(_: RunSpec) -> Leave | None:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            app.dismissed = asyncio.current_task()
            return leave
        raise AssertionError("it works on")

    monkeypatch.setattr(app, "spec_of", AsyncMock(return_value=spec))
    monkeypatch.setattr(app, "_attempt", attempt)
    monkeypatch.setattr(app, "_tell_lost", AsyncMock())
    monkeypatch.setattr(app_module, "newest_boot", AsyncMock(side_effect=lambda *_: own))
    monkeypatch.setattr(app.membership, "refresh", AsyncMock())
    monkeypatch.setattr(app.membership, "worked_for", lambda: spec.name)
    own = app.membership.record.boot
    async with asyncio.timeout(5.0):
        await app._work_for(spec.name)
    assert attempts == [0]
    await bus.close()
    folder.release()


async def test_a_life_that_is_asked_for_what_it_has_not_read_is_followed_by_one_that_reads(
    tmp_path: Path, spec: RunSpec
) -> None:
    folder, bus = DataFolder(tmp_path, "a"), MemoryBus(MemoryBroker(), "a")
    app = Learner(Settings(id="a", data=tmp_path), bus, bus, folder)
    app.assigned = this = spec.name, spec.id
    assert await app._begins_again(Leave("restored", "epoch 1"), spec)
    assert app.reads_for != this
    assert await app._begins_again(Leave("unread", "it has lost all"), spec)
    assert app.reads_for == this
    await bus.close()
    folder.release()


async def test_what_takes_long_before_it_joins_is_shown_until_it_is_built(
    tmp_path: Path, spec: RunSpec
) -> None:
    """As the digest of a file of terabytes, which one thread reads for an hour."""
    folder, bus = DataFolder(tmp_path, "a"), MemoryBus(MemoryBroker(), "a")
    app = Learner(Settings(id="a", data=tmp_path), bus, bus, folder)
    assert isinstance(app.computing, OnThisMachine) and app.computing.cache is not None
    tell, shown = app.computing.cache.tell, app.membership
    assert tell is not None
    tell("nobody works yet")
    app.here, work = asyncio.get_running_loop(), SimpleNamespace(built=False)
    app.work = cast(Any, work)
    shown.update(state="unfit", reason="no room")
    await asyncio.to_thread(tell, "0 %")
    await asyncio.sleep(0)
    assert shown.record.reason == "no room", "what is wrong is worth more"
    shown.update(state="working", reason="")
    await asyncio.to_thread(tell, "50 %")
    await asyncio.sleep(0)
    assert shown.record.reason == "50 %"
    work.built = True
    await asyncio.to_thread(tell, "60 %")
    await asyncio.sleep(0)
    assert shown.record.reason == "50 %"
    await bus.close()
    folder.release()


@pytest.mark.whole
async def test_the_next_life_begins_without_the_trainer_of_the_one_before(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    """Whatever Python collects by itself, and when: a device may have no room for two."""
    await syncer.prepare()
    await syncer.assign("a", "r")
    trainers, alive = list[weakref.ref[Any]](), list[int]()
    gc.disable()
    try:
        async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
            build = app.computing.build

            def counted(*of: Any, **how: Any) -> Any:
                alive.append(sum(trainer() is not None for trainer in trainers))
                built = build(*of, **how)
                trainers.append(weakref.ref(built.trainer))
                return built

            app.computing.build = counted  # type: ignore[method-assign]
            await syncer.bootstrap("a")
            for life in (1, 2):
                await syncer.reported("a", lambda p: p.step > 0)
                syncer.fields = {"incarnations": {"a": life}}
                await syncer.reported("a", lambda p, n=life: p.incarnation == n)
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


async def test_a_thread_that_has_told_its_end_holds_nothing_of_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine it may be long until it runs once more, and ends."""

    class Trainer:
        def step(self) -> int:
            return 7

    told, ends = computing_io.soon, threading.Event()

    def told_and_stopped(*of: Any) -> None:
        told(*of)
        ends.wait()

    monkeypatch.setattr(computing_io, "soon", told_and_stopped)
    trainer = Trainer()
    known = weakref.ref(trainer)
    try:
        ended = computing_io.threaded("train", trainer.step)
        del trainer
        assert await ended == 7
        assert known() is None
    finally:
        ends.set()


@pytest.mark.whole
async def test_who_waits_to_try_again_holds_nothing_of_what_failed(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Half:
        """Of a trainer, on a device that has no room for the rest."""

    made = list[weakref.ref[Half]]()

    def build(*of: Any, **how: Any) -> None:
        half = Half()
        made.append(weakref.ref(half))
        raise ValueError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr("diloco_learner.app.UNFIT_RETRY_S", UNFIT_RETRY_S_MAX)
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        app.computing.build = build  # type: ignore[method-assign]
        await until(lambda: app.membership.record.state == "unfit")
        await until(lambda: made[0]() is None, patience_s=UNFIT_RETRY_S_MAX / 2)
        assert len(made) == 1


async def test_a_run_whose_assignment_came_again_meanwhile_is_looked_at_once_more() -> None:
    """It was over when the hub was lost, and goes on with the hub that was put back."""
    worked: list[str] = []

    async def work_once_for(run: str) -> None:
        worked.append(run)

    app: Any = SimpleNamespace(
        membership=SimpleNamespace(worked_for=lambda: len(worked) < 2),
        _work_once_for=work_once_for,
        _is_dismissed=False,
    )
    await Learner._work_for(app, "r")
    assert worked == ["r", "r"]
