"""Streams whose limits are just the budget hold a run at its worst; and not much more (I12)."""

import itertools
from typing import Any, get_args

import pytest
from shared.budget.storing import Stored

from diloco_shared.budget import known, limits, roomy, streams
from diloco_shared.budget.job import Job
from diloco_shared.budget.streams import FLOOR, records_max
from diloco_shared.bus.port import StreamFull
from diloco_shared.checking import check
from diloco_shared.spec.algorithm import Codec

CODECS = get_args(Codec)
# A budget, not a guess: at most so many times what a run was seen to store.
LOOSE_MAX = 1.3


def job(learners: int = 3, **algorithm: Any) -> Job:
    body = {"name": "r", "algorithm": algorithm, "budget": {"steps": 480}}
    found = known(check(body), learners=learners)
    assert found is not None
    return found


def fill_up(run: Stored, takeover: int) -> None:
    """The first initializer dies; a snapshot takes as long to write as the next one is away.

    In interval `takeover` a new leader pulls the rounds in flight again.
    """
    every, flying = run.job.spec.keeping.snapshot_every_rounds, run.algorithm.rounds_in_flight_max
    run.initial(run.learners[0])
    run.initial(run.learners[-1])
    pulled, covered = 0, run.last("UP")
    for interval in range(2):
        while pulled < (interval + 1) * every:
            run.pulled(pulled)
            pulled += 1
        before = run.last("UP")
        for _ in range(flying):
            run.pulled(pulled)
            pulled += 1
        if interval == takeover:
            for number in range(pulled - flying, pulled):
                run.pulled(number, term=2)
        # The snapshot that was begun an interval ago is durable: what it covers goes.
        run.purge_up(covered + 1)
        covered = before


def fill_down(run: Stored) -> None:
    """Every fragment is just before its keyframe; purges lag behind as far as they may."""
    algorithm = run.algorithm
    fragments = range(algorithm.fragments)
    for p in fragments:
        run.publication(p, 0, keyframe="fp32")
    for version in range(1, algorithm.keyframe_every):
        for p in fragments:
            run.publication(p, version)
    owned = algorithm.fragments // algorithm.shards
    at_once = min(algorithm.rounds_in_flight_max + 1, owned) + 1
    behind: list[int] = []
    by_turns = itertools.chain(
        *zip(*(algorithm.owned(s) for s in range(algorithm.shards)), strict=True)
    )
    # A leader that took over publishes exact keyframes of what its predecessor did not.
    for p in [*by_turns][: at_once * algorithm.shards]:
        run.publication(p, algorithm.keyframe_every, keyframe="fp32")
        behind.append(p)
    for p in behind:
        run.purge_down(p)
    for p in (p for p in fragments if p not in behind):
        run.publication(p, algorithm.keyframe_every, keyframe=algorithm.keyframe_codec)
        run.purge_down(p)
    for version in range(algorithm.keyframe_every + 1, 2 * algorithm.keyframe_every):
        for p in fragments:
            run.publication(p, version)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("codec_up", CODECS)
def test_contributions_at_their_worst_fit_and_nearly_fill_their_stream(
    codec_up: str, shards: int
) -> None:
    found = job(codec_up=codec_up, shards=shards)
    runs = [Stored(found), Stored(found)]
    for takeover, run in enumerate(runs):
        fill_up(run, takeover)
    assert streams(found)["UP"].bytes <= LOOSE_MAX * max(run.worst["UP"] for run in runs)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("keyframe_codec", ["fp32", "bf16"])
@pytest.mark.parametrize("codec_down", CODECS)
def test_publications_at_their_worst_fit_and_nearly_fill_their_stream(
    codec_down: str, keyframe_codec: str, shards: int
) -> None:
    algorithm = {"codec_down": codec_down, "keyframe_codec": keyframe_codec, "shards": shards}
    for every in (1, 5):
        found = job(**algorithm, keyframe_every=every)
        run = Stored(found)
        fill_down(run)
        assert streams(found)["DN"].bytes <= LOOSE_MAX * run.worst["DN"]


