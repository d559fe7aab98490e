"""What is too much for a syncer, and what somebody cannot have whole: refused, and the run ends."""

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_shared.bus.port import Stored
from diloco_shared.spec.codecs import bytes_of
from diloco_simulator.troubles.spoiling import LASTS_S, Spoiling
from diloco_simulator.worlds import constants
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import SELDOM, Options, seldom
from diloco_simulator.worlds.tiny import payloads_least, spec_of
from diloco_simulator.worlds.world import WorldResult, played
from diloco_syncer.merging.payloads_io import Payloads

# Answers of several rounds come at the same time, and slowly.
MANY = Options.calm(
    learners=4, quorum=2, fragments=3, overlap_steps=9, steps=36, safety_s=20.0, delay_s=0.4
)
LITTLE = {d.path: min(d.others) for d in constants.MEMORY}
SPOILT = Options.calm(learners=2, quorum=2, steps=60, syncers=2, spoilt=0.5, safety_s=40.0)
PATIENCE = {d.path: min(d.others) for d in constants.SPOILT}
# Seeds tried, where what a process says has changed and lets dice fall otherwise.
SEEDS = range(1, 4)


def first_that_reaches(case: Case, *states: str) -> WorldResult:
    """Every world until then is sound."""
    for seed in SEEDS:
        found = played(case.of(seed))
        assert found.violations == []
        if all(found.counts[state] for state in states):
            return found
    raise AssertionError(f"no world reaches all of {states}")


@pytest.mark.whole
def test_what_finds_no_room_is_left_out_and_the_run_ends() -> None:
    found = first_that_reaches(Case(1, MANY, LITTLE), "contributions refused: no-room")
    assert found.counts["missed: its answer was refused"] and found.rounds > 0


@pytest.mark.whole
def test_what_is_not_whole_for_long_is_given_up_and_the_run_ends() -> None:
    found = first_that_reaches(
        Case(1, SPOILT, PATIENCE),
        "chunks altered for a reader",
        "chunks lost for a reader",
        "contributions refused: incomplete",
        "publications refused: incomplete",
    )
    assert found.rounds > 0


@pytest.mark.whole
def test_a_round_that_is_over_waits_for_no_payload() -> None:
    """The other learner's answer was enough."""
    case = Case(1, SPOILT.changed(quorum=1, syncers=1), PATIENCE)
    first_that_reaches(case, "contributions given up: no round waits")


@pytest.mark.whole
def test_a_syncer_that_holds_more_than_it_may_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Payloads, "room_for", lambda payloads, size: None)
    violations = played(Case(1, MANY, LITTLE)).violations
    assert any(v.startswith("I12 at ") and "bytes of payloads" in v for v in violations)


# --------------------------------------------------------------------------------------------------
# How payloads are spoilt.


def spoiling(rate: float = 1.0) -> tuple[Any, Spoiling]:
    """The scene, and what spoils that share of payloads."""
    scene: Any = SimpleNamespace(faulty=True, now=0.0, counts=Counter[str]())
    return scene, Spoiling(scene, Random(1), rate)


CHUNKS = [Stored("dn.sim.0.0.1.1", bytes([n] * 3), {}, n + 5) for n in range(4)]


def seen_by(reader: str, of: Spoiling, chunks: list[Stored] = CHUNKS) -> list[Stored]:
    return of.seen(reader, chunks[0].subject, chunks)


def test_the_same_chunk_is_spoilt_for_a_reader_until_it_is_over() -> None:
    scene, of = spoiling()
    first = seen_by("learner-0-data", of)
    assert first != CHUNKS and len(first) in (3, 4)
    assert sum(chunk in first for chunk in CHUNKS) == 3, "one of them"
    assert seen_by("learner-0-data", of) == first, "whenever it reads"
    parts = [*seen_by("learner-0-data", of, CHUNKS[:2]), *seen_by("learner-0-data", of, CHUNKS[2:])]
    assert parts == first, "and however much at a time"
    scene.now = max(LASTS_S) + 1.0
    assert seen_by("learner-0-data", of) == CHUNKS


def test_nothing_is_spoilt_once_all_is_well() -> None:
    scene, of = spoiling()
    assert seen_by("learner-0-data", of) != CHUNKS
    scene.faulty = False
    assert seen_by("learner-0-data", of) == seen_by("learner-1-data", of) == CHUNKS


def test_learners_meet_it_on_dn_and_syncers_on_up() -> None:
    _, of = spoiling()
    up = [Stored("up.sim.a.0.0.1.1", bytes(3), {}, n + 1) for n in range(3)]
    assert seen_by("syncer-0-data", of) == CHUNKS
    assert seen_by("coordinator/1/export-a", of) == CHUNKS
    assert seen_by("learner-0-data", of, up) == up
    assert seen_by("syncer-0-data", of, up) != up
    found = {seen is not None for seen in of.spoilt.values()}
    assert found == {True}


def test_chunks_are_altered_as_often_as_lost() -> None:
    scene, of = spoiling()
    for n in range(200):
        seen_by(f"learner-{n}-data", of)
    lost, altered = (scene.counts[f"chunks {how} for a reader"] for how in ("lost", "altered"))
    assert lost + altered == scene.counts["payloads spoilt for a reader"] == 200
    assert 70 < lost < 130


# --------------------------------------------------------------------------------------------------
# What is drawn, and how.


def test_both_are_drawn_from_dice_of_their_own() -> None:
    """Kept worlds and calm ones have neither, and half a minute is waited where nothing lasts."""
    seeds = range(400)
    assert 0.7 * 400 * SELDOM["spoilt"].share < sum("spoilt" in seldom(seed) for seed in seeds)
    little = [constants.of_memory(seed) for seed in seeds]
    assert 0.7 * 400 * constants.LITTLE < sum(map(bool, little)) < 1.4 * 400 * constants.LITTLE
    assert Options.calm().spoilt == 0.0
    for case in map(Case.drawn, range(60)):
        assert (case.options.spoilt > 0) == any(d.path in case.constants for d in constants.SPOILT)


def test_without_them_seeds_draw_what_they_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [Case.drawn(seed) for seed in range(40)]
    monkeypatch.delitem(SELDOM, "spoilt")
    monkeypatch.setattr(constants, "of_memory", lambda seed: {})
    later = {d.path for d in (*constants.MEMORY, *constants.SPOILT)}
    for case, before in zip(drawn, map(Case.drawn, range(40)), strict=True):
        assert case.without(["spoilt", *later]) == before


def test_the_least_memory_has_room_for_the_start_and_for_a_whole_round() -> None:
    """With less, no run would ever begin, or one of all learners would never be merged."""
    for seed in range(100):
        options = Options.drawn(seed)
        a, least = spec_of(options, seed).algorithm, payloads_least(spec_of(options, seed), 1)
        assert least >= bytes_of("fp32", 5) * a.fragments // a.shards
        assert least >= bytes_of(a.codec_up, 5)
        many = payloads_least(spec_of(options, seed), options.learners)
        assert many >= options.learners * bytes_of(a.codec_up, 24 // a.fragments)
    assert min(room for d in constants.MEMORY for room in d.others) >= 1.0
