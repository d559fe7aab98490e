"""The processes of an island in a whole world: process 0 is the product's learner (`computing`),
others follow.

Each host has a supervisor, which starts its process again. What process 0 decides of the others is
decided by the product's `hosts.whole`; what travels between them are the product's bytes.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

from diloco_learner.hosts import plan, whole
from diloco_learner.hosts.carrying_io import ERRAND, SharedUpload
from diloco_learner.hosts.leading_io import LOOK_S
from diloco_learner.hosts.link_io import GATHERING_S, UNACKNOWLEDGED_S_MIN
from diloco_learner.hosts.parts import Buffer, packed
from diloco_learner.hosts.whole import (
    BEAT_S,
    ORDER_S_MAX,
    Hearing,
    HostLost,
    OfWork,
    Over,
    WholeIsland,
    silence,
)
from diloco_shared import ambient
from diloco_simulator.checkers.islands import IslandLife, IslandWatch
from diloco_simulator.islands.carrying import (
    HubWay,
    SeenCarrier,
    SeenCarriers,
    SharedWhole,
)
from diloco_simulator.islands.links import Cable, Connection, Programs
from diloco_simulator.islands.trainer import (
    SHARED,
    FollowingTrainer,
    ForEach,
    shared_state,
)
from diloco_simulator.islands.waiting import carry, waited
from diloco_simulator.virtual_loop import Hosted, VirtualLoop
from diloco_simulator.worlds.processes import RESTART_S, Client, Host
from diloco_simulator.worlds.tiny import Part

# Between two attempts to reach process 0, in virtual seconds.
AGAIN_S = 0.5
# Until an answer is on its way, which another thread fetches, in virtual seconds.
FETCH_S = (0.0, 0.1)
# Of the deaths of process 0, so many are its machine's, which closes no connection.
WORDLESS = 0.3
# What a host has just done, where it may die with it.
MOMENTS: dict[type[Any], str] = {
    plan.Contribute: "encoded",
    plan.Hold: "keeps an anchor",
    plan.Gather: "gives an anchor",
}
# Orders that wait to be carried out.
ORDERS_MAX = 8


class Island:
    """Of one machine of a world: process 0 of it is that machine's."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: Random,
        watch: IslandWatch,
        name: str,
        learner: int,
        hosts: int,
        silence_s: float,
        client: Client | None = None,
    ) -> None:
        """`learner`: which one it computes as, of `hosts` processes. `client`: makes connections of
        those that carry their shares to and from the hub; None where process 0 does all."""
        self.loop, self.rng, self.watch = loop, rng, watch
        self.name, self.learner, self.hosts, self.silence_s = name, learner, hosts, silence_s
        self.client = client
        self.machine: Host | None = None
        self.leading: Leading | None = None  # of the process 0 that lives
        self.lives = 0
        self.followers = {n: Follower(self, n) for n in range(1, hosts)}
        # Who is to die at which of the moments that nobody else can see; told which host it is.
        self.armed: dict[str, list[Callable[[Island, int], None]]] = {}

    def moment(self, what: str, index: int = 0) -> None:
        """Somebody may be to die now, at what this host does."""
        for strike in self.armed.pop(what, ()):
            strike(self, index)

    def begins(self, machine: Host, leading: "Leading", process: Hosted) -> None:
        """Process 0 is started; the others are too, the first time."""
        self.machine = machine
        machine.over = self._over
        self.lives += 1
        leading.begins(process, self.watch.begins(machine.name, machine.host, self, process))
        self.leading = leading
        for follower in self.followers.values():
            if follower.process is None and not follower.starts:
                follower.start()

    def _over(self) -> None:
        """Process 0 is gone, and its connections with it, unless its whole machine is."""
        leading, self.leading = self.leading, None
        if leading is not None:
            leading.life.ended_at = self.loop.now
            if self.rng.random() >= WORDLESS:
                leading.close()
            else:
                self.watch.counts["islands: process 0 gone without a word"] += 1
                for connection in leading.connections.values():
                    connection.said.gone_at = self.loop.now

    @property
    def able(self) -> bool:
        """Whether nobody keeps it from its work."""
        return (
            self.leading is not None
            and not self.leading.whole.lost
            and all(f.lives for f in self.followers.values())
        )


