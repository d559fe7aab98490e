"""Process 0 of an island that loses a host, or has a busy one, when it does not train."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from learner.contexts import learner
from waiting import until

from diloco_learner.hosts import computing_io, plan
from diloco_learner.hosts.computing_io import OnHosts, in_time
from diloco_learner.hosts.whole import HostLost
from diloco_learner.training.computing_io import Check, LeftBehind, OnThisMachine, go_on
from diloco_shared.spec.mesh import MeshSizes
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker

LOST = "host 1 (node1) is gone: no sign of life for 4.0 s. The island ends"


class Losing(OnThisMachine):
    """One that loses a host while it builds a run's model."""

    def __init__(self, fails: Callable[[], None]) -> None:
        super().__init__()
        self.fails, self.built = fails, threading.Event()
        self.gone, self.ends = "", list[float | None]()

    @property
    def lost(self) -> str:
        return self.gone

    def build(self, spec: RunSpec, check: Check = go_on, **how: Any) -> Any:
        self.gone = LOST
        self.built.set()
        self.fails()
        return super().build(spec, check, **how)

    async def over(self, within_s: float | None = None) -> None:
        self.ends.append(within_s)


def raises() -> None:
    """As the thread that waits for the host's answer does."""
    raise HostLost(LOST)


@pytest.mark.parametrize("fails", [raises, lambda: None])
async def test_a_host_that_is_lost_before_training_is_told_to_all(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, fails: Callable[[], None]
) -> None:
    """Also where the thread that built was quicker than the signal that ends the process."""
    await syncer.prepare()
    await syncer.assign("a", "r")
    computing = Losing(fails)
    async with syncer.serving(), learner(broker, tmp_path, "a", computing) as (_, task):
        await until(computing.built.is_set, "a model that is built")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (event,) = await syncer.events("host-lost")
        assert event.text == f"a: {LOST}"
        assert await syncer.events("unfit") == []
    assert len(computing.ends) == 1 and computing.ends[0], "the process ends with it"


async def test_whoever_tells_a_busy_host_of_the_end_holds_up_nothing_else() -> None:
    let_go, said = threading.Event(), list[str]()

    def tells() -> None:
        let_go.wait(30.0)
        said.append("told")

    await in_time(tells, 0.01)
    assert said == []
    let_go.set()
    await until(lambda: said == ["told"])
    await in_time(tells, None)
    assert said == ["told", "told"]
    with pytest.raises(HostLost):
        await in_time(raises, None)


class Begins:
    """The connections to the others, as a build needs them."""

    def __init__(self) -> None:
        self.begun = 0

    def work(self) -> "Begins":
        self.begun += 1
        return self

    def check(self) -> None:
        """The island works for it."""

    def tell(self, order: plan.Order) -> int:
        return 1

    def answers(self, number: int) -> dict[int, bytes]:
        return {1: b""}


def test_a_build_that_is_left_ends_no_work_but_its_own_and_completes_what_all_have_begun(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others would wait in a program for process 0."""
    hosts, wanted, made = Begins(), [True], list[bool]()
    island = OnHosts(hosts)  # type: ignore[arg-type]

    def check() -> None:
        if not wanted[0]:
            raise LeftBehind

    class Made:
        holder: Any = SimpleNamespace(close=lambda: None)

        def __init__(self, program: Any, link: Any) -> None:
            looks[0]()
            made.append(True)

    def build(self: OnThisMachine, spec: RunSpec, check: Check, **how: Any) -> Any:
        looks.append(check)
        wanted[0] = False
        with pytest.raises(LeftBehind):
            check()
        program: Any = SimpleNamespace(spec=spec, unread=False)
        self.trainer(program, MeshSizes(fsdp=2), None)

    looks: list[Check] = []
    monkeypatch.setattr(OnThisMachine, "build", build)
    monkeypatch.setattr(computing_io, "HostsTrainer", Made)
    island.build(spec, check)
    assert made == [True] and hosts.begun == 1
    with pytest.raises(LeftBehind):
        island.build(spec, check)
    assert hosts.begun == 1, "the next run's work would be over with it"


async def test_the_others_are_told_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    island = object.__new__(OnHosts)
    by: list[threading.Thread] = []
    monkeypatch.setattr(OnHosts, "_over", lambda _: by.append(threading.current_thread()))
    await island.over()
    assert by and by[0] is not threading.main_thread()
