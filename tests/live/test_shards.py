"""Two syncer shards with a standby each: one loses its leader, the other never notices."""

import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from live.stack import Stack, spec, up

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

ALGORITHM = {"fragments": 6, "shards": 2, "quorum": 1, "overlap_steps": 8}


def of_shard(stack: Stack, shard: int) -> list[dict[str, Any]]:
    return [r for r in stack.rounds() if r["shard"] == shard]


def leading(stack: Stack, shard: int) -> str:
    syncers = stack.client.run("r")["syncers"]
    found = [s["id"] for s in syncers if (s["shard"], s["state"]) == (shard, "leading")]
    return str(found[0]) if found else ""


def check_shard(rounds: list[dict[str, Any]], shard: int) -> None:
    """Numbered without a gap, versions by one (I1), nothing merged twice (I2), terms grow (I7)."""
    assert [r["round"] for r in rounds] == list(range(len(rounds)))
    assert all(a["term"] <= b["term"] for a, b in pairwise(rounds))
    assert {r["fragment"] % 2 for r in rounds} == {shard}
    for p in range(shard, 6, 2):
        versions = [
            r["version"] for r in rounds if r["fragment"] == p and r["outcome"] == "committed"
        ]
        assert versions == list(range(1, len(versions) + 1))
    merged = [v["subject"] for r in rounds for v in r["verdicts"] if v["outcome"] == "merged"]
    assert len(merged) == len(set(merged))


@pytest.mark.long
def test_one_shards_leader_dies_and_the_run_goes_on_whole(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--learners", "2", "--syncers", "4") as stack:
        stack.client.create_run(spec(algorithm=ALGORITHM, budget={"steps": 960}))
        stack.wait_until(
            lambda: min(len(of_shard(stack, s)) for s in (0, 1)) > 6, "rounds of both shards"
        )
        victim = stack.wait_until(lambda: leading(stack, 1), "a leader of shard 1")
        term = of_shard(stack, 1)[-1]["term"]
        stack.send(signal.SIGKILL, victim)
        stack.wait_until(lambda: leading(stack, 1) not in ("", victim), "its standby")
        stack.wait_until(lambda: of_shard(stack, 1)[-1]["term"] > term, "rounds of its term")
        kept = stack.diloco("checkpoint", "create", "r")
        assert kept["learners"] == ["learner-1", "learner-2"] and min(kept["versions"]) > 0

        stack.wait_until(lambda: stack.client.run("r")["state"] == "finished", "the end")
        for shard in (0, 1):
            rounds = of_shard(stack, shard)
            check_shard(rounds, shard)
            assert rounds[-1]["stamp"]["steps"] >= 960
            number = ("--shard", str(shard))
            assert stack.diloco("tape", "verify", "r", *number)["faults"] == []
            assert stack.diloco("replay", "r", *number)["fault"] is None
        status = stack.status()
        assert sum(status["tokens"].values()) == status["tokens_processed"], "I5"
        losses = stack.evaluations()
        assert losses[-1]["final"] and losses[-1]["val_loss"] < losses[0]["val_loss"]
        assert min(losses[-1]["versions"]) > 0 and not stack.told("left-behind")

        # Another run begins with it: both shards, and both learners' moments.
        stack.diloco("checkpoint", "restore", "r", "1", "--as", "again")
        rounds_before = stack.client.show_checkpoint("r", 1)["stamp"]["round"]
        stack.wait_until(
            lambda: stack.client.run("again")["status"]["stamp"]["round"] > rounds_before + 3,
            "rounds of both shards of the new run",
        )
        again = stack.client.run("again")["status"]
        assert again["epoch"] == 1
        recovered = {
            e["source"]: e["data"]["source"]
            for e in stack.client.events("again")
            if e["kind"] == "recovered" and e["source"].startswith("learner")
        }
        assert recovered == {"learner-1": "checkpoint", "learner-2": "checkpoint"}