def test_one_direction_does_not_depend_on_the_codec_of_the_other() -> None:
    """So the two tests above are of every pair."""
    for kind, other in (("UP", "codec_down"), ("UP", "keyframe_codec"), ("DN", "codec_up")):
        known_to_all = CODECS if other != "keyframe_codec" else ("fp32", "bf16")
        assert len({streams(job(**{other: codec}))[kind].bytes for codec in known_to_all}) == 1


@pytest.mark.parametrize("shards", [1, 2])
def test_moments_and_snapshots_on_their_way_fit_and_nearly_fill_their_stream(shards: int) -> None:
    found = job(shards=shards)
    run = Stored(found)
    run.donations(found.learners)
    run.snapshot_parts()
    assert streams(found)["STATE"].bytes <= LOOSE_MAX * run.worst["STATE"]


def test_a_whole_run_fits_on_its_tape() -> None:
    Stored(job(shards=2)).tape()


@pytest.mark.parametrize("shards", [1, 2])
def test_what_is_not_archived_yet_fits_on_the_tape_of_a_long_run_and_nearly_fills_it(
    shards: int,
) -> None:
    algorithm = {"fragments": 2 * shards, "shards": shards}
    keeping = {"snapshot_every_rounds": 4}
    body = {"name": "r", "algorithm": algorithm, "keeping": keeping, "budget": {"steps": 10**6}}
    found = known(check(body), learners=1)
    assert found is not None
    run = Stored(found, name="r" * 63, learner="l" * 61)
    run.tape(records_max(4))
    assert streams(found)["TAPE"].bytes <= 2 * run.worst["TAPE"], "names in it are given, not all"
    longer = known(check({**body, "budget": {"steps": 10**7}}), learners=1)
    assert longer is not None
    assert streams(longer)["TAPE"].bytes == streams(found)["TAPE"].bytes


@pytest.mark.parametrize(
    "algorithm",
    [
        {"fragments": 1, "sync_every_steps": 1, "keyframe_every": 1},
        {"fragments": 24, "sync_every_steps": 24, "overlap_steps": 8, "keyframe_every": 3},
        {"fragments": 12, "shards": 4, "sync_every_steps": 12, "overlap_steps": 30},
    ],
)
def test_also_with_many_rounds_in_flight_and_the_longest_names(algorithm: dict[str, Any]) -> None:
    run = Stored(job(5, **algorithm), name="r" * 63, learner="l" * 61)
    fill_up(run, takeover=1)
    fill_down(run)
    run.tape()
    run.donations(run.job.learners)
    run.snapshot_parts()


def test_a_byte_less_than_a_run_stores_is_refused_by_the_stream() -> None:
    run = Stored(job(keyframe_every=5))
    fill_down(run)
    short = Stored(job(keyframe_every=5))
    short.broker.narrow("DN-run", run.worst["DN"] - 1)
    with pytest.raises(StreamFull):
        fill_down(short)


def test_contributions_of_the_whole_run_are_counted_where_all_are_kept() -> None:
    body = {"name": "r", "keeping": {"contributions": "all"}, "budget": {"steps": 480}}
    found = known(check(body), learners=2)
    assert found is not None
    run = Stored(found)
    run.initial("a")
    run.initial("b")
    for number in range(found.rounds):
        run.pulled(number)
    assert streams(found)["UP"].bytes <= LOOSE_MAX * run.worst["UP"]
    assert "until_snapshot" in streams(found)["UP"].lower


def test_limits_have_a_floor_that_who_sets_a_bound_does_not_get() -> None:
    assert min(limits(job()).values()) == FLOOR
    bound = max(need.bytes for need in streams(job()).values())
    body = {"name": "r", "keeping": {"stream_bytes_max": bound}, "budget": {"steps": 480}}
    found = known(check(body), learners=1)
    assert found is not None
    assert max(limits(found).values()) <= bound


def test_no_limit_is_above_the_bound_however_large_the_run_becomes() -> None:
    alone = max(need.bytes for need in streams(job(learners=1)).values())
    body = {"name": "r", "keeping": {"stream_bytes_max": alone}, "budget": {"steps": 480}}
    found = known(check(body), learners=8)
    assert found is not None
    assert max(roomy(found).values()) > alone
    assert limits(found) == {kind: min(n, alone) for kind, n in roomy(found).items()}
