"""The message server stands still for half a minute: learners step on, and nobody is blamed."""

from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from live.stack import Stack, spec, up
from live.tape_checks import check_tape

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

STALL_S = 30.0
# Of the stall, what a train loop may spend on anything but its computation: descheduled in the
# middle of handing out a copy, say. One that waited for the bus would spend nearly all of it.
BLOCKED_S_MAX = 3.0
LEARNERS = ("learner-1", "learner-2")


def asked(addresses: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What every learner's own health endpoint says: no bus is needed for it."""
    return {
        name: httpx.get(f"http://{address}/healthz", timeout=30).json()
        for name, address in addresses.items()
    }


def stalled(stack: Stack) -> bool:
    return bool(stack.nats().status() == psutil.STATUS_STOPPED)


def lives(stack: Stack) -> dict[str, int]:
    """Process id of every member: a restart would show."""
    return {name: stack.pid(name) for name in (*LEARNERS, "syncer-1", "syncer-2")}


@pytest.mark.long
def test_steps_go_on_through_a_stall_and_nobody_is_evicted_or_replaced(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--learners", "2", "--syncers", "2", "--chaos") as stack:
        stack.client.create_run(spec())
        stack.wait_until(lambda: len(stack.committed()) > 12, "the first rounds")
        stack.wait_until(
            lambda: set(stack.syncers().values()) == {"leading", "standby"}, "both syncers"
        )
        leader, term, processes = stack.leader(), stack.status()["term"], lives(stack)
        addresses = {name: stack.client.member(name)["address"] for name in LEARNERS}
        alive = len(stack.told("learner-alive"))

        stack.client.chaos("hang", "nats", duration_s=STALL_S)
        stack.wait_until(lambda: stalled(stack), "the stall")
        begin, latest = asked(addresses), asked(addresses)
        while stalled(stack):
            latest = asked(addresses)
        for name in LEARNERS:
            steps = latest[name]["step"] - begin[name]["step"]
            blocked_s = latest[name]["wait_s"] - begin[name]["wait_s"]
            # At 50 ms a step on a machine with much else to do, half a minute has hundreds.
            assert steps > 24, f"{name} took {steps} steps (I8)"
            assert blocked_s < BLOCKED_S_MAX, f"{name} was blocked for {blocked_s:.2f} s (I8)"

        stack.goes_on("the stall", more=12)
        check_tape(stack.rounds())
        assert (stack.leader(), stack.status()["term"]) == (leader, term)
        assert lives(stack) == processes
        # Nobody was evicted: nobody had to come back.
        assert not stack.told("learner-lost")
        assert len(stack.told("learner-alive")) == alive
        assert set(stack.status()["alive"]) == set(LEARNERS)
        # And all of them contribute again (I10).
        last = stack.rounds()[-12:]
        merged = {v["learner"] for r in last for v in r["verdicts"] if v["outcome"] == "merged"}
        assert merged == set(LEARNERS)
