"""Plans: what is chosen, that it fits what there is, and that there is always an answer."""

import re
from math import ceil
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from diloco_planner.bandwidth import CODEC_BITS
from diloco_planner.plan_request import PlanRequest
from diloco_planner.planner import (
    CODECS,
    LEARNERS_MAX,
    LOAD_MAX,
    SNAPSHOT_EVERY,
    SYNC_EVERY,
    Infeasible,
    loss_gap,
    plan,
    sensitivity,
)
from diloco_shared.budget.refusing import faults
from diloco_shared.spec.algorithm import MEMBERS_MAX, Algorithm
from diloco_shared.spec.run import RunSpec
from diloco_syncer.rounds.grace import Timings, grace_s

PAPER = {"params": 5e9, "chips": 1_200_000, "centers": 8, "step_s": 1.0, "tokens": 1e12}


def wishes(**changes: Any) -> PlanRequest:
    return PlanRequest.model_validate(PAPER | changes)


def test_the_papers_setting_is_planned_as_the_paper_has_it() -> None:
    found = plan(wishes(link_gbit_per_s=6.0))
    chosen = found["settings"]
    assert (chosen["learners"], chosen["sync_every_steps"], chosen["fragments"]) == (8, 24, 24)
    assert chosen["quorum"] == 1
    assert found["predicted"]["goodput"] == pytest.approx(0.88, abs=0.02)
    # By hand: 5e9 values in 24 s, 16 bits up, and down one publication in 16 in 32 bits. In a
    # quarter of the turns it is one in four.
    gbit = 5e9 / 24 / 1e9
    assert found["predicted"]["bytes_up_per_step"] == pytest.approx(5e9 * 2 / 24)
    assert found["predicted"]["gbit_per_s_link"] == pytest.approx(17 * gbit)
    assert found["predicted"]["gbit_per_s_link_keyframes"] == pytest.approx(20 * gbit)
    assert found["predicted"]["link_load"] == pytest.approx(20 * gbit / 6)
    assert found["hub"]["gbit_per_s_each_way"] == pytest.approx(8 * 20 * gbit)
    # 1e12 tokens at 4e6 a step of one second.
    days = 250_000 / 86_400 / found["predicted"]["goodput"]
    assert found["predicted"]["days"] == pytest.approx(days)
    assert set(found["reasons"]) == set(chosen)


def test_slower_links_get_smaller_codecs_then_longer_rounds() -> None:
    order = [(h, c) for h in SYNC_EVERY for c in CODECS]
    found = []
    for gbit in (10.0, 3.0, 1.5, 0.8, 0.4):
        chosen = plan(wishes(link_gbit_per_s=gbit))["settings"]
        found.append(order.index((chosen["sync_every_steps"], chosen["codec_up"])))
    assert found == sorted(found)
    assert found[0] < found[-1]


@pytest.mark.parametrize("gbit", [5.0, 4.5, 3.0, 2.0, 1.0, 0.5])
def test_no_turn_of_a_plan_has_more_than_its_link_carries(gbit: float) -> None:
    found = plan(wishes(link_gbit_per_s=gbit))
    chosen = Algorithm.model_validate(found["algorithm"])
    bits = {
        codec: CODEC_BITS[codec] * 5e9 / chosen.fragments / 1e9
        for codec in (chosen.codec_down, chosen.keyframe_codec)
    }
    every_s = chosen.sync_every_steps / chosen.fragments
    for version in range(chosen.keyframe_every, 2 * chosen.keyframe_every):
        turn = [
            bits[chosen.codec_down if chosen.deltas_since(p, version) else chosen.keyframe_codec]
            for p in range(chosen.fragments)
        ]
        assert sum(turn) / len(turn) / every_s <= LOAD_MAX * gbit


