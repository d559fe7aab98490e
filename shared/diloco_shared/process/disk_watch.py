"""Looks after a member's folder: says when its disk is full, removes files of deleted runs."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Container
from pathlib import Path

import structlog

from diloco_shared import ambient
from diloco_shared.bus.port import Bus
from diloco_shared.bus.repeating import again_and_again
from diloco_shared.durable import free_bytes
from diloco_shared.process.disk_room import DiskRoom
from diloco_shared.process.membership import Registration
from diloco_shared.protocol import subjects

log = structlog.get_logger()

# Between two looks, in seconds: with what a look waits for, a full disk is named within five.
LOOK_S = 1.0


async def watch_disk(
    membership: Registration,
    room: Callable[[], DiskRoom | None],
    tell: Callable[[str, str], Awaitable[None]],
) -> None:
    """For ever: `room` is that of the present work, if there is any; `tell` writes an event.

    In a thread: a network file system may keep a look waiting.
    """
    while True:
        reason, here = "", room()
        if here is not None:
            folder = here.folder
            free = None if folder is None else await asyncio.to_thread(free_bytes, folder)
            reason = here.saw(free, ambient.monotonic())
        reason = reason[:500]  # as much as the record takes
        if reason != membership.record.full:
            membership.update(full=reason)
            if reason:
                await tell("full", reason)
            elif here is not None:
                await tell("room-again", f"{here.place} has room again")
        await asyncio.sleep(LOOK_S)


# --------------------------------------------------------------------------------------------------
# Files of deleted runs go, also where nobody was there to remove them at the time.
#
# A deleted run leaves a mark under its id. Only a mark removes anything: a message server that has
# lost its state, or a wrong one, has no marks, and so costs nobody a snapshot.

# Between two attempts at a server that does not answer, in seconds.
RETRY_S = 1.0
# And between two looks for what was made after its mark was seen, by who heard of the end late.
AGAIN_S = 10.0
# A mark lasts longer than any process is away and comes back; without it files stay, unused.
MARK_S = 90 * 86_400.0


async def remove_deleted(bus: Bus, folder: Path) -> None:
    """For ever: what lies in `folder` under `RunSpec.folder` of a run that is deleted."""
    marked = set[str]()  # ids of runs: as many as were deleted in MARK_S

    async def watch() -> None:
        async with bus.kv_watch(subjects.DELETED) as entries:
            async for entry in entries:
                if entry.value is None:
                    marked.discard(entry.key)
                    continue
                marked.add(entry.key)
                await asyncio.to_thread(remove, folder, entry.key)

    async def look_again() -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            await asyncio.to_thread(_remove_marked, folder, marked)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(again_and_again(watch, "marks of deleted runs", RETRY_S))
        tasks.create_task(look_again())


def _remove_marked(folder: Path, marked: Container[str]) -> None:
    """In one reading of the folder, however many runs have marks."""
    try:
        ids = {path.name.rpartition(".")[2] for path in folder.iterdir()}
    except OSError:  # it is made with the first run that needs it
        return
    for run_id in ids:
        if run_id in marked:
            remove(folder, run_id)


def remove(folder: Path, run_id: str) -> None:
    """The folders of one run; what cannot be removed is left and logged."""
    try:
        for path in folder.glob(f"*.{run_id}"):
            shutil.rmtree(path, onerror=_left)
            log.info("files of a deleted run removed", folder=str(path))
    except OSError as error:  # of the folder itself: training needs nothing of what lies there
        _left(None, str(folder), error)


def _left(_: object, path: str, error: object) -> None:
    log.warning("not removed", path=path, error=str(error))
