"""One learner working for one run: recover, train, carry messages, leave."""

import asyncio
import contextvars
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import structlog

from diloco_learner.context import RunContext
from diloco_learner.data.leasing_io import Leases
from diloco_learner.events import (
    BeatSeen,
    Checkpoint,
    Contribute,
    DonateSeen,
    Evaluate,
    GiveState,
    Leave,
)
from diloco_learner.exchange.anchors import AnchorBook
from diloco_learner.exchange.downlink_io import Downlink
from diloco_learner.exchange.evaluations_io import Evaluations
from diloco_learner.exchange.exchange import Exchange
from diloco_learner.exchange.reporter_io import Reporter
from diloco_learner.exchange.uplink_io import Uplink
from diloco_learner.preflight.findings import told
from diloco_learner.recovery.checkpoint_io import LocalCheckpoints, OwnCheckpoints
from diloco_learner.recovery.incarnation_io import take_incarnation
from diloco_learner.recovery.moments import Handed
from diloco_learner.recovery.recoverer_io import Begun, Recoverer, RecoveryArrivals
from diloco_learner.recovery.recovery import OwnModel, Recovery
from diloco_learner.settings import STOP_S
from diloco_learner.training.computing_io import Built, Computing, LeftBehind, WaitClock
from diloco_learner.training.mailbox_io import Mailbox
from diloco_learner.training.speed import Arithmetic, report
from diloco_learner.training.train import Clocks, Injected, Keeper, OwnKeeping, ToSend, TrainLoop
from diloco_shared import ambient
from diloco_shared.budget.terms import shown
from diloco_shared.bus.port import BusError, Traffic
from diloco_shared.bus.repeating import PROMPT, until_done
from diloco_shared.bus.status_key import shown as shown_of
from diloco_shared.process.chaos import FaultAgent
from diloco_shared.process.disk_room import DiskRoom
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Beat, Progress, SocketBytes
from diloco_shared.protocol.records import LearnerSpeed, RunStatus
from diloco_shared.protocol.run_states import OVER
from diloco_shared.spec.run import RunSpec

T = TypeVar("T")

log = structlog.get_logger()

# Between two looks at what the train thread hands out, in seconds: half a nano step.
HAND_S = 0.005
# In a learner's data folder: one folder per run.
CHECKPOINTS = "checkpoints"
# How a learner leaves whose contributions no merge takes any more: their epoch is void, or this
# life is, or the run has merged its last round.
VOID = frozenset({"restored", "superseded", *OVER})
# Why it leaves where nobody merges anything any more.
RUN_OVER = "the run is over"
UNSAVED = "leaves without having saved its moments"
# Of the seconds that a process has to stop, so many are for giving back its shards. The others are
# for its step and its last checkpoint.
RELEASE_S = 1.5
# No checkpoint is taken to be written faster, in bytes a second: as one of 94 GB in 47 s, on quick
# disks of a server.
QUICK_BYTES_PER_S = 2_000_000_000


class Unfit(Exception):
    """Model or data of the run cannot be had in this process as it is; the text says why."""


def counting(control: Traffic, data: Traffic) -> Callable[[], SocketBytes]:
    """Tells what crossed both planes' sockets from now on."""

    def read() -> dict[str, int]:
        return {
            "data_up": data.socket_bytes_out,
            "data_down": data.socket_bytes_in,
            "control_up": control.socket_bytes_out,
            "control_down": control.socket_bytes_in,
        }

    before = read()
    return lambda: SocketBytes(**{name: now - before[name] for name, now in read().items()})


