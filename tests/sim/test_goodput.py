"""Goodput against closed forms, published cells, and what must hold for every fleet."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diloco_planner.bandwidth import BadSetting
from diloco_planner.goodput_model import (
    PUBLISHED,
    SIZES,
    Failures,
    absent,
    job_goodput,
    uptime,
)
from diloco_simulator.fleets.goodput import Cell, Estimate, Replicas, simulate, student
from diloco_simulator.fleets.goodput_rounds import Coupling, lockstep, simulate_rounds
from diloco_simulator.fleets.goodput_table import lines, table

SHORT_S = 4000.0


def of(cell: Cell, failures: Failures, horizon_s: float = SHORT_S) -> Estimate:
    return simulate([cell], failures, seeds=8, horizon_s=horizon_s)[0][0]


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    return table(Failures(), seeds=4, horizon_s=5000.0)


def test_published_cells_within_four_points(cells: list[dict[str, Any]]) -> None:
    """Fitted: the elastic row and the one dp cell. The Decoupled cells are predictions."""
    known = [cell for cell in cells if cell["published"] is not None]
    assert len(known) == len(PUBLISHED)
    assert {cell["method"] for cell in known if cell["fitted"]} == {"dp", "elastic"}
    for cell in known:
        assert abs(100 * cell["goodput"] - cell["published"]) < 4, cell


def test_four_learners_are_nearly_always_up(cells: list[dict[str, Any]]) -> None:
    for cell in cells:
        assert cell["learners"] < 4 or cell["uptime"] > 0.985, cell
        assert cell["learners"] < 8 or cell["uptime"] > 0.9999, cell


def test_the_table_shows_every_cell(cells: list[dict[str, Any]]) -> None:
    assert len(cells) == 30
    text = "\n".join(lines(cells))
    assert len(text.splitlines()) == 3 * 8 and max(map(len, text.splitlines())) <= 80
    published = text.partition("Published")[2].partition("Uptime")[0]
    assert published.split().count("88") == 2


def test_without_failures_nothing_is_lost() -> None:
    never = Failures(mtbi_s=1e18)
    cells = [Cell("dp", 10**6), Cell("elastic", 10**6), Cell("decoupled", 10**6, 8)]
    for goodput, up in simulate(cells, never, seeds=2, horizon_s=SHORT_S):
        assert goodput.mean == up.mean == 1.0


def test_instant_returns_leave_the_scale_down_only() -> None:
    """What is back before the scale-down ends is taken along: 1/G = 1 + rate down."""
    failures = Failures(return_mean_s=0.0, up_s=1e6)
    found = of(Cell("elastic", 1_200_000), failures)
    assert found.mean == pytest.approx(1 / (1 + failures.rate(1_200_000) * 11), abs=0.01)
    assert of(Cell("dp", 1_200_000), failures).mean == pytest.approx(1.0)


def test_a_rigid_job_stands_for_the_mean_delay() -> None:
    failures = Failures()
    found = of(Cell("dp", 1_200_000), failures, 2 * SHORT_S)
    expected = job_goodput(failures, 1_200_000, elastic=False)
    assert found.mean == pytest.approx(expected, abs=0.03)


def test_free_reconfigurations_leave_only_absent_chips() -> None:
    failures = Failures(down_s=0.0, up_s=0.0, slice_chips=20_000)
    found = of(Cell("elastic", 1_200_000), failures, 2 * SHORT_S)
    assert 1 - found.mean == pytest.approx(absent(failures), rel=0.2)


def test_one_decoupled_learner_is_elastic_data_parallel() -> None:
    assert of(Cell("decoupled", 600_000, 1), Failures()) == of(Cell("elastic", 600_000), Failures())


def test_the_mean_field_is_near_and_falls_with_size() -> None:
    found = simulate([Cell("elastic", n) for n in SIZES], Failures(), seeds=8, horizon_s=SHORT_S)
    means = [goodput.mean for goodput, _ in found]
    assert means == sorted(means, reverse=True)
    for size, mean in zip(SIZES, means, strict=True):
        assert job_goodput(Failures(), size, elastic=True) == pytest.approx(mean, abs=0.03)


def test_more_learners_and_fewer_failures_are_better() -> None:
    cells = [Cell("decoupled", 1_200_000, m) for m in (1, 2, 4, 8, 16)]
    usual = [g.mean for g, _ in simulate(cells, Failures(), seeds=4, horizon_s=SHORT_S)]
    assert usual == sorted(usual)
    rarer = replace(Failures(), mtbi_s=10 * Failures().mtbi_s)
    assert all(
        g.mean > other
        for (g, _), other in zip(
            simulate(cells, rarer, seeds=4, horizon_s=SHORT_S), usual, strict=True
        )
    )


def test_losing_a_learners_state_costs_its_recovery() -> None:
    every = Failures(return_mean_s=0.0, state_loss=1.0, recovery_s=30.0)
    found = of(Cell("elastic", 1_200_000), every)
    assert found.mean == pytest.approx(1 / (1 + every.rate(1_200_000) * 41), abs=0.01)


def test_seeds_decide_everything() -> None:
    cells = [Cell("decoupled", 600_000, 4), Cell("dp", 150_000)]
    first, again, other = (
        simulate(cells, Failures(), seed=seed, seeds=2, horizon_s=1000.0) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_delays_have_their_mean() -> None:
    one = np.ones(1)
    replicas = Replicas.fresh(Failures(), one, one > 0, np.random.default_rng(0))
    assert replicas.delays(200_000).mean() == pytest.approx(72.0, rel=0.02)


def test_uptime_of_independent_learners() -> None:
    (goodput, up) = simulate(
        [Cell("decoupled", 2_400_000, 2)], Failures(), seeds=8, horizon_s=SHORT_S
    )[0]
    assert up.mean == pytest.approx(uptime(goodput.mean, 2), abs=0.02)
    assert up.low <= up.mean <= up.high


def test_intervals_are_students() -> None:
    assert student(15) == pytest.approx(2.131, rel=1e-3)
    assert student(3) == pytest.approx(3.182, rel=0.01)
    assert Estimate.of(np.array([0.5])) == Estimate(0.5, 0.0, 1.0)


def test_who_waits_for_all_goes_as_the_slowest() -> None:
    never, speeds = Failures(mtbi_s=1e18), (1.0, 1.0, 0.8, 0.8)
    cell = Cell("decoupled", 1000, 4)
    all_of_them = simulate_rounds(cell, never, Coupling(4, speeds=speeds), seeds=2, rounds=100)
    assert all_of_them.goodput.mean == pytest.approx((0.8 + 0.8 + 1 + 1) / 4, abs=0.005)
    assert all_of_them.merged == 4
    anyone = simulate_rounds(cell, never, Coupling(1, speeds=speeds), seeds=2, rounds=100)
    assert anyone.goodput.mean == pytest.approx(1.0)
    greedy = Coupling(1, speeds=speeds, grace_factor=0.0)
    assert simulate_rounds(cell, never, greedy, seeds=2, rounds=100).merged < anyone.merged
    assert lockstep(Coupling(speeds=(1.0, 0.5)), 2, steps=10) == pytest.approx(0.75)


def test_quorum_one_loses_what_independent_learners_lose() -> None:
    cell = Cell("decoupled", 2_400_000, 4)
    apart = simulate([cell], Failures(), seeds=8, horizon_s=SHORT_S)[0][0]
    rounds = simulate_rounds(cell, Failures(), Coupling(1), seeds=16, rounds=400)
    assert rounds.goodput.mean == pytest.approx(apart.mean, abs=0.04)
    waiting = simulate_rounds(cell, Failures(), Coupling(4), seeds=4, rounds=150)
    assert waiting.goodput.mean < rounds.goodput.mean


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Failures(mtbi_s=0.0), "mtbi_s"),
        (lambda: Failures(down_s=float("nan")), "down_s"),
        (lambda: Failures(state_loss=2.0), "state_loss"),
        (lambda: Cell("ring", 10), "method"),  # type: ignore[arg-type]
        (lambda: Cell("decoupled", 10, 11), "learners"),
        (lambda: Coupling(speeds=(1.0, 0.0)), "speeds"),
        (lambda: Coupling(jitter=-1.0), "jitter"),
        (lambda: simulate([Cell("dp", 10)], Failures(), seeds=0), "seeds"),
        (
            lambda: simulate_rounds(Cell("decoupled", 10, 2), Failures(), Coupling(3)),
            "quorum",
        ),
    ],
)
def test_bad_settings_are_named(make: object, named: str) -> None:
    with pytest.raises(BadSetting, match=named):
        make()  # type: ignore[operator]
