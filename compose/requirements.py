"""Prints the requirements of extras of pyproject.toml, for an image's first layer."""

import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], *extras: str) -> list[str]:
    """The base requirements and those of `extras`; raises KeyError for an unknown extra."""
    base, optional = project["dependencies"], project["optional-dependencies"]
    assert isinstance(base, list) and isinstance(optional, dict)
    return [*base, *(wanted for extra in extras for wanted in optional[extra])]


if __name__ == "__main__":
    text = Path("pyproject.toml").read_text(encoding="utf-8")
    print("\n".join(requirements(tomllib.loads(text)["project"], *sys.argv[1:])))
