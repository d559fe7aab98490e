"""Faults on request: refused unless allowed, told before they happen, over when they say so."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from diloco_shared.bus.port import StreamSpec
from diloco_shared.process.chaos import (
    ARMED_MAX,
    REMEMBERED_MAX,
    Abilities,
    FaultAgent,
    applied,
    healed,
    planned,
)
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Event, Fault, FaultReply
from diloco_shared.protocol.wire import decode, encode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus


class Victim:
    """Abilities that note what was done to them."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def note(self, what: str) -> None:
        self.done.append(what)

    def abilities(self) -> Abilities:
        return Abilities(
            slow=lambda factor: self.note(f"slow {factor:g}"),
            nan=lambda: self.note("nan"),
            kill=lambda: self.note("kill"),
            hang=lambda seconds: self.note(f"hang {seconds:g}"),
            hung=lambda now: self.note("stops" if now else "runs again"),
        )


@asynccontextmanager
async def serving(agent: FaultAgent) -> AsyncIterator[MemoryBus]:
    """The agent answers; yields a bus to ask it by."""
    await agent.bus.ensure_stream(
        StreamSpec(subjects.EVENTS_STREAM, (subjects.EVENTS_FILTER,), 1 << 20)
    )
    asker = MemoryBus(agent.bus.broker, "asker")  # type: ignore[attr-defined]
    task = asyncio.create_task(agent.serve())
    await asyncio.sleep(0)
    try:
        yield asker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ask(bus: MemoryBus, **fields: Any) -> FaultReply:
    fault = Fault.model_validate({"id": "f-1", "kind": "kill", "target": "l-1"} | fields)
    return decode(await bus.request(subjects.chaos("l-1"), encode(fault)), FaultReply)


async def told(bus: MemoryBus) -> list[Event]:
    found = await bus.fetch(subjects.EVENTS_STREAM, subjects.EVENTS_FILTER)
    return [decode(stored.payload, Event) for stored in found]


def new_agent(victim: Victim | None = None, *, enabled: bool = True) -> FaultAgent:
    bus = MemoryBus(MemoryBroker(), "l-1")
    abilities = victim.abilities() if victim else None
    agent = FaultAgent(bus, "l-1", enabled=enabled, abilities=abilities)
    agent.answer_s = 0.0
    return agent


async def test_chaos_that_is_off_refuses_with_a_way_to_turn_it_on() -> None:
    victim = Victim()
    async with serving(new_agent(victim, enabled=False)) as bus:
        reply = await ask(bus)
        assert not reply.accepted
        assert "DILOCO_CHAOS=1" in reply.reason
        assert victim.done == []
        assert await told(bus) == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kind": "hang"}, "duration"),
        ({"kind": "hang", "duration_s": 4000.0}, "duration"),
        ({"kind": "slow", "duration_s": 1.0, "factor": 0.5}, "factor"),
        ({"kind": "slow", "duration_s": 1.0, "factor": 1001.0}, "factor"),
        ({"at_step": 5}, "takes no inner steps"),
    ],
)
async def test_a_fault_that_makes_no_sense_is_refused_with_its_reason(
    fields: dict[str, Any], why: str
) -> None:
    victim = Victim()
    async with serving(new_agent(victim)) as bus:
        reply = await ask(bus, **fields)
        assert not reply.accepted
        assert why in reply.reason
        assert victim.done == []


async def test_a_process_knows_of_its_hang_before_and_after_it() -> None:
    victim = Victim()
    async with serving(new_agent(victim)) as bus:
        assert (await ask(bus, kind="hang", duration_s=0.01)).accepted
        await until(lambda: len(victim.done) == 3)
        assert victim.done == ["stops", "hang 0.01", "runs again"]


async def test_what_a_process_cannot_do_it_refuses() -> None:
    async with serving(new_agent()) as bus:
        slow = await ask(bus, kind="slow", duration_s=1.0, factor=2.0)
        nan = await ask(bus, kind="nan")
        assert "no training loop" in slow.reason
        assert "no gradients" in nan.reason


