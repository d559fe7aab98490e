"""Files of deleted runs go, also where nobody was there to remove them at the time.

A deleted run leaves a mark under its id. Only a mark removes anything: a message server that has
lost its state, or a wrong one, has no marks, and so costs nobody a snapshot.
"""

import asyncio
import shutil
from pathlib import Path

import structlog

from diloco_shared.edges.bus import Bus
from diloco_shared.edges.repeating import again_and_again
from diloco_shared.protocol import subjects

log = structlog.get_logger()

# Between two attempts at a server that does not answer, in seconds.
RETRY_S = 1.0
# A mark lasts longer than any process is away and comes back; without it files stay, unused.
MARK_S = 90 * 86_400.0


async def remove_deleted(bus: Bus, folder: Path) -> None:
    """For ever: what lies in `folder` under `RunSpec.folder` of a run that is deleted."""

    async def watch() -> None:
        async with bus.kv_watch(subjects.DELETED) as entries:
            async for entry in entries:
                if entry.value is not None:
                    await asyncio.to_thread(remove, folder, entry.key)

    await again_and_again(watch, "marks of deleted runs", RETRY_S)


def remove(folder: Path, run_id: str) -> None:
    """The folders of one run; what cannot be removed is left and logged."""
    for path in folder.glob(f"*.{run_id}"):
        shutil.rmtree(path, onerror=_left)
        log.info("files of a deleted run removed", folder=str(path))


def _left(_: object, path: str, error: object) -> None:
    log.warning("not removed", path=path, error=str(error))
