"""What goes wrong in a whole world: processes die and stand still, links are cut, disks are lost.

Every trouble is planned at the beginning, for some time before the world is healed.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_shared.bus.stream_kv import bucket_stream
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeCheckpoint, TapeInit, TapeRebirth, TapeTerm
from diloco_shared.protocol.wire import decode_tape
from diloco_simulator.hub.far_bus import FarBus
from diloco_simulator.troubles.clogs import Clogs
from diloco_simulator.troubles.storms import Storms
from diloco_simulator.virtual_loop import Hosted
from diloco_simulator.worlds.processes import Host

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# A process that stands still for minutes is not waited for, in virtual seconds.
MINUTES_S = (100.0, 300.0)
# As nodes take to elect another leader (docs/results/r3.md), in virtual seconds.
ELECTION_S = (1.0, 12.0)
# Somebody makes room on the hub's disk after so long, and whoever owns the server starts it anew
# after as long again as `RESTARTED_S`, in virtual seconds.
FULL_S, RESTARTED_S = (3.0, 40.0), (1.0, 4.0)
# A connection that breaks is there again after so long, in virtual seconds.
BROKEN_S = (0.2, 12.0)
# A server that ends is there again after so long, in virtual seconds.
BACK_S = (0.2, 2.0)
# Half of the servers that begin have everybody at once, as each client tries four times a second
# (`bus.nats.link`); the other half one after another, as over a network that is loaded.
AT_ONCE, AT_ONCE_S, APART_S = 0.5, (0.0, 0.25), (0.1, 4.0)
# A client that finds no server, or stands still, tries again after so long, in virtual seconds.
TRIED_S = 0.25
# So many outages are the server's own, and the others the network's, over which connections last.
SERVER_ENDS = 0.5
# Of what stands still, so many do as a whole machine that is suspended: its clock stands still too.
SUSPENDED = 0.4
# A power cut at the hub takes so many of the newest messages of a stream that is not synced: none,
# a part of a publication, or all of several rounds, as a server writes such a stream every two
# minutes. So many that were purged last come back: the purge was not written either.
TAILS, PURGED_BACK = (0, 1, 3, 30), (0, 1, 30)
# On the tape these make sense of all that follows, and learners have seen who leads: a disaster
# that took them could not be told from another run.
# What a checkpoint covers is on disk, as is what a snapshot covers.
KEPT = TapeInit | TapeTerm | TapeRebirth | TapeCheckpoint
# What the names of streams begin with that are synced in every world: tapes and buckets.
SYNCED = (subjects.tape_stream(""), bucket_stream(""))


class Troubles:
    """Of one world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.rng, self.loop, self.net = world.rng, world.loop, world.net
        self.of_clocks = Random(f"whole {world.seed}, clocks that stand still")
        self.of_elections = Random(f"whole {world.seed}, leaders of the hub")
        self.of_full_disks = Random(f"whole {world.seed}, the hub's disk")
        self.of_connections = Random(f"whole {world.seed}, connections that break")
        self.broken: list[FarBus] = []
        self.counts = world.found.counts
        self.clogs = Clogs(world)
        self.storms = Storms(self, self.clogs)
        self.asked: list[asyncio.Task[object]] = []  # what the user still waits for
        self.renamed = 0
        self.twins: list[Host] = []
        self.long: list[Hosted] = []  # that stand still for minutes, whatever is healed
        self.restarts = 0  # of the hub, for a disk that was full, and still to come

    def plan(self) -> None:
        """Draw when what happens."""
        o = self.world.options
        of_processes = (
            (o.syncer_hangs, lambda: self._hang(self._syncer(), self.rng.uniform(2.0, 15.0))),
            (o.learner_hangs, lambda: self._hang(self._learner(), self.rng.uniform(1.0, 12.0))),
            (o.long_hangs, lambda: self._hang(self._learner(), self.rng.uniform(*MINUTES_S))),
            (o.blackouts, self._blackout),
            (o.replaced, lambda: self._replace(self._anybody(), self.rng.random() < 0.5)),
            (o.lost_disks, self._lose_disks),
            (o.losses, self._lose_somebody),
        )
        of_the_hub = (
            (o.partitions, lambda: self.cut(self._anybody().host, self.rng)),
            (o.slow_links, lambda: self._slow(self._anybody().host)),
            (o.outages, self._outage),
            (o.squeezes, self._squeeze),
            (o.tails, self._cut_power),
            (o.power_cuts, self._lose_records),
        )
        user = self.world.user
        of_the_user = (
            (o.wishes, lambda: self._ask(user.wish())),
            (o.checkpoints, lambda: self._ask(user.checkpoint())),
            (o.restores, lambda: self._ask(user.restore())),
            (int(o.stop or o.stop_late), lambda: self._ask(user.desire("stop"))),
        )
        for count, strike in (*of_processes, *of_the_hub, *of_the_user):
            for _ in range(count):
                self.loop.call_later(self.rng.uniform(3.0, o.safety_s), self._strike, strike)
        for dice, count, strike in (
            (self.of_elections, o.elections, lambda: self.elect(self.of_elections)),
            (self.of_full_disks, o.full_disks, self._fill_disk),
            (self.of_connections, o.breaks, self._break),
            (self.clogs.dice, o.clogs, self.clogs.strike),
            (self.storms.dice, o.storms, self.storms.strike),
        ):
            for _ in range(count):
                self.loop.call_later(dice.uniform(3.0, o.safety_s), self._strike, strike)

    def heal(self) -> None:
        """From now on nobody stands still but for minutes, and a name has one process."""
        for twin in self.twins:
            self.world.lose(twin)  # one that died just before would come back
        for bus in [*self.broken]:
            self._mend(bus)
        for machine in self.world.machines:
            if machine.process is not None and machine.process not in self.long:
                self.goes_on(machine.process)

    async def answered(self) -> None:
        """Until the user waits for nothing: what is on its way would overtake what follows."""
        if self.asked:
            await asyncio.wait(self.asked)

    def _strike(self, strike: Callable[[], object]) -> None:
        if self.world.scene.faulty:
            strike()

    def _ask(self, work: Coroutine[Any, Any, object]) -> None:
        self.asked.append(self.loop.create_task(work))

    # --- who -----------------------------------------------------------------------------------

    def _syncer(self) -> Host | None:
        """None: all are lost for good."""
        return self.rng.choice(self.world.syncers) if self.world.syncers else None

    def _learner(self) -> Host | None:
        return self.rng.choice(self.world.learners) if self.world.learners else None

    def _anybody(self) -> Host:
        return self.rng.choice(self.world.machines)

    # --- connections ---------------------------------------------------------------------------

    def _break(self) -> None:
        """A process loses one of its connections, or both, and has them again later."""
        dice = self.of_connections
        machine = dice.choice(self.world.machines)
        if machine.process is None or machine.process.frozen:
            return
        for bus in dice.choice([machine.buses, machine.buses[:1], machine.buses[1:]]):
            if bus.connected:
                self.breaks(bus, dice.uniform(*BROKEN_S))

    def breaks(self, bus: FarBus, seconds: float) -> None:
        """A connection that is there is lost for so long."""
        if not bus.connected:
            return
        self._loses(bus)
        self.loop.call_later(seconds, self._mend, bus)

    def _loses(self, bus: FarBus) -> None:
        self.counts["connections broken"] += 1
        bus.breaks()
        self.broken.append(bus)

    def _mend(self, bus: FarBus) -> None:
        """Unless it is there again, or its process died meanwhile."""
        if bus not in self.broken:
            return
        if self.world.options.severs and self._unreachable(bus):
            self.loop.call_later(TRIED_S, self._mend, bus, context=self.net.outside)
            return
        self.broken.remove(bus)
        if not bus.vanished:
            bus.mended()

    def _unreachable(self, bus: FarBus) -> bool:
        """Whether there is no server to connect to, or a process that stands still."""
        there = [*self.world.machines, *self.twins]
        process = next((m.process for m in there if bus in m.buses), None)
        frozen = process is not None and process.frozen
        return not bus.vanished and (self.net.away or self.net.gone or frozen)

    def server_ends(self) -> list[FarBus]:
        """The hub's does: what is on its way never comes, and everybody's connection is lost.
        Whoever asks hears of that at once. Returns what `server_begins` connects again."""
        self.net.lives += 1
        lost = [bus for bus in self.world.connections if bus.connected]
        for bus in lost:
            self._loses(bus)
        self.counts["servers of the hub ended"] += 1
        return lost

    def server_begins(self, lost: list[FarBus], dice: Random, after_s: float = 0.0) -> None:
        """So much later another one is there."""
        within_s = AT_ONCE_S if dice.random() < AT_ONCE else APART_S
        for bus in lost:
            self.loop.call_later(after_s + dice.uniform(*within_s), self._mend, bus)

    def _begins_anew(self, dice: Random, back_s: float) -> None:
        """The hub's server ends, and is there again after so long."""
        self.net.away = True
        self.server_begins(self.server_ends(), dice, back_s)
        self.loop.call_later(back_s, setattr, self.net, "away", False)

    # --- processes and disks -------------------------------------------------------------------

    def _hang(self, machine: Host | None, seconds: float) -> None:
        """It stands still; sometimes its supervisor begins another process meanwhile, elsewhere."""
        process = None if machine is None else machine.process
        if machine is None or process is None or process.frozen:
            return
        self.counts["hangs"] += 1
        suspended = self.of_clocks.random() < SUSPENDED
        self.counts["machines suspended"] += suspended
        process.freeze(suspended=suspended)
        self.loop.call_later(seconds, self.goes_on, process)
        if seconds >= MINUTES_S[0]:
            self.long.append(process)
        elif self.rng.random() < 0.3:
            self.counts["two processes of a name"] += 1
            self.twins.append(twin := self.world.twin(machine))
            self.loop.call_later(self.rng.uniform(0.5, 8.0), self._strike, twin.start)
            self.loop.call_later(seconds + self.rng.uniform(0.0, 8.0), twin.kill)

    def goes_on(self, process: Hosted) -> None:
        """What stood still does. A leader whose clock did too does not notice that it was silent:
        who must have beaten meanwhile, it cannot say."""
        suspended = process.suspended_at is not None
        process.thaw()
        if suspended:
            self.world.forgives()

    def _blackout(self) -> None:
        self.counts["blackouts"] += 1
        for machine in self.world.machines:
            self.world.crash(machine, self.rng.uniform(0.5, 8.0))

    def _lose_disks(self) -> None:
        """Of all syncers, at once or one after another, half of the time under new names."""
        renamed, apart_s = self.rng.random() < 0.5, self.rng.choice([0.0, 0.0, 2.0, 20.0])
        for n, machine in enumerate(list(self.world.syncers)):
            self.loop.call_later(
                n * apart_s, self._strike, lambda m=machine: self._replace(m, renamed)
            )

    def _replace(self, machine: Host, renamed: bool) -> None:
        """Another machine with an empty disk in its place, unless it has gone meanwhile."""
        if machine in self.world.lost:
            return
        self.counts["disks lost"] += 1
        machine.wipe()
        if renamed and machine is not self.world.coordinator:
            self.counts["new names"] += 1
            self.renamed += 1
            machine = self.world.renamed(machine, self.renamed)
        self.world.start(machine, self.rng.uniform(0.5, 6.0))

    def _lose_somebody(self) -> None:
        """Never to come back."""
        there = [*self.world.syncers, *self.world.learners]
        if not there:
            return
        machine = self.rng.choice(there)
        self.counts["lost for good"] += 1
        self.world.lose(machine)

    # --- links and the hub ---------------------------------------------------------------------

    def cut(self, host: str, dice: Random) -> None:
        """Its link, one way or both, for some seconds."""
        self.counts["partitions"] += 1
        link, way = self.net.link(host), dice.choice(["in", "out", "both"])

        def cut(up: bool) -> None:
            if way in ("out", "both"):
                link.out = up
            if way in ("in", "both"):
                link.into = up

        cut(False)
        self.loop.call_later(dice.uniform(1.0, 12.0), cut, True)

    def _slow(self, host: str) -> None:
        self.counts["slow links"] += 1
        link = self.net.link(host)
        link.slow = True
        self.loop.call_later(self.rng.uniform(2.0, 12.0), setattr, link, "slow", False)

    def _outage(self) -> None:
        """Of the network before the hub, over which connections last; or of the hub's server."""
        self.counts["outages"] += 1
        broker, seconds = self.world.broker, self.rng.uniform(1.0, 10.0)
        if self.world.options.severs and not broker.disk_full and self.rng.random() < SERVER_ENDS:
            broker.restart()
            self._begins_anew(self.rng, seconds)
            return
        self.net.away = True
        self.loop.call_later(seconds, setattr, self.net, "away", False)

    def elect(self, dice: Random) -> None:
        """The node that led everything is gone, or has lost the others, and goes on telling what
        it has. Nobody leads for a while; connections stay."""
        broker = self.world.broker
        if broker.leaderless:
            return
        self.counts["elections"] += 1
        seconds, alone = dice.uniform(*ELECTION_S), dice.random() < 0.5
        self.counts["leaders alone"] += alone
        broker.lose_leader(tells=alone)
        self.loop.call_later(seconds, broker.elected, lambda: dice.random() < 0.5)

    def _squeeze(self) -> None:
        broker = self.world.broker
        self.counts["squeezes"] += 1
        broker.squeezed = True
        self.loop.call_later(self.rng.uniform(2.0, 20.0), setattr, broker, "squeezed", False)

    def _fill_disk(self) -> None:
        """No append is answered, until there is room and the server was started anew."""
        broker, dice = self.world.broker, self.of_full_disks
        if broker.disk_full:
            return
        self.counts["the hub's disk full"] += 1
        broker.disk_full = True
        self.restarts += 1
        room_s = dice.uniform(*FULL_S)
        self.loop.call_later(room_s, setattr, broker, "disk_full", False)
        self.loop.call_later(room_s + dice.uniform(*RESTARTED_S), self._restart)

    def _restart(self) -> None:
        """The hub's server: everybody's connection breaks."""
        if self.world.options.severs and not self.world.scene.faulty:
            self.restarts -= 1  # whoever healed it has done so
            return
        self.world.broker.restart()
        self.net.away = True
        back_s = self.of_full_disks.uniform(*BACK_S)
        if self.world.options.severs:
            self.server_begins(self.server_ends(), self.of_full_disks, back_s)
        self.loop.call_later(back_s, self._restarted)

    def _restarted(self) -> None:
        self.net.away = False
        self.restarts -= 1

    def _cut_power(self) -> None:
        """At the hub, whose server is there again soon."""
        if self.world.options.severs:
            self._begins_anew(self.rng, self.rng.uniform(*BACK_S))
        self.lose_tails(self.rng)

    def lose_tails(self, dice: Random) -> None:
        """A power cut at the hub: of every stream but those that are synced, as the tape is."""
        name, broker = self.world.spec.name, self.world.broker
        streams = (subjects.up_stream(name), subjects.dn_stream(name), subjects.state_stream(name))
        lost, deep = list[int](), self.world.options.deep_tails
        for stream in filter(broker.exists, streams):
            newest = dice.choice(TAILS) if deep else dice.randint(0, 3)
            lost.append(broker.lose(stream, newest))
            # Not on UP yet: I12 counts what a snapshot covers, and cannot tell that it came back.
            if deep and stream != streams[0]:
                back = broker.take_back(stream, dice.choice(PURGED_BACK))
                self.counts["purged messages back"] += back
        self.counts["tails lost"] += any(lost)
        named = self.world.options.named  # then events are not synced
        synced = SYNCED if named else (*SYNCED, subjects.EVENTS_STREAM)
        for stream in broker.names():
            if stream.startswith(synced):
                broker.lose(stream, 3)  # nothing, unless the product forgets to have it synced

    def _lose_records(self) -> None:
        """The hub's disk loses records that it had synced: some of the tape's newest.

        What a snapshot covers is kept, for nobody could know of it otherwise; connections go too.
        """
        world, broker = self.world, self.world.broker
        tape = subjects.tape_stream(world.spec.name)
        if not broker.exists(tape) or world.observer.watch.ended:
            return
        stored = list(broker.select(tape, ">", 1))
        covered, loose = _covered(world.folder), 0
        while loose < len(stored):
            message = stored[-1 - loose]
            if message.seq <= covered or isinstance(decode_tape(message.payload), KEPT):
                break
            loose += 1
        lost = min(self.rng.randint(1, 3), loose)
        if lost:
            self.counts["power cuts"] += 1
            broker.lose(tape, lost, synced=True)
            if world.options.severs:
                self._begins_anew(self.rng, self.rng.uniform(*BACK_S))
            else:
                self.net.lives += 1  # what was on its way to the server that was killed never comes
            world.observer.lost()
            for machine in world.syncers:
                world.crash(machine, self.rng.uniform(0.5, 3.0))


def _covered(folder: Path) -> int:
    """Sequence on the tape of the newest record that a snapshot on any disk covers; 0: none."""
    names = (path.name for path in folder.rglob("*snapshot-*") if path.is_dir())
    return max((int(name.rpartition("-")[2]) for name in names), default=0)