async def test_garbage_is_answered_and_changes_nothing() -> None:
    """I11."""
    victim = Victim()
    async with serving(new_agent(victim)) as bus:
        reply = decode(await bus.request(subjects.chaos("l-1"), b"garbage"), FaultReply)
        assert not reply.accepted
        assert victim.done == []


async def test_the_truth_is_written_before_the_kill() -> None:
    victim = Victim()
    agent = new_agent(victim)
    agent.run = "r"
    order: list[str] = []
    append = agent.bus.append

    async def appended(subject: str, *args: Any, **kwargs: Any) -> int:
        seq = await append(subject, *args, **kwargs)
        order.append(subject)
        return seq

    agent.bus.append = appended  # type: ignore[method-assign]

    def kill() -> None:
        order.append("kill")
        victim.note("kill")

    agent.abilities = Abilities(kill=kill)
    async with serving(agent) as bus:
        assert (await ask(bus)).accepted
        await until(lambda: victim.done)
        assert order == [subjects.event("r", "fault-applied"), "kill"]
        (event,) = await told(bus)
        assert event.data["id"] == "f-1"
        assert event.data["kind"] == "kill"
        assert event.data["target"] == event.source == "l-1"
        assert event.text == "l-1 was killed on request (f-1)"


@pytest.mark.parametrize(
    ("kind", "will", "does"),
    [
        ("kill", "is to be killed", "was killed on request"),
        ("hang", "is to stand still for 20 s", "stands still for 20 s, on request"),
        (
            "slow",
            "is to take 3 times as long for each step, for 20 s",
            "takes 3 times as long for each step for 20 s, on request",
        ),
        (
            "nan",
            "is to compute gradients of one step that are no numbers",
            "computes gradients of one step that are no numbers, on request",
        ),
    ],
)
def test_a_fault_is_told_in_words(kind: Any, will: str, does: str) -> None:
    fault = Fault(id="f-1", kind=kind, target="l-1", duration_s=20.0, factor=3.0)
    assert (planned(fault), applied(fault)) == (will, does)
    assert healed(fault) == ("goes on" if kind == "hang" else "is as fast as before")


async def test_a_fault_for_a_step_waits_for_that_step_and_comes_once() -> None:
    victim = Victim()
    agent = new_agent(victim)
    agent.stepped(3)
    async with serving(agent) as bus:
        reply = await ask(bus, at_step=5)
        assert reply.accepted
        assert "step 5" in reply.reason
        agent.stepped(4)
        assert agent.armed and not agent.tasks
        agent.stepped(6)  # steps are reported coalesced: 5 itself may never be seen
        await until(lambda: victim.done)
        agent.stepped(7)
        assert victim.done == ["kill"]
        assert not agent.armed


async def test_a_fault_that_is_asked_for_twice_comes_once() -> None:
    """The first answer was lost, and whoever asked asks again."""
    victim = Victim()
    agent = new_agent(victim)
    agent.stepped(3)
    async with serving(agent) as bus:
        first = await ask(bus, kind="nan", at_step=5)
        agent.stepped(4)
        assert await ask(bus, kind="nan", at_step=5) == first
        assert len(agent.armed) == 1
        agent.stepped(6)
        await until(lambda: victim.done)
        assert await ask(bus, kind="nan", at_step=5) == first, "it is past, and comes no more"
        await asyncio.gather(*agent.tasks)
        assert victim.done == ["nan"]


async def test_a_process_remembers_a_bounded_number_of_faults() -> None:
    """I12."""
    agent = new_agent(Victim())
    async with serving(agent) as bus:
        for number in range(REMEMBERED_MAX + 3):
            assert (await ask(bus, id=f"f-{number}", kind="nan")).accepted
            await asyncio.gather(*agent.tasks)
        assert len(agent.accepted) == REMEMBERED_MAX and "f-3" in agent.accepted


