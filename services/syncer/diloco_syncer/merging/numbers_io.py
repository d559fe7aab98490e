"""What a leader does with its numbers: merges, installs, publishes and keeps them; of one term.

What takes time is done in threads; so is letting go of large arrays, for the system takes back a
gigabyte in some tenths of a second. What needs the store is done in the order of the effects: while
the store is being built, all of that waits.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import structlog

from diloco_shared import ambient
from diloco_shared.protocol.chunks import Payload
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.protocol.pace import STORED_BYTES_PER_S
from diloco_shared.spec.fragmentation import Piece
from diloco_syncer.checkpoints.checkpointing_io import Checkpointer
from diloco_syncer.context import RunContext
from diloco_syncer.events import (
    Capture,
    Drop,
    Event,
    Install,
    InstallInit,
    InstallLoaded,
    MergeWaits,
    Publish,
    Published,
    Snapshot,
    SnapshotBrokenOff,
    SnapshotDone,
    SnapshotFailed,
    Stage,
    Staged,
    StageFailed,
    Unstage,
)
from diloco_syncer.history.replay import build_store, stage_chosen
from diloco_syncer.machine import Machine
from diloco_syncer.merging.payloads_io import Payloads
from diloco_syncer.merging.store import FragmentStore, StagedMerge, Unmergeable
from diloco_syncer.messages.outbox_io import Outbox
from diloco_syncer.snapshots.snapshots_io import BrokenOff

log = structlog.get_logger()

# Fragments that rounds have replaced while a snapshot has yet to write them, or a checkpoint: their
# arrays stay in memory until it has. Beyond this many of either, a merge of another such fragment
# waits, so that a slow disk or bucket takes time and not memory: all fragments would be there
# twice. But a disk that hangs stops nobody: what has written no fragment for so many seconds holds
# no merge up, nor for twice as long as its largest fragment takes at the slowest place worth using.
REPLACED_MAX, REPLACED_S, REPLACED_SLOWER, REPLACED_LOOK_S = 1, 30.0, 2, 0.1
# Of a merge's wait, in seconds: shorter ones are not told, and a longer one again and again.
WAITS_SAID_S = 1.0

DiskWrite = Snapshot | Capture
PLACES: dict[type[DiskWrite], str] = {
    Snapshot: "the disk of snapshots",
    Capture: "the place of checkpoints",
}
WRITES: dict[type[DiskWrite], str] = {Snapshot: "snapshots", Capture: "checkpoints"}
Numeric = Stage | Unstage | Install | InstallInit | InstallLoaded | Publish | Drop | DiskWrite


@dataclass(slots=True)
class Unwritten:
    """Arrays that are being written; who writes takes out what is written."""

    arrays: dict[str, np.ndarray]
    replaced: set[int] = field(default_factory=set)  # fragments that were merged since it began
    patience_s: float = field(init=False)  # without a fragment more that is written
    moved: tuple[int, float] = field(init=False)  # how many arrays were left, and since when

    def __post_init__(self) -> None:
        of_fragment: Counter[str] = Counter()
        for name, array in self.arrays.items():
            of_fragment[name.partition(".")[0]] += array.nbytes
        slowest_s = max(of_fragment.values(), default=0) / STORED_BYTES_PER_S
        self.patience_s = max(REPLACED_S, REPLACED_SLOWER * slowest_s)
        self.moved = len(self.arrays), ambient.monotonic()

    @property
    def moves(self) -> bool:
        """Whether it is being written, however slowly."""
        now, left = ambient.monotonic(), len(self.arrays)
        if left != self.moved[0]:
            self.moved = left, now
        return now - self.moved[1] <= self.patience_s

    def has(self, fragment: int) -> bool:
        return f"{fragment}.master" in self.arrays

    def full(self, fragment: int) -> bool:
        """Whether that fragment would be one too many in memory twice: as it is or will be, and as
        it is written."""
        adds = self.has(fragment) and fragment not in self.replaced
        return adds and sum(map(self.has, self.replaced)) >= REPLACED_MAX


def soonest_first(store: FragmentStore, owned: Sequence[int], round_: int) -> dict[str, np.ndarray]:
    """All arrays, those first which rounds from `round_` on will replace first: they are written in
    this order, and what was written before it is replaced is in memory once."""
    arrays = store.state_arrays()
    due = {p: (n - round_) % len(owned) for n, p in enumerate(owned)}
    order = sorted(arrays, key=lambda name: due[int(name.partition(".")[0])])
    return {name: arrays[name] for name in order}


async def may_replace(
    unwritten: Mapping[type[DiskWrite], Unwritten],
    fragment: int,
    hurries: Callable[[], bool] = lambda: False,
    waited: Callable[[type[DiskWrite], str, float], object] = lambda kind, where, seconds: None,
) -> None:
    """Once what is being written has got far enough, of what rounds replace; or once this process
    `hurries`. `waited` is told as it goes on: for what, where that is, and seconds since the last
    time."""
    looked = ambient.monotonic()
    while full := [kind for kind, of in unwritten.items() if of.full(fragment)]:
        where = " and ".join(PLACES[kind] for kind in full)
        moving = [kind for kind in full if unwritten[kind].moves]
        if hurries() or not moving:
            log.warning("more stays in memory until it is written", slow=where)
            break
        await asyncio.sleep(REPLACED_LOOK_S)
        now = ambient.monotonic()
        waited(moving[0], where, now - looked)
        looked = now
    for of in unwritten.values():
        of.replaced.add(fragment)


class Numbers:
    """`spawn` begins a task of the leader's; `put` hands the machine an event."""

    def __init__(
        self,
        context: RunContext,
        machine: Machine,
        payloads: Payloads,
        outbox: Outbox,
        checkpointer: Checkpointer,
        store: FragmentStore | None,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        put: Callable[[Event], None],
    ) -> None:
        self.spec, self.snapshots = context.spec, context.snapshots
        self.machine = machine
        self.payloads = payloads
        self.outbox = outbox
        self.checkpointer = checkpointer
        self.store = store
        self.spawn = spawn
        self.put = put
        # By epoch and round.
        self.staged: dict[tuple[int, int], StagedMerge] = {}  # at most D rounds
        self.installed: dict[tuple[int, int], StagedMerge] = {}  # committed, not yet published
        self.publishing: set[asyncio.Task[None]] = set()  # at most D rounds, and keyframes
        # What the newest snapshot has yet to write, and the newest part of a checkpoint.
        self.unwritten: dict[type[DiskWrite], Unwritten] = {}
        self.broken = threading.Event()  # the thread of the newest snapshot shall end
        self.building = False  # the store, in a thread
        self.waiting: deque[Callable[[], object]] = deque()  # for it, in order: a few per fragment
        self.waited_s = dict.fromkeys(WRITES.values(), 0.0)  # merges, all together

    def pieces(self, fragment: int) -> Sequence[Piece]:
        """Of what is in the store; none before it is there, or of what is not in it."""
        fragments = () if self.store is None else self.store.layout.fragments
        return fragments[fragment] if 0 <= fragment < len(fragments) else ()

    def perform(self, effect: Numeric) -> None:
        """What is said of the history is settled now, whenever the work itself is done."""
        match effect:
            case InstallInit():
                self._install_init(effect)
            case Stage():
                self._in_order(partial(self._stage, effect))
            case Unstage():
                self._in_order(partial(self.staged.pop, (effect.epoch, effect.round), None))
            case Install():
                place = (self.machine.history.epoch, effect.round)
                self._in_order(partial(self._install, effect, place))
            case InstallLoaded():
                self._in_order(partial(self._install_loaded, effect))
            case Publish():
                self._publish(effect)
            case Drop():
                self._in_order(partial(self._drop, effect.key))
            case Snapshot() | Capture():
                self._in_order(partial(self._keep, effect, self.machine.history.meta()))

    def _in_order(self, work: Callable[[], object]) -> None:
        """Do what needs the store or payloads, after what was to be done before it.

        At once, unless the store is being built: then nothing may overtake that.
        """
        if self.building:
            self.waiting.append(work)
        else:
            work()

    def _install(self, effect: Install, place: tuple[int, int]) -> None:
        assert self.store is not None
        self.installed[place] = self.staged.pop(place)
        self._let_go([self.store.install(effect.fragment, self.installed[place])])

    def _install_loaded(self, effect: InstallLoaded) -> None:
        # What is replaced by it is of no use to anybody, and no merge waits until it is written.
        self.break_off()
        before: list[object] = [self.store, self.staged]
        self.store, self.staged = self.checkpointer.install(effect.serial), {}
        self._let_go(before)

    def break_off(self) -> None:
        """Write no more of the newest snapshot, as soon as its thread has another look."""
        self.broken.set()
        self.unwritten.clear()

    def _drop(self, key: str) -> None:
        if (payload := self.payloads.drop(key)) is not None:
            held: list[object] = [payload]
            del payload
            self._let_go(held)

    def _let_go(self, held: list[object]) -> None:
        """Of the last reference, in a thread."""
        self.spawn(_forgotten(held))

    def _stage(self, effect: Stage) -> None:
        """Compute the merge in a thread; from what is held now, whatever begins again meanwhile."""
        assert self.store is not None
        held = self.payloads.of([c.key for c in effect.contributions])
        merge = partial(stage_chosen, self.store, effect, *held)
        self.spawn(self._staged(effect, merge))

    async def _staged(self, effect: Stage, merge: Callable[[], StagedMerge]) -> None:
        await self._may_replace(effect.fragment)
        try:
            staged = await asyncio.to_thread(merge)
        except ValueError as error:
            # A contribution may cost its round, but no leader: the next one would meet it as well.
            learner = error.learner if isinstance(error, Unmergeable) else ""
            log.error("a merge failed", round=effect.round, learner=learner, error=str(error))
            self.put(StageFailed(effect.epoch, effect.round, learner, str(error)))
            return
        self.staged[effect.epoch, effect.round] = staged
        digests = (staged.anchor_digest, staged.master_digest, staged.payload_digest)
        self.put(Staged(effect.epoch, effect.round, *digests))

    async def _may_replace(self, fragment: int) -> None:
        """And people are told where that takes long."""
        began = said = ambient.monotonic()

        def waited(kind: type[DiskWrite], where: str, seconds: float) -> None:
            nonlocal said
            self.waited_s[WRITES[kind]] += seconds
            if (now := ambient.monotonic()) - said >= WAITS_SAID_S:
                said = now
                self._say_waits(fragment, where)

        await may_replace(self.unwritten, fragment, waited=waited)
        if said > began:
            self._say_waits(fragment, "")

    def _say_waits(self, fragment: int, where: str) -> None:
        self.put(MergeWaits(fragment, where, sum(self.waited_s.values())))

    def _install_init(self, effect: InstallInit) -> None:
        """Build the store in a thread; what needs it is done after that."""
        payloads = {s: self.payloads.held[s] for s in effect.subjects if s}
        self.building = True
        work = partial(
            build_store,
            self.machine.history,
            effect.subjects,
            payloads,
            self.snapshots.shelf,
        )
        self.spawn(self._built(work, tuple(payloads)))

    async def _built(self, work: Callable[[], FragmentStore], subjects: tuple[str, ...]) -> None:
        self.store = await asyncio.to_thread(work)
        for subject in subjects:
            self._drop(subject)
        self.building = False
        while self.waiting and not self.building:
            self.waiting.popleft()()

    def _publish(self, effect: Publish) -> None:
        """What is published is settled now: a restore may be next."""
        p, history = effect.fragment, self.machine.history
        said = (history.sizes_P[p], history.anchor_digests[p], history.layout)
        self._in_order(partial(self._publish_as, effect, *said))

    def _publish_as(
        self, effect: Publish, size: int, digest: str, layout: tuple[TensorSpec, ...]
    ) -> None:
        assert self.store is not None
        algorithm = self.spec.algorithm
        staged = self.installed.pop((effect.epoch, effect.round), None)
        payload: Payload
        if staged is None:
            payload, codec = self.store.current_keyframe(effect.fragment), "fp32"
        else:
            payload = staged.payload
            keyframe = effect.prev_version < 0
            codec = algorithm.keyframe_codec if keyframe else algorithm.codec_down
        readers = max(len(self.machine.announcer.alive), 1)
        # Begun by its task: one that is ended before that leaves nothing half begun.
        send = partial(
            self.outbox.publish, effect, payload, codec, size, digest, layout, readers=readers
        )
        self.publishing.add(self.spawn(self._published(send, effect)))
        self.publishing = {task for task in self.publishing if not task.done()}

    async def _published(self, send: Callable[[], Awaitable[None]], effect: Publish) -> None:
        await send()
        self.put(Published.of(effect))

    def _keep(self, effect: DiskWrite, history: dict[str, Any]) -> None:
        """Capture between two effects; write in a thread."""
        assert self.store is not None
        owned, next_round = self.machine.history.owned, history["next_round"]
        store, arrays = self.store.meta(), soonest_first(self.store, owned, next_round)
        self.unwritten[type(effect)] = Unwritten(arrays)
        if isinstance(effect, Capture):
            writing = partial(self.checkpointer.capture, effect, history, store, arrays)
        else:
            meta, self.broken = {"history": history, "store": store}, threading.Event()
            writing = partial(self._write_snapshot, effect, meta, arrays, self.broken)
        self.spawn(_written(writing, arrays))

    async def _write_snapshot(
        self,
        effect: Snapshot,
        meta: dict[str, Any],
        arrays: dict[str, np.ndarray],
        broken: threading.Event,
    ) -> None:
        what = effect.covers, meta, arrays, broken.is_set
        try:
            path = await asyncio.to_thread(self.snapshots.save, *what)
        except BrokenOff:
            self.put(SnapshotBrokenOff())
            return
        except OSError as error:
            self.put(
                SnapshotFailed(
                    f"snapshot of record {effect.covers} not written to "
                    f"{self.snapshots.folder}: {error}; contributions stay until one is, "
                    "free disk space"
                )
            )
            return
        self.put(SnapshotDone(effect.covers, effect.round, path.name))


async def _written(write: Callable[[], Awaitable[None]], arrays: dict[str, np.ndarray]) -> None:
    await write()  # whoever is cancelled has a thread that goes on with them
    arrays.clear()  # where that failed, nobody writes the rest any more


async def _forgotten(held: list[object]) -> None:
    await asyncio.to_thread(held.clear)
