"""Exports of a whole world: the product's own program for them, as a child of the coordinator.

What a real coordinator starts is a process; here it is a virtual one, with a connection and the
disk of the coordinator's machine. Who starts and hears it is the product's. Its troubles have dice
of their own.
"""

import asyncio
import errno
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_coordinator.exports.child_io import COMMAND, ChildExporter, Moved
from diloco_coordinator.exports.exports import ExportRecord
from diloco_learner.exporting.__main__ import FORESEEN, Line, arguments, export
from diloco_learner.exporting.assembling import Values
from diloco_learner.exporting.observing_io import PublishedView
from diloco_learner.settings import Settings
from diloco_shared.protocol.exports import ExportedFragment
from diloco_shared.protocol.messages import TapeRound
from diloco_simulator.hub.data_bus import DataBus, DataTroubles
from diloco_simulator.hub.far_bus import FarBus
from diloco_simulator.troubles.disks import SPELL_S
from diloco_simulator.virtual_loop import Hosted, current
from diloco_simulator.worlds.processes import Host, settings_of
from diloco_simulator.worlds.programs import Program

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# What one export meets, by how often: in a world of faults one of three meets nothing.
DIES, NOT_STARTED, FULL, CUT, STANDS_STILL = 0.08, 0.04, 0.1, 0.3, 0.1
# How often one writes for people, and what nobody can read.
CHATTERS = 0.2
# When it strikes, after the beginning of an export, in virtual seconds: most take about one.
SOON_S = (0.0, 2.0)
# Before each fragment, in virtual seconds: on a slow machine a run goes on meanwhile.
PAUSES_S = (0.0, 0.0, 1.0, 6.0, 20.0)
AWAY_S = (0.5, 6.0)


def slow(pause_s: float) -> type[PublishedView]:
    """What a run published, of which each fragment takes a while."""

    class SlowPublished(PublishedView):
        async def fragments(self) -> AsyncIterator[tuple[ExportedFragment, Values]]:
            """See `PublishedView`."""
            async with aclosing(super().fragments()) as fragments:  # type: ignore[type-var]
                async for found in fragments:
                    await asyncio.sleep(pause_s)
                    yield found

    return SlowPublished


