"""Told to stop: what the seconds that there are go to, and what is said where they are too few."""

import asyncio
from functools import partial
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import pytest
import structlog
from learner.contexts import context, learner, uplink
from pydantic import ValidationError
from waiting import until

from diloco_cli.up.stack import CLOSING_S
from diloco_learner.events import Checkpoint, Contribute, Leave
from diloco_learner.exchange.encoding import Encoded
from diloco_learner.hosts import following_io
from diloco_learner.settings import STOP_S, Settings
from diloco_learner.training.train import ToSend
from diloco_learner.work_io import QUICK_BYTES_PER_S, RELEASE_S, UNSAVED, Work, too_long
from diloco_shared import ambient
from diloco_shared.process.stopping import CLOSES_S
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

pytestmark = pytest.mark.virtual

GB = 1_000_000_000


class Stopping(Work):
    """One whose step ends, and whose last checkpoint is written, after so many seconds."""

    def __init__(self, spec: RunSpec, broker: MemoryBroker, step_s: float, save_s: float) -> None:
        none: Any = None
        super().__init__(context(spec, MemoryBus(broker, "a")), none, none)
        self.done: dict[str, float] = {}
        self.save_s, self.began = save_s, asyncio.get_running_loop().time()
        self.ended = asyncio.create_task(asyncio.sleep(step_s, none))
        self.leases: Any = SimpleNamespace(release=lambda: self.did("released"))
        self.evaluations: Any = SimpleNamespace(end=lambda: self.did("ended"))
        own_disk = SimpleNamespace(took_s=save_s)
        self.up: Any = SimpleNamespace(own_disk=own_disk, send=lambda _: asyncio.sleep(save_s))
        self.checkpoints: Any = SimpleNamespace(room=SimpleNamespace(needed=94 * GB))
        exchange = SimpleNamespace(step_s=step_s)
        self.train_loop: Any = SimpleNamespace(exchange=exchange, left=None)

    async def did(self, what: str) -> None:
        self.done[what] = asyncio.get_running_loop().time() - self.began

    async def _clear_out(self) -> None:
        await self._carry(ToSend(Checkpoint(0, 1, (0, 0, 0), final=True)))
        await self.did("saved")

    async def stopped(self, stop_s: float) -> list[str]:
        """What it logs."""
        self.stop_s = stop_s
        with structlog.testing.capture_logs() as logs:
            await self._withdraw_now()
        assert self.train_loop.stopping
        return [entry["event"] for entry in logs]


async def test_a_step_and_a_checkpoint_have_all_the_seconds_that_the_setting_gives(
    broker: MemoryBroker, spec: RunSpec
) -> None:
    """Of a large model: a step takes seconds, and to write its moments most of a minute."""
    work = Stopping(spec, broker, 5.0, 47.0)
    assert await work.stopped(55.0) == []
    assert work.done == {"saved": 52.0, "released": 52.0, "ended": 52.0}


async def test_moments_are_saved_though_an_upload_takes_all_the_seconds_there_are(
    broker: MemoryBroker, spec: RunSpec
) -> None:
    """Nobody but this learner needs them; of a contribution the run needs no single one."""
    work = Stopping(spec, broker, 1.0, 3.0)
    effects: list[Any] = [
        Contribute(0, 1, 5, 0, 3, 0, 1, 0, 9, None, deadline=1000.0),
        Checkpoint(0, 1, (0, 0, 0), final=True),
        Leave("withdrawn", "told to stop"),
    ]
    for effect in effects:
        work.mailbox.post(ToSend(effect))

    async def send(item: ToSend) -> None:
        takes_s = {Contribute: 1000.0, Checkpoint: work.save_s}
        await asyncio.sleep(takes_s.get(type(item.effect), 0.0))
        await work.did(type(item.effect).__name__)

    async def nothing() -> None:
        pass

    own_disk = work.up.own_disk
    work.up = SimpleNamespace(send=send, stop_giving=lambda: None, told=nothing, own_disk=own_disk)
    work.evaluations.stop = lambda: None
    work.reporter = cast(Any, SimpleNamespace(flush=nothing))
    work.stop_s = 9.0
    work._clear_out = partial(Work._clear_out, work)  # type: ignore[method-assign]
    with structlog.testing.capture_logs() as logs:
        await work._withdraw_now()
    assert [entry["event"] for entry in logs] == ["leaves with an upload that is not whole"]
    assert work.done.pop("released") == work.done.pop("ended") == 9.0 - RELEASE_S
    assert work.done == {"Leave": 1.0, "Checkpoint": 4.0}