class Leading:
    """What process 0 knows of the others; like `leading_io.Hosts`, without sockets and threads."""

    def __init__(self, island: Island) -> None:
        self.island = island
        self.hosts = island.hosts
        self.whole = WholeIsland()
        self.cable = Cable(island.loop, island.rng)
        self.programs = Programs(self.cable, self.hosts)
        self.connections: dict[int, Connection] = {}
        self.changed: list[asyncio.Future[None]] = []
        self.when_lost: Callable[[], None] | None = None
        self.all_there: asyncio.Event | None = None

    def begins(self, process: Hosted, life: IslandLife) -> None:
        self.process, self.life = process, life
        carries = self.island.client is not None
        self.carriers = SeenCarriers(self._say, life, wanted=carries)
        # Whatever this process does in a thread may wait for the others there.
        process.carry = carry

    @property
    def lost(self) -> str:
        return self.whole.lost

    @property
    def ends(self) -> bool:
        """Whether this process was to end: an island has lost a host, or one was told to stop."""
        return bool(self.whole.lost or self.whole.stopped_by)

    # --- the beginning -------------------------------------------------------------------------

    async def gather(self) -> None:
        """Wait until all are there; from then on hear them."""
        self.all_there = asyncio.Event()
        while not self.all_there.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.all_there.wait()
                    break
            self._still_gathering()
        names = {n: f"host {n} (vm{n})" for n in self.connections}
        self.whole.begins(names, self.island.silence_s, ambient.monotonic())
        self.life.whole_at = self.island.loop.now
        self.island.watch.counts["islands whole"] += 1
        if self.island.lives > 1:
            self.island.watch.counts["islands whole again"] += 1
        for index, connection in self.connections.items():
            connection.orders.send(("welcome", self.island.silence_s))
            self._begin(self._hear(index, connection))
            self._begin(self._collect(index, connection))
        self._begin(self._beat())

    def _still_gathering(self) -> None:
        """As of `leading_io.Hosts`."""
        for index, connection in list(self.connections.items()):
            try:
                connection.orders.send(("alive",))
            except HostLost:
                connection.close()
                del self.connections[index]
                assert self.all_there is not None
                self.all_there.clear()  # it came, and went while this process stood still

    def takes(self, index: int) -> Connection | None:
        """A host comes; None while this process does not listen."""
        if self.all_there is None or self.all_there.is_set():
            return None
        if (before := self.connections.get(index)) is not None:
            before.close()
        follower = self.island.followers[index]
        self.connections[index] = found = Connection.over(follower.cable)
        if len(self.connections) == self.hosts - 1 and not any(
            c.said.closed for c in self.connections.values()
        ):
            self.all_there.set()
        return found

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self.process.run(work)

    # --- orders --------------------------------------------------------------------------------

    def work(self) -> OfWork:
        """As of `leading_io.Hosts`."""
        return OfWork(self, self.whole.begins_work())

    def end_work(self) -> None:
        """As of `leading_io.Hosts`."""
        if self.whole.leaves():
            self.tell(plan.Leave())

    def tell(self, order: plan.Order, parts: ForEach | None = None, of: int | None = None) -> int:
        """See `hosts.trainer.Link`."""
        try:
            number, head = self.whole.tells(order, ambient.monotonic(), of)
        except Over:
            self.island.watch.counts["islands: an order of work that is over"] += 1
            raise
        except HostLost:
            self.island.watch.counts["islands: no order without a host"] += 1
            raise
        self.life.told(number, head)
        self.life.asks(getattr(order, "carriers", ()), ambient.monotonic())
        for index, connection in self.connections.items():
            data = b"" if parts is None else b"".join(parts(index))
            try:
                connection.orders.send(("order", head, data))
            except HostLost as error:
                self.lose(f"{self._name(index)} is gone: {error}")
        self.island.moment(f"told {type(order).__name__}")
        self.whole.check()
        return number

    def answers(self, number: int) -> Mapping[int, Buffer]:
        """What each host gave for an order. Raises HostLost."""
        until = ambient.monotonic() + ORDER_S_MAX
        while (found := self.whole.answers(number)) is None:
            if ambient.monotonic() > until:
                why = self.whole.never_came(number)
                self.lose(why)
                raise HostLost(why)
            change: asyncio.Future[None] = self.island.loop.create_future()
            self.changed.append(change)
            waited(change)
        return found

    def ready(self) -> tuple[int, ...]:
        """See `hosts.trainer.Link`."""
        return self.carriers.ready()

    @property
    def carries(self) -> bool:
        """Whether the others carry what they can."""
        return self.carriers.wanted

    def upload_of(self, shared: SharedWhole) -> SharedUpload:
        """See `hosts.trainer.Link`."""
        return self.carriers.upload_of(shared)

    def _say(self, index: int, head: bytes) -> None:
        self.connections[index].orders.send((ERRAND, head))

    def _notify(self) -> None:
        changed, self.changed = self.changed, []
        for one in changed:
            if not one.done():
                one.set_result(None)

    def _name(self, index: int) -> str:
        return self.whole.others[index].name

    # --- what comes ----------------------------------------------------------------------------

    async def _hear(self, index: int, connection: Connection) -> None:
        try:
            while True:
                values = await connection.said.receive()
                stopped = self.whole.stopped_by
                fault = self.whole.hears(index, values, ambient.monotonic())
                if values[0] == ERRAND:
                    self.carriers.heard(index, self._name(index), *values[1:])
                if fault:
                    self.lose(fault)
                if self.whole.stopped_by != stopped:
                    self.stop()
        except ConnectionError as error:
            self.lose(f"{self._name(index)} is gone: {error}")

    async def _collect(self, index: int, connection: Connection) -> None:
        try:
            while True:
                number, data, fault, *indices = await connection.answers.receive()
                if number < 0:
                    self.carriers.came(index, number, indices, data)
                    continue
                self.whole.gave(index, number, data, fault)
                self._notify()
        except (ConnectionError, ValueError) as error:
            self.lose(f"{self._name(index)} is gone: {error}")

    async def _beat(self) -> None:
        while not self.whole.lost and not self.whole.closing:
            for connection in self.connections.values():
                if not connection.orders.closed:
                    connection.orders.send(("alive",))
            if why := self.whole.looks(ambient.monotonic()):
                self.island.watch.counts["islands: silent past the limit"] += 1
                self.lose(why)
            await asyncio.sleep(BEAT_S)

    def straggling(self) -> str:
        return self.whole.straggling(ambient.monotonic())

    # --- the end -------------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """This process ends, after its last words."""
        if self.process.killed or not self.whole.lose(why):
            return
        self.island.watch.counts["islands lost a host"] += 1
        self._notify()
        self.carriers.lost(self.lost)
        self.island.loop.call_later(whole.LAST_WORDS_S, self.leave)
        if self.when_lost is not None:
            self.when_lost()
        else:
            self.stop()

    def stop(self) -> None:
        """As of `leading_io.Hosts`: by another signal than a supervisor's."""
        self.process.signal(signal.SIGINT)

    def leave(self) -> None:
        """At once: its supervisor starts it again."""
        machine = self.island.machine
        if machine is not None and machine.process is self.process:
            self.island.watch.counts["islands ended without their last words"] += 1
            machine.kill()
            self.cable.later(RESTART_S, machine.start)

    def bye(self) -> None:
        """The last order."""
        if not self.whole.lost and self.whole.others:
            self.tell(plan.Bye())
        self.whole.closing = True

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()

    # --- what is seen --------------------------------------------------------------------------

    def gathered(self, payload: bytes, expected: bytes, fragment: int, round_: int) -> None:
        """A contribution of all hosts' parts is about to be put."""
        self.life.gathered(payload, expected, fragment, round_)
        self.island.moment("gathered")


