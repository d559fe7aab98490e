"""Brings a learner from its incarnation to its first step: feeds `Recovery`, does what it says."""

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog

from diloco_learner.events import (
    Begin,
    CheckpointLoaded,
    InitMoved,
    Leave,
    LoadState,
    RecoveryEffect,
    SendInit,
    SendJoin,
    Tell,
    TimePassed,
)
from diloco_learner.exchange.arrivals import essence, heavy, repeated
from diloco_learner.exchange.downlink_io import Downlink
from diloco_learner.exchange.uplink_io import Uplink
from diloco_learner.hosts.giving_io import SharedStateUpload
from diloco_learner.recovery.checkpoint_io import OwnCheckpoints, epoch_of, read_part
from diloco_learner.recovery.recovery import Recovery
from diloco_learner.training.train import Anchored, Values
from diloco_learner.training.trainer import Trainer
from diloco_shared import ambient
from diloco_shared.bus.port import Bus, BusError, TransferProgress
from diloco_shared.bus.repeating import left_undone
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Join, Restored
from diloco_shared.protocol.wire import encode

log = structlog.get_logger()

# Between two looks at how far the initial parameters are, in seconds.
LOOK_S = 1.0
# Initial fragments under way: one whose chunks are sent, one before it whose manifest is, and one
# that is made meanwhile. Each is a copy in the host's memory.
INIT_AHEAD = 3
# Of so many repeats of a join one is said as release 0.2 hears it too.
UNSIGNED_EVERY = 4


@dataclass(frozen=True, slots=True)
class Begun:
    """Recovered; the trainer holds the inner state, and these are the anchors to begin with."""

    begin: Begin
    anchors: tuple[Values, ...]  # per fragment


