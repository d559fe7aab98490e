"""A power cut in small: everything is killed at once and started again on the same data folder."""

import asyncio
from pathlib import Path

import pytest
from live.stack import Stack, spec, up
from live.tape_checks import check_tape, executed_again, published

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


async def anchors(stack: Stack) -> dict[tuple[int, int], str]:
    """(fragment, version) -> digest of what is published."""
    async with stack.bus() as bus:
        return await published(bus)


@pytest.mark.long
def test_everybody_is_killed_and_the_run_goes_on_from_its_last_round(tmp_path: Path) -> None:
    often = {"evaluation": {"every_steps": 48, "sequences": 64}}
    with up(tmp_path / "data", "--learners", "2", "--syncers", "2") as stack:
        stack.client.create_run(spec(**often))
        stack.wait_until(lambda: len(stack.evaluations()) >= 6, "evaluations")
        before, anchors_before = stack.rounds(), asyncio.run(anchors(stack))
        losses_before = stack.evaluations()
        stack.kill_everybody()

        stack.start()
        stack.goes_on("everybody's death", more=12)
        rounds = stack.rounds()
        check_tape(rounds)
        assert rounds[: len(before)] == before, "history is what it was"
        assert rounds[-1]["term"] > before[-1]["term"]
        assert not stack.told("init")[1:], "nobody began anew"
        # What was published is what it was, bit for bit, and learners went on from it.
        anchors_after = asyncio.run(anchors(stack))
        both = anchors_before.keys() & anchors_after.keys()
        assert both
        assert all(anchors_before[key] == anchors_after[key] for key in both)
        last, again = losses_before[-1], losses_before[-1]["steps"]
        later = stack.wait_until(
            lambda: next((e for e in stack.evaluations() if e["steps"] > again), None),
            "an evaluation afterwards",
        )
        assert all(a >= b for a, b in zip(later["versions"], last["versions"], strict=True))
        spread = max(e["val_loss"] for e in losses_before[-3:])
        assert later["val_loss"] <= spread * 1.02, "the loss did not jump"

        stack.end()
        check_tape(stack.rounds())
        assert asyncio.run(executed_again(stack)) == len(stack.committed())
