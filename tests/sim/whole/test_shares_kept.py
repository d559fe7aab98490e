"""Worlds in which learners keep a share of their own parameters when they adopt (alpha).

No seed draws such a share, so that what seeds have met stays as it is.
"""

import re
from dataclasses import replace
from typing import Any

import pytest

from diloco_learner.events import Adopt
from diloco_learner.training.train import TrainLoop
from diloco_simulator.troubles.troubles import Troubles
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played

pytestmark = pytest.mark.whole

SHORT = Options.calm(learners=2, quorum=1, steps=36, safety_s=30.0, snapshot_every_rounds=3)


def in_a_new_epoch(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> WorldResult:
    """Syncers lose their disks while learners train."""

    def plan(self: Troubles) -> None:
        for at in (8.0, 16.0):
            self.loop.call_later(at, lambda: self._replace(self.world.syncers[0], renamed=False))

    monkeypatch.setattr(Troubles, "plan", plan)
    return played(Case(1, SHORT.changed(alpha=0.5, **changes)))


@pytest.mark.parametrize("hosts", [(), (2, 1)])
def test_nothing_of_ones_own_is_carried_into_a_new_epoch(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[int, ...]
) -> None:
    found = in_a_new_epoch(monkeypatch, hosts=hosts)
    assert found.violations == [] and found.rounds > 0
    assert found.counts["learners: adopts anew"]


def test_who_carries_a_share_into_a_new_epoch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = TrainLoop._adopt

    def plainly(self: TrainLoop, effect: Adopt) -> None:
        adopt(self, replace(effect, anew=False))

    monkeypatch.setattr(TrainLoop, "_adopt", plainly)
    found = in_a_new_epoch(monkeypatch)
    assert any(re.search(r"carries 0\.5 of fragment . into epoch", v) for v in found.violations)
