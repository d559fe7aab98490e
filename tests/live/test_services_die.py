"""Each service dies once by SIGKILL in the middle of a run; nothing committed is lost (I6)."""

import signal

import pytest
from live.stack import SELDOM, Stack, spec
from live.tape_checks import check_tape

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_coordinator_syncer_and_nats_die_and_rounds_go_on(stack: Stack) -> None:
    stack.client.create_run(spec(keeping=SELDOM))
    stack.wait_until(lambda: len(stack.committed()) > 20, "the first rounds")

    # The coordinator: nobody who trains notices.
    rounds = len(stack.rounds())
    old = stack.pid("coordinator")
    stack.send(signal.SIGKILL, "coordinator")
    stack.wait_until(lambda: stack.pid("coordinator") != old, "another coordinator")
    # As soon as there is one to ask; on a busy machine a round takes longer than its start.
    stack.wait_until(lambda: len(stack.rounds()) > rounds, "rounds after the coordinator's death")

    # The syncer: learners keep stepping, and its successor goes on from the tape.
    old = stack.pid("syncer-1")
    term = stack.status()["term"]
    steps = stack.learner("learner-1")["step"]
    stack.send(signal.SIGKILL, "syncer-1")
    stack.wait_until(lambda: stack.status()["term"] > term, "another term")
    stack.wait_until(lambda: stack.learner("learner-1").get("step", 0) > steps, "steps")
    assert stack.learner("learner-1")["incarnation"] == 0, "the learner lived on"
    stack.goes_on("the syncer's death", more=12)

    # The NATS server: started again on the same store.
    steps = stack.learner("learner-1")["step"]
    stack.client.chaos("kill", "nats")
    stack.goes_on("the server's death", more=12)
    assert stack.learner("learner-1")["step"] > steps
    assert stack.learner("learner-1")["incarnation"] == 0, "the learner lived on"

    check_tape(stack.rounds())
    stack.end()
    check_tape(stack.rounds())


@pytest.mark.long
def test_a_step_with_bad_gradients_costs_that_step_alone(shared: Stack) -> None:
    shared.client.create_run(spec(keeping=SELDOM))
    shared.wait_until(lambda: len(shared.committed()) > 12, "the first rounds")
    shared.client.chaos("nan", "learner-2")
    shared.wait_until(lambda: shared.told("step-skipped"), "the event")
    seen = len(shared.committed())
    shared.wait_until(
        lambda: any(
            v["learner"] == "learner-2" and v["outcome"] == "merged"
            for r in shared.committed()[seen + 3 :]
            for v in r["verdicts"]
        ),
        "learner-2 merged again",
    )
    assert shared.learner("learner-2")["incarnation"] == 0, "no process had to die"
    assert not shared.status()["refused"].get("non-finite")


@pytest.mark.long
def test_pause_holds_everybody_and_resume_goes_on(shared: Stack) -> None:
    shared.client.create_run(spec(keeping=SELDOM))
    shared.wait_until(lambda: len(shared.committed()) > 6, "the first rounds")
    shared.client.pause("r")
    shared.wait_until(
        lambda: all(
            shared.learner(name).get("state") == "paused" for name in ("learner-1", "learner-2")
        ),
        "everybody paused",
    )
    assert shared.client.run("r")["state"] == "paused"
    rounds = len(shared.rounds())
    shared.client.resume("r")
    shared.wait_until(lambda: len(shared.committed()) > rounds + 6, "rounds after the pause")
