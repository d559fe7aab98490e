"""Leads one run: feeds the machine with events and performs its effects, until the run ends.

One queue. Inbox, timer and finished effects put events in; nothing else changes the machine.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

import structlog

from diloco_shared import ambient
from diloco_shared.budget import assumed
from diloco_shared.budget.memory import payloads
from diloco_shared.bus.port import BusError
from diloco_shared.bus.repeating import again_and_again, left_undone, until_done
from diloco_shared.checkpoints.tape_archive_io import archives_of
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import ContributionManifest, TapeRestore, TapeSnapshot
from diloco_shared.protocol.pace import LAST_EVALUATION_S
from diloco_shared.protocol.records import ShardLease
from diloco_shared.spec.fragmentation import Piece
from diloco_syncer.checkpoints.checkpointing_io import Checkpointer
from diloco_syncer.checkpoints.marks_io import Marks
from diloco_syncer.context import RunContext
from diloco_syncer.events import (
    Append,
    Appended,
    BusBack,
    Capture,
    Drop,
    Effect,
    Ended,
    Event,
    FindMark,
    FindNumber,
    Install,
    InstallInit,
    InstallLoaded,
    Led,
    Load,
    Publish,
    PurgeDown,
    PurgeUnsealed,
    PurgeUp,
    Rewound,
    Seal,
    SendBeat,
    SendDonate,
    SendGrant,
    SendPull,
    Snapshot,
    Stage,
    Suspended,
    Tell,
    TimePassed,
    Unload,
    Unstage,
)
from diloco_syncer.history.archiving_io import TapeArchiver
from diloco_syncer.history.follow_io import Recovered
from diloco_syncer.history.tape_io import Tape
from diloco_syncer.leadership.lease_io import LeaseKeeper
from diloco_syncer.machine import Machine
from diloco_syncer.merging.numbers_io import Numbers
from diloco_syncer.merging.payloads_io import Payloads
from diloco_syncer.messages.arrivals_io import Arrivals
from diloco_syncer.messages.data_leases_io import DataLeases
from diloco_syncer.messages.inbox_io import Inbox
from diloco_syncer.messages.merged_positions_io import MergedPositions
from diloco_syncer.messages.outbox_io import Control, Outbox
from diloco_syncer.rounds.round import Phase
from diloco_syncer.snapshots.handover_io import SnapshotSender
from diloco_syncer.status.status import size
from diloco_syncer.status.status_writer_io import StatusWriter, until_over
from diloco_syncer.streams.floods_io import Floods
from diloco_syncer.streams.fullness_io import Fullness, Signs
from diloco_syncer.streams.purging_io import LeftStates, UpPurger, forget_states
from diloco_syncer.streams.room import Horizon
from diloco_syncer.streams.tail_io import Tail

log = structlog.get_logger()

# After the end, live learners that do not say they are finished are waited for this long: the last
# evaluation of a large model, which one that stands by may begin two minutes after the end, and its
# last checkpoint. Those that died are not waited for. Once the leader has left, whoever evaluates
# is told to leave too.
LINGER_S = LAST_EVALUATION_S + 300.0
# Of a run of several shards, learners that have yet to begin by then only this long. Whoever led
# another shard may have left before they came, and without its word they never begin.
BEGIN_S = 60.0
# A gap this long between two looks at the queue was ours (stopped, swapped out): the learners'
# silence in it says nothing about them.
OWN_GAP_S = 1.0
# Between two words on events that are dropped, in seconds: a flood of them is what fills the queue.
DROPPED_SAY_S = 10.0


class Leader:
    """One term of one run, from where a follower stands that has read all of the tape.

    `run` returns the outcome. Raises Deposed when another leads.
    """

    def __init__(
        self,
        context: RunContext,
        tape: Tape,
        lease: LeaseKeeper,
        recovered: Recovered,
        executed: Callable[[int], None],
    ) -> None:
        self.context = context
        self.spec, self.leader, shard = context.spec, context.me, context.shard
        self.control, self.data, self.snapshots = context.control, context.data, context.snapshots
        self.tape, self.lease = tape, lease
        self.recovered, self.executed = recovered, executed  # the latter: told the newest record
        self.machine = Machine(self.spec, recovered.history)
        self.payloads = Payloads(lambda: context.payload_bytes_max or self._payload_bytes())
        self.queue = Arrivals(lambda key: key in self.payloads.held)
        self.inbox = Inbox(
            context,
            self.payloads,
            self._put,
            self._wanted,
            self._pieces,
            lambda seq, subject: self.tail.saw(seq, subject),
            lambda learner: learner in self.machine.announcer.appointed,
            lambda: self.machine.announcer.initializing(),
        )
        self.outbox = Outbox(context)
        self.tail = Tail(self.data, self.spec.name, lambda: self.purger.below, self._up_rewound)
        self.purger = self._purger()
        self.sender = SnapshotSender(context)
        self.merged_positions = MergedPositions(
            self.control,
            self.spec.name,
            lambda: self.machine.history.ledger,
            lambda: self.lease.ours(),
            shard,
        )
        self.data_leases = DataLeases(
            context,
            lambda: self.machine.roster.holders(ambient.monotonic()),
            lambda: not self.lease.lapsed,
            self._put,
            self.merged_positions.write,
        )
        self.horizon = Horizon()
        self.tasks: asyncio.TaskGroup
        self.ended_at: float | None = None  # all shards
        self.dropped_said_at = float("-inf")
        self.status_writer = StatusWriter(
            self.control, self.machine, self.inbox, self.outbox, lease
        )
        self.checkpointer = Checkpointer(context, self._put, lambda: self.lease.ours())
        self.marks = Marks(context, self._put)
        self.numbers = Numbers(
            context,
            self.machine,
            self.payloads,
            self.outbox,
            self.checkpointer,
            recovered.take_store(),
            lambda work: self.tasks.create_task(work),
            self._put,
        )
        archive = archives_of(self.spec, context.checkpoint_root)[shard]
        checkpoints = self.machine.user_requests.checkpoints
        self.archiver = TapeArchiver(context, tape, archive, lambda: checkpoints.needed_from)
        self.fullness = self._fullness()
        self.floods = self._floods()

    def _purger(self) -> UpPurger:
        return UpPurger(
            self.context,
            self.outbox,
            lambda: self.tail.sure,
            lambda: self.status_writer.storage.flying,
            self.tape.still_ours,
        )

    def _fullness(self) -> Fullness:
        return Fullness(
            self.context,
            self.machine,
            self.outbox,
            self.tape,
            self.status_writer.storage,
            self._put,
            Signs(
                pulling=lambda: any(r.phase is Phase.PULLING for r in self.machine.rounds.open),
                lapsed=lambda: self.lease.lapsed,
                waits=lambda: self.purger.owes,
            ),
        )

    def _floods(self) -> Floods:
        return Floods(
            self.context,
            self.machine,
            self.status_writer,
            self.outbox,
            lambda: self.purger.removed,
            self.tape.still_ours,
        )

    def _left_states(self) -> LeftStates:
        admission = self.machine.admission
        return LeftStates(
            self.context,
            self.status_writer.storage,
            lambda: admission.states()[1],
            lambda: admission.using(ambient.monotonic()),
        )

    async def run(self) -> str:
        """Lead until the run is over, linger for its learners; the outcome."""
        for note in self.recovered.notes:
            self.outbox.tell(Tell("recovered", note))
        await self.status_writer.begin()
        await until_done(self.merged_positions.write, "places in the data")
        recovered = self.recovered
        self._put(
            Led(
                self.leader,
                ambient.wall(),
                recovered.published,
                recovered.reborn,
                recovered.keyframes,
                recovered.unsure,
                recovered.uncovered,
            )
        )
        async with asyncio.TaskGroup() as tasks:
            self.tasks = tasks
            self.inbox.up_seq = await until_done(self._up_info, "the end of UP")
            start_seq = self.inbox.up_seq + 1
            background = [
                tasks.create_task(work)
                for work in (
                    self.inbox.progress(),
                    self.inbox.joins(),
                    self.inbox.user_requests(),
                    self.inbox.contributions(start_seq),
                    self.outbox.events_out(),
                    self.purger.work(),
                    forget_states(self.context),
                    self._left_states().keep(),
                    self.data_leases.serve(),
                    self.sender.send(),
                    self.status_writer.keep(),
                    self.fullness.keep(),
                    self.tail.keep(),
                    self.floods.keep(),
                    self.archiver.work(),
                    self.marks.work(),
                    self._watch_bus(),
                    self._watch_tape(),
                    self._watch_lease(),
                    self.merged_positions.keep(),
                )
            ]
            if not self.machine.history.initialised:
                background.append(tasks.create_task(self.inbox.initial()))
            if self._restored_lately:
                background.append(tasks.create_task(self._set_back_again()))
            await self._loop()
            # What no stream takes is on the tape: whoever leads again publishes it.
            for task in (*background, *self.numbers.publishing):
                task.cancel()
        while not self.outbox.events.empty():
            await self.outbox.event(self.outbox.events.get_nowait())
        self.machine.user_requests.checkpoints.given_up()
        await self.status_writer.last()
        return self.machine.history.outcome

    async def _up_info(self) -> int:
        info = await self.data.stream_info(subjects.up_stream(self.spec.name))
        return info.last_seq

    def _up_rewound(self, end: int, certain: bool) -> None:
        """What comes again after `end` belongs to rounds of now, and is not to be purged; and what
        is lost for `certain` may be of rounds that no snapshot covers."""
        self.inbox.up_seq = min(self.inbox.up_seq, end)
        self.horizon.rewound(end)
        self.purger.rewound(end)
        if certain:
            self._put(Rewound(None))

    def _payload_bytes(self) -> int:
        """What the run may need, as large as it is known to be."""
        return payloads(assumed(self.spec, **size(self.machine)._asdict()))

    # --- the loop ------------------------------------------------------------------------------

    def _put(self, event: Event) -> None:
        if self.queue.put(event):
            return
        now = ambient.monotonic()
        if now - self.dropped_said_at >= DROPPED_SAY_S:
            self.dropped_said_at = now
            log.error("queue full: events are dropped", dropped=dict(self.queue.dropped))

    async def _loop(self) -> None:
        looked = ambient.monotonic()
        while not self._over():
            event = await self._next()
            now = ambient.monotonic()
            if now - looked > OWN_GAP_S + self.spec.membership.heartbeat_s:
                self._handle(BusBack(), now)
            looked = now
            self._handle(event, now)

    def _handle(self, event: Event, now: float) -> None:
        for effect in self.machine.handle(event, now):
            self._perform(effect)

    async def _next(self) -> Event:
        deadline = self.machine.deadline
        if deadline is None or len(self.queue):
            return await self.queue.get()
        wait_s = deadline - ambient.monotonic()
        if wait_s <= 0:
            await asyncio.sleep(0)
            return TimePassed()
        try:
            # Not wait_for: in Python 3.11 it may swallow the cancellation that deposes us.
            async with asyncio.timeout(max(wait_s, 0.001)):
                return await self.queue.get()
        except TimeoutError:
            return TimePassed()

    def _over(self) -> bool:
        if not self.machine.history.outcome:
            self.ended_at = None  # a restore may have taken the end back: the next has its own time
        if self.ended_at is None:
            return False
        now, roster = ambient.monotonic(), self.machine.roster
        states = [m.progress.state if m.progress else "" for m in roster.live(now)]
        not_awaited = ["finished"]
        if self.spec.algorithm.shards > 1 and now - self.ended_at > BEGIN_S:
            not_awaited += ["", "joining", "recovering"]
        busy = [state for state in states if state not in not_awaited]
        checkpoints = self.machine.user_requests.checkpoints
        making = checkpoints.making or checkpoints.owes
        # Whoever has yet to speak to a leader that has just begun may be the one that evaluates.
        awaited = busy or making or roster.expected(now)
        return not awaited or now - self.ended_at > LINGER_S

    async def _end(self) -> None:
        """Over: once all shards are. Until then a learner that returns needs a leader of each."""
        await until_over(self.control, self.spec, self.recovered.history.shard)
        self.ended_at = ambient.monotonic()
        self.machine.user_requests.checkpoints.all_over()
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

        Three quarters of a lease at most go by before that is noticed. A slow answer is one: if it
        counted as none, a learner that is dead would never be silent for long enough.
        """
        membership = self.spec.membership
        while True:
            try:
                async with asyncio.timeout(membership.lease_s / 2):
                    await self.control.kv_get(subjects.LEASES, self.lease.key)
            except (BusError, TimeoutError):
                self._put(BusBack())
            await asyncio.sleep(membership.heartbeat_s / 2)

    async def _watch_tape(self) -> None:
        """Raises Deposed where a server that began anew has another tape.

        For itself, with a request's whole patience: on a slow link a heartbeat is too short for it.
        """
        every_s = self.spec.membership.heartbeat_s
        await again_and_again(self.tape.look_back, "look back at the tape", every_s)

    async def _watch_lease(self) -> None:
        """Open no round while the lease is not renewed; end when another may have it for good."""
        lapsed = False
        while True:
            self.lease.check()
            if self.lease.lapsed != lapsed:
                lapsed = not lapsed
                self._put(Suspended("the leader cannot renew its lease" if lapsed else ""))
            await self.lease.moves()

    # --- effects -------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendPull() | SendGrant() | SendDonate() | SendBeat():
                if self.lease.lapsed:
                    # All of these are repeated by whoever leads; but on a full hub nobody's lease
                    # can be renewed, and nobody else could say why.
                    if isinstance(effect, SendBeat):
                        self.tasks.create_task(self.outbox.say_lapsed(effect.beat))
                    return
                if isinstance(effect, SendPull):
                    self.horizon.pulled(effect.pull.round, self.inbox.up_seq)
                granted = isinstance(effect, SendGrant) and effect.grant.accepted
                self.tasks.create_task((self._let_in if granted else self.outbox.send)(effect))
            case Append():
                self.tasks.create_task(self._append(effect))
            case Stage() | Unstage() | Install() | InstallInit() | Publish() | Drop():
                self.numbers.perform(effect)
            case Snapshot() | Capture():
                self.numbers.perform(effect)
            case FindMark():
                self.marks.want()
            case FindNumber():
                self.tasks.create_task(self.checkpointer.look())
            case Seal():
                self.tasks.create_task(self.checkpointer.seal(effect))
            case Load():
                self.tasks.create_task(self.checkpointer.load(effect.restore))
            case Unload():
                self.checkpointer.unload(effect.serial)
            case InstallLoaded():
                self.horizon = Horizon()
                self.purger.begun_again()
                leases = self.checkpointer.loaded[effect.serial].leases
                self.merged_positions.back = None  # the ledger says the same
                self.numbers.perform(effect)
                self.tasks.create_task(self._gone_back(leases))
            case PurgeUp():
                below = self.horizon.below(effect.last_round, self.inbox.up_seq)
                self.purger.want(self.machine.history.snapshot_covers, below, effect.last_round)
            case PurgeDown():
                self.tasks.create_task(self.outbox.purge_down(effect))
            case PurgeUnsealed():
                self.tasks.create_task(self.outbox.purge_unsealed(effect))
            case Tell():
                self.outbox.tell(effect)
            case Ended():
                self.tasks.create_task(self._end())
            case _:
                assert_never(effect)

    async def _let_in(self, effect: Control) -> None:
        """Behind the places in the data: a newcomer takes up again what its life before has read,
        and a hub that takes nothing may have refused the place up to which that is merged."""
        with left_undone("places in the data"):  # it asks again
            await self.merged_positions.write()
            await self.outbox.send(effect)

    async def _append(self, effect: Append) -> None:
        if isinstance(effect.record, TapeRestore):
            await self._goes_back(effect.record.serial)
        seq = await self.tape.append(effect.record)
        self.executed(seq)
        if isinstance(effect.record, TapeSnapshot):
            self.archiver.want()
        self._put(Appended(seq, ambient.wall()))
        self.merged_positions.changed.set()

    async def _goes_back(self, serial: int) -> None:
        """What must be there before a restore is on the tape."""
        # Places first: whoever sees a lease of the checkpoint looks for the place after that.
        self.merged_positions.back = self.checkpointer.merged(serial)
        await until_done(self.merged_positions.write, "places in the data")
        await self.checkpointer.rewind(serial)

    @property
    def _restored_lately(self) -> bool:
        """Whether the run went back to a checkpoint, and nothing was merged since: who led then may
        have ended before it had set leases back once more."""
        h = self.machine.history
        return not h.shard and h.restored is not None and not any(h.last_merged)

    async def _set_back_again(self) -> None:
        restored = self.machine.history.restored
        assert restored is not None
        try:
            leases = await self.checkpointer.leases_of(restored.source)
        except (OSError, ValueError) as error:
            log.warning("places in the data are not set back again", error=str(error))
            return
        await self._gone_back(leases)

    async def _gone_back(self, leases: Iterable[ShardLease]) -> None:
        """Once more: until places in the data are those of the checkpoint, a learner of before
        that looked for data took the further place of the two."""
        await until_done(self.merged_positions.write, "places in the data")
        await self.checkpointer.lease_from(leases, beyond=True)

    def _pieces(self, fragment: int) -> Sequence[Piece]:
        return self.numbers.pieces(fragment)
