"""Where the run stands, for people: on the bus a few times a second, and once more at the end."""

import structlog

from diloco_shared import ambient
from diloco_shared.bus.port import Bus, BusError
from diloco_shared.bus.repeating import again_and_again, until_done
from diloco_shared.bus.status_key import Standing, shown
from diloco_shared.protocol.records import RunStatus
from diloco_shared.protocol.run_states import over
from diloco_shared.spec.run import RunSpec
from diloco_syncer.leadership.lease_io import LeaseKeeper
from diloco_syncer.machine import Machine
from diloco_syncer.messages.inbox_io import Inbox
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.status.status import goodbyes_in, size, status
from diloco_syncer.streams.storage_io import Storage

log = structlog.get_logger()

# In seconds between two writes.
STATUS_S = 0.5
# In seconds between two looks at whether other shards have ended: they do within a round or two.
END_LOOK_S = 1.0


async def over_elsewhere(control: Bus, spec: RunSpec, shard: int) -> bool:
    """Whether every other syncer shard of the run shows that it is over. Raises BusError."""
    for other in range(spec.algorithm.shards):
        if other != shard and not await shown_over(control, spec, other):
            return False
    return True


async def until_over(control: Bus, spec: RunSpec, shard: int) -> None:
    """Until every other shard shows that it is over."""
    await again_and_again(lambda: over_elsewhere(control, spec, shard), "other ends", END_LOOK_S)


async def shown_over(control: Bus, spec: RunSpec, shard: int) -> bool:
    """Whether a leader has shown the end of a shard. Raises BusError."""
    status = await shown(control, spec.name, spec.id, shard)
    # What the coordinator forced no tape says: a leader has yet to end it.
    return status is not None and over(status) and not status.forced


class StatusWriter:
    """Writes where the run, or one shard of it, stands; of one leader's term."""

    def __init__(
        self, control: Bus, machine: Machine, inbox: Inbox, outbox: Outbox, lease: LeaseKeeper
    ) -> None:
        self.control = control
        self.machine = machine
        self.inbox = inbox
        self.outbox = outbox
        self.lease = lease
        self.storage = Storage(outbox.spec, control, lambda: size(machine), outbox.tell)
        self.standing = Standing(control, machine.spec.name, machine.spec.id, machine.history.shard)
        self.bytes_before = (0, 0)
        self.refused = ""

    async def begin(self) -> None:
        """Traffic of earlier leaders, who had said goodbye to them, and the wish that they gave up,
        from the last status they wrote."""
        earlier = await until_done(self.standing.read, "status of earlier leaders")
        if earlier is not None:
            self.bytes_before = (earlier.bytes_up, earlier.bytes_down)
            self.machine.roster.farewells = goodbyes_in(earlier)
            self.machine.user_requests.restoring.refused_before(earlier.epoch, earlier.restores)

    async def keep(self) -> None:
        """For ever."""

        async def look() -> None:
            # Whoever leads meanwhile shows where the run is: nothing older may replace that.
            if not self.lease.lapsed:
                await self.show()

        # What no message can hold is shown by nobody: no reason to lead no more.
        trouble = (BusError, ValueError)
        await again_and_again(look, "status", STATUS_S, trouble=trouble)

    async def show(self) -> None:
        """Where the run is now, unless somebody knows better. Raises BusError."""
        self._note(await self.standing.write(self._status()))

    def _note(self, refused: str) -> None:
        if refused and refused != self.refused:
            log.info("status not shown", reason=refused)
        self.refused = refused

    def _status(self) -> RunStatus:
        return status(
            self.machine,
            ambient.monotonic(),
            ambient.wall(),
            bytes_up=self.bytes_before[0] + self.inbox.bytes_in,
            bytes_down=self.bytes_before[1] + self.outbox.bytes_out,
            streams=self.storage.streams,
        )

    async def last(self) -> None:
        """The run is over and left: nobody is needed any more, unless somebody knows better."""
        settled = self._status().model_copy(update={"settled": True})
        try:
            await self._last(settled)
        except ValueError as error:
            # It would end this leader, and each that came after it: without what there is most of.
            log.warning("the last status leaves learners out", error=str(error))
            await self._last(settled.model_copy(update={"learners": {}}))

    async def _last(self, settled: RunStatus) -> None:
        self._note(await until_done(lambda: self.standing.write(settled), "last status"))
