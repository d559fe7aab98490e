"""Heartbeats: a learner is seen while it compiles, and not for ever while it hangs (I10)."""

import asyncio
from typing import Any

import pytest
from learner.contexts import context

from diloco_learner.exchange import reporter_io as reporter
from diloco_learner.exchange.anchors import AnchorBook
from diloco_learner.exchange.reporter_io import NoStepBoundary, Reporter
from diloco_learner.recovery.recovery import before_training
from diloco_learner.training.mailbox_io import Mailbox
from diloco_learner.work_io import counting
from diloco_shared.bus.port import Traffic
from diloco_shared.process.chaos import FaultAgent
from diloco_shared.protocol.messages import Progress, SocketBytes
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


@pytest.fixture
def box() -> Mailbox:
    return Mailbox()


@pytest.fixture
def faults(broker: MemoryBroker) -> FaultAgent:
    return FaultAgent(MemoryBus(broker, "faults"), "a", enabled=True)


@pytest.fixture
def reports(broker: MemoryBroker, spec: RunSpec, box: Mailbox, faults: FaultAgent) -> Reporter:
    bus, book = MemoryBus(broker, "a"), AnchorBook((4, 4, 4))
    sockets = lambda: SocketBytes(data_up=9)  # noqa: E731
    return Reporter(context(spec, bus, incarnation=2), box, book, faults, sockets)


def progress(step: int) -> Progress:
    fresh = before_training("a", 2, 0, (0, 0, 0))
    return fresh.model_copy(update={"state": "stepping", "step": step})


def test_a_run_begins_with_nothing_at_the_sockets() -> None:
    control, data = Traffic(), Traffic()
    data.crossed_socket(out=5)
    read = counting(control, data)
    data.crossed_socket(out=3, into=2)
    control.crossed_socket(into=1)
    assert read() == SocketBytes(data_up=3, data_down=2, control_down=1)


async def test_before_the_first_step_it_says_that_it_is_coming(
    reports: Reporter, syncer: Any
) -> None:
    async with syncer.serving():
        beating = asyncio.create_task(reports.heartbeats())
        first = await syncer.reported("a", lambda p: True)
        assert (first.state, first.incarnation, first.adopted) == ("joining", 2, (-1, -1, -1))
        assert first.sockets == SocketBytes(data_up=9)
        beating.cancel()


async def test_the_newest_report_is_sent_once_and_then_repeated(
    reports: Reporter, box: Mailbox, faults: FaultAgent, syncer: Any
) -> None:
    async with syncer.serving():
        sending = asyncio.create_task(reports.newest())
        reports.look()  # there is nothing yet
        box.progress(progress(7))
        box.progress(progress(8))
        reports.look()
        await syncer.reported("a", lambda p: p.step == 8)
        assert [p.step for p in syncer.progress["a"]] == [8]
        # Faults armed for a step come due by it.
        assert faults.step == 8
        beating = asyncio.create_task(reports.heartbeats())
        while len(syncer.progress["a"]) < 3:
            await syncer.reported("a", lambda p: p.step == 8)
            await asyncio.sleep(0)
        assert {p.step for p in syncer.progress["a"]} == {8}
        for task in (sending, beating):
            task.cancel()


async def test_a_train_thread_that_hangs_ends_the_process(
    reports: Reporter, box: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "STUCK_S", 0.5)
    box.progress(progress(8))
    await reports.flush()
    with pytest.raises(NoStepBoundary, match="no step boundary"):
        await reports.heartbeats()


async def test_a_large_state_may_take_its_time_between_two_steps(
    reports: Reporter, box: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come from other hosts, over a network of one gigabit a second."""
    monkeypatch.setattr(reporter, "STUCK_S", 0.2)
    reports.state_bytes = reporter.STATE_BYTES_PER_S
    box.progress(progress(8))
    await reports.flush()
    with pytest.raises(NoStepBoundary, match="no step boundary for 1 s"):
        await reports.heartbeats()
