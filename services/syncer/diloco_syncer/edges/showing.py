"""Where the run stands, for people: on the bus a few times a second, and once more at the end."""

import asyncio
import time
from contextlib import suppress

from diloco_shared.config import RunSpec
from diloco_shared.edges.bus import Bus, BusError
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunStatus
from diloco_shared.protocol.wire import WireError, decode, encode
from diloco_syncer.edges.inbox import Inbox
from diloco_syncer.edges.lease import LeaseKeeper
from diloco_syncer.edges.outbox import Outbox, until_done
from diloco_syncer.machine import Machine
from diloco_syncer.status import status

# In seconds between two writes.
STATUS_S = 0.5
# In seconds between two looks at whether other shards have ended: they do within a round or two.
END_LOOK_S = 1.0


async def over_elsewhere(control: Bus, spec: RunSpec, shard: int) -> bool:
    """Whether every other syncer shard of the run shows that it is over. Raises BusError."""
    for other in range(spec.algorithm.shards):
        if other != shard and not await shown_over(control, spec.name, other):
            return False
    return True


async def until_over(control: Bus, spec: RunSpec, shard: int) -> None:
    """Until every other shard shows that it is over."""
    while True:
        with suppress(BusError):
            if await over_elsewhere(control, spec, shard):
                return
        await asyncio.sleep(END_LOOK_S)


async def shown_over(control: Bus, run: str, shard: int) -> bool:
    """Whether a leader has shown the end of a shard. Raises BusError."""
    entry = await control.kv_get(subjects.STATUS, subjects.status_key(run, shard))
    if entry is None or entry.value is None:
        return False
    try:
        return decode(entry.value, RunStatus).state in ("finished", "stopped")
    except WireError:
        return False


class Showing:
    """Of one leader's term."""

    def __init__(
        self, control: Bus, machine: Machine, inbox: Inbox, outbox: Outbox, lease: LeaseKeeper
    ) -> None:
        self.control = control
        self.machine = machine
        self.inbox = inbox
        self.outbox = outbox
        self.lease = lease
        self.bytes_before = (0, 0)

    async def begin(self) -> None:
        """Traffic of earlier leaders, from the last status they wrote."""
        await until_done(self._earlier_bytes)

    async def _earlier_bytes(self) -> None:
        entry = await self.control.kv_get(subjects.STATUS, self.outbox.status_key)
        if entry is None or entry.value is None:
            return
        try:
            earlier = decode(entry.value, RunStatus)
        except WireError:
            return
        self.bytes_before = (earlier.bytes_up, earlier.bytes_down)

    async def keep(self) -> None:
        """For ever."""
        while True:
            # Whoever leads meanwhile shows where the run is: nothing older may replace that.
            if not self.lease.lapsed:
                await self.outbox.status(self._status())
            await asyncio.sleep(STATUS_S)

    def _status(self) -> RunStatus:
        return status(
            self.machine,
            time.monotonic(),
            time.time(),
            bytes_up=self.bytes_before[0] + self.inbox.bytes_in,
            bytes_down=self.bytes_before[1] + self.outbox.bytes_out,
        )

    async def last(self) -> None:
        """The run is over and left: nobody is needed any more."""
        settled = encode(self._status().model_copy(update={"settled": True}))
        key = self.outbox.status_key
        await until_done(lambda: self.control.kv_put(subjects.STATUS, key, settled))
