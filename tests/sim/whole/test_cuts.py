"""A checkpoint of several shards holds one history, whatever its run or its hub goes back to.

Each rule that keeps two apart is taken away once, and a world has a checkpoint of both.
"""

import asyncio
from contextvars import Context
from typing import Any

import pytest

from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.watched_run import WatchedRun
from diloco_simulator.worlds.world import World, WorldResult, played
from diloco_syncer.checkpoints import checkpointing_io as checkpointing
from diloco_syncer.checkpoints.checkpointing_io import Checkpointer
from diloco_syncer.checkpoints.restoring import Restoring
from diloco_syncer.events import Seal
from diloco_syncer.leadership.lease_io import LeaseKeeper

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


def test_a_leader_that_names_no_checkpoint_it_goes_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would know that the checkpoint must stay."""
    monkeypatch.setattr(Restoring, "needed", property(lambda self: ()))
    found = world(2, restores=4)
    assert any("are said to be needed" in text for text in found.violations)


# Of five checkpoints this one is made while its leader stands still, for so many seconds: until the
# next one is complete, and three are kept at the end.
AT, STILL_S = 3, 25.0


class StandsStill:
    """The leader, once all parts of a checkpoint are written, before it completes it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.times, self.world, seal = 0, list[World](), Checkpointer.seal
        begin = WatchedRun.begin

        async def begun(run: WatchedRun) -> None:
            self.world.append(run.world)
            await begin(run)

        async def late(maker: Checkpointer, effect: Seal) -> None:
            if effect.number == AT:
                self.times += 1
                self.freeze()
                await asyncio.sleep(0.1)  # which ends once it goes on
            await seal(maker, effect)

        patch.setattr(WatchedRun, "begin", begun)
        patch.setattr(Checkpointer, "seal", late)

    def freeze(self) -> None:
        world = self.world[-1]
        name = world.observer.reached.leaders[0]
        process = next(m for m in world.syncers if m.name == name).process
        assert process is not None
        process.freeze()
        # Not as a part of the process, which would do it once it goes on.
        world.loop.call_later(STILL_S, process.thaw, context=Context())


@pytest.mark.parametrize("asks", [True, False])
def test_a_leader_that_stood_still_completes_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch, *, asks: bool
) -> None:
    """The other one has told that it failed, and removed its parts. Worlds see what is left."""
    stands_still, seal = StandsStill(monkeypatch), checkpointing.seal

    async def leads(_: LeaseKeeper) -> None:
        return

    def blindly(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunCheckpoints, "part", lambda *_: None)
            return seal(*given)

    if not asks:
        monkeypatch.setattr(LeaseKeeper, "ours", leads)
        monkeypatch.setattr(checkpointing, "seal", blindly)
    found = played(Case(1, OPTIONS.changed(shards=1, syncers=2, steps=24, safety_s=100.0)))
    assert stands_still.times == 1 and (found.violations == []) is asks
    assert all("the checkpoint is not whole" in v for v in found.violations)
