"""A run as a file: what `config` prints, and what `plan` writes."""

import tomllib

import pytest

from diloco_cli.run_file import of_plan, whole
from diloco_planner.plan_request import PlanRequest
from diloco_planner.planner import plan
from diloco_shared.checking import check, load


@pytest.mark.parametrize("more", [{}, {"keeping": {"stream_bytes_max": 1 << 40}}])
def test_what_config_prints_is_the_same_run(more: dict[str, object]) -> None:
    spec = check({"name": "r", "budget": {"steps": 96}, **more})
    text = whole(spec)
    assert load(text) == spec
    unset = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert ("stream_bytes_max" in unset) == (not more)


def test_a_plan_becomes_a_run_that_is_accepted_once_the_model_is_there() -> None:
    wishes = PlanRequest.model_validate({"params": 12e9, "chips": 4096, "centers": 4})
    found = plan(wishes)
    body = tomllib.loads(of_plan(found, wishes.params))
    spec = check(body)
    assert spec.algorithm.sync_every_steps == found["settings"]["sync_every_steps"]
    assert spec.algorithm.shards == found["settings"]["syncer_shards"]
    assert spec.membership.learners_min == found["settings"]["learners"]
    every = found["settings"]["snapshot_every_rounds"]
    assert spec.keeping.snapshot_every_rounds == every > 24
    assert spec.model.parameters == 12_000_000_000
