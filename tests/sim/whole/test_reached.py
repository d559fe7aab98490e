"""Rare states of whole worlds, and places to die: named, counted, required."""

from collections import Counter
from pathlib import Path

import pytest

from diloco_simulator.coverage import required
from diloco_simulator.coverage.required import CHECKED, ENOUGH, OF, REQUIRED, RequiredStates
from diloco_simulator.worlds import crash_points

REPOSITORY = Path(__file__).parents[3]


def test_what_no_world_reached_is_missing_where_there_were_enough() -> None:
    states = RequiredStates()
    assert REQUIRED and CHECKED and len(set(REQUIRED)) == len(REQUIRED)
    for n in range(2):
        states.add(Counter({REQUIRED[n]: 3, "other": 1}), Counter({CHECKED[0]: 1}))
    assert states.worlds == {REQUIRED[0]: 1, REQUIRED[1]: 1, "other": 2}
    checks = [f"a check of {name}" for name in CHECKED[1:]]
    assert states.missing() == [*REQUIRED[2:], *checks]
    assert states.unchecked(ENOUGH) == [f"a check of {name}" for name in CHECKED]


def test_every_promise_of_the_page_must_be_checked() -> None:
    """Those of its table."""
    page = (REPOSITORY / "docs/explanation/simulation.md").read_text("utf-8")
    table = page.split("| promise | what is checked in every world |")[1].split("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert sorted(rows) == sorted(CHECKED)


def test_enough_worlds_miss_nothing_by_chance() -> None:
    """Less than once in a thousand runs; and so few, that each would say it."""
    assert required.chance_to_miss(0) == 1.0
    assert required.chance_to_miss(1) == pytest.approx(1 - (required.REACHED + 1) / (OF + 2))
    assert set(required.RAREST) < set(REQUIRED)
    chances = [
        required.chance_to_miss(ENOUGH, required.RAREST.get(state, required.REACHED))
        for state in REQUIRED
    ]
    assert sum(chances) < 1e-3


def test_a_process_dies_once_at_the_named_place_and_the_run_ends() -> None:
    calm = crash_points.play()
    assert calm.violations == [] and calm.counts["crashes"] == 0
    assert set(calm.passings) == set(crash_points.ROLES)
    found = crash_points.play("leader", calm.passings["leader"] // 2)
    assert found.violations == [] and found.counts["crashes"] == 1
    assert any(what.startswith("leader dies before ") for what in found.counts)
    assert found.rounds > 0


def test_every_so_many_places_of_every_role_are_tried() -> None:
    passings = Counter(dict.fromkeys(crash_points.ROLES, 5))

    tried = crash_points.places(2, passings)
    assert tried == [(role, n) for role in crash_points.ROLES for n in (1, 3, 5)]
