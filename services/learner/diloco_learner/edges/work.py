"""One learner working for one run: recover, train in a thread, carry messages, leave."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import structlog

from diloco_learner.anchors import AnchorBook
from diloco_learner.data.corpus import load
from diloco_learner.data.shards import Cut
from diloco_learner.edges.batches import Batches
from diloco_learner.edges.checkpoint import Checkpoints
from diloco_learner.edges.clocks import WaitClock
from diloco_learner.edges.downlink import Downlink
from diloco_learner.edges.mailbox import Mailbox
from diloco_learner.edges.shards import Leases
from diloco_learner.edges.uplink import Uplink
from diloco_learner.evaluate import held_out
from diloco_learner.events import (
    BeatSeen,
    Begin,
    GrantSeen,
    Leave,
    LoadState,
    RecoveryEffect,
    SendInit,
    SendJoin,
    Tell,
    TimePassed,
)
from diloco_learner.exchange import Exchange
from diloco_learner.model.named import to_named
from diloco_learner.recovery import Recovery
from diloco_learner.train import Anchored, Injected, TrainLoop
from diloco_learner.trainer import Program, Trainer
from diloco_shared.config import RunSpec, config_hash
from diloco_shared.edges.bus import Bus, BusError, Conflict, Refused
from diloco_shared.edges.faults import FaultAgent
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Grant, Incarnation, Progress
from diloco_shared.protocol.wire import WireError, decode, encode

log = structlog.get_logger()

# Between two attempts at a server that does not answer, in seconds.
RETRY_S = 0.3
# Between two looks at what the train thread hands out, in seconds: half a nano step.
LOOK_S = 0.005
# Progress messages a second at most: a nano step takes 10 ms, and newer ones replace older.
PROGRESS_S = 0.02


class Work:
    """From assignment to leave."""

    def __init__(
        self,
        spec: RunSpec,
        learner: str,
        boot: str,
        folder: Path,
        control: Bus,
        data: Bus,
        faults: FaultAgent,
    ) -> None:
        self.spec = spec
        self.learner = learner
        self.boot = boot
        self.folder = folder
        self.control = control
        self.data = data
        self.faults = faults
        self.injected = Injected()
        self.mailbox = Mailbox()
        self.events: asyncio.Queue[Any] = asyncio.Queue(4096)  # as many as the mailbox takes
        self.live: tuple[str, ...] = ()
        self.incarnation = -1
        self.last_progress: Progress | None = None
        self.loop_runs = False
        self.awaited: set[str] = set()  # nonces; one per join attempt
        self.state_tasks: list[asyncio.Task[None]] = []
        self.ended: asyncio.Future[Leave]

    # --- set-up --------------------------------------------------------------------------------

    async def run(self) -> Leave:
        """Work until the run is over or refuses this learner; raises what the train loop raised."""
        self.ended = asyncio.get_running_loop().create_future()
        self.incarnation = await self._next_incarnation()
        await self._streams()
        await asyncio.to_thread(self._build)
        async with asyncio.TaskGroup() as tasks:
            self.tasks = tasks
            background = [
                tasks.create_task(work)
                for work in (
                    self.down.beats(),
                    self.down.pulls(),
                    self.down.grants(),
                    self.down.donations(),
                    self.down.publications(),
                    self.leases.supply(),
                    self._heartbeats(),
                )
            ]
            leave = await self._recover()
            if leave is None:
                background += [tasks.create_task(self._deliver()), tasks.create_task(self._hand())]
                leave = await self._train()
            for task in background + self.state_tasks:
                task.cancel()
            await self._clear_out()
        await self.leases.release()
        await asyncio.to_thread(self.checkpoints.close)
        return leave

    async def _next_incarnation(self) -> int:
        """This life's number, by compare-and-set: no two processes ever have the same."""
        key = f"{self.spec.name}.{self.learner}"
        while True:
            try:
                entry = await self.control.kv_get(subjects.INCARNATIONS, key)
                if entry is None or entry.value is None:
                    number, revision = 0, None
                else:
                    number = decode(entry.value, Incarnation).incarnation + 1
                    revision = entry.revision
                value = encode(
                    Incarnation(
                        learner=self.learner, incarnation=number, boot=self.boot, at=time.time()
                    )
                )
                if revision is None:
                    await self.control.kv_create(subjects.INCARNATIONS, key, value)
                else:
                    await self.control.kv_update(subjects.INCARNATIONS, key, value, revision)
                return number
            except Conflict:
                continue  # another process was first: take the next number
            except BusError as error:
                log.warning("no incarnation yet", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _streams(self) -> None:
        """Wait until the syncer has created the run's streams."""
        while True:
            try:
                for stream in subjects.run_streams(self.spec.name):
                    await self.data.stream_info(stream)
                return
            except (Refused, BusError) as error:
                log.debug("streams not there yet", error=str(error))
                await asyncio.sleep(RETRY_S)

    def _build(self) -> None:
        """Everything that computes: off the event loop, since compiling takes seconds."""
        spec = self.spec
        corpus = load(spec.data)
        cut = Cut(corpus.train, spec.data.virtual_shards, spec.model.context_tokens, spec.seed)
        sequences = spec.inner.batch_sequences * spec.inner.accumulation
        self.batches = Batches(cut, sequences)
        self.held_out = held_out(
            corpus.validation, spec.model.context_tokens, spec.evaluation.sequences, spec.seed
        )
        self.program = Program.build(spec)
        self.trainer = Trainer(self.program)
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints" / spec.name, spec.keeping.checkpoints
        )
        sizes_P = self.program.layout.sizes
        self.book = AnchorBook(sizes_P)
        self.leases = Leases(
            self.control, spec, self.learner, self.incarnation, self.batches, lambda: self.live
        )
        self.up = Uplink(
            spec,
            self.learner,
            self.incarnation,
            self.control,
            self.data,
            sizes_P,
            self.checkpoints,
            self.leases,
        )
        self.down = Downlink(
            spec.name,
            self.learner,
            self.incarnation,
            config_hash(spec),
            self.control,
            self.data,
            self.book,
            self._put,
        )

    def _put(self, event: Any) -> None:
        if isinstance(event, BeatSeen):
            self.live = event.beat.live
        if self.loop_runs:
            if not self.mailbox.put(event):
                log.error("mailbox full: an arrival is lost", event=type(event).__name__)
        elif self.events.full():
            log.error("queue full: an arrival is lost", event=type(event).__name__)
        else:
            self.events.put_nowait(event)

    # --- recovery ------------------------------------------------------------------------------

    async def _recover(self) -> Leave | None:
        """Drive the recovery machine to Begin (None) or Leave."""
        warm = self.tasks.create_task(asyncio.to_thread(self._warm_up))
        self.recovery = Recovery(
            self.spec,
            self.learner,
            self.incarnation,
            has_checkpoint=self.checkpoints.newest is not None,
            nonce_seed=self.boot,
        )
        pending: list[Any] = [TimePassed()]
        while True:
            for event in pending:
                if isinstance(event, GrantSeen):
                    self._expect_state(event.grant)
                machine_event = event.ready if isinstance(event, Anchored) else event
                for effect in self.recovery.handle(machine_event, time.monotonic()):
                    if isinstance(effect, Leave):
                        return effect
                    if isinstance(effect, Begin):
                        await warm
                        await self._begin(effect)
                        return None
                    await self._perform(effect)
            pending = [await self._next()]

    def _warm_up(self) -> None:
        self.trainer.warm_up(self.batches.sequences)

    async def _next(self) -> Any:
        deadline = self.recovery.deadline
        wait_s = 1.0 if deadline is None else max(deadline - time.monotonic(), 0.001)
        try:
            return await asyncio.wait_for(self.events.get(), wait_s)
        except TimeoutError:
            return TimePassed()

    async def _perform(self, effect: RecoveryEffect) -> None:
        match effect:
            case SendJoin():
                try:
                    await self.control.publish(subjects.join(self.spec.name), encode(effect.join))
                except BusError as error:
                    log.debug("join not sent", error=str(error))
            case SendInit():
                fragments = await asyncio.to_thread(self.trainer.initial_fragments)
                self.tasks.create_task(
                    self._send_init([values_F.tobytes() for values_F in fragments])
                )
            case LoadState():
                await asyncio.to_thread(self._load_state, effect)
            case Tell():
                await self.up.tell(effect.kind, effect.text, effect.data)
            case _:
                pass

    async def _send_init(self, fragments: list[bytes]) -> None:
        try:
            await self.up.initial(self.program.layout.tensors, fragments)
        except BusError as error:
            log.warning("initial parameters not sent", error=str(error))

    def _expect_state(self, grant: Grant) -> None:
        """A grant names a donor: look out for its inner state from now on."""
        if grant.accepted and grant.donor and grant.nonce not in self.awaited:
            self.awaited.add(grant.nonce)
            self.state_tasks.append(
                self.tasks.create_task(self.down.state(grant.donor, grant.nonce))
            )

    def _load_state(self, effect: LoadState) -> None:
        if effect.source == "donor":
            data = self.down.states.get(effect.nonce)
            assert data is not None, f"no inner state under nonce {effect.nonce}"
            self.trainer.load_inner_state(data)
        elif effect.source == "checkpoint":
            saved = self.checkpoints.load(to_named(self.trainer.opt_state))
            if saved is not None:
                self.trainer.load_inner_state(saved)
            else:
                log.warning("no sound checkpoint: fresh moments")

    async def _begin(self, begin: Begin) -> None:
        """Adopt the anchors; from here on the train thread owns the trainer."""
        versions = self.book.versions
        for p, version in enumerate(versions):
            anchor_F = self.book.take(self.book.epoch, p, version)
            await asyncio.to_thread(self.trainer.adopt, p, anchor_F, 0.0)
        self.exchange = Exchange(
            self.spec,
            self.learner,
            self.incarnation,
            self.book.epoch,
            versions,
            begin.stamp,
            time.monotonic(),
        )
        await self.leases.first()
        self.tasks.create_task(self.down.forget_state())
        self.loop_runs = True
        while not self.events.empty():
            self.mailbox.put(self.events.get_nowait())

    # --- training ------------------------------------------------------------------------------

    async def _train(self) -> Leave:
        loop = asyncio.get_running_loop()
        waiting = WaitClock()
        self.train_loop = TrainLoop(
            self.trainer,
            self.exchange,
            self.batches,
            self.held_out,
            self.mailbox,
            now=time.monotonic,
            sleep=time.sleep,
            waiting=waiting,
            injected=self.injected,
        )

        def body() -> None:
            try:
                leave = self.train_loop.run()
                loop.call_soon_threadsafe(self.ended.set_result, leave)
            except BaseException as error:
                loop.call_soon_threadsafe(self.ended.set_exception, error)

        threading.Thread(target=body, name="train", daemon=True).start()
        return await self.ended

    async def _hand(self) -> None:
        """Carry what the train thread hands out, for ever."""
        while True:
            for item in self.mailbox.collect():
                self.tasks.create_task(self.up.send(item))
            await asyncio.sleep(LOOK_S)

    async def _deliver(self) -> None:
        """Send the newest progress, and let faults know the step, for ever."""
        while True:
            progress = self.mailbox.newest_progress()
            if progress is not None:
                self.last_progress = progress
                self.faults.stepped(progress.step)
                await self._send_progress(progress)
            await asyncio.sleep(PROGRESS_S)

    async def _send_progress(self, progress: Progress) -> None:
        try:
            await self.control.publish(
                subjects.progress(self.spec.name, self.learner), encode(progress)
            )
        except (BusError, WireError) as error:
            log.debug("progress not sent", error=str(error))

    async def _heartbeats(self) -> None:
        """While recovering, compiling or evaluating: still here, for ever."""
        sent: Progress | None = None
        while True:
            await asyncio.sleep(self.spec.membership.heartbeat_s)
            if self.last_progress is None:
                await self._send_progress(self._not_yet())
            elif self.last_progress is sent:
                await self._send_progress(self.last_progress)
            sent = self.last_progress

    def _not_yet(self) -> Progress:
        zeros = (0,) * self.spec.algorithm.fragments
        return Progress(
            learner=self.learner,
            incarnation=self.incarnation,
            epoch=self.book.epoch,
            state="recovering" if min(self.book.versions) >= 0 else "joining",
            step=0,
            tokens=0,
            c_steps=zeros,
            c_tokens=zeros,
            adopted=tuple(-1 for _ in zeros),
            adopted_at=zeros,
            loss=float("nan"),
            step_s=0.0,
            wait_s=0.0,
        )

    async def _clear_out(self) -> None:
        """The last results and the last word of the train thread."""
        progress = self.mailbox.newest_progress()
        if progress is not None:
            await self._send_progress(progress)
        for item in self.mailbox.collect():
            await self.up.send(item)

    def health(self) -> dict[str, Any]:
        """What a probe or the member list shows."""
        p = self.last_progress
        shown: dict[str, Any] = {"run": self.spec.name, "incarnation": self.incarnation}
        if p is not None:
            shown |= {"state": p.state, "step": p.step, "wait_s": p.wait_s}
        return shown
