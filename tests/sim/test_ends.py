"""Short runs one after another on the product's own services: each ends, the next one begins."""

import pytest

from diloco_simulator.worlds.ends import one


@pytest.mark.whole
def test_short_runs_follow_each_other() -> None:
    """On the product's own syncers, coordinator and handlers; in some, a leader is killed."""
    worlds = [one(seed, runs=3) for seed in range(3)]
    assert [v for w in worlds for v in w.violations] == []
    assert sum(w.ended for w in worlds) == 9
    assert sum(w.killed for w in worlds) > 0
