"""A world that breaks a promise is taken apart until little is left; a sound one is refused."""

import json
from pathlib import Path

import pytest

from diloco_simulator import check, found, shrink
from diloco_simulator.options import Options
from diloco_simulator.scenario import play
from diloco_syncer.events import Effect
from diloco_syncer.rounds import Round, Rounds

# Its world has eighteen faults and settings that a calm one has not.
SEED = 1


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product's rule broken: when a round closes, one contribution is as good as a quorum."""
    close = Rounds._close

    def hastily(self: Rounds, r: Round, now: float, why: str = "") -> list[Effect]:
        asked, self.history.quorum = self.history.quorum, 1
        try:
            return close(self, r, now, why)
        finally:
            self.history.quorum = asked

    monkeypatch.setattr(Rounds, "_close", hastily)


def test_what_broke_is_the_first_word_and_of_a_crash_the_place_too() -> None:
    assert shrink.promise("I6 at 3.00 s: a learner at 4") == "I6"
    assert shrink.promise("liveness at 3.00 s: no end") == "liveness"
    assert shrink.promise("crash: ValueError('x at 3') at rounds.py:12") == "crash: rounds.py:12"


@pytest.mark.whole
@pytest.mark.usefixtures("hasty")
def test_a_world_is_shrunk_to_what_breaks_its_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is written is played again, and breaks it again (I3)."""
    drawn = Options.drawn(SEED)
    file = found.keep(tmp_path, SEED, drawn, play(SEED, drawn).violations)
    shrink.main([str(file)])
    out = tmp_path / f"seed-{SEED}-shrunk.json"
    seed, left = found.read(out)
    assert shrink.promise(play(seed, left).violations[0]) == "I3"
    faults = [name for name in found.described(left) if name not in shrink.SIZES]
    assert len(faults) <= 4 < len(found.described(drawn))
    assert left.learners <= drawn.learners
    assert left.steps < drawn.steps
    original = json.loads(file.read_text())
    before = json.loads(out.read_text())["shrunk_from"]
    assert before == {"seed": original["seed"], "options": original["options"]}
    assert shrink.again(out) in capsys.readouterr().out


@pytest.mark.whole
@pytest.mark.usefixtures("hasty")
def test_a_limit_leaves_the_least_that_was_found_so_far() -> None:
    drawn = Options.drawn(SEED)
    shrunk = shrink.shrink(SEED, drawn, worlds_max=6)
    assert not shrunk.complete
    assert shrunk.worlds == 6
    assert shrunk.options.learners < drawn.learners or shrunk.options.steps < drawn.steps
    assert shrink.promise(play(shrunk.seed, shrunk.options).violations[0]) == "I3"


def test_a_world_that_goes_round_in_circles_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def circles(*_: object) -> list[Effect]:
        while True:
            pass

    monkeypatch.setattr(shrink, "WORLD_S_MAX", 0.05)
    monkeypatch.setattr(Rounds, "advance", circles)
    shrunk = shrink.shrink(0, Options.calm(steps=6), worlds_max=1)
    assert shrunk.promise.startswith("crash: ")
    assert "circles" in shrunk.violations[0]


def test_a_sound_world_is_refused(tmp_path: Path) -> None:
    options = Options.calm(steps=6)
    with pytest.raises(shrink.Sound, match=r"seed 3 .* breaks no promise"):
        shrink.shrink(3, options)
    file = found.keep(tmp_path, 3, options, ["I3 at 1.00 s: what it broke once"])
    with pytest.raises(SystemExit, match=r"seed-3\.json: seed 3 .* breaks no promise"):
        shrink.main([str(file)])
    assert list(tmp_path.iterdir()) == [file], "nothing is written"


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(3))
def test_the_smallest_worlds_are_sound(seed: int) -> None:
    """Else what is left would break promises by being small."""
    least = {name: values[0] for name, values in shrink.SIZES.items()}
    for more in ({}, {"learners": 2, "quorum": 2}, {"shards": 2, "syncers": 2, "fragments": 2}):
        assert play(seed, Options.calm(**{**least, **more})).violations == []


def test_shrinking_without_keeping_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["check", "--shrink"])
    with pytest.raises(SystemExit) as refused:
        check.arguments()
    assert refused.value.code == 2
