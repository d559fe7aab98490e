"""Specifications as they were written down, perhaps by another release than this one."""

from typing import Any

from pydantic import ValidationError

from diloco_coordinator.edges.problems import Problem
from diloco_shared.config import RunSpec
from diloco_shared.protocol.records import RunRecord


def spec_of(record: RunRecord) -> RunSpec:
    """What a run was submitted with; 409 where this release cannot read it."""
    return readable(record.spec, f"run {record.name!r}")


def readable(spec: dict[str, Any], whose: str) -> RunSpec:
    """409 where this release cannot read it."""
    try:
        return RunSpec.model_validate(spec)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Problem(
            409,
            "Written by another release",
            f"the specification of {whose} was written by another release, and this one cannot "
            f"read it ({where}: {first['msg']}): ask a coordinator of that release; here it can "
            "be shown, stopped and deleted",
        ) from None
