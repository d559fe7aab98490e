"""One life of a learner under its id: a number taken by compare-and-set (invariant I10)."""

from functools import partial

from diloco_shared import ambient
from diloco_shared.bus.port import Bus, BusError
from diloco_shared.bus.repeating import PROMPT, against_others, until_done
from diloco_shared.bus.stored_records import record_at, write_if
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Incarnation
from diloco_shared.protocol.wire import WireError, encode

# A record that nobody can read is waited out as well: a number below it would be taken twice.
TROUBLE = (BusError, WireError)


async def take_incarnation(bus: Bus, run: str, learner: str, boot: str) -> int:
    """The next number of this learner in this run: no two processes ever have the same.

    Waits as long as the bus is away. An attempt whose outcome is unknown costs a number.
    """
    key = subjects.life_key(run, learner, named=bus.named)

    async def take() -> int:
        # Where another process was first, take the next number.
        return await against_others(partial(_take, bus, key, learner, boot))

    return await until_done(take, f"incarnation of {key}", pauses=PROMPT, trouble=TROUBLE)


async def newest_boot(bus: Bus, run: str, learner: str) -> str:
    """The process that took this learner's newest number, "" for none; waits for the bus."""
    key = subjects.life_key(run, learner, named=bus.named)
    found = await until_done(
        lambda: record_at(bus, subjects.INCARNATIONS, key, Incarnation),
        f"incarnation of {key}",
        pauses=PROMPT,
        trouble=TROUBLE,
    )
    return found.record.boot if found else ""


async def _take(bus: Bus, key: str, learner: str, boot: str) -> int:
    found = await record_at(bus, subjects.INCARNATIONS, key, Incarnation)
    if found is None:
        first = await record_at(bus, subjects.INCARNATIONS, subjects.FIRST_LIFE, Incarnation)
        number, revision = first.record.incarnation if first else 0, 0
    else:
        number, revision = found.record.incarnation + 1, found.revision
    record = Incarnation(learner=learner, incarnation=number, boot=boot, at=ambient.wall())
    await write_if(bus, subjects.INCARNATIONS, key, encode(record), revision)
    return number