class Follower:
    """One of the others: its supervisor, and its process."""

    def __init__(self, island: Island, index: int) -> None:
        self.island, self.index = island, index
        self.cable = Cable(island.loop, island.rng)
        self.process: Hosted | None = None
        self.connection: Connection | None = None
        self.life: IslandLife | None = None
        self.way: HubWay | None = None  # to the hub, where it carries
        self.starts = 0

    @property
    def lives(self) -> bool:
        return self.process is not None and not self.process.frozen

    @property
    def silent_since(self) -> float:
        assert self.process is not None
        return self.process.silent_since

    def start(self) -> None:
        """Begin another life of the process, unless it runs, or its machine is lost."""
        machine = self.island.machine
        if self.process is not None or (machine is not None and machine.lost):
            return
        self.starts += 1
        name = f"{self.island.name}-host-{self.index}/{self.starts}"
        self.process = process = Hosted(self.island.loop, name)
        self.connection, self.life, self.way = None, None, None
        self.orders: asyncio.Queue[tuple[int, plan.Order, Buffer]] = asyncio.Queue(ORDERS_MAX)
        self.following = plan.Following()
        process.run(self._guarded(self._follow))

    def dies(self, *, closes: bool = True) -> None:
        """As by SIGKILL; or with its machine, which closes no connection."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        if self.way is not None:
            self.way.vanish()
        if self.life is not None:
            self.life.died(self.island.loop.now)
        if self.connection is not None and closes:
            self.connection.close()
        self.cable.later(RESTART_S + self.island.rng.uniform(0.0, 2.0), self.start)

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A process ends with what ends it; only a fault of the plan is none of the world's."""
        process = self.process
        try:
            await work()
        except HostLost:
            pass
        except Exception as error:
            self.island.watch.broken(f"{self.island.name}, host {self.index}: {error!r}")
        if self.process is process:
            self.dies()

    async def _follow(self) -> None:
        while True:
            leading = self.island.leading
            if leading is not None and (connection := leading.takes(self.index)) is not None:
                break
            await asyncio.sleep(AGAIN_S)
        self.connection = connection
        silence_s = await self._welcomed(connection)
        connection.said.given_up_s = max(silence_s, UNACKNOWLEDGED_S_MIN)
        now = ambient.monotonic()
        self.hearing = Hearing(silence_s, now, now)
        self.life = leading.life
        part = Part(self.index, self.island.hosts)
        self.carrier = self._carrier(connection)
        trainer = FollowingTrainer(
            self.island.learner,
            part,
            leading.programs,
            self.island.watch.numbers,
            partial(self.life.took, self.index),
            None if self.carrier is None else self.carrier.keep,
        )
        assert self.process is not None
        for work in (partial(self._work, connection, trainer), partial(self._beat, connection)):
            self.process.run(self._guarded(work))
        if self.carrier is not None:
            self.process.run(self._guarded(self.carrier.run_here))
        await self._read(connection)

    def _carrier(self, connection: Connection) -> SeenCarrier | None:
        """With a link of its own to the hub; None where process 0 carries all."""
        island = self.island
        if island.client is None:
            return None
        assert self.process is not None and self.life is not None
        name, moment = f"{island.name}-host-{self.index}", partial(self._moment, self.process)
        self.way = HubWay(island.client, f"{name}-data", self.host, self.process, moment)
        return SeenCarrier(self.way, connection, self.life)

    @property
    def host(self) -> str:
        """Whose link to the hub it has."""
        machine = self.island.machine
        return f"{self.island.name if machine is None else machine.host}-host-{self.index}"

    def _moment(self, process: Hosted, what: str) -> None:
        if self.process is process:
            self.island.moment(what, self.index)

    async def _welcomed(self, connection: Connection) -> float:
        """Once all are there. Raises HostLost where process 0 gives no sign of life meanwhile."""
        while True:
            try:
                async with asyncio.timeout(GATHERING_S):
                    what, *values = await connection.orders.receive()
            except TimeoutError:
                self.island.watch.counts["islands: process 0 gone before all were there"] += 1
                raise HostLost(silence(GATHERING_S)) from None
            if what == "welcome":
                silence_s: float = values[0]
                return silence_s

    async def _read(self, connection: Connection) -> None:
        assert self.life is not None
        while True:
            what, *values = await connection.orders.receive()
            self.hearing.heard(ambient.monotonic())
            if what == "alive":
                continue
            if what == ERRAND and self.carrier is not None:
                self.carrier.hears(*values)
                continue
            head, data = values
            number, order = plan.decode(head)
            self.following.take(number)
            self.life.taken(self.index, number, head)
            if isinstance(order, plan.Bye):
                return
            await self._waits(number, order, data)

    async def _waits(self, number: int, order: plan.Order, data: Buffer) -> None:
        """As of `following_io.LeadingHost`."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self.orders.put((number, order, data))
                return
            self.hearing.heard(ambient.monotonic())

    async def _work(self, connection: Connection, trainer: FollowingTrainer) -> None:
        assert self.life is not None
        while True:
            since = ambient.monotonic()
            number, order, data = await self.orders.get()
            connection.said.send(("taken", number, ambient.monotonic() - since))
            given = await trainer.carry_out(number, order, data)
            if isinstance(order, SHARED):
                self.life.carried(self.index, number, shared_state(trainer.tiny))
            if (moment := MOMENTS.get(type(order))) is not None:
                self.island.moment(moment, self.index)
            if given is not None:
                await asyncio.sleep(self.island.rng.uniform(*FETCH_S))
                answer = b"".join(packed(given))
                connection.answers.send((number, answer, ""))
            if isinstance(order, plan.Leave) and self.carrier is not None:
                self.carrier.forget(number)

    async def _beat(self, connection: Connection) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if self.hearing.over(ambient.monotonic()):
                self.island.watch.counts["islands: process 0 silent past the limit"] += 1
                raise HostLost(silence(self.hearing.limit_s))
            connection.said.send(("alive",))

    def told_to_stop(self) -> None:
        """As by SIGTERM: process 0 ends the island in order."""
        if self.connection is not None and self.lives and not self.connection.said.closed:
            self.connection.said.send(("stop",))
