"""A power cut at a hub takes what several rounds brought, and brings back what was purged."""

import pytest

from diloco_simulator.troubles import troubles
from diloco_simulator.troubles.troubles import Troubles
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import played

CALM = Options.calm(steps=36, safety_s=40.0, syncers=2, snapshot_every_rounds=3, deep_tails=True)


@pytest.mark.whole
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_goes_on_after_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(self: Troubles) -> None:
        for at in (8.0, 20.0):
            self.loop.call_later(at, self.lose_tails, self.world.rng)

    monkeypatch.setattr(Troubles, "plan", plan)
    monkeypatch.setattr(troubles, "TAILS", (30,))
    monkeypatch.setattr(troubles, "PURGED_BACK", (30,))
    found = played(Case(seed, CALM))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["tails lost"] == 2 and found.counts["purged messages back"] > 0


def test_every_drawn_world_has_such_power_cuts_and_no_older_one() -> None:
    """What kept worlds were found with stays as it was."""
    assert all(Options.drawn(seed).deep_tails for seed in range(50))
    assert not Options.calm().deep_tails
