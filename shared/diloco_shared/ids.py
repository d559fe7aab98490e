"""Identifiers that appear in subjects, keys and file names."""

import re
from typing import Annotated

from pydantic import StringConstraints

# One NATS subject token, one DNS label, one file name: valid in all three.
ID_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]


def check_id(value: str, what: str) -> str:
    """Return `value`, or raise ValueError naming `what`, the value and the rule."""
    if not re.fullmatch(ID_PATTERN, value):
        raise ValueError(
            f"{what} {value!r} is not a valid id: use 1 to 63 lower-case letters, digits and "
            "hyphens, beginning and ending with a letter or digit"
        )
    return value
