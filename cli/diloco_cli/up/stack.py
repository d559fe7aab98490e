"""The whole stack of one machine: nats-server, coordinator, syncers, learners, supervised.

State lies in one data folder; `endpoint.json` there tells every other command where it listens.
"""

import asyncio
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco_cli.cluster import TOKEN_FILE
from diloco_cli.commands.options import own_factories
from diloco_cli.up.folder import DETACHED_OUT, Folder, unusable
from diloco_cli.up.process import PAUSE_S, STOP_S, Child, bound, last_line
from diloco_cli.words import CONFLICT, INVALID, CliError, counted
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import BusError
from diloco_shared.bus.repeating import until_done
from diloco_shared.gpus import VISIBLE, gpus_here, shared_out
from diloco_shared.hub.nats_binary import BinaryError
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.hub.watch import LOOK_S
from diloco_shared.process import crash_points
from diloco_shared.process.chaos import Abilities, FaultAgent
from diloco_shared.process.faults import in_a_task
from diloco_shared.process.logs import configure
from diloco_shared.process.membership import Registration

# Learners leave the processor to whoever carries messages: a round then takes fewer steps.
LEARNER_NICENESS = 5
# So long a learner that is told to stop may save its state and take its leave, in seconds, unless
# DILOCO_STOP_S says another time: as long as the files for systemd, Kubernetes and Slurm grant. It
# is told so, and is killed some seconds after that. One of a small model ends within one second.
LEARNERS_STOP_S, CLOSING_S = 25.0, 5.0
# The message server's own time for that.
NATS_STOP_S = 10.0
# Processes that are named while they are waited for.
NAMED = 4
# Messages kept for the live view.
MESSAGES_MAX = 200
# Between two looks at the sizes of logs, in seconds.
LOGS_S = 10.0
# Before the message server is started again, and after a start or a connection that failed (the
# first pause and the longest one).
NATS_PAUSE_S, NATS_RETRIES = 0.2, (2.0, 2.0)
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class EachLearner:
    """What every learner computes with.

    `threads`: of the processor, 0: all. `devices`: GPUs, 0: all there are, divided among the
    learners. `hosts`: processes that make one learner, as if each had a host of its own.
    """

    threads: int = 1
    devices: int = 0
    hosts: int = 1


