"""Exports of a whole world: the product's own program for them, as a child of the coordinator.

What a real coordinator starts is a process; here it is a virtual one, with a connection and the
disk of the coordinator's machine. It ends with the coordinator, goes on while that one stands
still, and leaves what it wrote. Its troubles have dice of their own.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from diloco_coordinator.exports.child_io import ExportFault, Moved
from diloco_coordinator.exports.exports import ExportRecord
from diloco_learner.exporting.__main__ import FORESEEN, spec_of
from diloco_learner.exporting.assembling import Values
from diloco_learner.exporting.checkpoint_io import Checkpointed
from diloco_learner.exporting.making_io import Order, Progress, make
from diloco_learner.exporting.observing_io import Published
from diloco_shared.protocol.exports import ExportedFragment, ExportMoved
from diloco_simulator.hub.data_bus import DataBus
from diloco_simulator.troubles.disks import SPELL_S
from diloco_simulator.virtual_loop import Hosted, current
from diloco_simulator.worlds.processes import Host

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# What one export meets, by how often: in a world of faults one of three meets nothing.
DIES, NOT_STARTED, FULL, CUT, STANDS_STILL = 0.08, 0.04, 0.1, 0.3, 0.1
# When it strikes, after the beginning of an export, in virtual seconds: most take about one.
SOON_S = (0.0, 2.0)
# Before each fragment, in virtual seconds: on a slow machine a run goes on meanwhile.
PAUSES_S = (0.0, 0.0, 1.0, 6.0, 20.0)
AWAY_S = (0.5, 6.0)


class SlowPublished(Published):
    """Each fragment takes a while."""

    pause_s = 0.0

    async def fragments(self) -> AsyncIterator[tuple[ExportedFragment, Values]]:
        """See `Published`."""
        async with aclosing(super().fragments()) as fragments:  # type: ignore[type-var]
            async for found in fragments:
                await asyncio.sleep(self.pause_s)
                yield found


class VirtualExporter:
    """See `diloco_coordinator.exports.child_io.Exporter`. Of all coordinators of a world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.rng = Random(f"exporting {world.seed}")
        self.counts = world.found.counts
        self.made: list[ExportRecord] = []  # every folder that was finished, seen or not
        # By whom: a process of the coordinator. There may be two of one name, on two disks.
        self.begun: list[tuple[Hosted, ExportRecord]] = []
        # What was killed must not be closed by a collection of garbage: it would tidy up.
        self.children: list[_Child] = []

    async def make(self, record: ExportRecord, to: Path, moved: Moved) -> None:
        """See `Exporter`."""
        process, machine = current(), self.world.disks.machine()
        assert process is not None, "only a coordinator makes exports"
        self._not_again(process, record)
        if machine is None:
            raise ExportFault("its machine is gone")
        self.counts["exports begun by themselves" if record.automatic else "exports begun"] += 1
        if self._strikes(NOT_STARTED):
            raise ExportFault("no process can be started for it")
        child = _Child(self, machine, process, record, moved)
        self.children.append(child)
        try:
            await child.ended(record, to)
        finally:
            if not process.killed:  # else both are gone, and this is the end of the world
                child.process.kill()
                process.children.remove(child.process)

    def _not_again(self, process: Hosted, record: ExportRecord) -> None:
        """What a run exports by itself is newer each time, as long as a process lives."""
        for by, before in self.begun:
            if record.automatic and before.automatic and by is process:
                same = record.run_id, record.rounds, record.final
                if same == (before.run_id, before.rounds, before.final):
                    text = f"{record.run} is exported again after {record.rounds} rounds"
                    self.world.broken("exports", text)
        self.begun.append((process, record))

    # --- what goes wrong -----------------------------------------------------------------------

    def _strikes(self, often: float) -> bool:
        return self.world.scene.faulty and self.rng.random() < often

    def trouble(self, child: "_Child", machine: Host) -> None:
        """Draw what this export meets."""
        later = self.world.loop.call_later
        for often, strike in (
            (DIES, child.dies),
            (FULL, lambda: self._full(machine)),
            (CUT, lambda: self._cut(child, machine)),
            (STANDS_STILL, lambda: self._stands_still(child, machine)),
        ):
            if self._strikes(often):
                # Of no process: it would stand still with this one.
                later(self.rng.uniform(*SOON_S), strike, context=self.world.net.outside)
        if self.world.scene.faulty:
            child.pause_s = self.rng.choice(PAUSES_S)

    def _full(self, machine: Host) -> None:
        self.counts["exports to a full disk"] += 1
        until = self.world.loop.now + self.rng.uniform(*SPELL_S)
        self.world.disks.full_until[machine.host] = until

    def _cut(self, child: "_Child", machine: Host) -> None:
        if self.world.scene.faulty and child.goes_on and machine is self.world.coordinator:
            self.counts["a coordinator dies over an export"] += 1
            self.world.crash(machine, self.rng.uniform(*AWAY_S))

    def _stands_still(self, child: "_Child", machine: Host) -> None:
        process = machine.process
        if not self.world.scene.faulty or process is None or process.frozen:
            return
        self.counts["a coordinator stands still over an export"] += 1
        process.freeze(suspended=self.rng.random() < 0.3)
        seconds = self.rng.uniform(2.0, 15.0)
        outside = self.world.net.outside
        self.world.loop.call_later(seconds, self.world.troubles.goes_on, process, context=outside)


