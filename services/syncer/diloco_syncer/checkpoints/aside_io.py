"""Where a syncer that has the run's numbers in memory already puts those of a checkpoint.

In one file without a name, on the disk that snapshots go to, and mapped: the numbers in memory stay
as they are until these are in force, and these take no place there. Their pages are the page
cache's, like those of anchors one version back. Rounds replace the arrays one by one by arrays in
memory; the file goes with the last of them, and with the process in any case.

Not for an event loop: it waits for the vault and for the disk.
"""

import mmap
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from diloco_shared.budget.terms import shown
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.durable import make_folder
from diloco_shared.memory.pages import Pages
from diloco_shared.protocol.checkpoints import ShardPart

# Bytes: where a line of the processor's cache begins, so that merges read whole lines.
LINE = 64


def blobs_aside(
    there: RunCheckpoints, ref: str, part: ShardPart, folder: Path
) -> Iterator[memoryview]:
    """The arrays of a part, blob by blob, checked: only to be read.

    Raises OSError where `folder` has no room for them, before anything is read, and as
    `RunCheckpoints.pieces` does.
    """
    spans = list(_spans(part))
    size = spans[-1][1] if spans else 0
    make_folder(folder)
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(
            f"to go back takes {shown(size)} in {folder} until rounds have replaced it, and "
            f"{shown(free)} are free: free disk space there, then ask again"
        )
    # Written, not filled through the mapping: a full disk is an error here, no signal later.
    with tempfile.TemporaryFile(dir=folder) as file:
        for stored, (first, _) in zip(part.arrays, spans, strict=True):
            file.seek(first)
            for piece in there.pieces(ref, stored):
                file.write(piece)
        file.flush()
        whole = memoryview(Pages(file.fileno(), size, access=mmap.ACCESS_READ)) if size else None
    for first, end in spans:
        assert whole is not None
        yield whole[first:end]


def _spans(part: ShardPart) -> Iterator[tuple[int, int]]:
    """Where in the file every object of the part lies: [first, end)."""
    end = 0
    for stored in part.arrays:
        first = -(-end // LINE) * LINE
        end = first + stored.bytes
        yield first, end
