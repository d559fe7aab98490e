"""Leads one run: feeds the machine with events and performs its effects, until the run ends.

One queue. Inbox, timer and finished effects put events in; nothing else changes the machine.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, assert_never

import numpy as np
import structlog

from diloco_shared.config import RunSpec
from diloco_shared.edges.bus import Bus, BusError
from diloco_shared.numerics.fragments import Piece
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import ContributionManifest, TapeRestore
from diloco_syncer.edges.checkpointing import Checkpointer
from diloco_syncer.edges.follow import Recovered
from diloco_syncer.edges.handover import SnapshotSender
from diloco_syncer.edges.inbox import Inbox
from diloco_syncer.edges.lease import LeaseKeeper
from diloco_syncer.edges.outbox import Outbox, until_done
from diloco_syncer.edges.payloads import Payloads
from diloco_syncer.edges.places import Places
from diloco_syncer.edges.purging import UpPurger
from diloco_syncer.edges.showing import Showing, until_over
from diloco_syncer.edges.snapshots import SnapshotStore
from diloco_syncer.edges.tape import Deposed, Tape
from diloco_syncer.events import (
    Append,
    Appended,
    BusBack,
    Capture,
    Drop,
    Effect,
    Ended,
    Event,
    Install,
    InstallInit,
    InstallLoaded,
    Led,
    Load,
    Publish,
    Published,
    PurgeDown,
    PurgeUp,
    Seal,
    SendBeat,
    SendDonate,
    SendGrant,
    SendPull,
    Snapshot,
    SnapshotDone,
    SnapshotFailed,
    Stage,
    Staged,
    Suspended,
    Tell,
    TimePassed,
    Unstage,
)
from diloco_syncer.horizon import Horizon
from diloco_syncer.machine import Machine
from diloco_syncer.replay import build_store, stage_chosen
from diloco_syncer.round import Phase
from diloco_syncer.store import FragmentStore
from diloco_syncer.store import Staged as StagedArrays

log = structlog.get_logger()

# Between two looks at the lease, in seconds: far below what a round takes to open.
LEASE_LOOK_S = 0.05
# After the end, live learners that do not say they are finished are waited for this long: the
# last evaluation and checkpoint of a large model. Those that died are not waited for.
LINGER_S = 600.0
# Between two looks at whether the bus answers, in seconds: five a second, well within any lease.
BUS_LOOK_S = 0.2
# A gap this long between two looks at the queue was ours (stopped, swapped out): the learners'
# silence in it says nothing about them.
OWN_GAP_S = 1.0
# Events waiting: progress of some hundred learners for a few seconds.
QUEUE_MAX = 65536


class Leader:
    """One term of one run, from where a follower stands that has read all of the tape.

    `run` returns the outcome. Raises Deposed when another leads.
    """

    def __init__(
        self,
        spec: RunSpec,
        leader: str,
        control: Bus,
        data: Bus,
        tape: Tape,
        snapshots: SnapshotStore,
        lease: LeaseKeeper,
        recovered: Recovered,
        executed: Callable[[int], None],
        *,
        payload_bytes_max: int,
        checkpoint_root: str,
    ) -> None:
        self.spec = spec
        self.leader = leader
        self.control = control
        self.data = data
        self.tape = tape
        self.snapshots = snapshots
        self.lease = lease
        self.recovered = recovered
        self.executed = executed  # told the newest record
        self.payloads = Payloads(payload_bytes_max)
        self.queue: asyncio.Queue[Event] = asyncio.Queue(QUEUE_MAX)
        shard = recovered.history.shard
        self.inbox = Inbox(
            spec, control, data, self.payloads, self._put, self._wanted, self._pieces, shard
        )
        self.outbox = Outbox(spec, leader, control, data, shard)
        self.purger = UpPurger(spec, leader, control, data, self.outbox)
        self.sender = SnapshotSender(spec, shard, leader, control, data, snapshots)
        self.machine = Machine(spec, recovered.history)
        self.places = Places(control, spec.name, lambda: self.machine.history.ledger, shard)
        self.store: FragmentStore | None = recovered.store
        # By epoch and round.
        self.staged: dict[tuple[int, int], StagedArrays] = {}  # at most D rounds
        self.installed: dict[tuple[int, int], StagedArrays] = {}  # committed, not yet published
        self.horizon = Horizon()
        self.tasks: asyncio.TaskGroup
        self.ended_at: float | None = None  # all shards
        self.showing = Showing(control, self.machine, self.inbox, self.outbox, lease)
        self.checkpointer = Checkpointer(spec, shard, checkpoint_root, control, self._put)

    async def run(self) -> str:
        """Lead until the run is over, linger for its learners; the outcome."""
        for note in self.recovered.notes:
            self.outbox.tell(Tell("recovered", note))
        await self.showing.begin()
        await until_done(self.places.write)
        self._put(Led(self.leader, time.time(), self.recovered.published))
        async with asyncio.TaskGroup() as tasks:
            self.tasks = tasks
            self.inbox.up_seq = await until_done(self._up_info)
            start_seq = self.inbox.up_seq + 1
            background = [
                tasks.create_task(work)
                for work in (
                    self.inbox.progress(),
                    self.inbox.joins(),
                    self.inbox.wishes(),
                    self.inbox.contributions(start_seq),
                    self.outbox.events_out(),
                    self.purger.work(),
                    self.sender.send(),
                    self.showing.keep(),
                    self._watch_bus(),
                    self._watch_lease(),
                    self.places.keep(),
                )
            ]
            if not self.machine.history.initialised:
                background.append(tasks.create_task(self.inbox.initial()))
            await self._loop()
            for task in background:
                task.cancel()
        while not self.outbox.events.empty():
            await self.outbox.event(self.outbox.events.get_nowait())
        await self.showing.last()
        return self.machine.history.outcome

    async def _up_info(self) -> int:
        info = await self.data.stream_info(subjects.up_stream(self.spec.name))
        return info.last_seq

    # --- the loop ------------------------------------------------------------------------------

    def _put(self, event: Event) -> None:
        if self.queue.full():
            log.error("queue full: an event is lost", event=type(event).__name__)
            return
        self.queue.put_nowait(event)

    async def _loop(self) -> None:
        looked = time.monotonic()
        while not self._over():
            event = await self._next()
            now = time.monotonic()
            if now - looked > OWN_GAP_S + self.spec.membership.heartbeat_s:
                self._handle(BusBack(), now)
            looked = now
            self._handle(event, now)

    def _handle(self, event: Event, now: float) -> None:
        for effect in self.machine.handle(event, now):
            self._perform(effect)

    async def _next(self) -> Event:
        deadline = self.machine.deadline
        if deadline is None:
            return await self.queue.get()
        wait_s = deadline - time.monotonic()
        if wait_s <= 0 and self.queue.empty():
            await asyncio.sleep(0)
            return TimePassed()
        try:
            # Not wait_for: in Python 3.11 it may swallow the cancellation that deposes us.
            async with asyncio.timeout(max(wait_s, 0.001)):
                return await self.queue.get()
        except TimeoutError:
            return TimePassed()

    def _over(self) -> bool:
        if self.ended_at is None or not self.machine.history.outcome:
            return False
        now = time.monotonic()
        busy = [
            m
            for m in self.machine.roster.live(now)
            if m.progress is None or m.progress.state != "finished"
        ]
        return not busy or now - self.ended_at > LINGER_S

    async def _end(self) -> None:
        """Over: once all shards are. Until then a learner that returns needs a leader of each."""
        await until_over(self.control, self.spec, self.recovered.history.shard)
        self.ended_at = time.monotonic()
        self._put(TimePassed())

    def _wanted(self, manifest: ContributionManifest) -> bool:
        return any(
            r.n == manifest.round
            and r.phase is Phase.PULLING
            and r.participants.get(manifest.learner) == manifest.incarnation
            and not r.answer(manifest.learner)
            for r in self.machine.rounds.open
        )

    async def _watch_bus(self) -> None:
        """While the bus is away, or stands still on open connections, silence is nobody's fault.

        Half a lease at most goes by before that is noticed (heartbeat_s is at most half of it).
        """
        while True:
            try:
                async with asyncio.timeout(self.spec.membership.heartbeat_s):
                    await self.control.kv_get(subjects.LEASES, self.lease.key)
            except (BusError, TimeoutError):
                self._put(BusBack())
            await asyncio.sleep(BUS_LOOK_S)

    async def _watch_lease(self) -> None:
        """Open no round while the lease is not renewed; end when another may have it for good."""
        lapsed = False
        while True:
            if not self.lease.leading:
                raise Deposed(f"the lease is not ours any more, but {self.lease.holder}'s")
            if self.lease.lapsed != lapsed:
                lapsed = not lapsed
                self._put(Suspended("the leader cannot renew its lease" if lapsed else ""))
            await asyncio.sleep(LEASE_LOOK_S)

    # --- effects -------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendPull() | SendGrant() | SendDonate() | SendBeat():
                if self.lease.lapsed:
                    return  # all of these are repeated by whoever leads
                if isinstance(effect, SendPull):
                    self.horizon.pulled(effect.pull.round, self.inbox.up_seq)
                self.tasks.create_task(self.outbox.send(effect))
            case Append():
                self.tasks.create_task(self._append(effect))
            case Stage():
                self._stage(effect)
            case Unstage():
                self.staged.pop((effect.epoch, effect.round), None)
            case Install():
                assert self.store is not None
                place = (self.machine.history.epoch, effect.round)
                self.installed[place] = self.staged.pop(place)
                self.store.install(effect.fragment, self.installed[place])
            case InstallInit():
                self._install_init(effect)
            case Publish():
                self._publish(effect)
            case Drop():
                self.payloads.drop(effect.key)
            case Snapshot() | Capture():
                self._keep(effect)
            case Seal():
                self.tasks.create_task(self.checkpointer.seal(effect))
            case Load():
                self.tasks.create_task(self.checkpointer.load(effect.restore))
            case InstallLoaded():
                self.store, self.horizon = self.checkpointer.install(effect.serial), Horizon()
                self.staged.clear()
            case PurgeUp():
                below = self.horizon.below(effect.last_round, self.inbox.up_seq)
                self.purger.want(self.machine.history.snapshot_covers, below)
            case PurgeDown():
                self.tasks.create_task(self.outbox.purge_down(effect))
            case Tell():
                self.outbox.tell(effect)
            case Ended():
                self.tasks.create_task(self._end())
            case _:
                assert_never(effect)

    async def _append(self, effect: Append) -> None:
        if isinstance(effect.record, TapeRestore):
            await self.checkpointer.rewind(effect.record.serial)
        seq = await self.tape.append(effect.record)
        self.executed(seq)
        self._put(Appended(seq, time.time()))

    def _stage(self, effect: Stage) -> None:
        """Compute the merge in a thread; from what is held now, whatever begins again meanwhile."""
        assert self.store is not None
        held = self.payloads.of([c.key for c in effect.contributions])
        merge = partial(stage_chosen, self.store, effect, *held)
        self.tasks.create_task(self._staged(effect, merge))

    async def _staged(self, effect: Stage, merge: Callable[[], StagedArrays]) -> None:
        staged = await asyncio.to_thread(merge)
        self.staged[effect.epoch, effect.round] = staged
        digests = (staged.anchor_digest, staged.master_digest, staged.payload_digest)
        self._put(Staged(effect.epoch, effect.round, *digests))

    def _pieces(self, fragment: int) -> Sequence[Piece]:
        """Of what is in the store; none before it is there, or of what is not in it."""
        fragments = () if self.store is None else self.store.layout.fragments
        return fragments[fragment] if 0 <= fragment < len(fragments) else ()

    def _install_init(self, effect: InstallInit) -> None:
        payloads = {s: self.payloads.held[s] for s in effect.subjects if s}
        self.store = build_store(self.machine.history, effect.subjects, payloads)
        for subject in payloads:
            self.payloads.drop(subject)

    def _publish(self, effect: Publish) -> None:
        """What is published is settled now: a restore may be next."""
        assert self.store is not None
        p, algorithm, history = effect.fragment, self.spec.algorithm, self.machine.history
        staged = self.installed.pop((effect.epoch, effect.round), None)
        if staged is None:
            payload, codec = self.store.current_keyframe(p), "fp32"
        else:
            payload = staged.payload
            keyframe = effect.prev_version < 0
            codec = algorithm.keyframe_codec if keyframe else algorithm.codec_down
        sent = self.outbox.publish(
            effect,
            payload,
            codec,
            history.sizes_P[p],
            history.anchor_digests[p],
            history.layout,
            readers=max(len(self.machine.announcer.alive), 1),
        )
        self.tasks.create_task(self._published(sent, p, effect.version))

    async def _published(self, sent: Awaitable[None], fragment: int, version: int) -> None:
        await sent
        self._put(Published(fragment, version))

    def _keep(self, effect: Snapshot | Capture) -> None:
        """Capture now, between two events; write in a thread."""
        assert self.store is not None
        history, store = self.machine.history.meta(), self.store.meta()
        arrays = self.store.state_arrays()
        if isinstance(effect, Capture):
            writing = self.checkpointer.capture(effect, history, store, arrays)
        else:
            meta = {"history": history, "store": store}
            writing = self._write_snapshot(effect, meta, arrays)
        self.tasks.create_task(writing)

    async def _write_snapshot(
        self, effect: Snapshot, meta: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> None:
        try:
            path = await asyncio.to_thread(self.snapshots.save, effect.covers, meta, arrays)
        except OSError as error:
            self._put(
                SnapshotFailed(
                    f"snapshot of record {effect.covers} not written: {error}; contributions "
                    "stay until one is, free disk space"
                )
            )
            return
        self._put(SnapshotDone(effect.covers, effect.round, path.name))