@pytest.mark.parametrize(
    ("outcome", "ends_s", "takes_s"),
    [
        ("restored", inf, 0.0),
        ("superseded", inf, 0.0),
        ("finished", inf, 0.0),
        ("stopped", inf, 0.0),
        ("withdrawn", inf, 30.0),
        ("drained", inf, 30.0),
        ("drained", 4.0, 4.0),
    ],
)
async def test_who_leaves_waits_for_contributions_only_while_a_merge_may_take_them(
    broker: MemoryBroker,
    spec: RunSpec,
    syncer: Any,
    tmp_path: Path,
    outcome: str,
    ends_s: float,
    takes_s: float,
) -> None:
    """Its next life, or run, comes after them; over a slow link each takes minutes. The run may
    end `ends_s` after it left."""
    await syncer.prepare()
    broker.fault = lambda client, operation, subject: (
        "lose_request" if subject.startswith("up.") else "deliver"
    )
    work = Stopping(spec, broker, 0.0, 0.0)
    work.up, work.built = uplink(broker, spec, tmp_path, (9, 9, 4)), True
    work.evaluations.stop = lambda: None
    work.reporter = cast(Any, SimpleNamespace(flush=partial(asyncio.sleep, 0.0)))
    work.train_loop.left = leave = Leave(outcome, "for that reason")
    loop = asyncio.get_running_loop()
    sent = Encoded("fp32", 4, (jnp.zeros(4),))
    until_s = ambient.monotonic() + 30.0
    first, second = (
        ToSend(Contribute(0, 1, n, 2, 3, 0, 1, 0, 9, None, deadline=until_s), sent) for n in (5, 6)
    )
    under_way = asyncio.create_task(work.up.send(first))
    await until(lambda: work.up.contributing)
    for item in (second, ToSend(leave)):
        work.mailbox.post(item)
    if ends_s < inf:
        loop.call_later(ends_s, partial(work.withdraw, "the run is over", run_over=True))
    began = loop.time()
    await Work._clear_out(work)
    await under_way
    assert loop.time() - began == pytest.approx(takes_s, abs=0.5)
    assert not work.up.contributing
    assert len(await syncer.events("upload-abandoned")) == (2 if takes_s == 30.0 else 0)
    (told,) = await syncer.events("leave")
    assert told.text == f"{outcome}: for that reason"


@pytest.mark.parametrize(
    ("step_s", "save_s", "stop_s", "during"),
    [(5.0, 47.0, 30.0, "its last checkpoint"), (60.0, 1.0, 30.0, "a step")],
)
async def test_what_cannot_be_done_in_time_is_said_at_once_and_at_the_end(
    broker: MemoryBroker,
    spec: RunSpec,
    step_s: float,
    save_s: float,
    stop_s: float,
    during: str,
) -> None:
    work = Stopping(spec, broker, step_s, save_s)
    with structlog.testing.capture_logs() as logs:
        work.stop_s = stop_s
        stopping = asyncio.create_task(work._withdraw_now())
        await asyncio.sleep(0.1)
        (first,) = logs
        assert first["event"].startswith("it may leave without")
        assert "set DILOCO_STOP_S higher" in first["reason"]
        await stopping
    assert logs[1]["during"] == during
    # The shards are given back all the same, and in time.
    assert work.done == {"released": stop_s - RELEASE_S, "ended": stop_s - RELEASE_S}
    work.ended.cancel()


async def test_one_that_does_not_train_has_nothing_to_save(
    broker: MemoryBroker, spec: RunSpec
) -> None:
    work = Stopping(spec, broker, 0.0, 100.0)
    assert len(await work.stopped(5.0)) == 2
    work.train_loop = None
    assert work._never_saved(0.1) == ""


def test_what_is_known_of_a_disk_counts_and_else_a_quick_one() -> None:
    size = 10 * QUICK_BYTES_PER_S
    assert not too_long(size, 10.0) and not too_long(size, 30.0, 5.0, 25.0)
    assert "to save 20 GB at least 10 s, and there are 9.9 s" in too_long(size, 9.9)
    assert "a step takes 5 s, and to save 20 GB 25 s, and" in too_long(size, 29.0, 5.0, 25.0)


def test_it_ends_before_anybody_kills_it_unless_it_is_told_more() -> None:
    assert Settings().stop_s == STOP_S
    assert STOP_S + CLOSES_S <= 10.0, "Docker's own time"
    assert 2 * CLOSES_S < CLOSING_S, "that of 'diloco up', beside the seconds that it grants"
    with pytest.raises(ValidationError):
        Settings(stop_s=0.5)


