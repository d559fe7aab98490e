"""A place that hangs is waited for within a limit, and holds one thread."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from learner.contexts import context, uplink
from waiting import until

from diloco_learner.events import Checkpoint, KeepPart
from diloco_learner.exchange import uplink_io
from diloco_learner.recovery import checkpoint_io as storing
from diloco_learner.recovery.checkpoint_io import Storing
from diloco_learner.recovery.moments import Handed
from diloco_learner.training.train import ToSend
from diloco_learner.work_io import Work
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


async def test_what_is_stored_is_waited_for_and_its_fault_is_raised() -> None:
    store, written = Storing(), []
    await store(8, written.append, b"x")
    assert written == [b"x"]
    with pytest.raises(OSError, match="no such place"):
        await store(8, _fails)


def _fails() -> None:
    raise OSError("no such place")


async def test_a_place_that_hangs_is_given_up_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storing, "STORED_S_MIN", 0.01)
    store, answers, tries = Storing(), threading.Event(), []

    def hangs() -> None:
        tries.append(1)
        answers.wait()
        raise OSError("nobody asks any more")

    try:
        for why in ("not answer within", "still hangs", "still hangs"):
            with pytest.raises(OSError, match=why):
                await store(8, hangs)
        assert len(tries) == 1, "no thread more"
    finally:
        answers.set()
    monkeypatch.setattr(storing, "STORED_S_MIN", 60.0)
    while True:
        try:
            await store(8, tries.append, 2)
            break
        except OSError:
            await asyncio.sleep(0.01)
    assert tries == [1, 2]


async def test_a_large_state_has_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "STORED_S_MIN", 0.01)
    monkeypatch.setattr(storing, "STORED_BYTES_PER_S", 1)
    await Storing()(60, time.sleep, 0.1)
    monkeypatch.setattr(storing, "STORED_BYTES_PER_S", 10**9)
    await Storing()(60, time.sleep, 0.1, beside_s=60.0)


@pytest.mark.parametrize(
    "effect", [Checkpoint(0, 8, (0, 0, 0), final=False), KeepPart(3, 0, 8, (0, 0, 0))]
)
async def test_a_thread_that_hangs_is_waited_for_by_the_next_life_and_by_no_copy(
    broker: MemoryBroker,
    spec: RunSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    effect: Checkpoint | KeepPart,
) -> None:
    """What newcomers and run-wide checkpoints are given stays of now, and is not what hangs."""
    up, answers = uplink(broker, spec, tmp_path, (9, 9, 4)), threading.Event()
    none: Any = None
    work = Work(context(spec, MemoryBus(broker, "a")), none, none)
    work.up, work.built = up, True
    assert work.over() == set()

    def hangs(*_: Any) -> None:
        answers.wait()
        raise OSError("what is given up")

    monkeypatch.setattr(storing, "STORED_S_MIN", 0.01)
    monkeypatch.setattr(up.checkpoints, "save", hangs)
    monkeypatch.setattr(uplink_io, "write_part", hangs)
    monkeypatch.setattr(up, "tell", AsyncMock())
    held, refused, later = (Handed(b"moments") for _ in range(3))
    try:
        await up.send(ToSend(effect, held))
        await up.send(ToSend(effect, refused))
        assert refused.gone and held.gone
        assert len(work.over()) == 1, "the next life waits for that thread"
    finally:
        answers.set()
    # It is forgotten a turn after it is over.
    await until(lambda: up.own_disk._hanging is up.vault._hanging is None)
    assert not work.over()
    monkeypatch.setattr(storing, "STORED_S_MIN", 60.0)
    await up.send(ToSend(effect, later))
    assert later.gone and not work.over()
