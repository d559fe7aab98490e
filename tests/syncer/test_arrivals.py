"""Events that wait for a leader: in order, bounded, and answers to effects are never lost."""

import asyncio

from diloco_shared.protocol.messages import Join, Progress
from diloco_shared.protocol.records import Restore
from diloco_syncer.events import (
    Appended,
    BusBack,
    Event,
    InitMoved,
    JoinSeen,
    Kept,
    Loaded,
    Malformed,
    ProgressSeen,
    Published,
    Sealed,
    SnapshotBrokenOff,
    SnapshotDone,
    SnapshotFailed,
    Staged,
    Suspended,
    Wanted,
)
from diloco_syncer.messages.arrivals_io import LONG, MAX, Arrivals

# Each is the answer to an effect, or the only word of something.
INTERNAL: list[Event] = [
    Appended(1, 0.0),
    Staged(0, 0, "", "", ""),
    Published(0, -1, 0, 0, True),
    SnapshotDone(0, 0, ""),
    SnapshotBrokenOff(),
    SnapshotFailed(""),
    Kept(1),
    Sealed(1),
    Loaded(Restore(serial=1, source="")),
    Suspended(""),
    BusBack(),
    Wanted(False, False, 1),
]


def report(learner: str, step: int, incarnation: int = 0) -> ProgressSeen:
    return ProgressSeen(
        Progress(
            learner=learner,
            incarnation=incarnation,
            epoch=0,
            state="stepping",
            step=step,
            tokens=step,
            c_steps=(),
            c_tokens=(),
            adopted=(),
            adopted_at=(),
            loss=0.0,
            step_s=0.0,
            wait_s=0.0,
        )
    )


async def taken(queue: Arrivals) -> list[Event]:
    return [await queue.get() for _ in range(len(queue))]


async def test_events_come_out_in_order() -> None:
    queue = Arrivals()
    events = [report("a", 1), *INTERNAL, report("a", 2), Malformed("wire", "", "")]
    assert all(queue.put(e) for e in events)
    assert await taken(queue) == events


async def test_answers_to_effects_are_never_dropped() -> None:
    queue = Arrivals()
    for n in range(MAX):
        queue.put(Malformed("wire", str(n), ""))
    assert not queue.put(Malformed("wire", "one more", ""))
    assert not queue.put(report("a", 1))
    assert all(queue.put(e) for e in INTERNAL)
    assert (await taken(queue))[MAX:] == INTERNAL
    assert queue.dropped == {"Malformed": 1, "ProgressSeen": 1}


async def test_while_many_wait_only_the_newest_report_of_a_life_counts() -> None:
    queue = Arrivals()
    for step in range(10 * MAX):
        assert queue.put(report("a", step))
        assert queue.put(report("b", step, incarnation=step // MAX))
    assert len(queue) < LONG + 20
    found = await taken(queue)
    newest = {}
    for event in found:
        assert isinstance(event, ProgressSeen)
        newest[event.progress.learner, event.progress.incarnation] = event.progress.step
    assert newest["a", 0] == 10 * MAX - 1
    assert all(newest["b", n] == (n + 1) * MAX - 1 for n in range(10))
    queue.put(report("a", 0))
    assert await taken(queue) == [report("a", 0)], "what was taken is not replaced any more"


async def test_signs_that_say_the_same_wait_once() -> None:
    queue = Arrivals()
    for _ in range(100):
        queue.put(BusBack())
        queue.put(InitMoved())
    assert await taken(queue) == [BusBack(), InitMoved()]


async def test_joins_are_repeated_by_those_who_wait() -> None:
    join = Join(learner="a", incarnation=0, nonce="n", config={})
    queue = Arrivals()
    for _ in range(2 * MAX):
        queue.put(JoinSeen(join))
    assert len(queue) == LONG


async def test_a_reader_waits_for_the_first() -> None:
    queue = Arrivals()
    reading = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    queue.put(Kept(1))
    assert await reading == Kept(1)