@pytest.mark.whole
async def test_that_a_model_is_too_large_to_be_saved_in_time_is_said_when_it_begins(
    broker: MemoryBroker, syncer: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_learner.work_io.QUICK_BYTES_PER_S", 1)
    await syncer.prepare()
    await syncer.assign("a", "r")
    with structlog.testing.capture_logs() as logs:
        async with syncer.serving(), learner(broker, tmp_path, "a"):
            await syncer.bootstrap("a")
    told = [entry for entry in logs if entry["event"].startswith("to stop in order will take")]
    assert len(told) == 1 and "set DILOCO_STOP_S higher" in told[0]["reason"]


def test_a_host_that_is_told_to_stop_stays_for_the_islands_last_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others cannot end it without this one's part."""
    waited: list[float] = []
    over = SimpleNamespace(wait=waited.append)
    told: Any = SimpleNamespace(stop=lambda: None, over=over)
    monkeypatch.setattr(following_io, "end", lambda why, status: waited.append(status))
    following_io._stop(told, 55.0)
    assert waited == [55.0 + CLOSES_S, 0]


def of_disk(broker: MemoryBroker, spec: RunSpec, folder: Path) -> Stopping:
    """One that has left by itself, with an uplink of its own and checkpoints in a folder."""
    work = Stopping(spec, broker, 0.0, 0.0)
    work.up = uplink(broker, spec, folder, (9, 9, 4))
    work.evaluations.stop = lambda: None
    look = {"flush": partial(asyncio.sleep, 0.0), "look": lambda: None}
    work.reporter = cast(Any, SimpleNamespace(**look))
    work.computing = cast(Any, SimpleNamespace(handed=asyncio.sleep))
    work._clear_out = partial(Work._clear_out, work)  # type: ignore[method-assign]
    work.stop_s = 9.0
    return work


async def handing(work: Work) -> None:
    """As long as the train thread hands things out, and whatever is under way."""
    async with asyncio.TaskGroup() as work.tasks:
        await work._hand()


@pytest.mark.parametrize("by", ["who clears out", "who hands on"])
async def test_who_is_told_to_stop_while_it_leaves_waits_for_what_it_still_says_and_saves(
    broker: MemoryBroker, spec: RunSpec, syncer: Any, tmp_path: Path, by: str
) -> None:
    """It has handed all of it out by then; its process ends as soon as this says that it is done,
    whatever a thread still writes."""
    await syncer.prepare()
    work = of_disk(broker, spec, tmp_path)
    disk, begun, written = asyncio.Event(), asyncio.Event(), list[int]()

    async def slow(size: int, save: Any, sequence: int, *_: Any, beside_s: float) -> None:
        begun.set()
        await disk.wait()
        written.append(sequence)

    work.up.own_disk, slow.took_s = slow, 0.1  # type: ignore[attr-defined]
    work.up.tell_soon("some-kind", "said before", {})
    checkpoint = Checkpoint(0, 1, (0, 0, 0), final=True)
    for effect in (checkpoint, Leave("drained", "assigned elsewhere")):
        work.mailbox.post(ToSend(effect, []))
    leaving = asyncio.create_task(handing(work) if by == "who hands on" else work._clear_out())
    await begun.wait()
    leaving.cancel()
    await asyncio.wait({leaving})
    stopping = asyncio.create_task(work._withdraw_now())
    asyncio.get_running_loop().call_later(3.0, disk.set)
    with structlog.testing.capture_logs() as logs:
        await stopping
    assert work.done == {"released": 3.0, "ended": 3.0}
    assert len(written) == 1 and not work._unsaved
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    assert len(await syncer.events("leave")) == len(await syncer.events("some-kind")) == 1


async def test_of_a_last_checkpoint_that_is_not_written_in_time_it_says_so_however_it_began(
    broker: MemoryBroker, spec: RunSpec, syncer: Any, tmp_path: Path
) -> None:
    await syncer.prepare()
    work = of_disk(broker, spec, tmp_path)
    begun = asyncio.Event()

    async def hangs(*_: Any, beside_s: float) -> None:
        begun.set()
        await asyncio.Event().wait()

    work.up.own_disk, hangs.took_s = hangs, 0.1  # type: ignore[attr-defined]
    work.mailbox.post(ToSend(Checkpoint(0, 1, (0, 0, 0), final=True), []))
    leaving = asyncio.create_task(work._clear_out())
    await begun.wait()
    leaving.cancel()
    with structlog.testing.capture_logs() as logs:
        await work._withdraw_now()
    (entry,) = (entry for entry in logs if entry["log_level"] == "warning")
    assert (entry["event"], entry["during"]) == (UNSAVED, "its last checkpoint")
    for task in work.carried:
        task.cancel()
