"""Where anchors that are one version behind are kept: in files without a name, mapped.

Their pages are the page cache's, which the kernel writes out and drops when memory is short, and
reads again in the rare round with a contribution measured against them. The file goes when nothing
refers to the array any more, and with the process in any case.
"""

import mmap
import tempfile
from pathlib import Path

import numpy as np
import structlog

from diloco_shared.durable import make_folder
from diloco_shared.memory.pages import Pages
from diloco_syncer.merging.store import Values

log = structlog.get_logger()


class FileShelf:
    """Arrays in `folder`, on the disk that snapshots go to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused = False  # the disk is full: told once, until it takes one again

    def __call__(self, values_F: Values) -> Values:
        """The same values, only to be read; in memory as before where the disk takes none."""
        try:
            kept_F = self._put(values_F)
        except OSError as error:
            if not self.refused:
                log.warning(
                    "previous anchors stay in memory: free disk space",
                    folder=str(self.folder),
                    error=str(error),
                )
            self.refused = True
            return values_F
        self.refused = False
        return kept_F

    def _put(self, values_F: Values) -> Values:
        if not values_F.size:
            return values_F
        if not self.folder.is_dir():
            make_folder(self.folder)  # snapshots come into it
        # Written, not filled through the mapping: a full disk is an error here, no signal later.
        with tempfile.TemporaryFile(dir=self.folder) as file:
            file.write(np.ascontiguousarray(values_F).view(np.uint8).data)
            file.flush()
            mapped = Pages(file.fileno(), values_F.nbytes, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, np.float32)