def test_rarer_keyframes_come_before_longer_rounds_and_are_said() -> None:
    chosen, why = (plan(wishes(link_gbit_per_s=1.7))[part] for part in ("settings", "reasons"))
    assert (chosen["sync_every_steps"], chosen["keyframe_every"]) == (24, 64)
    assert "63 versions" in why["keyframe_every"]
    usual = plan(wishes(link_gbit_per_s=6.0))
    assert usual["settings"]["keyframe_every"] == 16
    assert "the default" in usual["reasons"]["keyframe_every"]


def test_an_overlap_has_room_for_a_keyframe_or_a_note_says_how_late_it_is() -> None:
    fits = plan(wishes())
    predicted, overlap = fits["predicted"], fits["settings"]["overlap_steps"]
    assert predicted["round_s"] < 3 < predicted["keyframe_round_s"] < overlap == 4
    late = plan(wishes(params=12e9, step_s=0.44, centers=4, chips=4096))
    assert late["settings"]["overlap_steps"] == 4
    steps = ceil(late["predicted"]["keyframe_round_s"] / 0.44) - 4
    assert steps > 1
    (note,) = (note for note in late["notes"] if "keyframe" in note)
    assert f"by {steps} steps" in note
    assert not any("keyframe" in note for note in fits["notes"])


def test_the_disk_of_the_hub_is_that_of_the_streams() -> None:
    found = plan(wishes())
    streams = [size for name, size in found["budget_gb"].items() if name.startswith("stream_")]
    assert len(streams) == 4
    assert found["hub"]["disk_gib"] == pytest.approx(sum(streams) * 1e9 / 2**30)


LARGE = {"params": 11.8e9, "chips": 24, "centers": 3, "step_s": 5.0}


def test_snapshots_are_made_so_seldom_that_a_syncers_disk_carries_them() -> None:
    """By hand: 11.8e9 values in 120 s, of which each round writes 4 bytes and each snapshot 16."""
    usual, seldom = (plan(wishes(**LARGE, syncer_disk_gb_per_s=rate)) for rate in (2.0, 1.0))
    assert usual["settings"]["snapshot_every_rounds"] == SNAPSHOT_EVERY == 24
    assert usual["budget_gb"]["disk_syncer_gb_per_s"] == pytest.approx((4 + 16) * 11.8 / 120)
    # Half as often is (4 + 8) * 11.8 / 120 = 1.18 GB/s.
    assert seldom["settings"]["snapshot_every_rounds"] == 4 * 24
    assert seldom["budget_gb"]["disk_syncer_gb_per_s"] == pytest.approx((4 + 4) * 11.8 / 120)
    assert "0.787 GB/s, 1 allowed" in seldom["reasons"]["snapshot_every_rounds"]
    assert seldom["budget_gb"]["stream_UP"] > usual["budget_gb"]["stream_UP"]
    for found in (usual, seldom):
        assert found["budget_gb"]["disk_syncer"] == pytest.approx((3 * 16 + 4 + 16) * 11.8)
        assert found["settings"]["syncer_shards"] == 1


def test_a_disk_that_carries_not_even_the_anchors_gets_more_syncers() -> None:
    found = plan(wishes(**LARGE, syncer_disk_gb_per_s=0.3))
    assert found["settings"]["syncer_shards"] == 2
    assert "disk decides" in found["reasons"]["syncer_shards"]
    assert found["budget_gb"]["disk_syncer_gb_per_s"] <= 0.3


def test_the_devices_of_a_learner_share_its_state() -> None:
    alone, shared = (plan(wishes(**LARGE | {"chips": chips})) for chips in (3, 24))
    of_one, of_eight = (found["budget_gb"]["memory_learner_device"] for found in (alone, shared))
    assert of_eight < of_one / 6


@pytest.mark.parametrize("step_s", [1.0, 100.0])
def test_the_grace_window_is_the_syncers(step_s: float) -> None:
    """More than a step where there is time, and not more than a run's limit on it."""
    found = plan(wishes(step_s=step_s))
    predicted, chosen = found["predicted"], Algorithm.model_validate(found["algorithm"])
    timings = Timings()
    timings.sync.update(predicted["round_s"])
    window = grace_s(
        factor=chosen.grace_factor,
        overlap_steps=chosen.overlap_steps,
        step_s=step_s,
        timings=timings,
        limit_s=chosen.grace_s_max,
    )
    assert predicted["grace_s"] == pytest.approx(window)
    assert window > step_s if step_s == 1.0 else window == chosen.grace_s_max


