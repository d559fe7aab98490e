"""Leaving: a run that is deleted, and what is given back however long the rest takes."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from learner.contexts import learner
from learner.test_app import compiled, stepping
from waiting import until

from diloco_learner import work_io
from diloco_learner.settings import STOP_S
from diloco_learner.training.trainer import Program
from diloco_learner.work_io import CHECKPOINTS
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord, ShardLease
from diloco_shared.protocol.wire import decode, encode
from diloco_simulator.hub.broker import MemoryBroker

pytestmark = pytest.mark.whole


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile once for all tests of this module: the same run every time."""
    monkeypatch.setattr(Program, "build", compiled)


@pytest.mark.parametrize("there", ["nothing", "its deletion", "another run"])
async def test_a_learner_whose_run_was_deleted_waits_for_no_round(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, there: str
) -> None:
    """It stood still meanwhile: nobody is left who would merge what it has done. And what it kept
    for the run was removed: its last checkpoint makes no new folder."""
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)
        assert app.work is not None
        shutil.rmtree(kept := app.folder.path / CHECKPOINTS / app.work.spec.folder)
        entry = await syncer.bus.kv_get(subjects.RUNS, "r")
        record = decode(entry.value, RunRecord)
        if there == "nothing":
            await syncer.bus.kv_delete(subjects.RUNS, "r")
        elif there == "its deletion":
            record = record.model_copy(update={"phase": "deleting"})
            await syncer.bus.kv_put(subjects.RUNS, "r", encode(record))
        else:
            record.spec["id"] = "another"
            await syncer.bus.kv_put(subjects.RUNS, "r", encode(record))
        await syncer.assign("a", "")
        await until(lambda: app.membership.record.state == "idle")
        leave = (await syncer.events("leave"))[-1]
        assert leave.text == "withdrawn: the run is deleted"
        assert not kept.exists()


async def test_a_learner_that_leaves_takes_no_more_data(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    """Its run may be deleted, and what has its name be another one."""
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)
        work = app.work
        assert work is not None
        await until(lambda: not work.batches.wants)
        work.drain("assigned elsewhere")
        await syncer.reported("a", lambda p: p.state == "draining")
        before = dict(work.leases.held)
        work.batches.granted.clear()
        assert work.batches.wants
        work.leases.verified_at = float("inf")
        await work.leases.look(0.0)
        assert work.leases.held == before


async def test_a_life_that_is_told_to_leave_before_it_trains_leaves(
    broker: MemoryBroker, syncer: Any, tmp_path: Path
) -> None:
    """It waits for a first shard, and nobody else would end it."""
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a") as (app, _):
        await until(lambda: app.work is not None)
        assert app.work is not None
        app.work.drain("assigned elsewhere")
        await syncer.bootstrap("a")

        async def left() -> bool:
            told = await syncer.events("leave")
            return bool(told) and told[-1].text == "withdrawn: assigned elsewhere"

        await until(left)


async def test_a_learner_whose_last_checkpoint_takes_long_gives_its_shards_back(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others could not read them until it counts as gone."""
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving():
        async with learner(broker, tmp_path, "a") as (app, _):
            await syncer.bootstrap("a")
            await syncer.reported("a", stepping)
            assert app.work is not None
            assert app.work.stop_s == STOP_S, "as the settings say"
            app.work.stop_s = work_io.RELEASE_S + 0.3
            slow, write = app.work.checkpoints, threading.Event()
            monkeypatch.setattr(slow, "save", lambda *_: write.wait(30))
        write.set()
    leases = [
        decode(e.value, ShardLease)
        for e in (await syncer.bus.kv_all(subjects.SHARDS)).values()
        if e.value is not None
    ]
    assert leases and all(lease.holder == "" for lease in leases)
