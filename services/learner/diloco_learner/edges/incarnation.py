"""One life of a learner under its id: a number taken by compare-and-set (invariant I10)."""

import time
from contextlib import suppress

from diloco_shared.edges.bus import Bus, BusError, Conflict
from diloco_shared.edges.repeating import PROMPT, until_done
from diloco_shared.edges.stored_records import record_at
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Incarnation
from diloco_shared.protocol.wire import WireError, encode

# A record that nobody can read is waited out as well: a number below it would be taken twice.
TROUBLE = (BusError, WireError)


async def take_incarnation(bus: Bus, run: str, learner: str, boot: str) -> int:
    """The next number of this learner in this run: no two processes ever have the same.

    Waits as long as the bus is away. An attempt whose outcome is unknown costs a number.
    """
    key = f"{run}.{learner}"

    async def take() -> int:
        while True:
            with suppress(Conflict):  # another process was first: take the next number
                return await _take(bus, key, learner, boot)

    return await until_done(take, f"incarnation of {key}", pauses=PROMPT, trouble=TROUBLE)


async def newest_boot(bus: Bus, run: str, learner: str) -> str:
    """The process that took this learner's newest number, "" for none; waits for the bus."""
    key = f"{run}.{learner}"
    found = await until_done(
        lambda: record_at(bus, subjects.INCARNATIONS, key, Incarnation),
        f"incarnation of {key}",
        pauses=PROMPT,
        trouble=TROUBLE,
    )
    return "" if found is None else found[0].boot


async def _take(bus: Bus, key: str, learner: str, boot: str) -> int:
    found = await record_at(bus, subjects.INCARNATIONS, key, Incarnation)
    if found is None:
        await bus.kv_create(subjects.INCARNATIONS, key, _record(0, learner, boot))
        return 0
    number = found[0].incarnation + 1
    value = _record(number, learner, boot)
    await bus.kv_update(subjects.INCARNATIONS, key, value, found[1])
    return number


def _record(number: int, learner: str, boot: str) -> bytes:
    return encode(Incarnation(learner=learner, incarnation=number, boot=boot, at=time.time()))
