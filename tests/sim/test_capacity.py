"""Simulated streams have bytes and a limit; what is refused is put again until there is room."""

from dataclasses import astuple
from pathlib import Path

import pytest

from diloco_shared.protocol.messages import TapeTerm
from diloco_simulator.capacity import Capacities, needed, record_bytes
from diloco_simulator.hub import CONFLICT, FULL, Hub
from diloco_simulator.options import Options
from diloco_simulator.scenario import Scenario, play, spec_of
from diloco_simulator.world import FULL_S, MESSAGE_BYTES, Log, World

EACH = MESSAGE_BYTES + 4


def a_log(limit: float) -> Log:
    return Log(World(1, Options.calm()), "UP", limit=limit)


def a_term(term: int) -> TapeTerm:
    return TapeTerm(epoch=0, term=term, leader="s", at=0.0)


def test_a_stream_takes_what_fits_and_counts_what_it_refused() -> None:
    log = a_log(2 * EACH)
    assert log.store("a", None, b"1234") is not None
    assert log.store("b", None, b"1234") is not None
    assert log.store("c", None, b"") is None
    assert log.held == 2 * EACH
    assert log.world.counts["UP full"] == 1
    assert log.store("a", None, b"1234") is not None, "it has that already"


def test_a_purge_makes_room() -> None:
    log = a_log(EACH)
    log.store("a", None, b"1234")
    log.purge(lambda item: item.subject == "a")
    assert log.held == 0
    assert log.store("b", None, b"1234") is not None


def test_what_is_refused_is_put_again_until_there_is_room() -> None:
    log = a_log(EACH)
    log.store("a", None, b"1234")
    log.put("l0", "b", None, b"1234", until=100.0)
    log.world.run(10.0)
    assert "b" not in log.by_subject
    log.purge(lambda item: True)
    log.world.run(10.0 + FULL_S + 1.0)
    assert "b" in log.by_subject


def test_a_power_cut_takes_the_newest_and_gives_their_room_back() -> None:
    log = a_log(3 * EACH)
    for subject in "abc":
        log.store(subject, None, b"1234")
    assert log.lose(2) == 2
    assert [item.subject for item in log.items] == ["a"]
    assert log.held == EACH


def test_a_tape_has_a_limit_too() -> None:
    world = World(1, Options.calm())
    hub = Hub(world, spec_of(world.options, 1))
    hub.limit(Capacities(tape=2.0 * record_bytes(a_term(1))))
    assert [hub.append(0, a_term(n + 1), n) for n in range(3)] == [1, 2, FULL]
    assert hub.append(0, a_term(1), 0) == CONFLICT
    hub.shards[0].archived = 1
    assert hub.append(0, a_term(3), 2) == 3, "what is archived takes no room"


def test_while_the_hubs_disk_is_full_no_stream_takes_anything() -> None:
    log = a_log(float("inf"))
    log.world.squeezed = True
    assert log.store("a", None) is None
    log.world.heal()
    assert log.store("a", None) is not None


@pytest.mark.parametrize("codec_down", ["fp32", "bf16", "int4"])
def test_more_of_anything_needs_no_less(codec_down: str) -> None:
    def of(learners: int = 3, **changes: object) -> Capacities:
        options = Options.calm(codec_down=codec_down, **changes)
        return needed(spec_of(options, 1), [12, 12], learners, 80)

    for more in (of(learners=4), of(keyframe_every=5), of(overlap_steps=9)):
        assert all(a >= b for a, b in zip(astuple(more), astuple(of()), strict=True))


def test_a_calm_run_fits_into_what_it_needs() -> None:
    verdict = play(1, Options.calm(room=1.0, codec_up="int4", codec_down="int8"))
    assert verdict.violations == []
    assert not any(name.endswith("full") for name in verdict.counts)


def test_a_stream_with_too_little_room_is_told_of_as_silence(tmp_path: Path) -> None:
    """The check itself: a run that says it runs while nothing comes of it."""
    scenario = Scenario(1, Options.calm(steps=200), tmp_path)
    scenario.world.at(30.0, lambda: setattr(scenario.hub.dn, "limit", 0.0))
    verdict = scenario.run()
    assert verdict.counts["DN full"] > 0
    assert verdict.violations, "neither named nor ended"
