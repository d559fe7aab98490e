"""A learner is drained, comes back, and dies: nothing is wasted, every phase is timed."""

import signal

import pytest
from live.stack import SELDOM, Stack, spec
from live.tape_checks import balanced

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(900)]


def merged(stack: Stack, learner: str, incarnation: int) -> bool:
    return any(
        (v["learner"], v["incarnation"], v["outcome"]) == (learner, incarnation, "merged")
        for r in stack.committed()[-30:]
        for v in r["verdicts"]
    )


def test_a_drained_learner_wastes_nothing_and_a_killed_one_is_accounted_for(stack: Stack) -> None:
    stack.client.create_run(spec(keeping=SELDOM))
    stack.wait_until(lambda: merged(stack, "learner-2", 0), "learner-2 merged")

    # Drained: its last words are that none of its work is left unmerged.
    stack.client.drain("learner-2")
    leave = stack.wait_until(
        lambda: next((e for e in stack.told("leave") if e["source"] == "learner-2"), None),
        "its leave",
    )
    assert leave["data"]["outcome"] == "drained"
    rounds = len(stack.rounds())
    stack.wait_until(lambda: len(stack.committed()) > rounds + 6, "rounds of the other one")
    status = stack.status()
    assert balanced(status) and status["tokens"]["lost"] == 0 and status["tokens_reread"] == 0

    # Given work again it joins the running run under a new life.
    stack.client.undrain("learner-2")
    stack.wait_until(lambda: merged(stack, "learner-2", 1), "learner-2 merged again")

    # Killed: what it had not merged is lost, and its return is timed phase by phase.
    stack.send(signal.SIGKILL, "learner-2")
    found = stack.wait_until(
        lambda: next(
            (
                r
                for r in stack.client.recoveries("r")
                if r["complete"] and (r["learner"], r["incarnation"]) == ("learner-2", 2)
            ),
            None,
        ),
        "its return",
    )
    assert (found["donor"], found["source"]) == ("learner-1", "donor")
    told = {k: v for k, v in found["phases_s"].items() if v is None}
    assert not told, "every phase has its time"
    assert found["rounds"] > 0
    status = stack.status()
    assert balanced(status) and status["tokens"]["lost"] > 0
    kinds = {e["kind"] for e in stack.client.events("r")}
    assert {"join", "donated", "recovered", "returned"} <= kinds
