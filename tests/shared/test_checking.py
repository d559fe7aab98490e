"""Every fault of a specification at once, under the path of the value at fault."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.budget.refusing import DATA_SHARDS_MAX
from diloco_shared.checking import FAULTS_MAX, Invalid, check
from diloco_shared.protocol.subjects import NO_RUNS
from diloco_shared.spec.algorithm import MEMBERS_MAX
from diloco_shared.spec.run import Data, RunSpec

GOOD: dict[str, Any] = {"name": "r", "budget": {"steps": 8}}


def paths(body: dict[str, Any]) -> set[str]:
    with pytest.raises(Invalid) as caught:
        check(body)
    assert all(f.message for f in caught.value.faults)
    return {f.path for f in caught.value.faults}


def test_a_good_one_passes() -> None:
    assert check(GOOD).name == "r"


@pytest.mark.parametrize("name", NO_RUNS)
def test_a_name_that_subjects_have_for_something_else_is_refused(name: str) -> None:
    """Its deletion would purge the events that concern no run."""
    body = {**GOOD, "name": name}
    assert paths(body) == {"name"}
    assert RunSpec.model_validate(body).name == name, "what is there already can be read"


def test_more_learners_than_a_run_takes_are_refused() -> None:
    """Else it would wait for ever for those that are not let in."""
    many = {"learners_min": MEMBERS_MAX + 1, "learners_max": MEMBERS_MAX + 1}
    body = {**GOOD, "membership": many, "algorithm": {"quorum": MEMBERS_MAX + 1}}
    assert paths(body) == {"membership.learners_min", "membership.learners_max", "algorithm.quorum"}
    check({**GOOD, "membership": {"learners_min": 1, "learners_max": MEMBERS_MAX}})


def test_a_new_run_has_so_many_data_shards_at_most_and_an_older_one_is_read() -> None:
    most = {**GOOD, "data": {"virtual_shards": DATA_SHARDS_MAX}}
    check(most)
    more = {**GOOD, "data": {"virtual_shards": DATA_SHARDS_MAX + 1}}
    with pytest.raises(Invalid, match=f"a new run has {DATA_SHARDS_MAX} data shards at most"):
        check(more)
    described = Data.model_fields["virtual_shards"].description or ""
    assert str(DATA_SHARDS_MAX) in described
    assert RunSpec.model_validate(more).data.virtual_shards == DATA_SHARDS_MAX + 1


def test_faults_of_single_values_and_across_values_come_together() -> None:
    body = GOOD | {
        "algorithm": {"codec_up": "int3", "fragments": 5},
        "membership": {"learners_min": 9, "learners_max": 3},
        "inner": {"b1": 2},
    }
    assert paths(body) == {
        "algorithm.codec_up",
        "algorithm.sync_every_steps",
        "membership.learners_min",
        "inner.b1",
    }


def test_a_check_across_sections_is_not_hidden_by_an_unrelated_fault() -> None:
    body = GOOD | {"algorithm": {"quorum": 65}, "inner": {"b1": 2}}
    assert paths(body) == {"algorithm.quorum", "inner.b1"}


def test_no_fault_is_made_up_from_values_put_in_a_wrong_ones_place() -> None:
    body = GOOD | {"algorithm": {"quorum": 65}, "membership": {"learners_max": 0}}
    assert paths(body) == {"membership.learners_max"}
    assert paths(GOOD | {"algorithm": {"preset": "huge"}}) == {"algorithm.preset"}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({}, "budget"),
        ({"steps": 1, "tokens": 2}, "budget"),
        ({"steps": 0}, "budget.steps"),
        ("soon", "budget"),
        ({"days": 1, "steps": 1}, "budget.days"),
    ],
)
def test_budgets(budget: Any, expected: str) -> None:
    assert expected in paths({"name": "r", "budget": budget})


def test_what_is_missing_and_what_is_too_much() -> None:
    assert paths({"colour": "red"}) == {"name", "budget", "colour"}
    assert paths(GOOD | {"model": {"overrides": {"width": []}}}) == {"model.overrides.width"}


def test_a_document_of_nothing_but_faults_is_told_in_bounds() -> None:
    """I12."""
    assert len(paths({f"x{n}": n for n in range(5000)})) == FAULTS_MAX


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.floats()
    | st.sampled_from(["", "ab", "Ω"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["steps", "quorum", "fragments", "learners_max", "name", "x"]), inner
        )
    ),
    max_leaves=8,
)
SECTIONS = st.sampled_from(["name", "seed", "algorithm", "membership", "budget", "model", "y"])


@given(st.dictionaries(SECTIONS, JSON))
def test_whatever_comes_is_either_good_or_has_a_fault(body: dict[str, Any]) -> None:
    """I11: never another error, never a refusal without a reason, and the input stays as it is."""
    before = repr(body)
    try:
        check(body)
    except Invalid as error:
        assert error.faults
    assert repr(body) == before


def test_an_evaluation_is_sized_by_sequences_or_by_tokens() -> None:
    def sequences(**evaluation: Any) -> int:
        model = {"context_tokens": 128}
        return check(GOOD | {"evaluation": evaluation, "model": model}).held_out_sequences

    assert sequences() == 256
    assert sequences(sequences=7) == 7
    assert sequences(tokens=128 * 9 + 127) == 9
    assert sequences(tokens=5) == 1, "whole sequences, and one at least"
    with pytest.raises(Invalid, match="both say how much is evaluated: leave one of them out"):
        check(GOOD | {"evaluation": {"tokens": 512, "sequences": 256}})
    assert paths(GOOD | {"evaluation": {"tokens": 0}}) == {"evaluation.tokens"}


def test_a_run_that_is_evaluated_by_tokens_is_read_as_it_was_written() -> None:
    spec = check(GOOD | {"evaluation": {"tokens": 4096}})
    assert check(spec.model_dump(mode="json")) == spec
    assert check(json.loads(spec.model_dump_json())) == spec