def test_a_plan_has_no_more_learners_than_a_run_takes() -> None:
    with pytest.raises(ValidationError, match="centers"):
        wishes(centers=MEMBERS_MAX + 1)
    spec = {"name": "x", "membership": {"learners_max": MEMBERS_MAX}, "budget": {"steps": 1}}
    assert not faults(RunSpec.model_validate(spec))


def test_more_failures_get_more_learners() -> None:
    found = [
        plan(wishes(centers=2, mtbi_years=y))["settings"]["learners"] for y in (20, 2, 1, 0.01)
    ]
    assert found == sorted(found)
    assert found[-1] == LEARNERS_MAX
    assert "none of up to 16" in plan(wishes(mtbi_years=0.01))["reasons"]["learners"]


def test_a_host_too_small_for_all_gets_shards_that_cut_the_fragments() -> None:
    for changes in ({"syncer_memory_gib": 20.0}, {"hub_gbit_per_s": 5.0}, {"syncer_cores": 1}):
        found = plan(wishes(**changes))
        shards = found["settings"]["syncer_shards"]
        assert shards > plan(wishes(syncer_cores=64))["settings"]["syncer_shards"]
        assert found["settings"]["fragments"] % shards == 0
        assert found["algorithm"]["shards"] == shards


def test_more_shards_do_not_relieve_the_message_server() -> None:
    few, many = (plan(wishes(syncer_memory_gib=gib)) for gib in (256.0, 20.0))
    assert few["hub"]["server_cores"] == many["hub"]["server_cores"]
    assert any("message server" in note for note in many["notes"])


def test_small_steps_get_an_overlap_that_covers_the_round_trip() -> None:
    found = plan(wishes(params=1e6, step_s=0.02, chips=8))
    overlap = found["settings"]["overlap_steps"]
    assert overlap * 0.02 >= found["predicted"]["round_s"] >= 0.12
    assert any("overlap" in note for note in found["notes"])


def test_a_missed_deadline_is_said_and_told_what_would_do() -> None:
    assert not any("days" in note for note in plan(wishes(deadline_days=30))["notes"])
    (note,) = (note for note in plan(wishes(deadline_days=1))["notes"] if "days" in note)
    assert "3.3 days" in note
    assert "times the chips" in note


def test_a_measured_step_time_follows_the_work() -> None:
    days = {row["changed"]: row.get("days") for row in sensitivity(wishes())}
    as_it_is = plan(wishes())["predicted"]["days"]
    assert days["params x 2"] > 1.5 * as_it_is
    assert days["chips x 0.5"] > 1.5 * as_it_is
    assert days["link_gbit_per_s x 2"] == pytest.approx(as_it_is)


def test_the_gap_is_that_of_the_fits() -> None:
    gaps = [loss_gap(3.5e7, m) for m in (2, 3, 4, 8, 16)]
    assert gaps == sorted(gaps)
    assert gaps[0] == pytest.approx(18.768 / 18.129 * 3.5e7 ** (0.0953 - 0.0969) - 1)
    assert loss_gap(3.5e7, 8) == pytest.approx(3.621 / 3.485 - 1, abs=0.006)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"params": 1e13, "step_s": 100.0, "link_gbit_per_s": 1e4}, "syncer_memory_gib"),
        ({"chips": 4}, "chips must be at least one per data center"),
        ({"link_gbit_per_s": 0.01}, "link_gbit_per_s must be at least"),
        ({"round_trip_s": 50.0}, "round_trip_s"),
        ({"syncer_memory_gib": 0.1}, "syncer_memory_gib"),
        ({"hub_gbit_per_s": 0.1}, "hub_gbit_per_s"),
        ({"syncer_disk_gb_per_s": 1e-3}, "syncer_disk_gb_per_s"),
    ],
)
def test_what_is_short_is_named(changes: dict[str, float], named: str) -> None:
    with pytest.raises(Infeasible, match=named):
        plan(wishes(**changes))


