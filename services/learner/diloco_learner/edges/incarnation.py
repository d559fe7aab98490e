"""One life of a learner under its id: a number taken by compare-and-set (invariant I10)."""

import asyncio
import time

import structlog

from diloco_shared.edges.bus import Bus, BusError, Conflict
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Incarnation
from diloco_shared.protocol.wire import WireError, decode, encode

log = structlog.get_logger()

# Between two attempts at a server that does not answer, in seconds.
RETRY_S = 0.3


async def take_incarnation(bus: Bus, run: str, learner: str, boot: str) -> int:
    """The next number of this learner in this run: no two processes ever have the same.

    Waits as long as the bus is away. An attempt whose outcome is unknown costs a number.
    """
    key = f"{run}.{learner}"
    while True:
        try:
            return await _take(bus, key, learner, boot)
        except Conflict:
            continue  # another process was first: take the next number
        except (BusError, WireError) as error:
            log.warning("no incarnation yet", key=key, error=str(error))
            await asyncio.sleep(RETRY_S)


async def newest_boot(bus: Bus, run: str, learner: str) -> str:
    """The process that took this learner's newest number, "" for none; waits for the bus."""
    while True:
        try:
            entry = await bus.kv_get(subjects.INCARNATIONS, f"{run}.{learner}")
            if entry is None or entry.value is None:
                return ""
            return decode(entry.value, Incarnation).boot
        except (BusError, WireError) as error:
            log.warning("no incarnation yet", learner=learner, error=str(error))
            await asyncio.sleep(RETRY_S)


async def _take(bus: Bus, key: str, learner: str, boot: str) -> int:
    entry = await bus.kv_get(subjects.INCARNATIONS, key)
    if entry is None or entry.value is None:
        await bus.kv_create(subjects.INCARNATIONS, key, _record(0, learner, boot))
        return 0
    number = decode(entry.value, Incarnation).incarnation + 1
    value = _record(number, learner, boot)
    await bus.kv_update(subjects.INCARNATIONS, key, value, entry.revision)
    return number


def _record(number: int, learner: str, boot: str) -> bytes:
    return encode(Incarnation(learner=learner, incarnation=number, boot=boot, at=time.time()))