class Work:
    """From assignment to leave."""

    def __init__(
        self,
        context: RunContext,
        faults: FaultAgent,
        computing: Computing,
    ) -> None:
        self.context = context
        self.spec = context.spec
        self.control, self.data = context.control, context.data
        self.faults = faults
        self.computing = computing
        self.injected, self.mailbox = Injected(), Mailbox()
        self.fit: Callable[[], None] = lambda: None  # called once model and data are there
        # Called for as long as the run's last evaluation is this learner's to make.
        self.evaluates: Callable[[], None] = lambda: None
        self.reads_beginning = False  # what the run began from, however far the run is
        self.begun = False  # the run, so far that nothing of that is read
        self.stop_s = STOP_S  # in which it stops when the process is told to
        self.events = RecoveryArrivals()
        self.beat: Beat | None = None
        self.beat_at = -math.inf
        self.built, self.stopping = False, ""
        self.run_over = False  # it was told to leave since nobody merges anything any more
        self.shared: Keeper | None = None  # of its checkpoints, where all hosts write them
        self.train_loop: TrainLoop | None = None
        self.ended: asyncio.Task[Leave] | None = None
        # Carried out whether or not anybody waits: as many as the mailbox has handed out, and few
        # take long. Not the items: a state's memory goes with its task.
        self.carried: dict[asyncio.Task[None], Any] = {}
        self.tasks: asyncio.TaskGroup
        # That hold, or are to hold, something of a device: see `_apart`.
        self.threads: set[asyncio.Future[Any]] = set()
        self.is_over = False

    # --- from outside --------------------------------------------------------------------------

    def over(self) -> set[asyncio.Future[Any]]:
        """Nobody works with it any more. The threads that are at work for it all the same: they
        look now and then whether it is over."""
        self.is_over = True
        return self.threads | (self.up.hanging if self.built else set())

    def check(self) -> None:
        """Of these threads: raises LeftBehind once it is over."""
        if self.is_over:
            raise LeftBehind("the work for this run is over")

    def withdraw(self, reason: str, *, run_over: bool = False) -> None:
        """Leave at the next step boundary although the run may go on.

        `run_over`: nobody merges anything of the run any more. It may have left already, and wait
        for what it still sends.
        """
        self.stopping, self.run_over = reason, self.run_over or run_over
        if self.run_over and self.built:
            self.up.stop_contributing()
        if self.train_loop is not None:
            self.train_loop.stopping = reason

    def drain(self, reason: str) -> None:
        """Leave once what this learner has done is merged, if it has done anything."""
        if self.train_loop is None:
            self.withdraw(reason)
        else:
            self.train_loop.draining = reason

    @property
    def leaves(self) -> bool:
        """Whether it was told to leave, now or once its work is merged."""
        loop = self.train_loop
        return bool(self.stopping or (loop is not None and (loop.stopping or loop.draining)))

    @property
    def run_ends(self) -> bool:
        """Whether the run itself ends this work, within a limit of its own."""
        return self.beat is not None and self.beat.state in OVER

    @property
    def last_progress(self) -> Progress | None:
        return self.reporter.last if self.built else None

    @property
    def room(self) -> DiskRoom | None:
        """For its checkpoints, once it is known how large they are."""
        return self.checkpoints.room if self.built else None

    def health(self) -> dict[str, Any]:
        """What a probe or the member list shows."""
        shown: dict[str, Any] = {"run": self.spec.name, "incarnation": self.context.incarnation}
        p = self.last_progress
        if p is not None:
            shown |= p.model_dump(include={"state", "step", "steps_skipped", "wait_s"})
        if self.train_loop is not None:
            shown |= {"paused_s": self.train_loop.paused_s, "injected_s": self.injected.seconds}
        if self.built:
            shown |= {
                "shard_repeats": self.batches.repeats,
                "sequences_unleased": self.batches.unleased,
                "sequences_left_out": self.batches.left_out.total,
                "mailbox_dropped": self.mailbox.dropped,
                "publications_refused": dict(self.book.refused),
            }
        if (speed := self.speed()) is not None:
            shown["speed"] = speed.model_dump(exclude={"run", "learner", "incarnation"})
        return shown

    def speed(self) -> LearnerSpeed | None:
        """How fast it trains, and on what; None before it begins, or where no device computes."""
        loop = self.train_loop
        island = None if loop is None else self.computing.island()
        if loop is None or island is None:
            return None
        me, incarnation = self.context.me, self.context.incarnation
        return report(loop.speed, island, self.arithmetic, self.spec.name, me, incarnation)

    # --- the whole of it -----------------------------------------------------------------------

    async def run(self) -> Leave:
        """Until the run is over, or refuses this learner: Unfit, or what the train loop raised."""
        me, boot = self.context.me, self.context.boot
        incarnation = await take_incarnation(self.control, self.spec.name, me, boot)
        self.context = replace(self.context, incarnation=incarnation)
        log.info("works", run=self.spec.name, incarnation=incarnation)
        self.begun = await self._is_begun()
        try:
            await self._apart(self._build)
        # A model or data of the user's own may raise anything, or want to end the process.
        except (Exception, SystemExit) as error:
            raise Unfit(told(error)[:400]) from error
        self.fit()
        await self._streams()
        self._connect()
        try:
            async with asyncio.TaskGroup() as self.tasks:
                leave = await self._recover_and_train()
        except asyncio.CancelledError:
            await self._withdraw_now()
            raise
        await self.leases.release()
        await self.evaluations.end()
        return leave

    async def _recover_and_train(self) -> Leave:
        warm = self._start(self._apart(self.trainer.warm_up, self.batches.sequences))
        serving = [self._start(work) for work in self._services()]
        ended = await self._recover()
        if isinstance(ended, Begun):
            await warm
            await self._begin(ended)
            del ended  # its anchors are the trainer's from now on, until newer ones come
            serving += [
                self._start(self.reporter.newest()),
                self._start(self._hand()),
                self._start(self.reporter.speeds(self.speed)),
                self._start(self.evaluations.serve()),
            ]
            leave = await self._train_or_tell()
        else:
            leave = ended
        for task in serving:
            task.cancel()
        await self._clear_out()
        return leave

    async def _recover(self) -> Begun | Leave:
        self.reporter.recovery = recovery = self._recovery()
        up, down = self.up, self.down
        return await Recoverer(
            recovery, self.trainer, self.checkpoints, self.control, up, down, self.events
        ).run()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.tasks.create_task(work)

    async def _apart(self, work: Callable[..., T], *args: Any) -> T:
        """In a thread. No thread can be ended: where nobody waits for it any more, it is one of
        `threads` until it ends by itself, and nobody asks what became of it."""
        given, found, failed = [partial(work, *args)], list[T](), list[Exception | SystemExit]()

        def body() -> None:
            try:
                # Taken out: a thread that has told that it ended may still hold this function.
                found.append(given.pop()())
            except (Exception, SystemExit) as error:
                failed.append(error)

        loop, known = asyncio.get_running_loop(), contextvars.copy_context()
        thread = loop.run_in_executor(None, partial(known.run, body))
        self.threads.add(thread)
        thread.add_done_callback(self.threads.discard)
        await asyncio.shield(thread)
        if failed:
            raise failed.pop()  # it knows this frame: they would keep each other, and all it holds
        return found.pop()

    def _services(self) -> list[Coroutine[Any, Any, None]]:
        """What runs from the first moment to the last."""
        return [
            self.down.beats(),
            self.down.pulls(),
            self.down.grants(),
            self.down.donations(),
            self.down.publications(),
            self._heed_untold_end(),
            self.leases.supply(),
            self.reporter.heartbeats(),
        ]

    async def _heed_untold_end(self) -> None:
        await self.down.untold_end()
        self.withdraw(RUN_OVER, run_over=True)

    # --- set-up --------------------------------------------------------------------------------

    async def _streams(self) -> None:
        """Wait until the syncer has created the run's streams."""

        async def look() -> None:
            for stream in subjects.run_streams(self.spec.name):
                await self.data.stream_info(stream)

        await until_done(look, "streams of the run", pauses=PROMPT)

    async def _is_begun(self) -> bool:
        """Whether a run that began from weights is shown to have merged every fragment since.

        Then its learners need nothing but its anchors, and those weights may be gone. Of a run that
        begins from its seed the same parameters are made at any time.
        """
        spec = self.spec
        if not spec.model.weights or self.reads_beginning:
            return False
        try:
            for shard in range(spec.algorithm.shards):
                status = await shown_of(self.control, spec.name, spec.id, shard)
                if not merged(status, spec, shard):
                    return False
        except BusError:
            return False
        return True

    def _build(self) -> None:
        """Everything that computes: off the event loop, since compiling takes seconds."""
        built = self.computing.build(self.spec, self.check, begun=self.begun)
        self.trainer, self.batches = built.trainer, built.batches
        self.held_out = built.held_out
        for text in built.warnings:
            log.warning(text)
        self.checkpoints = self._checkpoints(built)
        self.checkpoints.room.needed = self.trainer.inner_state_bytes
        parameters = sum(self.trainer.program.layout.sizes)
        self.arithmetic = Arithmetic.of(self.spec.model, parameters)
        if why := too_long(self._saved_here, self.stop_s - RELEASE_S):
            log.warning("to stop in order will take longer than it may", reason=why)

    def _checkpoints(self, built: Built) -> OwnCheckpoints:
        many = self.spec.keeping.checkpoints
        if built.keeper is None:
            folder = self.context.folder / CHECKPOINTS / self.spec.folder
            return LocalCheckpoints(folder, many, lambda: not self.run_over)
        name = f"{self.spec.folder}/{self.context.me}"
        kept = built.keeper(name, self.context.incarnation, many)
        self.shared = kept
        return cast(OwnCheckpoints, kept)

    def _connect(self) -> None:
        context = self.context
        self.book = AnchorBook(sizes_P := self.trainer.program.layout.sizes, self.trainer.hold)
        self.leases = Leases(
            context,
            self.batches,
            lambda: self.beat.live if self.beat else (),
            lambda kind, text, data: self.up.tell(kind, text, data),
            # The first shard comes whatever was said: nothing begins, and nothing ends, without it.
            lambda: self.train_loop is not None and self.leaves,
            # There is one in each heartbeat. Who has missed two may have missed who is back.
            lambda: ambient.monotonic() - self.beat_at <= 2 * self.spec.membership.heartbeat_s,
        )
        self.up = Uplink(context, sizes_P, self.checkpoints, self.leases, self._put)
        over = not self.spec.evaluation.beside_training
        self.evaluations = Evaluations(self.computing, self.up.tell, self._put, evaluated=over)
        check = self.trainer.check_inner_state
        initial = None if self.begun else self.trainer.fragment
        self.down = Downlink(context, self.book, self._put, check, initial)
        sockets = counting(self.control.traffic, self.data.traffic)
        self.reporter = Reporter(context, self.mailbox, self.book, self.faults, sockets)
        self.down.state_bytes = self.reporter.state_bytes = self.checkpoints.room.needed
        self.built = True
        if why := self.checkpoints.fault:
            self.up.tell_soon("checkpoint-failed", why, {})

    def _put(self, event: Any) -> None:
        put = self.events.leave if self.train_loop is None else self.mailbox.put
        if not put(event):
            log.error("too much waits: an arrival is dropped", arrival=type(event).__name__)
        elif isinstance(event, BeatSeen):
            self.beat, self.beat_at = event.beat, ambient.monotonic()
            self.up.outlived(event.beat.incarnations)
            if event.beat.state in OVER and event.beat.evaluator == self.context.me:
                self.evaluates()
        elif isinstance(event, DonateSeen):
            self.up.asked(event.donate)

    def _recovery(self) -> Recovery:
        return Recovery(
            self.spec,
            self.context.me,
            self.context.incarnation,
            OwnModel(
                self.trainer.program.layout.digest(),
                self.trainer.inner_state_bytes,
                sum(self.trainer.program.layout.sizes),
            ),
            has_checkpoint=self.checkpoints.newest is not None,
            nonce_seed=f"{self.context.boot}-{self.context.incarnation}",
            initial=not self.begun,
        )

    # --- training ------------------------------------------------------------------------------

    async def _begin(self, begun: Begun) -> None:
        """Adopt the anchors; from here on the train thread owns the trainer."""
        begin = begun.begin
        await self.down.no_initial()
        for p, anchor_F in enumerate(begun.anchors):
            await self._apart(self.trainer.adopt, p, anchor_F, 0.0)
        exchange = Exchange(
            self.spec,
            self.context.me,
            self.context.incarnation,
            begin,
            ambient.monotonic(),
        )
        self._start(self.down.forget_state())
        await self.leases.first(gone_back=begin.restore > 0)
        loop = TrainLoop(
            self.trainer,
            exchange,
            self.batches,
            self.held_out,
            self.mailbox,
            Clocks(ambient.monotonic, WaitClock()),
            self.injected,
            OwnKeeping(self.shared, lambda: self.up.own_disk.hanging is not None),
        )
        loop.stopping = self.stopping
        self.train_loop = loop
        self.reporter.stepping_at = ambient.monotonic()
        recovery = self.reporter.recovery
        if recovery is not None and recovery.beat is not None:
            # The next one may be long in coming: a run that is paused must not be stepped until
            # then, and a mark that it carries is known as a new one.
            self.mailbox.put(BeatSeen(recovery.beat))
        while not self.events.empty():
            self.mailbox.put(self.events.get_nowait())

    async def _train_or_tell(self) -> Leave:
        try:
            return await self._train()
        except Exception as error:
            # The process ends with this: what the thread said before must not be lost with it.
            self.up.tell_soon("train-failed", f"{type(error).__name__}: {error}"[:500], {})
            await self._clear_out()
            raise

    async def _train(self) -> Leave:
        assert self.train_loop is not None
        training = self.computing.train(self.train_loop, self.mailbox)
        self.ended = asyncio.get_running_loop().create_task(training)
        # Shielded: a process that is told to stop still waits for its last step.
        return await asyncio.shield(self.ended)

    async def _hand(self) -> None:
        """Carry what the train thread hands out, for ever: the one who looks whether it has."""
        while True:
            self.reporter.look()
            for item in self.mailbox.collect():
                if isinstance(item.effect, Evaluate):
                    self.evaluations.take(item)
                elif isinstance(item.effect, Contribute | GiveState):
                    self._start(self.up.send(item))
                else:
                    self._start(_over(self._carry(item)))
                del item  # what it holds is large, and this waits
            await self.computing.handed(HAND_S)

    async def _clear_out(self) -> None:
        """The last results and the last word of the train thread.

        All at once: an upload may take what seconds there are, and the moments are to be saved.
        Whoever is told to stop while this is under way comes here again, and waits for the rest.
        """
        self.up.stop_giving()
        if self._is_void:
            self.up.stop_contributing()
        self.evaluations.stop()  # the last one was told before the train thread left
        await self.reporter.flush()
        sending = list[Awaitable[None]](map(asyncio.shield, self.carried))
        for item in self.mailbox.collect():
            if isinstance(item.effect, Contribute):
                sending.append(self.up.send(item))
            elif not isinstance(item.effect, GiveState | Evaluate):
                sending.append(self._carry(item))
            elif isinstance(item.handle, Handed):
                item.handle.let_go()
        await asyncio.gather(*sending)
        await self.up.told()

    @property
    def _is_void(self) -> bool:
        """Whether no merge takes anything of this life any more."""
        left = None if self.train_loop is None else self.train_loop.left
        return self.run_over or (left is not None and left.outcome in VOID)

    def _carry(self, item: ToSend) -> Awaitable[None]:
        """Begin to send it, to be waited for. Where whoever waits is cancelled, it goes on: a
        checkpoint's thread does, too, and nobody else says the last word."""
        task = asyncio.get_running_loop().create_task(self.up.send(item))
        self.carried[task] = item.effect
        task.add_done_callback(self.carried.pop)
        return asyncio.shield(task)

    @property
    def _unsaved(self) -> bool:
        return any(isinstance(effect, Checkpoint) for effect in self.carried.values())

    async def _withdraw_now(self) -> None:
        """Cancelled: end the train thread, say good-bye, give the shards back.

        However long a step and the last checkpoint take, the shards are given back.
        """
        self.withdraw("the process is told to stop")
        within_s = self.stop_s - RELEASE_S
        if why := self._never_saved(within_s):
            log.warning("it may leave without saving its moments", reason=why)
        try:
            async with asyncio.timeout(within_s):
                if self.ended is not None:
                    await asyncio.wait({self.ended})
                await self._clear_out()
        except TimeoutError:
            if self.ended is not None and not self.ended.done():
                log.warning(UNSAVED, during="a step", after_s=within_s)
            elif self._unsaved:
                log.warning(UNSAVED, during="its last checkpoint", after_s=within_s)
            elif self.ended is not None:
                log.warning("leaves with an upload that is not whole", after_s=within_s)
        except BusError:
            pass
        with suppress(TimeoutError, BusError):
            async with asyncio.timeout(RELEASE_S):
                await self.leases.release()
                await self.evaluations.end()

    def _never_saved(self, within_s: float) -> str:
        """Why the last checkpoint takes longer than that, as far as is known; ""."""
        if self.train_loop is None:
            return ""  # there is nothing to save
        step_s, took_s = self.train_loop.exchange.step_s, self.up.own_disk.took_s
        return too_long(self._saved_here, within_s, step_s, took_s)

    @property
    def _saved_here(self) -> int:
        """Bytes of a checkpoint where this process writes all of it; 0 where each host its part."""
        return 0 if self.shared is not None else self.checkpoints.room.needed


def merged(status: RunStatus | None, spec: RunSpec, shard: int) -> bool:
    """Whether every fragment of a syncer shard has a version behind the first one."""
    if status is None or len(status.versions) != spec.algorithm.fragments:
        return False
    return all(status.versions[p] > 0 for p in spec.algorithm.owned(shard))


def too_long(size: int, within_s: float, step_s: float = 0.0, took_s: float = 0.0) -> str:
    """Why a step of `step_s` and a checkpoint of so many bytes take longer than that; "".

    `took_s`: what one took before; 0 where none was written yet.
    """
    save_s = took_s or size / QUICK_BYTES_PER_S
    if step_s + save_s <= within_s:
        return ""
    step = f"a step takes {step_s:.2g} s, and " if step_s else ""
    kind = "" if took_s else "at least "
    return (
        f"{step}to save {shown(size)} {kind}{save_s:.2g} s, and there are {within_s:.2g} s for it: "
        "set DILOCO_STOP_S higher, and let this process's supervisor wait longer than that"
    )


async def _over(carried: Awaitable[None]) -> None:
    """Once it is; what it raises ends this."""
    await carried
