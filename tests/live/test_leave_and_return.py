"""A learner is drained, comes back, and dies: nothing is wasted, every phase is timed."""

from typing import Any

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def balanced(status: dict[str, Any]) -> bool:
    """I5, per fragment, as the API shows it."""
    return all(
        sum(tokens.values()) == status["tokens_processed"]
        for tokens in status["tokens_by_fragment"]
    )


def merged(cluster: Any, learner: str, incarnation: int) -> bool:
    return any(
        (v["learner"], v["incarnation"], v["outcome"]) == (learner, incarnation, "merged")
        for r in cluster.committed("r")[-30:]
        for v in r["verdicts"]
    )


def test_a_drained_learner_wastes_nothing_and_a_killed_one_is_accounted_for(
    cluster: Any, spec: Any, wait_until: Any
) -> None:
    cluster.client.create_run(spec("r"))
    wait_until(lambda: merged(cluster, "learner-2", 0), "learner-2 merged")

    # Drained: its last words are that none of its work is left unmerged.
    cluster.client.drain("learner-2")
    leave = wait_until(
        lambda: next(
            (
                e
                for e in cluster.client.events("r")
                if e["kind"] == "leave" and e["source"] == "learner-2"
            ),
            None,
        ),
        "its leave",
    )
    assert leave["text"].startswith("drained: ")
    assert "none of its work is left unmerged" in leave["text"]
    rounds = len(cluster.client.rounds("r"))
    wait_until(lambda: len(cluster.committed("r")) > rounds + 6, "rounds of the other one")
    status = cluster.client.run("r")["status"]
    assert balanced(status) and status["tokens"]["lost"] == 0 and status["tokens_reread"] == 0

    # Given work again it joins the running run under a new life.
    cluster.client.undrain("learner-2")
    wait_until(lambda: merged(cluster, "learner-2", 1), "learner-2 merged again")

    # Killed: what it had not merged is lost, and its return is timed phase by phase.
    cluster.kill("learner-2")
    found = wait_until(
        lambda: next(
            (
                r
                for r in cluster.client.recoveries("r")
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
    status = cluster.client.run("r")["status"]
    assert balanced(status) and status["tokens"]["lost"] > 0
    kinds = {e["kind"] for e in cluster.client.events("r")}
    assert {"join", "donated", "recovered", "returned"} <= kinds
