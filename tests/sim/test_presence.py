"""Fleets whose learners die, differ in speed, come and go: what becomes of their time."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from diloco_shared.spec.run import RunSpec
from diloco_simulator.experiments.setting import Interruptions, Loan, Setting
from diloco_simulator.experiments.train import IdleFleet

pytestmark = pytest.mark.whole

STEPS = 150
DEADLY = Interruptions(mtbi_s=60.0, away_s=5.0)


def spec(seed: int = 0, steps: int = STEPS, **algorithm: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "r",
            "seed": seed,
            "algorithm": {"fragments": 3, "sync_every_steps": 12, **algorithm},
            "budget": {"tokens": 4 * steps * 512},
        }
    )


def played(setting: Setting, seed: int = 0, **algorithm: Any) -> dict[str, Any]:
    """Of four learners' steps, 150 each; a violated invariant raises."""
    return IdleFleet(spec(seed, **algorithm), setting).run()


# A setting and a seed are a run, so that one serves several tests.
run = cache(played)


def test_without_failures_all_time_is_stepped_and_most_of_it_useful() -> None:
    found = run(Setting(4))
    assert found["stepping"] > 0.97
    assert 0.85 < found["goodput"] < found["stepping"]
    assert found["merged_per_round"] == 4.0
    assert found["goodput"] / found["stepping"] == pytest.approx(
        found["tokens_useful"] / found["tokens"], rel=0.01
    )


def test_interruptions_cost_time_and_unmerged_work_but_never_the_run() -> None:
    free, failing = run(Setting(4)), run(Setting(4, interruptions=DEADLY))
    assert failing["interruptions"] >= 4
    # The last ones may be away when the run ends.
    assert failing["interruptions"] - 4 <= failing["recoveries_from_donors"]
    assert failing["goodput"] < failing["stepping"] < free["stepping"]
    lost = 1 - failing["tokens_useful"] / failing["tokens"]
    assert lost > 1 - free["tokens_useful"] / free["tokens"]
    assert failing["virtual_s"] > free["virtual_s"]


def test_a_seed_says_when_learners_die() -> None:
    setting = Setting(2, interruptions=replace(DEADLY, mtbi_s=20.0), over_time=True)
    first, again, other = (played(setting, seed, steps=50) for seed in (0, 0, 1))
    assert first == again and first["interruptions"]
    assert first["useful_over_time"] != other["useful_over_time"]


def test_lent_learners_shorten_a_run_by_what_they_work() -> None:
    alone, helped = run(Setting(4)), run(Setting(4, loan=Loan(4, 40.0, 80.0)))
    # Four learners for 40 s do as much as the four for 40 s more, but for joining.
    assert alone["virtual_s"] - helped["virtual_s"] == pytest.approx(40.0, abs=5.0)
    assert helped["recoveries_from_donors"] == 4
    # Who came later is out of step with the others: a round waits for one step of theirs more,
    # which is lost to the merge of all that they do meanwhile.
    assert helped["tokens_useful"] == pytest.approx(alone["tokens_useful"], rel=0.05)


def test_who_is_told_leaves_nothing_unmerged_who_is_taken_does() -> None:
    loan = Loan(4, 40.0, 80.0)
    told = run(Setting(4, loan=loan))
    taken = run(Setting(4, loan=replace(loan, notice=False)))
    lost = {
        name: r["tokens"] - r["tokens_useful"] for name, r in {"told": told, "taken": taken}.items()
    }
    # Half of H steps of four learners, about.
    assert lost["taken"] - lost["told"] > 4 * 512 * 3


def test_a_loan_that_begins_after_the_end_changes_nothing() -> None:
    late = run(Setting(4, loan=Loan(2, 1e6, 2e6)))
    assert late["virtual_s"] == run(Setting(4))["virtual_s"]
    assert late["merged_per_round"] == 4.0


@pytest.mark.long
def test_two_speeds_merge_everybody_whatever_the_quorum_and_the_grace() -> None:
    mixed = Setting(4, speeds=(1.0, 0.8), jitter=0.1)
    for algorithm in ({"quorum": 4}, {"grace_factor": 0.0}, {}):
        found = run(mixed, **algorithm)
        assert found["merged_per_round"] > 3.9, algorithm
        assert found["stepping"] > 0.97, algorithm


def test_merging_only_who_is_ready_wastes_the_work_of_the_others() -> None:
    mixed = Setting(4, speeds=(1.0, 0.8), jitter=0.1)
    asked = run(mixed, grace_factor=0.0)
    ready = run(replace(mixed, only_ready=True), grace_factor=0.0)
    assert ready["merged_per_round"] < asked["merged_per_round"] - 0.3
    assert ready["goodput"] < asked["goodput"] - 0.05
    assert ready["stepping"] == pytest.approx(asked["stepping"], abs=0.02)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="mtbi_s"):
        Interruptions(0.0, 1.0)
    with pytest.raises(ValueError, match="begins before it ends"):
        Loan(1, 5.0, 5.0)
