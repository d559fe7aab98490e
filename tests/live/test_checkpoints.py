"""A whole run goes back to a checkpoint after everybody died; another run begins with it."""

from pathlib import Path
from typing import Any

import pytest
from live.stack import Stack, spec, up

from diloco_client import ApiError

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def restored(stack: Stack, run: str) -> dict[str, Any]:
    """The newest restore record of the run's tape."""
    found: dict[str, Any] = [
        r for r in stack.diloco("tape", "show", run) if r["kind"] == "restore"
    ][-1]
    return found


def loss_at(stack: Stack, run: str, steps: int, *, after: int) -> float:
    """Validation loss of the published parameters at that step, told after an event; else 0."""
    told = [e["data"] for e in stack.client.events(run, after) if e["kind"] == "evaluation"]
    return next((float(e["val_loss"]) for e in told if e["steps"] == steps), 0.0)


@pytest.mark.long
def test_a_run_goes_on_from_its_checkpoint_after_everybody_died(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--learners", "2", "--syncers", "2") as stack:
        stack.client.create_run(spec())
        stack.wait_until(lambda: len(stack.committed()) > 12, "the first rounds")
        kept = stack.diloco("checkpoint", "create", "r")
        assert (kept["learners"], kept["missing"]) == (["learner-1", "learner-2"], {})
        steps = kept["stamp"]["steps"]
        stack.goes_on("the checkpoint", more=12)
        stack.kill_everybody()

        stack.start()
        stack.wait_until(lambda: stack.status()["term"] > 1, "another term")
        losses = []
        for epoch in (1, 2):  # twice: the same parameters have the same loss
            seen = max(e["seq"] for e in stack.client.events("r"))
            stack.diloco("checkpoint", "restore", "r", "1")
            status = stack.status()
            assert (status["epoch"], status["stamp"]["steps"] - steps < 100) == (epoch, True)
            loss = stack.wait_until(
                lambda s=seen: loss_at(stack, "r", steps, after=s),  # type: ignore[misc]
                "its loss",
            )
            losses.append(loss)
            stack.goes_on("the restore", more=12)
        assert losses[0] == losses[1]
        record = restored(stack, "r")
        assert record["versions"] == kept["versions"]
        moments = {e["data"].get("source") for e in stack.told("recovered")}
        assert "checkpoint" in moments and not stack.told("checkpoint-skipped")
        status = stack.status()  # once: the run goes on
        assert sum(status["tokens"].values()) == status["tokens_processed"], "I5"
        stack.end()
        assert stack.diloco("tape", "verify", "r")["faults"] == []
        assert stack.diloco("replay", "r")["fault"] is None

        # Another run, by the same members: the same anchors bit for bit, the same loss.
        stack.diloco("checkpoint", "restore", "r", "1", "--as", "again")
        assert (
            stack.wait_until(lambda: loss_at(stack, "again", steps, after=0), "its loss")
            == losses[0]
        )
        assert restored(stack, "again")["anchor_digests"] == record["anchor_digests"]
        again = stack.client.run("again")["status"]
        assert again["rounds_committed"] >= kept["stamp"]["round"] - again["rounds_skipped"]
        with pytest.raises(ApiError, match="known: r"):
            stack.client.restore("r", 9)


@pytest.mark.long
def test_two_runs_do_not_mix_and_a_deleted_one_leaves_nothing_behind(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--learners", "2", "--syncers", "2") as stack:
        alone = {"learners_min": 1, "learners_max": 1, "syncers": 1}
        stack.client.create_run(spec(membership=alone))
        stack.client.create_run({**spec(membership=alone), "name": "s"})
        for run in ("r", "s"):
            stack.wait_until(lambda r=run: rounds_of(stack, r) > 12, f"rounds of {run}")  # type: ignore[misc]
        merged = {
            run: {v["learner"] for r in stack.client.rounds(run) for v in r["verdicts"]}
            for run in ("r", "s")
        }
        assert len(merged["r"]) == len(merged["s"]) == 1 and merged["r"] != merged["s"]
        for run in ("r", "s"):
            assert stack.client.run(run)["status"]["alive"] == list(merged[run])
        first = stack.client.run("r")["spec"]["id"]
        assert kept_of(stack, first)
        stack.end()
        stack.wait_until(lambda: stack.status()["settled"], "everybody to have left")
        stack.client.delete_run("r")
        stack.wait_until(lambda: not kept_of(stack, first), "its files to go")

        # Under its old name it is another run, and finds nothing of the first.
        stack.client.create_run(spec(membership=alone))
        stack.wait_until(lambda: rounds_of(stack, "r") > 12, "rounds of the second r")
        rounds = stack.client.rounds("r")
        assert rounds[0]["round"] == 0 and {v["incarnation"] for v in rounds[0]["verdicts"]} == {0}
        assert not stack.told("standby-unfit") and not stack.told("lead-failed")
        assert rounds_of(stack, "s") > 12
        stack.end()
        assert stack.diloco("tape", "verify", "r")["faults"] == []


def rounds_of(stack: Stack, run: str) -> int:
    return len(stack.client.rounds(run))


def kept_of(stack: Stack, run_id: str) -> list[str]:
    """Folders that processes keep of a run."""
    return [
        str(p)
        for p in stack.folder.glob(f"*/*/*.{run_id}")
        if p.parent.name != "checkpoints" or p.parent.parent != stack.folder
    ]