class Recoverer:
    """One recovery. `run` ends with Begun, or Leave when the run does not want this learner."""

    def __init__(
        self,
        recovery: Recovery,
        trainer: Trainer,
        checkpoints: OwnCheckpoints,
        control: Bus,
        up: Uplink,
        down: Downlink,
        events: "asyncio.Queue[Any]",
    ) -> None:
        self.recovery = recovery
        self.trainer = trainer
        self.checkpoints = checkpoints
        self.control = control
        self.up = up
        self.down = down
        self.events = events
        # The newest per fragment, which is the one that Begin names: 4 bytes x N in all.
        self.anchors: dict[tuple[int, int, int], Values] = {}
        self.init: asyncio.Task[None] | None = None
        self.init_stored: list[TransferProgress] = []  # how far each fragment is
        self.state: asyncio.Task[None] | None = None
        self.loaded: dict[str, str] = {}  # digest of the inner state that a donor gave
        self.awaited: tuple[str, str] | None = None  # donor and nonce that `state` waits for
        self.joined: Join | None = None  # said last
        self.unanswered = 0  # how often it was said again
        self.tasks: asyncio.TaskGroup

    async def run(self) -> Begun | Leave:
        """Until the learner can take its first step, or must leave; then nothing loads any more."""
        async with asyncio.TaskGroup() as self.tasks:
            ended = await self._drive()
            for task in (self.init, self.state):
                if task is not None:
                    task.cancel()
        return ended

    async def _drive(self) -> Begun | Leave:
        event: Any = TimePassed()
        while True:
            for effect in self._handle(event):
                if isinstance(effect, Leave):
                    return effect
                if isinstance(effect, Begin):
                    return Begun(effect, self._begin_with(effect))
                await self._perform(effect)
            event = await self._next()

    def _handle(self, event: Any) -> list[RecoveryEffect]:
        if isinstance(event, Anchored):
            r = event.ready
            self.anchors[(r.epoch, r.fragment, r.version)] = event.values_F
            held = sorted(key for key in self.anchors if key[1] == r.fragment)
            for key in held[:-1]:
                del self.anchors[key]
            event = r
        effects = self.recovery.handle(event, ambient.monotonic())
        self._expect_state()
        return effects

    def _begin_with(self, begin: Begin) -> tuple[Values, ...]:
        return tuple(self.anchors[(begin.epoch, p, v)] for p, v in enumerate(begin.versions))

    async def _next(self) -> Any:
        deadline = self.recovery.deadline
        wait_s = 1.0 if deadline is None else max(deadline - ambient.monotonic(), 0.001)
        # Not wait_for: in Python 3.11 it loses a cancellation that comes together with an event.
        try:
            async with asyncio.timeout(wait_s):
                return await self.events.get()
        except TimeoutError:
            return TimePassed()

    async def _perform(self, effect: RecoveryEffect) -> None:
        match effect:
            case SendJoin():
                with left_undone("join"):
                    await self._join(effect.join)
            case SendInit():
                if self.init is None or self.init.done():
                    self.init = self.tasks.create_task(self._send_init())
            case LoadState():
                await self._load_state(effect)
            case Tell():
                # Not awaited: a slow log must not delay the first step.
                self.up.tell_soon(effect.kind, effect.text, effect.data | self.loaded)

    async def _join(self, join: Join) -> None:
        run = self.recovery.spec.name
        await self.control.publish(subjects.join(run, join.learner), encode(join))
        self.unanswered = self.unanswered + 1 if join == self.joined else 0
        # The syncer may be of release 0.2, which has no credentials. Not each time: all that a
        # syncer hears comes twice then, for as long as nobody can answer.
        if self.unanswered % UNSIGNED_EVERY == 1 and not self.control.named:
            await self.control.publish(subjects.unsigned_join(run), encode(join))
        self.joined = join

    async def _send_init(self) -> None:
        """Every fragment; asked again, it sends those that are not there.

        Trouble with one of them ends none of the others: what they have stored would be sent again.
        """
        watching = self.tasks.create_task(self._watch_init())
        fragments = range(len(self.trainer.program.layout.fragments))
        self.init_stored = [TransferProgress() for _ in fragments]
        ahead = asyncio.Semaphore(INIT_AHEAD)
        try:
            async with asyncio.TaskGroup() as sending:
                for p in fragments:
                    await ahead.acquire()
                    if await self.up.has_initial(p):  # other hosts would give their share again
                        ahead.release()
                        continue
                    payload = await asyncio.to_thread(self.trainer.initial_fragment, p)
                    sending.create_task(self._send_fragment(p, payload, ahead))
        except* BusError as errors:
            self._not_sent(errors.exceptions[0])
        finally:
            watching.cancel()

    async def _send_fragment(self, p: int, payload: Any, ahead: asyncio.Semaphore) -> None:
        tensors = self.trainer.program.layout.tensors
        try:
            await self.up.initial(tensors, p, payload, self.init_stored[p])
        except BusError as error:
            self._not_sent(error)
        finally:
            if isinstance(payload, SharedStateUpload):
                payload.let_go()
            ahead.release()

    def _not_sent(self, error: Exception) -> None:
        log.warning("initial parameters not sent, they are asked for again", error=str(error))

    async def _watch_init(self) -> None:
        """While more of them is stored, the syncer's silence means nothing."""
        seen = 0
        while True:
            stored = sum(fragment.stored for fragment in self.init_stored)
            if stored != seen:
                seen = stored
                self.down.put(InitMoved())
            await asyncio.sleep(LOOK_S)

    def _expect_state(self) -> None:
        """Fetch the inner state that is waited for, and nothing of one that is not any more.

        All of it would come beside the anchors, and lie in memory beside what is loaded instead.
        """
        awaited = self.recovery.awaited
        if awaited == self.awaited:
            return
        self.awaited = awaited
        if self.state is not None:
            self.state.cancel()
            self.state = None
        for nonce in [n for n in self.down.states if n != self.recovery.nonce]:
            del self.down.states[nonce]  # it was whole as its donor was given up
        if awaited is not None:
            self.state = self.tasks.create_task(self.down.state(*awaited))

    async def _load_state(self, effect: LoadState) -> None:
        if effect.source == "donor":
            # Taken out: its memory is free as soon as it is on the device.
            came = self.down.states.pop(effect.nonce, None)
            assert came is not None, f"no inner state under nonce {effect.nonce}"
            await asyncio.to_thread(self.trainer.load_inner_state, came.data)
            # Of what came: to read all of it back would hold up the first step.
            self.loaded = {"moments": came.digest}
        elif effect.source == "checkpoint":
            found = await self._go_back(effect.restored) or await self._own()
            self.events.put_nowait(CheckpointLoaded(none=not found))

    async def _own(self) -> bool:
        """Moments of an own checkpoint: whether there are any that can be used."""
        found, faults = await asyncio.to_thread(self.checkpoints.restore, self.trainer)
        for fault in faults:
            self.up.tell_soon("checkpoint-skipped", fault, {})
        return found

    async def _go_back(self, restored: Restored | None) -> bool:
        """Moments of the run-wide checkpoint that history began with, unless ours are newer."""
        newest = self.checkpoints.newest
        if restored is None or (newest is not None and epoch_of(newest) >= restored.epoch):
            return False
        try:
            saved, faults = await self.up.vault(
                self.checkpoints.room.needed,
                read_part,
                self.up.checkpoint_root,
                restored.source,
                self.recovery.learner,
                self.trainer.check_inner_state,
                self.up.checkpoint_places,
            )
        except OSError as error:
            saved, faults = None, [f"{restored.source} is passed over: {error}"[:300]]
        for fault in faults:
            self.up.tell_soon("checkpoint-skipped", fault, {})
        if saved is not None:
            await asyncio.to_thread(self.trainer.load_inner_state, saved)
        return saved is not None


# --------------------------------------------------------------------------------------------------
# What arrives for a learner that recovers: in order, bounded, and what must not be lost is not.

# Arrivals before they are looked through for what newer ones replace; with an anchor at once.
LOOK_EVERY = 64
# Beyond this many, what the syncer repeats by itself is dropped: as many as the mailbox takes.
EVENTS_MAX = 4096
# Of each fragment. This life has contributed nothing that an older one could tell of.
ANCHORS = 1


class RecoveryArrivals(asyncio.Queue[Any]):
    """For one reader; `leave` instead of `put`."""

    def __init__(self) -> None:
        super().__init__()
        self._look_at = LOOK_EVERY

    def leave(self, event: Any) -> bool:
        """Leave an event; False if it is dropped."""
        if self.qsize() >= EVENTS_MAX and repeated(event):
            return False
        self.put_nowait(event)
        if heavy(event) or self.qsize() >= self._look_at:
            waiting = [self.get_nowait() for _ in range(self.qsize())]
            for kept in essence(waiting, ANCHORS):
                self.put_nowait(kept)
            self._look_at = self.qsize() + LOOK_EVERY
        self._look_at = min(self._look_at, self.qsize() + LOOK_EVERY)
        return True
