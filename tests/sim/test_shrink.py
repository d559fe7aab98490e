"""A world that breaks a promise is taken apart until little is left; a sound one is refused."""

import gc
import json
import sys
from pathlib import Path

import pytest

from diloco_simulator import shrink
from diloco_simulator.worlds import constants, found, limit
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import played
from diloco_syncer.events import Effect
from diloco_syncer.rounds import rounds
from diloco_syncer.rounds.rounds import Rounds

SHORT = Options.calm(steps=18, safety_s=25.0, learners=2, quorum=1)
# Of what it has, only what is not finite has to do with what breaks.
CASE = Case(
    2,
    SHORT.changed(nan=0.3, duplicate=0.05, wishes=1),
    {constants.CHUNKS.path: 64, "diloco_shared.process.disk_watch.LOOK_S": 5.0},
    early=True,
    visitors=True,
)


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product's rule broken: whatever comes is good input."""
    monkeypatch.setattr(rounds, "judge", lambda *args, **kwargs: None)


def test_what_broke_is_the_first_word_and_of_a_crash_the_place_too() -> None:
    assert shrink.promise("I6 at 3.00 s: a learner at 4") == "I6"
    assert shrink.promise("liveness at 3.00 s: no end") == "liveness"
    assert shrink.promise("crash: ValueError('x at 3') at rounds.py:12") == "crash: rounds.py:12"
    ended = "processes at 3.00 s: syncer-0 ends by itself: KeyError: 'x'"
    assert shrink.promise(ended) == "processes KeyError"


@pytest.mark.long  # as test_check.py does with another one
@pytest.mark.whole
@pytest.mark.usefixtures("blind")
def test_a_world_is_shrunk_to_what_breaks_its_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is written is played again, and breaks it again (I11)."""
    file = found.keep(tmp_path, CASE, played(CASE).violations, "kept")
    shrink.main([str(file), "--worlds", "16"])
    out = tmp_path / "kept-shrunk.json"
    left = found.read(out)
    assert shrink.promise(played(left).violations[0]) == "I11"
    faults = [name for name in left.names() if name not in shrink.SIZES]
    assert "nan" in faults and len(faults) < len(CASE.names()) - 3
    assert left.options.learners < SHORT.learners or left.options.steps < SHORT.steps
    before = json.loads(out.read_text())["shrunk_from"]
    assert before == found.described(CASE)
    assert found.again(out) in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.usefixtures("blind")
def test_a_limit_leaves_the_least_that_was_found_so_far() -> None:
    shrunk = shrink.shrink(CASE, worlds_max=10)
    assert not shrunk.complete
    assert shrunk.worlds == 10
    assert shrunk.case.names() != CASE.names() or shrunk.case.options != CASE.options
    assert shrink.promise(played(shrunk.case).violations[0]) == "I11"


@pytest.mark.whole
def test_a_world_that_goes_round_in_circles_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def circles(*_: object) -> list[Effect]:
        while True:
            pass

    monkeypatch.setattr(limit, "WORLD_S_MAX", 2.0)
    monkeypatch.setattr(Rounds, "advance", circles)
    # Its coroutines are broken off, and want to tidy up when they are collected: here, and not in
    # a later test.
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: None)
    found_ = played(Case(0, Options.calm(steps=6, safety_s=8.0)))
    gc.collect()
    assert any(v.startswith("crash: Circling") for v in found_.violations)


@pytest.mark.whole
def test_a_sound_world_is_refused(tmp_path: Path) -> None:
    case = Case(3, Options.calm(steps=6, safety_s=8.0))
    file = found.keep(tmp_path, case, ["I3 at 1.00 s: what it broke once"])
    with pytest.raises(SystemExit, match=r"seed-3\.json: seed 3 .* breaks no promise"):
        shrink.main([str(file)])
    assert list(tmp_path.iterdir()) == [file], "nothing is written"


@pytest.mark.whole
def test_the_smallest_worlds_are_sound() -> None:
    """Else what is left would break promises by being small."""
    least = {name: values[0] for name, values in shrink.SIZES.items()}
    for more in ({}, {"learners": 2, "quorum": 2}, {"shards": 2, "syncers": 2, "fragments": 2}):
        assert played(Case(0, Options.calm(**{**least, **more}))).violations == []
