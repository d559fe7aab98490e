"""Whatever may be wished for is planned or refused; no number that passes overflows on the way."""

import json
import math
from typing import Any

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from diloco_planner.plan_request import PlanRequest
from diloco_planner.planner import Infeasible, plan, sensitivity

WISHES = PlanRequest.model_json_schema()["properties"]


def within(schema: dict[str, Any]) -> st.SearchStrategy[float]:
    """The limits themselves, and what lies between, over all magnitudes."""
    (kind, *_) = [k for k in schema.get("anyOf", [schema]) if k.get("type") != "null"]
    least, most = kind.get("minimum", 0), kind.get("maximum", 0.999999)
    if kind["type"] == "integer":
        return st.one_of(st.sampled_from([least, most]), st.integers(least, most))
    low = math.log10(max(least, 1e-9))
    between = st.floats(low, math.log10(most)).map(lambda x: min(max(10**x, least), most))
    return st.one_of(st.sampled_from([float(least), float(most)]), between)


ASKED = st.fixed_dictionaries(
    {name: within(WISHES[name]) for name in ("params", "chips")},
    optional={n: within(s) for n, s in WISHES.items() if n not in ("params", "chips")},
)
ANY = st.one_of(
    st.floats(), st.integers(), st.sampled_from([1e300, -1e300, 1e-300, 10**40, 2**63, 0])
)


@examples(100)
@given(ASKED)
def test_every_wish_within_the_limits_is_planned_or_refused(asked: dict[str, float]) -> None:
    try:
        found = plan(PlanRequest.model_validate(asked))
    except Infeasible:
        return
    json.dumps(found, allow_nan=False)


@examples(15)
@given(ASKED)
def test_so_are_its_changes(asked: dict[str, float]) -> None:
    json.dumps(sensitivity(PlanRequest.model_validate(asked)), allow_nan=False)


@examples(100)
@given(st.dictionaries(st.sampled_from([*WISHES]), ANY))
def test_any_other_number_is_a_fault_of_the_wish(asked: dict[str, float]) -> None:
    try:
        wishes = PlanRequest.model_validate({"params": 1e9, "chips": 64} | asked)
    except ValidationError:
        return
    # What passes is planned or refused: a fault of settings that a plan chose is the planner's.
    try:
        found = plan(wishes)
    except Infeasible:
        return
    json.dumps(found, allow_nan=False)
