"""Seeded worlds of the whole product: nothing wrong is ever done, and every run ends well.

Checked in each: I1 to I13, as far as a world shows them (docs/explanation/simulation.md).
`make sim SEEDS=2000` plays more; a failing seed is named with the command that plays it again.
"""

import gc
import weakref

import pytest
from next_release import speaking

from diloco_simulator import check
from diloco_simulator.worlds import crash_points
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.world import World, WorldResult, one, played, uncollected

# Of the first dozen those that are played quickest, and that meet every trouble together.
SEEDS = (21, 22, 25, 26, 27, 28, 29, 30, 31)
TROUBLES = (
    "lost",
    "duplicated",
    "overtaken",
    "unknown",
    "partitions",
    "crashes",
    "hangs",
    "failovers",
    "disks lost",
    "outages",
    "refused: told",
    "told: recovered",
)

verdicts: dict[int, WorldResult] = {}


def verdict(seed: int) -> WorldResult:
    """Played once."""
    if seed not in verdicts:
        verdicts[seed] = played(Case.drawn(seed))
    return verdicts[seed]


@pytest.mark.whole
@pytest.mark.parametrize("seed", SEEDS)
def test_no_seed_breaks_a_promise(seed: int) -> None:
    assert verdict(seed).violations == [], f"{check.COMMAND} --seeds 1 --from {seed}"


@pytest.mark.whole
@pytest.mark.parametrize("every", [1, 2])
def test_a_world_in_which_the_next_release_speaks(every: int) -> None:
    """All messages, or every other one, have fields that nobody knows: an upgrade goes on."""
    with speaking(every):
        result = played(Case.drawn(21))
    assert result.violations == []
    assert result.counts["recoveries"] == verdict(21).counts["recoveries"]


@pytest.mark.whole
def test_the_worlds_met_every_kind_of_trouble() -> None:
    """Calm ones would prove nothing."""
    for trouble in TROUBLES:
        assert any(verdict(seed).counts[trouble] for seed in SEEDS), trouble


@pytest.mark.whole
@pytest.mark.parametrize("role", crash_points.ROLES)
def test_a_process_may_die_before_anything_that_others_see(role: str) -> None:
    """At two places of a small world; `make sim` tries more."""
    places = crash_points.play().passings[role]
    for n in (places // 3, 2 * places // 3):
        task = check.place(role, n)
        found = check.play(task)
        assert sum(k.startswith(f"{role} dies before") for k in found.counts) == 1
        assert found.violations == [], task.again


def test_nothing_of_a_world_is_left_when_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands are played in one process."""
    worlds: list[weakref.ref[World]] = []

    play = World.play

    async def playing(self: World) -> None:
        worlds.append(weakref.ref(self))
        await play(self)

    monkeypatch.setattr(World, "play", playing)
    assert one(3, crash_points.small()).violations == []
    with uncollected():
        gc.unfreeze()
        gc.collect()
        assert [world() for world in worlds] == [None]
