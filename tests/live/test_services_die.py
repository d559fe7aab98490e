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


def test_a_contribution_that_is_not_finite_is_refused_and_its_learner_heals(
    cluster: Any, spec: Any, wait_until: Any
) -> None:
    cluster.client.create_run(spec("r"))
    wait_until(lambda: len(cluster.committed("r")) > 12, "the first rounds")
    cluster.client.chaos("nan", "learner-2")

    def refusals() -> list[dict[str, Any]]:
        return [
            v
            for r in cluster.client.rounds("r")
            for v in r["verdicts"]
            if v["outcome"] == "refused" and v["reason"].startswith("non-finite")
        ]

    assert {v["learner"] for v in wait_until(refusals, "a refusal")} == {"learner-2"}
    wait_until(lambda: cluster.client.run("r")["status"]["refused"].get("non-finite"), "its count")
    # Its moments are lost: a fresh process gets sound ones and is merged again.
    wait_until(
        lambda: any(
            v["learner"] == "learner-2" and v["incarnation"] == 1 and v["outcome"] == "merged"
            for r in cluster.committed("r")[-20:]
            for v in r["verdicts"]
        ),
        "learner-2 merged again",
    )
    assert cluster.learner("r", "learner-1")["loss"] is not None


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
