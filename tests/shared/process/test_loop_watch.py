"""The loop's watch: what holds it is named, and a process without a processor is not blamed."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
import uvloop
from prometheus_client.core import Metric

from diloco_shared.process import loop_watch
from diloco_shared.process.loop_watch import HELD_S, UNSEEN, Answer, Hold, LoopWatch, Sight
from diloco_shared.process.loop_watch import judged as judge

LAG = 10 * HELD_S
BEFORE = Answer(at=100.0, ran_s=1.0, queued_s=2.0)


def after(*, ran: float = 0.0, queued: float = 0.0, lag: float = LAG) -> Answer:
    return Answer(100.0 + HELD_S + lag, 1.0 + ran, 2.0 + queued)


def test_what_ran_held_the_loop_whoever_saw_it() -> None:
    hold = judge(BEFORE, after(ran=LAG), Sight("work (a.py:1)"))
    assert hold is not None and hold.by == "work (a.py:1)"
    assert hold.seconds == pytest.approx(LAG)
    assert str(hold) == "the event loop was held for 0.50 s by work (a.py:1)"
    # One call that keeps the interpreter keeps the thread that looks, too.
    hold = judge(BEFORE, after(ran=LAG), Sight("work (a.py:1)", late_s=LAG))
    assert hold is not None and hold.by == "work (a.py:1)"
    for sight in (Sight(), Sight("select (selectors.py:468)", idle=True)):
        hold = judge(BEFORE, after(ran=LAG), sight)
        assert hold is not None and hold.by == UNSEEN


def test_on_a_busy_machine_what_ran_is_blamed_for_its_own_part() -> None:
    ran = 2 * HELD_S
    hold = judge(BEFORE, after(ran=ran, queued=LAG - ran), Sight("work (a.py:1)"))
    assert hold is not None and hold.by == "work (a.py:1)"
    assert hold.seconds == pytest.approx(ran)


def test_what_waited_on_the_loop_held_it() -> None:
    hold = judge(BEFORE, after(), Sight("fsync (a.py:1)"))
    assert hold is not None and hold.by == "fsync (a.py:1)"


@pytest.mark.parametrize(
    ("now", "sight"),
    [
        (after(queued=LAG), Sight("work (a.py:1)")),  # it stood in the queue for a processor
        (after(), Sight("work (a.py:1)", late_s=LAG)),  # everybody was late
        (after(), Sight("select (selectors.py:468)", idle=True)),  # the loop had nothing to do
        (after(), Sight()),  # nothing was seen, nothing was done
        (after(ran=LAG, lag=HELD_S * 0.9), Sight("work (a.py:1)")),  # short
    ],
)
def test_a_starved_process_is_not_blamed(now: Answer, sight: Sight) -> None:
    assert judge(BEFORE, now, sight) is None


def test_what_is_watched_less_often_is_held_from_later_on() -> None:
    now = Answer(100.0 + 0.1 + 0.3, 1.0 + 0.06, 2.0 + 0.3)
    assert judge(BEFORE, now, Sight("work (a.py:1)"), 0.1) is None, "no more than between two looks"
    found = judge(BEFORE, now, Sight("work (a.py:1)"), 0.05)
    assert found is not None and found.seconds == pytest.approx(0.06)
    watch = LoopWatch(shortest_s=0.1)
    watch.answer = BEFORE
    watch._answered(now)
    assert not watch.held
    (times,) = [m.documentation for m in watch.metrics() if m.name == "diloco_loop_held"]
    assert "over 0.1 s" in times


def block_by_waiting() -> None:
    time.sleep(0.4)


def block_by_computing() -> None:
    until = time.thread_time() + 0.4
    while time.thread_time() < until:
        pass


def watched(block: object, told: list[Hold]) -> LoopWatch:
    watch = LoopWatch(told.append)

    async def main() -> None:
        keeping = asyncio.create_task(watch.keep())
        await asyncio.sleep(0.1)
        if callable(block):
            block()
        await asyncio.sleep(0.1)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    # On a machine that is busy with other things a single attempt may prove nothing.
    for _ in range(20):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
        if told:
            break
        watch = LoopWatch(told.append)
    return watch


@pytest.mark.parametrize("block", [block_by_waiting, block_by_computing])
def test_a_coroutine_that_blocks_is_named(block: object) -> None:
    told: list[Hold] = []
    watch = watched(block, told)
    name = getattr(block, "__name__", "")
    assert told[0].by.startswith(f"{name} (test_loop_watch.py:")
    assert watch.held >= 1 and watch.worst.seconds > HELD_S and name in watch.worst.by
    assert watch.detail()["loop_lag_by"] == watch.worst.by
    found: dict[str, Metric] = {metric.name: metric for metric in watch.metrics()}
    (worst,) = found["diloco_loop_lag_seconds"].samples
    assert worst.value == watch.worst.seconds and worst.labels == {"by": watch.worst.by}
    assert found["diloco_loop_held"].samples[0].value == watch.held
    assert found["diloco_loop_held_seconds"].samples[0].value == watch.held_s


@pytest.mark.parametrize(
    ("file", "named"),
    [
        (asyncio.__file__, False),
        ("/usr/lib/site-packages/httpx/client.py", False),
        ("/usr/lib/site-packages/diloco_syncer/app.py", True),  # as it is installed
        ("/home/me/my_model.py", True),
    ],
)
def test_whose_functions_are_named_is_ours_and_the_users(file: str, named: bool) -> None:
    assert loop_watch._is_foreign(file) is not named


def test_lines_in_the_log_are_few() -> None:
    told: list[Hold] = []
    watch = LoopWatch(told.append)
    for n in range(5):
        watch.answer = BEFORE
        watch.sight = Sight(f"work (a.py:{n})")
        watch._answered(after(ran=LAG * (n + 1), lag=LAG * (n + 1)))
    assert watch.held == 5 and watch.worst.by == "work (a.py:4)"
    assert [hold.by for hold in told] == ["work (a.py:0)"]


_STOPPED = """
import asyncio, sys
from diloco_shared.process.loop_watch import LoopWatch

async def main():
    watch = LoopWatch()
    keeping = asyncio.create_task(watch.keep())
    await asyncio.sleep(0.3)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await asyncio.sleep(0.1)
    print([by for by in [watch.worst.by] if by != ""], flush=True)

asyncio.run(main())
"""


def test_a_process_that_was_stopped_blames_nothing() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _STOPPED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        time.sleep(0.5)  # what the test is about: a gap that is nobody's fault
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stdout.readline() == "[]\n"