def _newest(
    published: Mapping[tuple[int, int, int], tuple[str, str]], epoch: int | None
) -> dict[int, str]:
    """By fragment, the digest of its newest version of an epoch."""
    return {p: digest for (e, p, _), (digest, _) in sorted(published.items()) if e == epoch}


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
        self.programs: list[_Export] = []
        self.of_product = ChildExporter({}, start=self._start)
        self.chatter = Random(f"exports chatter {world.seed}")

    async def make(self, record: ExportRecord, to: Path, moved: Moved) -> None:
        """See `Exporter`."""
        process = current()
        assert process is not None, "only a coordinator makes exports"
        self._not_again(process, record)
        self.counts["exports begun by themselves" if record.automatic else "exports begun"] += 1
        await self.of_product.make(record, to, moved)
        self.made.append(record)

    def _not_again(self, process: Hosted, record: ExportRecord) -> None:
        """What a run exports by itself is newer each time, as long as a process lives."""
        for by, before in self.begun:
            if record.automatic and before.automatic and by is process:
                same = record.run_id, record.rounds, record.final
                again = same == (before.run_id, before.rounds, before.final)
                if again and not self._of_another_history(record, before):
                    text = f"{record.run} is exported again after {record.rounds} rounds"
                    self.world.broken("exports", text)
        self.begun.append((process, record))

    def _of_another_history(self, record: ExportRecord, before: ExportRecord) -> bool:
        """Whether the run has gone back since: to other parameters, or to merge so many rounds once
        more. An epoch that closed no round may have the very parameters of before."""
        observer = self.world.observers.get(record.run)
        if observer is None or record.in_epoch == before.in_epoch:
            return False
        rounds = (r for tape in observer.records for _, r in tape if isinstance(r, TapeRound))
        merged = {r.epoch for r in rounds if r.outcome == "committed"}
        published = observer.watch.anchors.digests
        now, then = (_newest(published, r.in_epoch) for r in (record, before))
        return record.in_epoch in merged or any(then.get(p, d) != d for p, d in now.items())

    async def _start(
        self, command: Sequence[str], environment: Mapping[str, str], size: int, asks: bool
    ) -> Any:
        """In the place of `child_io.started`."""
        process, machine = current(), self.world.disks.machine()
        if process is None or machine is None or self._strikes(NOT_STARTED):
            raise OSError(errno.ENOMEM, "no memory")
        program = _Export(self, machine, process, arguments(command[len(COMMAND) :]), size)
        self.programs.append(program)
        program.runs(program.exports)
        return program

    # --- what goes wrong -----------------------------------------------------------------------

    def _strikes(self, often: float) -> bool:
        return self.world.scene.faulty and self.rng.random() < often

    def trouble(self, child: "_Export", machine: Host) -> None:
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
        if self.world.scene.faulty and self.chatter.random() < CHATTERS:
            later(self.chatter.uniform(*SOON_S), child.chatters, context=self.world.net.outside)

    def _full(self, machine: Host) -> None:
        self.counts["exports to a full disk"] += 1
        until = self.world.loop.now + self.rng.uniform(*SPELL_S)
        self.world.disks.full_until[machine.host] = until

    def _cut(self, child: "_Export", machine: Host) -> None:
        if self.world.scene.faulty and child.lives and machine is self.world.coordinator:
            self.counts["a coordinator dies over an export"] += 1
            self.world.crash(machine, self.rng.uniform(*AWAY_S))

    def _stands_still(self, child: "_Export", machine: Host) -> None:
        process = machine.process
        if not self.world.scene.faulty or process is None or process.frozen:
            return
        self.counts["a coordinator stands still over an export"] += 1
        process.freeze(suspended=self.rng.random() < 0.3)
        seconds = self.rng.uniform(2.0, 15.0)
        outside = self.world.net.outside
        self.world.loop.call_later(seconds, self.world.troubles.goes_on, process, context=outside)


class _Export(Program):
    """The process of one export."""

    def __init__(
        self,
        exporter: VirtualExporter,
        machine: Host,
        owner: Hosted,
        wanted: Namespace,
        line_bytes_max: int,
    ) -> None:
        self.world = world = exporter.world
        self.exporter = exporter
        self.wanted = wanted
        name = f"{owner.name}/export-{wanted.to.parent.name}"
        super().__init__(world.loop, name, owner, line_bytes_max, asks=False)
        self.settings = settings_of(Settings, machine.name, world.folder)
        self.pause_s = 0.0
        hub = (world.broker, name, machine.host, world.net, self.process.passes)
        as_it_is = DataTroubles(world.options, world.of_links, lambda subject, payload: payload)
        self.bus = DataBus(*hub, as_it_is)
        self.bus.damages = world.options.corrupt
        world.connections.append(self.bus)
        exporter.trouble(self, machine)

    def dies(self) -> None:
        """By a signal, as when there is no memory."""
        if self.lives and self.world.scene.faulty:
            self.exporter.counts["an export's process dies"] += 1
            self.kill()

    def chatters(self) -> None:
        """For people, and so that nobody can read it."""
        self.warns("careful")
        self.says("x" * self.exporter.chatter.randrange(40_000))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[FarBus]:
        yield self.bus

    async def exports(self) -> int:
        """As the product's program does; its exit status."""
        try:
            await export(self.settings, self.wanted, self._connected, self._say, slow(self.pause_s))
        except FORESEEN:
            return 1
        except Exception as error:
            self.world.broken("exports", f"an export ends with {error!r}")
            return 1
        return 0

    def _say(self, line: Line) -> None:
        self.says(line.model_dump_json())