class Stack:
    """`run` starts everything and keeps it alive until cancelled."""

    def __init__(
        self,
        data: Path,
        *,
        learners: int,
        syncers: int = 1,
        port: int,
        chaos: bool,
        each: EachLearner,
        throwaway: bool = False,
        pause_s: float = PAUSE_S,
    ) -> None:
        """`throwaway`: begin anew where an earlier throwaway cluster left its state.
        `pause_s`: between the death of a process and its first restart, in seconds."""
        self.folder = Folder(data)
        self.throwaway = throwaway
        self.data = self.folder.path
        self.learners = learners
        self.syncers = syncers
        self.port = port
        self.chaos = chaos
        self.threads = each.threads
        self.pause_s = pause_s
        self.devices_per_learner = each.devices
        self.hosts = each.hosts
        # Of each process of each learner, as found at the start.
        self.gpus: list[tuple[str, ...]] = [()] * (learners * each.hosts)
        self.messages: deque[str] = deque(maxlen=MESSAGES_MAX)
        self.messages_total = 0
        self.children: list[Child] = []
        self.nats_restarts = 0
        self.stop_s = LEARNERS_STOP_S
        self.up = asyncio.Event()
        self.stopping = False
        self.resuming: asyncio.TimerHandle | None = None  # the end of the message server's hang

    def told(self, text: str) -> None:
        """Something a person should know."""
        self.messages_total += 1
        self.messages.append(f"{time.strftime('%H:%M:%S')} {text}")

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def run(self) -> None:
        """Until cancelled; everything is stopped on the way out. CliError says what is amiss."""
        _check_crash_points()
        self.gpus = self._gpus()
        self.stop_s = _stop_s()
        self.folder.take()
        try:
            self.folder.begin(throwaway=self.throwaway)
            log = self.folder.logs / "supervisor.log"
            configure("info", file=log.open("a", encoding="utf-8", buffering=1))
            self.port = free_port(self.port)
            self.nats = NatsServer(
                self.data / "nats", token=self.folder.secret("nats-token"), dies_with_owner=True
            )
            try:
                await self.nats.start()
            except BinaryError as error:
                raise CliError(f"the message server does not start: {error}") from None
            await self._supervise()
        except OSError as error:
            raise unusable(self.data, error) from None
        finally:
            self.folder.release()

    async def _supervise(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_nats())
                tasks.create_task(self._mend_nats())
                tasks.create_task(self._be_member())
                tasks.create_task(self._bound_logs())
                for child in self._all_children():
                    self.children.append(child)
                    tasks.create_task(child.run())
                ends_s = self.stop_s + CLOSING_S + STOP_S + NATS_STOP_S
                self.folder.announce(url=self.url, nats=self.nats.address, ends_s=ends_s)
                self.up.set()
        finally:
            await self._stopped()

    # --- processes -----------------------------------------------------------------------------

    def _all_children(self) -> list[Child]:
        """In the order of their start."""
        learners = {
            "DILOCO_THREADS": str(self.threads),
            "DILOCO_FACTORIES": own_factories(),
            "DILOCO_STOP_S": f"{self.stop_s:g}",
        }
        return [
            self._child("coordinator", "diloco_coordinator", self._token()),
            *(
                self._child(f"syncer-{n}", "diloco_syncer", {"OMP_NUM_THREADS": "1"})
                for n in range(1, self.syncers + 1)
            ),
            *(
                self._child(
                    name,
                    "diloco_learner",
                    learners | more,
                    niceness=LEARNER_NICENESS,
                    stop_s=self.stop_s + CLOSING_S,
                )
                for name, more in self._processes()
            ),
        ]

    def _token(self) -> dict[str, str]:
        """Of the coordinator: it makes the file that is not given, and no other."""
        given = os.environ.get(TOKEN_FILE)
        return {TOKEN_FILE: str(self.folder.token_file)} if given else {}

    def _processes(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Of learners: each with its name, and what it is told beside what all are."""
        for n in range(self.learners):
            name = f"learner-{n + 1}"
            meeting = f"{HOST}:{free_port(0)}" if self.hosts > 1 else ""
            for host in range(self.hosts):
                share = self.gpus[n * self.hosts + host]
                more = {VISIBLE: ",".join(share)} if share else {}
                if meeting:
                    more |= {
                        "DILOCO_ID": name,
                        "DILOCO_HOSTS": str(self.hosts),
                        "DILOCO_HOST_INDEX": str(host),
                        "DILOCO_HOST_ADDRESS": meeting,
                    }
                yield name + (f".{host}" if host else ""), more

    def _gpus(self) -> list[tuple[str, ...]]:
        """Those of each process of each learner. CliError where there are fewer than asked for."""
        here = gpus_here()
        try:
            shares = shared_out(here, self.learners, self.devices_per_learner)
        except ValueError as error:
            raise CliError(f"--devices-per-learner: {error}", INVALID) from None
        if here and self.learners > len(here):
            self.told(f"{self.learners} learners share {counted(len(here), 'GPU')}: each is slower")
        return [part for share in shares for part in self._among_hosts(share)]

    def _among_hosts(self, share: tuple[str, ...]) -> list[tuple[str, ...]]:
        """A learner's GPUs, for each of its processes as many. CliError where one had none."""
        each = len(share) // self.hosts
        if share and not each:
            raise CliError(
                f"--hosts-per-learner: {counted(len(share), 'GPU')} of a learner cannot be divided "
                f"among {self.hosts} processes: start fewer of them, or fewer learners",
                INVALID,
            )
        return [share[n * each : (n + 1) * each] for n in range(self.hosts)]

    def _child(
        self,
        name: str,
        module: str,
        environment: dict[str, str],
        *,
        niceness: int = 0,
        stop_s: float = STOP_S,
    ) -> Child:
        shared = {
            "DILOCO_ID": name,
            "DILOCO_NATS_URL": self.nats.url,
            "DILOCO_DATA": str(self.data),
            "DILOCO_CHAOS": "1" if self.chaos else "0",
            "DILOCO_HOST": HOST,
            "DILOCO_PORT": str(self.port),
        }
        return Child(
            name,
            [sys.executable, "-m", module],
            {**_inherited(), **shared, **environment},
            self.folder.logs / f"{name}.log",
            self.told,
            niceness=niceness,
            pause_s=self.pause_s,
            stop_s=stop_s,
        )

    async def _keep_nats(self) -> None:
        """Start the server again whenever it dies, on the same port and store."""
        while True:
            code = await self.nats.wait()
            self.nats_restarts += 1
            self.told(f"nats ended ({code}), starting again")
            if self.resuming is not None:  # what hung is gone, and the next one hangs for itself
                self.resuming.cancel()
                self.resuming = None
            await asyncio.sleep(NATS_PAUSE_S)
            trouble = (BinaryError, OSError)
            await until_done(self._start_nats, "nats", pauses=NATS_RETRIES, trouble=trouble)

    async def _start_nats(self) -> None:
        try:
            await self.nats.start()
        except (BinaryError, OSError) as error:
            self.told(f"nats does not start: {error}")
            raise

    async def _mend_nats(self) -> None:
        """End a server that never goes on by itself; it is started anew."""
        while True:
            await asyncio.sleep(LOOK_S)
            if why := await asyncio.to_thread(self.nats.ails):
                self.told(f"nats is ended: {why}")
                await self.nats.terminate()

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(LOGS_S)
            for pattern in ("*.log", DETACHED_OUT):
                for log in self.folder.logs.glob(pattern):
                    with suppress(OSError):  # the next look may find a disk with room
                        bound(log)

    async def _be_member(self) -> None:
        """A member of role supervisor, and the one who can harm the message server."""
        while True:
            bus = await until_done(self._connected, "the supervisor's bus", pauses=NATS_RETRIES)
            membership = Registration(bus, "supervisor", "supervisor", self.folder.lock)
            faults = FaultAgent(bus, "nats", enabled=self.chaos, abilities=self._abilities())
            try:
                await in_a_task(_serving(membership, faults))
            except* BusError as errors:
                self.told(f"the supervisor lost its place: {errors.exceptions[0]}")
            finally:
                try:
                    await membership.leave()
                finally:  # also where that was cut short: what is open would try again for ever
                    await bus.close()

    async def _connected(self) -> NatsBus:
        try:
            return await NatsBus.connect(self.nats.url, name="supervisor")
        except BusError as error:
            self.told(f"the supervisor is no member yet: {error}")
            raise

    def _abilities(self) -> Abilities:
        loop = asyncio.get_running_loop()

        def kill() -> None:
            self.killing = loop.create_task(self.nats.kill())

        def resume() -> None:
            if self.nats.running:  # else it died meanwhile, and starts anew
                self.nats.resume()

        def hang(seconds: float) -> None:
            """Of several at once the one that lasts longest ends it."""
            self.nats.pause()
            ends_at, known = loop.time() + seconds, self.resuming
            if known is not None and known.when() >= ends_at:
                return
            if known is not None:
                known.cancel()
            self.resuming = loop.call_at(ends_at, resume)

        return Abilities(kill=kill, hang=hang)

    # --- the end -------------------------------------------------------------------------------

    def waits_for(self) -> str:
        """While everything is stopped: for whom, and for how long at most."""
        others, learners = self._in_order_of_their_end()
        again = "Ctrl-C again ends everything at once"
        if living := [child.name for child in learners if child.pid is not None]:
            longest = f"{self.stop_s + CLOSING_S:.0f} s at most, to save their state"
            return f"waits for {_named(living)} to stop ({longest}); {again}"
        if living := [child.name for child in others if child.pid is not None]:
            return f"waits for {_named(living)} to stop; {again}"
        return "waits for the message server to stop"

    def _in_order_of_their_end(self) -> tuple[list[Child], list[Child]]:
        """(those that end last, learners, which need them)."""
        return self.children[: 1 + self.syncers], self.children[1 + self.syncers :]

    async def _stopped(self) -> None:
        """Stop everything; cancelled meanwhile, stop it at once. Nothing is left behind."""
        self.stopping = True
        stopping = asyncio.create_task(self._stop())
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                for child in self.children:
                    child.kill()

    async def _stop(self) -> None:
        """Learners first, the message server last."""
        self.folder.withdraw()
        others, learners = self._in_order_of_their_end()
        await asyncio.gather(*(child.stop() for child in learners))
        await asyncio.gather(*(child.stop() for child in others))
        await self.nats.stop(timeout_s=NATS_STOP_S)


def _named(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _stop_s() -> float:
    """What learners are granted to stop in, in seconds; they say themselves what is too little."""
    given = os.environ.get("DILOCO_STOP_S") or str(LEARNERS_STOP_S)
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise CliError(f"DILOCO_STOP_S: {given!r} is no number of seconds", INVALID)
    return seconds


def _inherited() -> dict[str, str]:
    """This process's environment without settings of ours that are meant for others."""
    kept = (
        "DILOCO_LOG",
        "DILOCO_LOG_FORMAT",
        "DILOCO_CRASH_AT",
        "DILOCO_CACHE",
        "DILOCO_CACHE_BYTES_MAX",
        "DILOCO_CHECKPOINT_ROOTS",
        "DILOCO_DATA_ROOT",
        "DILOCO_CORPORA",
        "DILOCO_CORPORA_BYTES_MAX",
        "DILOCO_MESH",
        "DILOCO_DUTY_CYCLE",
    )
    return {k: v for k, v in os.environ.items() if not k.startswith("DILOCO_") or k in kept}


def _check_crash_points() -> None:
    """Said here once, instead of by every child, for ever."""
    try:
        crash_points.parse(os.environ.get("DILOCO_CRASH_AT", ""))
    except ValueError as error:
        raise CliError(f"DILOCO_CRASH_AT: {error}", INVALID) from None


def free_port(port: int) -> int:
    """`port`, or any for 0; CliError before anything is started when it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            raise CliError(
                f"port {port} is taken: stop what listens there, or choose another with "
                "--port (0 for any)",
                CONFLICT,
            ) from None
        chosen: int = probe.getsockname()[1]
        return chosen


async def _serving(membership: Registration, faults: FaultAgent) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_registered(membership))
        tasks.create_task(faults.serve())


async def _registered(membership: Registration) -> None:
    """The buckets are the coordinator's to make: wait for them by trying."""
    await membership.register()
    await membership.keep()


async def started(stack: Stack, ready: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Wait until the coordinator answers; CliError after `timeout_s`."""
    await stack.up.wait()
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(ready):
        if time.monotonic() > deadline:
            said = last_line(stack.folder.logs / "coordinator.log")
            raise CliError(f"the coordinator does not answer: {said} (logs: {stack.folder.logs})")
        await asyncio.sleep(0.2)
