"""Each service dies once by SIGKILL in the middle of a run; nothing committed is lost (I6)."""

from typing import Any

import pytest
from live.tape_checks import check_tape

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def goes_on(cluster: Any, wait_until: Any, what: str) -> None:
    """Rounds are committed that were not there before."""
    before = len(cluster.client.rounds("r"))
    wait_until(lambda: len(cluster.committed("r")) > before + 6, f"rounds after {what}")


def test_coordinator_syncer_and_nats_die_and_rounds_go_on(
    cluster: Any, spec: Any, wait_until: Any
) -> None:
    cluster.client.create_run(spec("r"))
    wait_until(lambda: len(cluster.committed("r")) > 20, "the first rounds")

    # The coordinator: nobody who trains notices.
    rounds = len(cluster.client.rounds("r"))
    old = cluster.pid("coordinator")
    cluster.kill("coordinator")
    wait_until(lambda: cluster.pid("coordinator") != old, "another coordinator")
    assert len(cluster.client.rounds("r")) > rounds, "rounds went on without it"

    # The syncer: learners keep stepping, and its successor goes on from the tape.
    old = cluster.pid("syncer-1")
    term = cluster.client.run("r")["status"]["term"]
    steps = cluster.learner("r", "learner-1")["step"]
    cluster.kill("syncer-1")
    wait_until(lambda: cluster.client.run("r")["status"]["term"] > term, "another term")
    wait_until(lambda: cluster.learner("r", "learner-1").get("step", 0) > steps, "steps")
    assert cluster.learner("r", "learner-1")["incarnation"] == 0, "the learner lived on"
    goes_on(cluster, wait_until, "the syncer's death")

    # The NATS server: started again on the same store.
    steps = cluster.learner("r", "learner-1")["step"]
    cluster.client.chaos("kill", "nats")
    goes_on(cluster, wait_until, "the server's death")
    assert cluster.learner("r", "learner-1")["step"] > steps
    assert cluster.learner("r", "learner-1")["incarnation"] == 0, "the learner lived on"

    check_tape(cluster.client.rounds("r"))
    cluster.client.stop("r")
    wait_until(lambda: cluster.client.run("r")["state"] == "stopped", "the end")
    check_tape(cluster.client.rounds("r"))


def test_a_step_with_bad_gradients_costs_that_step_alone(
    cluster: Any, spec: Any, wait_until: Any
) -> None:
    cluster.client.create_run(spec("r"))
    wait_until(lambda: len(cluster.committed("r")) > 12, "the first rounds")
    cluster.client.chaos("nan", "learner-2")
    wait_until(
        lambda: any(e["kind"] == "step-skipped" for e in cluster.client.events("r")), "the event"
    )
    seen = len(cluster.committed("r"))
    wait_until(
        lambda: any(
            v["learner"] == "learner-2" and v["outcome"] == "merged"
            for r in cluster.committed("r")[seen + 3 :]
            for v in r["verdicts"]
        ),
        "learner-2 merged again",
    )
    assert cluster.learner("r", "learner-2")["incarnation"] == 0, "no process had to die"
    assert not cluster.client.run("r")["status"]["refused"].get("non-finite")


def test_pause_holds_everybody_and_resume_goes_on(cluster: Any, spec: Any, wait_until: Any) -> None:
    cluster.client.create_run(spec("r"))
    wait_until(lambda: len(cluster.committed("r")) > 6, "the first rounds")
    cluster.client.pause("r")
    wait_until(
        lambda: all(
            cluster.learner("r", name).get("state") == "paused"
            for name in ("learner-1", "learner-2")
        ),
        "everybody paused",
    )
    assert cluster.client.run("r")["state"] == "paused"
    rounds = len(cluster.client.rounds("r"))
    cluster.client.resume("r")
    wait_until(lambda: len(cluster.committed("r")) > rounds + 6, "rounds after the pause")