async def test_a_fault_for_a_step_of_one_run_does_not_come_in_the_next() -> None:
    victim = Victim()
    agent = new_agent(victim)
    agent.works_for("one")
    agent.stepped(3)
    async with serving(agent) as bus:
        assert (await ask(bus, at_step=5)).accepted
        agent.works_for("")
        agent.works_for("two")
        reply = await ask(bus, id="f-2", at_step=2)
        assert not reply.accepted, "it has taken no step of this run yet"
        agent.stepped(6)
        await asyncio.sleep(0.01)
        assert victim.done == [] and not agent.tasks


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("worked_for", "then", "comes"),
    [
        ("one", ("", "two"), False),
        ("one", ("",), False),
        ("one", ("", "one"), True),
        ("", ("one",), True),
        ("", (), True),
    ],
)
async def test_a_fault_for_a_time_comes_in_its_own_run_alone(
    worked_for: str, then: tuple[str, ...], *, comes: bool
) -> None:
    victim = Victim()
    agent = new_agent(victim)
    agent.works_for(worked_for)
    async with serving(agent) as bus:
        assert (await ask(bus, run="one", after_s=60.0)).accepted
        await asyncio.sleep(1.0)
        for run in then:
            agent.works_for(run)
        await asyncio.gather(*agent.tasks)
        assert victim.done == (["kill"] if comes else [])
        assert len(await told(bus)) == comes, "what does not come is not told of"


@pytest.mark.parametrize("when", [{"after_s": 0.0}, {"at_step": 5}])
async def test_who_still_works_for_another_run_refuses_faults_of_the_next(when: Any) -> None:
    """It has been given the next one: what it took now would never come, and nobody would know."""
    agent = new_agent(Victim())
    agent.works_for("one")
    agent.stepped(100)
    async with serving(agent) as bus:
        reply = await ask(bus, run="two", **when)
        assert not reply.accepted and not agent.tasks
        assert "still works for run one: try again" in reply.reason
        assert (await ask(bus, run="one", **when)).accepted


async def test_a_learner_that_does_not_step_yet_says_when_to_try_again() -> None:
    """It is assigned, and compiles for a minute: whoever pastes commands is that early."""
    agent = new_agent(Victim())
    agent.role = "learner"
    async with serving(agent) as bus:
        assert "submit one" in (await ask(bus, at_step=5)).reason
        agent.works_for("one")
        reply = await ask(bus, at_step=5)
        assert not reply.accepted
        assert "has taken no step of run one yet: try again once it trains" in reply.reason
        agent.stepped(0)
        assert (await ask(bus, at_step=5)).accepted


async def test_a_step_already_taken_is_due_at_once() -> None:
    victim = Victim()
    agent = new_agent(victim)
    agent.stepped(9)
    async with serving(agent) as bus:
        reply = await ask(bus, at_step=5, kind="nan")
        assert reply.accepted and reply.reason == "at once: step 5 is past (now 9)"
        await until(lambda: victim.done)
        assert victim.done == ["nan"]


async def test_slowness_ends_and_its_end_is_told() -> None:
    victim = Victim()
    agent = new_agent(victim)
    async with serving(agent) as bus:
        assert (await ask(bus, kind="slow", duration_s=0.01, factor=3.0)).accepted
        await until(lambda: len(victim.done) >= 2)
        assert victim.done == ["slow 3", "slow 1"]
        await asyncio.gather(*agent.tasks)
        assert [e.kind for e in await told(bus)] == ["fault-applied", "fault-healed"]


