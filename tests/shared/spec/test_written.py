"""What is kept of a run's specification: the release before this one reads it where it can."""

from typing import Any

import pytest

from diloco_shared.checking import Invalid, check
from diloco_shared.spec.run import RunSpec, config_hash, written

# Settings that 0.2 does not have, each with a value that is not its default.
NEW = (
    ("model", "weights_context", 4096),
    ("data", "documents", "apart"),
    ("data", "digest", "1" * 32),
    ("data", "mixture", [{"source": "a", "weight": 1.0, "digest": ""}]),
    ("evaluation", "tokens", 4096),
    ("evaluation", "beside_training", False),
    ("keeping", "replicas", 3),
    ("keeping", "export_every_rounds", 8),
    ("keeping", "exports", 5),
)


def spec(**tables: Any) -> RunSpec:
    return check({"name": "r", "budget": {"steps": 96}, **tables})


def test_it_is_read_as_what_was_meant() -> None:
    for found in (spec(), *(spec(**{table: {name: value}}) for table, name, value in NEW)):
        again = RunSpec.model_validate(written(found))
        assert again == found and config_hash(again) == config_hash(found)


@pytest.mark.parametrize(("table", "name", "value"), NEW)
def test_what_is_new_is_named_only_where_it_is_used(table: str, name: str, value: Any) -> None:
    assert name not in written(spec())[table]
    assert written(spec(**{table: {name: value}}))[table][name] == value


@pytest.mark.parametrize("copies", [2, 4])
def test_an_even_number_of_copies_is_refused_with_the_reason(copies: int) -> None:
    with pytest.raises(Invalid) as refused:
        spec(keeping={"replicas": copies})
    (fault,) = refused.value.faults
    assert fault.path == "keeping.replicas"
    assert f"outlive no more nodes than {copies - 1}" in fault.message
    assert "give 1, 3 or 5" in fault.message


@pytest.mark.parametrize("copies", [0, 7])
def test_no_copy_and_too_many_are_refused(copies: int) -> None:
    with pytest.raises(Invalid):
        spec(keeping={"replicas": copies})


def test_what_an_export_says_is_nothing_that_members_must_agree_on() -> None:
    assert config_hash(spec(model={"weights_context": 4096})) == config_hash(spec())


def test_copies_are_nothing_that_members_must_agree_on() -> None:
    assert config_hash(spec(keeping={"replicas": 3})) == config_hash(spec())
