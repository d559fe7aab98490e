"""Disks that a test can fill, where mounting is permitted."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from storms import disks
from storms.disks import MIB as MIB
from storms.disks import fill as fill


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes at `folder`; the test is skipped where none can be mounted."""
    with ExitStack() as opened:
        try:
            opened.enter_context(disks.small_disk(folder, size))
        except PermissionError as error:
            pytest.skip(str(error))
        yield folder