@pytest.mark.virtual
@pytest.mark.parametrize(
    ("lasts", "becomes"), [((10.0, 3.0), [3, 5, 3, 1]), ((3.0, 10.0), [3, 5, 5, 1])]
)
async def test_the_end_of_one_slowness_ends_no_other(
    lasts: tuple[float, float], becomes: list[int]
) -> None:
    victim = Victim()
    agent = new_agent(victim)
    async with serving(agent) as bus:
        for number, (seconds, factor) in enumerate(zip(lasts, (3.0, 5.0), strict=True)):
            fields = {"id": f"f-{number}", "duration_s": seconds, "factor": factor}
            assert (await ask(bus, kind="slow", **fields)).accepted
            await asyncio.sleep(1.0)
        await asyncio.gather(*agent.tasks)
        assert victim.done == [f"slow {factor}" for factor in becomes]


@pytest.mark.virtual
async def test_a_slowness_is_over_with_the_run_that_it_came_in() -> None:
    victim = Victim()
    agent = new_agent(victim)
    agent.works_for("one")
    async with serving(agent) as bus:
        assert (await ask(bus, kind="slow", duration_s=60.0, factor=8.0)).accepted
        await asyncio.sleep(1.0)
        agent.works_for("two")
        assert (await ask(bus, id="f-2", kind="slow", duration_s=5.0, factor=2.0)).accepted
        await asyncio.gather(*agent.tasks)
    assert victim.done == ["slow 8", "slow 2", "slow 1"]


async def test_waiting_faults_are_bounded() -> None:
    """I12."""
    victim = Victim()
    agent = new_agent(victim)
    agent.stepped(0)
    async with serving(agent) as bus:
        for number in range(ARMED_MAX):
            assert (await ask(bus, id=f"f-{number}", at_step=5)).accepted
        assert "waiting already" in (await ask(bus, id="f-more", at_step=5)).reason


async def test_a_bus_that_is_away_does_not_save_the_victim() -> None:
    victim = Victim()
    agent = new_agent(victim)
    async with serving(agent) as bus:
        await bus.delete_stream(subjects.EVENTS_STREAM)
        assert (await ask(bus)).accepted
        await until(lambda: victim.done)
        assert victim.done == ["kill"]


_PROCESS = """
import asyncio, json, sys
from diloco_shared.bus.port import StreamSpec
from diloco_shared.process.chaos import FaultAgent
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import (Event, Fault)
from diloco_shared.protocol.wire import decode

async def main():
    bus = MemoryBus(MemoryBroker(), "l-1")
    agent = FaultAgent(bus, "l-1", enabled=True)
    await bus.ensure_stream(StreamSpec("EVENTS", ("ev.>",), 1 << 20))
    fault = Fault(id="f", kind=sys.argv[1], target="l-1", duration_s=0.3)
    print("begins", flush=True)
    await agent._carry_out(fault)
    found = await bus.fetch("EVENTS", "ev.>")
    print(json.dumps([[e.kind, e.at] for e in (decode(s.payload, Event) for s in found)]))

asyncio.run(main())
"""


def process(kind: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROCESS, kind], stdout=subprocess.PIPE, text=True
    )


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.live
def test_a_kill_is_a_sigkill() -> None:
    with process("kill") as victim:
        assert victim.wait(20) == -signal.SIGKILL


@pytest.mark.live
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_hang_stops_the_process_and_ends_by_itself() -> None:
    with process("hang") as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "begins\n"
        while state(victim.pid) != "T":
            assert victim.poll() is None, "it was never stopped"
        told = json.loads(victim.stdout.read())
        assert victim.wait(20) == 0
    (applied, began), (healed, ended) = told
    assert (applied, healed) == ("fault-applied", "fault-healed")
    assert ended - began >= 0.3


@pytest.mark.live
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_killed_while_it_hangs_leaves_nobody_behind() -> None:
    with process("hang") as victim:
        while state(victim.pid) != "T":
            assert victim.poll() is None, "it was never stopped"
        tasks = Path(f"/proc/{victim.pid}/task").glob("*/children")
        children = [child for task in tasks for child in task.read_text().split()]
        assert len(children) == 1
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait(20)
    waker = Path(f"/proc/{children[0]}")
    while waker.exists() and state(int(children[0])) != "Z":
        os.sched_yield()