@pytest.mark.parametrize("name", ["params", "chips", "mtbi_years", "step_s"])
def test_wishes_are_checked(name: str) -> None:
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValidationError, match=name):
            wishes(**{name: bad})


def test_no_more_shards_are_planned_than_a_run_may_have() -> None:
    """Ten chips for 0.6T parameters: 96 fragments, which 64 shards cannot serve."""
    asked = PlanRequest(
        params=10**11.75, chips=10, centers=2, link_gbit_per_s=10, mtbi_years=1, step_s=10
    )
    with pytest.raises(Infeasible, match="48 syncers for 96 fragments are not enough"):
        plan(asked)


def can_be_planned(asked: PlanRequest) -> bool:
    try:
        plan(asked)
    except Infeasible:
        return False
    return True


@examples(40)
@given(st.floats(0, 12), st.integers(2, 7), st.integers(1, 16), st.floats(-5, 4), st.floats(0, 2))
def test_nothing_is_refused_where_nothing_is_short(
    params: float, chips: int, centers: int, years: float, step: float
) -> None:
    plan(
        PlanRequest(
            params=10**params,
            chips=10**chips,
            centers=centers,
            mtbi_years=10**years,
            step_s=10**step,
            link_gbit_per_s=1e5,
            hub_gbit_per_s=1e5,
            syncer_memory_gib=1e5,
            syncer_cores=1024,
            syncer_disk_gb_per_s=1e4,
        )
    )


def link_named(text: str) -> float:
    found = re.match(r"link_gbit_per_s must be at least (\S+)", text)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("params", [1e8, 5e9, 4e10])
def test_a_link_that_is_named_suffices_and_a_thinner_one_does_not(params: float) -> None:
    """By hand: in 96 s, a value in 4.0625 bits, and in a turn with keyframes one of 16 in 32."""
    with pytest.raises(Infeasible) as refused:
        plan(wishes(params=params, link_gbit_per_s=1e-3))
    needed = link_named(str(refused.value))
    fullest = (15 * 4.0625 + 32) / 16
    assert needed == pytest.approx(params * fullest / 96 / 1e9 / LOAD_MAX, rel=5e-3)
    plan(wishes(params=params, link_gbit_per_s=1.01 * needed))
    with pytest.raises(Infeasible, match="link_gbit_per_s"):
        plan(wishes(params=params, link_gbit_per_s=0.99 * needed))


@examples(60)
@given(
    st.floats(0, 13), st.integers(0, 8), st.integers(1, 40), st.floats(-4, 5), st.floats(-5, 4),
    st.one_of(st.none(), st.floats(-3, 3)),
)  # fmt: skip
def test_every_plan_can_be_run_or_says_what_is_short(
    params: float, chips: int, centers: int, link: float, years: float, step: float | None
) -> None:
    asked = PlanRequest(
        params=10**params,
        chips=10**chips,
        centers=centers,
        link_gbit_per_s=10**link,
        mtbi_years=10**years,
        step_s=None if step is None else 10**step,
    )
    try:
        found = plan(asked)
    except Infeasible as error:
        text = str(error)
        more = {"link_gbit_per_s": 1e6, "syncer_disk_gb_per_s": 1e6}  # as much as can be asked for
        if can_be_planned(PlanRequest.model_validate(asked.model_dump() | more)):
            assert "link" in text or "disk" in text, f"neither was short: {text}"
        return
    Algorithm.model_validate(found["algorithm"])
    assert found["predicted"]["link_load"] <= LOAD_MAX
    assert found["budget_gb"]["disk_syncer_gb_per_s"] <= asked.syncer_disk_gb_per_s * 1.001
    assert 0 < found["predicted"]["goodput"] <= 1
    assert found["settings"]["learners"] % centers == 0
    assert found["predicted"]["staleness_steps"] <= found["settings"]["overlap_steps"]
