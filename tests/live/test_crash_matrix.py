"""SIGKILL at every known place of every service, and of the message server at moments of a round.

One stack goes through all of it. A supervisor restarts what dies; every point kills once.
"""

import asyncio
import signal
from pathlib import Path

import pytest
from live.stack import Stack, spec, up
from live.tape_checks import check_tape, executed_again

from diloco_client import Unreachable
from diloco_shared.process.crash_points import POINTS

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

# By whom: points of one service are shared out, so that one process lives while another dies.
# A dozen passages let a run get under way first.
DEATHS = (
    "coordinator/run-record",
    "syncer-1/before-append:12",
    "syncer-1/publication:12",
    "syncer-1/snapshot",
    "syncer-1/replay:3",
    "syncer-1/follow:12",
    "syncer-2/after-append:12",
    "syncer-2/after-manifest:12",
    "syncer-2/snapshot:2",
    "syncer-2/takeover",
    "syncer-2/replay:3",
    "learner-1/contribution:12",
    "learner-1/receiving",
    "learner-2/checkpoint",
    "learner-2/donation",
    "learner-3/donation",
)
# After thousands of records; worlds, whose streams hold fewer, die there.
LATER = {"archive", "archived"}
# Rounds of both syncers in place without a death, after which somebody is killed.
QUIET_ROUNDS = 24
# At which message of a round the message server dies.
MOMENTS = ("ctl.r.pull", "up.r.*.*.*.*.*.m", "tape.r.>", "dn.r.*.*.*.*.m")


def points(entries: set[str]) -> set[str]:
    return {entry.partition("/")[2].partition(":")[0] for entry in entries}


def test_no_point_is_left_out() -> None:
    assert points(set(DEATHS)) == set(POINTS) - LATER


def die_everywhere(stack: Stack) -> None:
    """Until every point has killed; when nothing dies by itself, somebody is killed."""
    seen: set[str] = set()
    while missing := points(set(DEATHS)) - points(seen):

        def died(seen: set[str] = seen) -> bool:
            return stack.crashed() != seen

        def in_place() -> bool:
            return set(stack.syncers().values()) == {"leading", "standby"}

        what = f"a death at {', '.join(sorted(missing))}"
        stack.wait_until(lambda died=died: died() or in_place(), f"two syncers, or {what}")
        begin = stack.wait_until(stack.rounds, "rounds")[-1]["round"]

        def quiet(begin: int = begin) -> bool:
            return bool(stack.rounds()[-1]["round"] > begin + QUIET_ROUNDS)

        stack.wait_until(
            lambda died=died, quiet=quiet: died() or quiet(), f"{QUIET_ROUNDS} rounds, or {what}"
        )
        if not died():
            # The standby's points are due when it leads; a newcomer brings the learners'.
            victims = [stack.wait_until(stack.leader, "a leader")]
            if missing & {"donation", "receiving"}:
                victims.append("learner-1")
            stack.send(signal.SIGKILL, *victims)
            stack.goes_on(f"the death of {', '.join(victims)}", more=1)
        seen = stack.crashed()
        check_tape(stack.wait_until(stack.rounds, "rounds"))


async def kill_server_at(stack: Stack, subject: str) -> None:
    """The moment such a message passes it."""
    async with stack.bus() as bus, bus.subscribe(subject, limit=16) as deliveries:
        async for _ in deliveries:
            stack.nats().kill()
            break


@pytest.mark.long
def test_death_at_any_point_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    options = ("--learners", "3", "--syncers", "2")
    with up(tmp_path / "data", *options, crash_at=",".join(DEATHS)) as stack:
        # Whoever submits hears nothing of a coordinator that dies over it, and asks again.
        with pytest.raises(Unreachable):
            stack.client.create_run(spec(), idempotency_key="once")
        stack.wait_until(stack.client.ready, "another coordinator")
        assert stack.wait_until(
            lambda: stack.client.create_run(spec(), idempotency_key="once"), "the run"
        )
        assert len(stack.client.runs()) == 1

        die_everywhere(stack)
        stack.goes_on("all the deaths", more=12)
        for moment in MOMENTS:
            asyncio.run(kill_server_at(stack, moment))
            stack.goes_on(f"the server's death at {moment}")
            check_tape(stack.rounds())

        stack.end()
        rounds = stack.rounds()
        check_tape(rounds)
        verified = stack.diloco("tape", "verify", "r")
        assert (verified["faults"], verified["records"] > len(rounds)) == ([], True)
        assert asyncio.run(executed_again(stack)) == len(stack.committed())
