"""What a life knows of its run when it begins to train: all that its recovery heard."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from learner.contexts import learner
from waiting import until

from diloco_learner.app import Learner
from diloco_shared.protocol.messages import Join, Progress
from diloco_simulator.hub.broker import MemoryBroker

pytestmark = pytest.mark.whole


def heard(app: Learner) -> bool:
    """Whether the recovery of its life knows a beat."""
    work = app.work
    recovery = work.reporter.recovery if work is not None and work.built else None
    return recovery is not None and recovery.beat is not None


@asynccontextmanager
async def begun_again(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A learner that comes back to a run in this state. Its recovery hears a beat, is granted, and
    no other beat follows until the test has it sent, by what this yields."""
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving():
        async with learner(broker, tmp_path, "a"):
            await syncer.bootstrap("a")
            await syncer.reported("a", lambda p: p.step > 0)
        syncer.state = state
        beat, grant = syncer.beat, syncer.grant
        async with learner(broker, tmp_path, "a") as (app, _):

            async def until_heard() -> None:
                if not heard(app):
                    await beat()

            async def once_heard(join: Join) -> None:
                await until(lambda: heard(app))
                await grant(join)

            with monkeypatch.context() as patched:
                patched.setattr(syncer, "beat", until_heard)
                patched.setattr(syncer, "grant", once_heard)
                yield beat


def begins(p: Progress) -> bool:
    return p.incarnation == 1 and p.state not in ("joining", "recovering")


async def test_a_learner_that_comes_back_to_a_paused_run_takes_no_step(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun_again(broker, syncer, tmp_path, monkeypatch, "paused"):
        first = await syncer.reported("a", begins)
        assert (first.state, first.step) == ("paused", 0)


async def test_a_mark_that_the_first_beat_of_a_training_carries_is_met(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader counts on its part, since it was told that it trains."""
    async with begun_again(broker, syncer, tmp_path, monkeypatch, "running") as beat:
        first = await syncer.reported("a", begins)
        assert (first.state, first.checkpoint) == ("stepping", 0)
        syncer.fields = {"checkpoint": 1}
        await beat()
        settled = await syncer.reported("a", lambda p: p.checkpoint == 1)
        assert settled.incarnation == 1
