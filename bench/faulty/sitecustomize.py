"""Puts a fault into a process that a test starts, as mutants.py does in the test's own.

Python imports this at each start where PYTHONPATH names its folder.
"""

import os
import sys
from dataclasses import dataclass

# This folder is on the path of such a process, and the one above it is not.
from faults import FAULT, SOURCE, Finder  # type: ignore[import-not-found]


@dataclass(frozen=True)
class Given:
    """The fault of whoever started this process."""

    module: str
    text: str

    def source(self) -> str:
        return self.text


if module := os.environ.get(FAULT):
    sys.meta_path.insert(0, Finder(Given(module, os.environ[SOURCE])))
