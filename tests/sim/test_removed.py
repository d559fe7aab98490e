"""A run that somebody began beside the world's own is removed, with all of it."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_simulator.people import sequel


class Visitors:
    """Whose requests to delete are answered so, while these streams are there."""

    def __init__(self, *answers: tuple[int, bool]) -> None:
        self.answers = list(answers)
        self.rest = SimpleNamespace(posted=set[int]())
        self.faults: list[str] = []
        self.left = False
        loop, options = SimpleNamespace(now=0.0), SimpleNamespace(step_s=1.0)
        broker = SimpleNamespace(exists=lambda name: self.left and name == "UP-large")
        found = SimpleNamespace(counts=Counter())
        self.world = SimpleNamespace(loop=loop, options=options, broker=broker, found=found)
        self.broken = self.faults.append

    async def until(self, method: str, path: str, may: Any) -> tuple[int, Any]:
        if method == "POST":
            return 404, None
        status, self.left = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.world.loop.now += 1.0
        return status, {"detail": "somebody is there"}


@pytest.mark.parametrize(
    ("answers", "faults"),
    [
        ([(404, False)], []),
        # A submission whose answer was lost is carried out behind the first attempt.
        ([(404, True), (404, True), (204, False)], []),
        ([(404, True)], ["UP-large outlived large"]),
        ([(204, True)], ["UP-large outlived large"]),
        ([(409, True), (204, False)], []),
        ([(409, False)], ["large cannot be deleted: somebody is there"]),
    ],
)
async def test_what_is_left_counts_once_nothing_can_come_any_more(
    monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, bool]], faults: list[str]
) -> None:
    monkeypatch.setattr(sequel, "LOOK_S", 0.0)
    visitors: Any = Visitors(*answers)
    await sequel.removed(visitors, "large")
    assert visitors.faults == faults


async def test_nothing_is_gone_while_somebody_may_still_begin_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its submission is being carried out, though nobody waits for the answer any more."""
    monkeypatch.setattr(sequel, "LOOK_S", 0.0)
    visitors: Any = Visitors((404, False), (404, False), (204, False))
    visitors.rest.posted.add(1)
    await sequel.removed(visitors, "large")
    assert not visitors.faults and visitors.world.loop.now == 3.0
