"""What a world that broke a promise is kept as (docs/explanation/simulation.md)."""

import json
from pathlib import Path

import pytest

from diloco_shared.spec.codecs import NAMES
from diloco_shared.spec.merge_rules import RULES, MergeRule
from diloco_simulator.worlds import constants, found
from diloco_simulator.worlds.case import CAST, Case
from diloco_simulator.worlds.options import Options


def test_a_kept_world_is_read_as_it_was_written(tmp_path: Path) -> None:
    for seed in range(12):
        case = Case.drawn(seed)
        path = found.keep(tmp_path, case, ["what it broke"])
        assert path.name == f"seed-{seed}.json"
        assert found.read(path) == case
        assert json.loads(path.read_text())["command"] == found.again(path)


def test_a_seed_has_one_world_however_it_is_asked_for() -> None:
    """Links of worlds once carried a hundred times of what options alone said."""
    assert all(Case.drawn(seed).options == Options.drawn(seed) for seed in range(100))


def test_seeds_choose_their_codecs_as_they_always_did() -> None:
    """A new codec is in some worlds, and changes nothing in the others."""
    chosen = [(o.codec_up, o.codec_down) for o in map(Options.drawn, range(200))]
    assert [chosen[seed] for seed in (0, 1, 4, 5)] == [
        ("bf16", "e3m0"),
        ("int8", "int8"),
        ("e3m0", "int8"),
        ("int4", "bf16"),
    ]
    assert {name for both in chosen for name in both} == {*NAMES}


def test_some_seeds_merge_by_another_rule_and_all_else_of_them_is_as_it_was() -> None:
    drawn = [Options.drawn(seed) for seed in range(200)]
    assert {o.merge for o in drawn} == {*RULES}
    assert sum(o.merge == "rda" for o in drawn) > 100
    # What these seeds drew before there was a choice.
    assert [drawn[seed].full_disks for seed in (0, 5, 12, 20)] == [1, 2, 2, 1]


def test_a_new_rule_is_in_some_worlds_and_changes_nothing_in_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So who writes one has no list of worlds to mend."""
    before = [Options.drawn(seed) for seed in range(200)]
    monkeypatch.setitem(RULES, "newer", MergeRule())
    drawn = [Options.drawn(seed) for seed in range(200)]
    assert 5 < sum(o.merge == "newer" for o in drawn) < 50
    assert {o.merge for o in drawn} == {*RULES}
    assert before == [
        o.changed(merge=was.merge) if o.merge == "newer" else o
        for o, was in zip(drawn, before, strict=True)
    ]


def test_a_calm_world_says_nothing_but_its_seed(tmp_path: Path) -> None:
    case = Case(3, Options.calm())
    assert case.names() == []
    assert found.described(case) == {"seed": 3, "options": {}}
    assert found.read(found.keep(tmp_path, case, [], "calm")) == case


def test_all_that_differs_can_be_taken_back() -> None:
    case = Case.drawn(4, Options.drawn(4).changed(nan=0.1))
    assert case.without(case.names()) == Case(4, Options.calm())
    assert case.without(["nan"]).options.nan == 0.0
    assert {*case.names()} - {*case.without(["nan"]).names()} == {"nan"}
    cast = case.without(CAST)
    assert not (cast.visitors or cast.early or cast.asks or cast.sequels)


def test_constants_that_belong_together_are_taken_back_together() -> None:
    rooms = {d.path: float(d.others[0]) for d in constants.ROOM}
    case = Case(1, Options.calm(), {**rooms, constants.CHUNKS.path: 16})
    assert case.without([next(iter(rooms))]).constants == {constants.CHUNKS.path: 16}
    assert case.without([constants.CHUNKS.path]).constants == rooms


def test_a_constant_that_is_not_there_any_more_is_named() -> None:
    with (
        pytest.raises(ValueError, match=r"no world draws diloco_old\.module\.LOOK_S"),
        constants.put({"diloco_old.module.LOOK_S": 1.0}),
    ):
        raise AssertionError("nothing is in force")