class _Child:
    """The process of one export."""

    def __init__(
        self,
        exporter: VirtualExporter,
        machine: Host,
        owner: Hosted,
        record: ExportRecord,
        moved: Moved,
    ) -> None:
        self.world = world = exporter.world
        self.exporter = exporter
        name = f"{owner.name}/export-{record.id}"
        self.process = Hosted(world.loop, name, skew_s=owner.skew_s, owner=owner)
        self.moved = moved
        self.pause_s = 0.0
        self.over: asyncio.Future[str] = world.loop.create_future()
        hub = (world.broker, name, machine.host, world.net, self.process.passes)
        self.bus = DataBus(*hub, world.options, world.of_links, lambda subject, payload: payload)
        self.bus.damages = world.options.corrupt
        exporter.trouble(self, machine)

    @property
    def goes_on(self) -> bool:
        return not self.process.killed and not self.over.done()

    def dies(self) -> None:
        """By a signal, as when there is no memory."""
        if self.goes_on and self.world.scene.faulty:
            self.exporter.counts["an export's process dies"] += 1
            self.process.kill()
            self._say("the process that made it ended (SIGKILL)")

    async def ended(self, record: ExportRecord, to: Path) -> None:
        """Raises ExportFault unless the folder is there."""
        self.task = self.process.run(self._run(record, to))
        if reason := await self.over:
            raise ExportFault(reason)
        self.exporter.made.append(record)

    def _say(self, reason: str) -> None:
        if not self.over.done():
            self.over.set_result(reason)

    async def _run(self, record: ExportRecord, to: Path) -> None:
        try:
            await self._export(record, to)
        except FORESEEN as error:
            self._say(str(error)[:500] or repr(error))
        except Exception as error:
            self.world.broken("exports", f"an export ends with {error!r}")
            self._say(repr(error))
        else:
            self._say("")

    async def _export(self, record: ExportRecord, to: Path) -> None:
        """As the product's program does; the tiny run has no tokenizer."""
        progress = Progress(self._tell)
        order = Order(to, record.asked.dtype, record.asked.checkpoint)
        source: Checkpointed | SlowPublished
        if record.asked.checkpoint:
            root = str(self.world.folder / "checkpoints")
            source = Checkpointed(record.asked.checkpoint, root, progress.fetching)
        else:
            spec = await spec_of(self.bus, record.run, record.run_id)
            source = SlowPublished(self.bus, spec, record.asked.version, progress.fetching)
            source.pause_s = self.pause_s
        await make(source, order, progress)

    def _tell(self, line: ExportMoved) -> None:
        if not self.process.killed:
            self.moved(line)
