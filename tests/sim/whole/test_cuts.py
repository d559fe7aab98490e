"""A checkpoint of several shards holds one history, whatever its run or its hub goes back to.

Each rule that keeps two apart is taken away once, and a world has a checkpoint of both.
"""

from typing import Any

import pytest

from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played
from diloco_syncer.checkpoints import checkpointing_io as checkpointing

pytestmark = pytest.mark.whole

# Of two shards, which make many checkpoints.
OPTIONS = Options.calm(
    shards=2,
    learners=2,
    quorum=1,
    steps=36,
    safety_s=40.0,
    checkpoint_every_steps=6,
    delay_s=0.3,
)

SEEDS = range(2, 14)  # most of them show it

# (epoch, serial of the newest restore) of each shard's part
Cut = list[tuple[int, int]]


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[Cut]:
    """Of every checkpoint that a manifest shall be written for."""
    found, seal = list[Cut](), checkpointing.seal

    def sealed(spec: Any, root: str, captured: Any, parts: Any, effect: Any) -> Any:
        found.append([(history["epoch"], history["restores"]) for history, _ in parts])
        return seal(spec, root, captured, parts, effect)

    monkeypatch.setattr(checkpointing, "seal", sealed)
    return found


def mixed(cuts: list[Cut]) -> list[Cut]:
    """Those of two histories. The first shard follows an epoch that another one begins."""
    return [[a, b] for a, b in cuts if b[0] < a[0] or b[1] != a[1]]


def world(seed: int, **trouble: Any) -> WorldResult:
    return played(Case(seed, OPTIONS.changed(**trouble)))


def test_a_hub_that_was_put_back(cuts: list[Cut], monkeypatch: pytest.MonkeyPatch) -> None:
    found = world(3, hub_restores=1)
    assert found.violations == [] and found.counts["hubs restored"]
    assert mixed(cuts) == [] and max(cuts)[0][0] > 1000, "there are some of the new epoch"
    cuts.clear()
    monkeypatch.setattr(checkpointing, "newest_there", lambda *_: 0)
    monkeypatch.setattr(checkpointing, "belongs", lambda *_: True)
    assert any(world(seed, hub_restores=1) and mixed(cuts) for seed in SEEDS)


def test_a_run_that_goes_back(cuts: list[Cut], monkeypatch: pytest.MonkeyPatch) -> None:
    found = world(2, restores=4)
    assert found.violations == [] and found.counts["restored"]
    assert cuts and mixed(cuts) == []
    cuts.clear()
    monkeypatch.setattr(checkpointing, "belongs", lambda *_: True)
    assert any(world(seed, restores=4) and mixed(cuts) for seed in SEEDS)
