"""Bandwidth needed, against the published points and against cases done by hand."""

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_planner.bandwidth import (
    CODEC_BITS,
    BadSetting,
    Bursts,
    Link,
    Method,
    Published,
    on_link,
    required,
)
from diloco_shared.budget import known
from diloco_shared.budget.traffic import load
from diloco_shared.spec.algorithm import Algorithm
from diloco_shared.spec.run import RunSpec


def gbit(method: Method, **changes: float) -> float:
    return float(required(Link(method, **changes))["gbit_per_s"])  # type: ignore[arg-type]


def test_published_points() -> None:
    assert gbit("dp", utilisation=0.90) == pytest.approx(104, rel=0.03)
    assert gbit("dp", learners=8, utilisation=0.95) == pytest.approx(198, rel=0.03)
    assert gbit("decoupled") == pytest.approx(1.7, rel=0.03)
    int4 = required(Link("decoupled", learners=8, up_bits=4.125, down_bits=4.125))
    assert int4["gbit_per_s"] == pytest.approx(0.43, rel=0.03)
    assert int4["gbit_per_s_both_directions"] == pytest.approx(0.84, rel=0.03)


def test_published_ratios() -> None:
    ideal = gbit("dp", utilisation=0.90)
    assert 60 < ideal / gbit("decoupled") < 64
    assert 238 < ideal / gbit("decoupled", up_bits=4.125, down_bits=4.125) < 246


def test_a_burst_done_by_hand() -> None:
    # 1 Gbit through 128 buckets: all are ready by 1 s; the first at 1/3 + 2/3/128 s. At 1 Gbit/s
    # the link is busy from then on, ends at 1.33854 s, and stalls each of the steps by 0.33854 s.
    bursts = Bursts(bits=1e9, period=1, overlap=0, step_s=1.0)
    assert bursts.utilisation(1e9) == pytest.approx(1 / (1 + 1 / 3 + 2 / 3 / 128))
    # A fast link is only held up by the last bucket.
    assert bursts.utilisation(1e12) == pytest.approx(1 / (1 + 1e-3 / 128))
    # Spread over ten steps, the same stall counts a tenth.
    assert Bursts(1e9, 10, 0, 1.0).utilisation(1e9) == pytest.approx(10 / (10 + 0.33854), rel=1e-4)
    # With a step of overlap there is none left.
    assert Bursts(1e9, 10, 1, 1.0).utilisation(1e9) == 1.0


def test_a_link_with_less_than_is_sent_bounds_the_utilisation() -> None:
    # 1 Gbit per step of 1 s at 0.5 Gbit/s: half, however far the overlap reaches.
    for overlap in (1, 5):
        assert Bursts(1e9, 1, overlap, 1.0).utilisation(0.5e9) == pytest.approx(0.5)
    # Without one, a step takes the two seconds of its burst, after the wait for its first bucket.
    alone = Bursts(1e9, 1, 0, 1.0).utilisation(0.5e9)
    assert alone == pytest.approx(1 / (2 + 1 / 3 + 2 / 3 / 128))


def test_the_shared_link_carries_every_fragment() -> None:
    both = required(Link("decoupled", keyframe_every=0))
    assert both["gbit_per_s_shared_link"] == pytest.approx(5e9 * 16 / 24 / 1e9)
    assert both["gbit_per_s_hub"] == pytest.approx(2 * both["gbit_per_s_shared_link"])
    # One fragment in flight at a time: both readings are the same.
    alone = required(Link("decoupled", fragments=6, keyframe_every=0))
    assert alone["gbit_per_s_shared_link"] == alone["gbit_per_s"]


def test_keyframes_are_more_than_half_of_what_comes_down_in_their_turns() -> None:
    """By hand: 5e9 values in 24 s; one version in 16, and one fragment in 4 in such turns."""
    per_bit = 5e9 / 24 / 1e9
    found = required(Link("decoupled", up_bits=4.0625, down_bits=4.0625))
    assert found["gbit_per_s_average_up"] == pytest.approx(4.0625 * per_bit)
    assert found["gbit_per_s_average_down"] == pytest.approx((15 * 4.0625 + 32) / 16 * per_bit)
    assert found["gbit_per_s_shared_link"] == pytest.approx((3 * 4.0625 + 32) / 4 * per_bit)
    assert found["gbit_per_s_keyframe"] == pytest.approx(32 * per_bit / 2)
    halved = required(Link("decoupled", up_bits=4.0625, down_bits=4.0625, keyframe_bits=16))
    assert halved["gbit_per_s_shared_link"] == pytest.approx((3 * 4.0625 + 16) / 4 * per_bit)


@pytest.mark.parametrize("change", [4.0625, 32.0])
@pytest.mark.parametrize("fragments", [1, 3, 6, 24])
@pytest.mark.parametrize("every", [1, 2, 7, 16, 64])
def test_publications_are_counted_as_a_run_makes_them(
    every: int, fragments: int, change: float
) -> None:
    algorithm = Algorithm.model_validate(
        {"fragments": fragments, "sync_every_steps": 24, "keyframe_every": every}
    )
    turns = [
        [
            16.0 if algorithm.deltas_since(p, version) == 0 else change
            for p in range(algorithm.fragments)
        ]
        for version in range(every, 2 * every)
    ]
    found = Published(change, 16.0, every, fragments)
    assert found.mean == pytest.approx(sum(map(sum, turns)) / every / fragments)
    assert found.fullest == pytest.approx(max(map(sum, turns)) / fragments)


def test_what_comes_down_on_average_is_what_the_budget_counts() -> None:
    asked = {"codec_up": "int4", "codec_down": "int4", "fragments": 24, "sync_every_steps": 24}
    spec = RunSpec.model_validate(
        {
            "name": "x",
            "algorithm": asked,
            "model": {"factory": "your:model", "parameters": 12_000_000_000},
            "budget": {"steps": 1},
        }
    )
    job, bits = known(spec), CODEC_BITS["int4"]
    assert job is not None
    found = required(Link("decoupled", 12e9, up_bits=bits, down_bits=bits))
    for way in ("up", "down"):
        counted = getattr(load(job), f"learner_{way}")
        assert found[f"gbit_per_s_average_{way}"] == pytest.approx(counted / 1e9, rel=1e-3)


def test_one_learner_needs_no_all_reduce() -> None:
    assert gbit("dp", learners=1) == 0.0
    assert on_link(Link("dp", learners=1), 1e-3) == {"utilisation_on_link": 1.0, "keeps_up": True}


@pytest.mark.parametrize("method", ["dp", "diloco", "streaming"])
def test_the_link_that_is_needed_gives_what_was_asked_for(method: Method) -> None:
    link = Link(method, utilisation=0.8)
    found = on_link(link, gbit(method, utilisation=0.8))
    assert found["utilisation_on_link"] == pytest.approx(0.8, rel=1e-3)


def test_12b_over_an_ordinary_link() -> None:
    """Four centers, 2 Gbit/s: 288 Gbit a step against 8 Gbit a step of fragments in bf16."""
    dp = on_link(Link("dp", 12e9, 4), 2)
    # Nothing is sent before the first gradient, a third of the step in.
    assert dp["utilisation_on_link"] == pytest.approx(1 / (144 + 1 / 3 + 2 / 3 / 128), rel=1e-3)
    assert not on_link(Link("decoupled", 12e9, 4), 2)["keeps_up"]
    assert on_link(Link("decoupled", 12e9, 4, step_s=4.0, keyframe_every=0), 2)["keeps_up"]
    # 10 Gbit a step while keyframes go out, of which only 8 would be through.
    assert not on_link(Link("decoupled", 12e9, 4, step_s=4.0), 2)["keeps_up"]
    assert on_link(Link("decoupled", 12e9, 4, step_s=5.0), 2)["keeps_up"]
    with pytest.raises(BadSetting, match="link_gbit_per_s must be"):
        on_link(Link("dp"), 0)


@examples(25)
@given(
    st.sampled_from(["dp", "diloco", "streaming"]),
    st.floats(1e6, 1e12),
    st.integers(2, 16),
    st.floats(0.05, 0.99),
)
def test_more_of_anything_needs_more(
    method: Method, params: float, learners: int, utilisation: float
) -> None:
    needed = gbit(method, params=params, learners=learners, utilisation=utilisation)
    slack = 1.001
    assert gbit(method, params=2 * params, learners=learners, utilisation=utilisation) > needed
    assert slack * gbit(method, params=params, learners=16, utilisation=utilisation) >= needed
    assert slack * gbit(method, params=params, learners=learners, utilisation=0.991) >= needed
    if method != "dp":
        ideal = gbit("dp", params=params, learners=learners, utilisation=utilisation)
        assert needed <= slack * ideal


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"params": 0}, "params"),
        ({"params": float("nan")}, "params"),
        ({"learners": 0}, "learners"),
        ({"utilisation": 1.01}, "utilisation"),
        ({"sync_every_steps": 25}, "sync_every_steps"),
        ({"method": "ring"}, "method"),
        ({"keyframe_every": -1}, "keyframe_every"),
        ({"keyframe_bits": 0}, "keyframe_bits"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(BadSetting, match=named):
        Link(**({"method": "decoupled"} | changes))  # type: ignore[arg-type]


def test_what_no_link_reaches_is_said() -> None:
    with pytest.raises(BadSetting, match="utilisation must be lower"):
        Bursts(1e9, 1, 0, 1.0).needed(1.0)
