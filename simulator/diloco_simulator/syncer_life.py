"""A simulated syncer process: the product's machine, store, history and replay around the hub."""

from typing import TYPE_CHECKING, Any

from diloco_shared.protocol.messages import TapeRecord
from diloco_simulator.checkpointer import Checkpointer
from diloco_simulator.coverage import of_syncer_effect
from diloco_simulator.hub import FULL
from diloco_simulator.process import Process
from diloco_simulator.publication import publication
from diloco_simulator.syncer_follow import Following, Lone
from diloco_simulator.syncer_inbox import Inbox
from diloco_simulator.world import FULL_S, Item
from diloco_syncer.acknowledged import Acknowledged
from diloco_syncer.events import (
    Append,
    Appended,
    BusBack,
    Capture,
    Drop,
    Effect,
    Ended,
    Event,
    Full,
    Install,
    InstallInit,
    InstallLoaded,
    Led,
    Load,
    Publish,
    Published,
    PurgeDown,
    PurgeUp,
    Rewound,
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
    Unload,
    Unstage,
)
from diloco_syncer.history import History
from diloco_syncer.horizon import Horizon
from diloco_syncer.machine import Machine
from diloco_syncer.rebirth import Reborn
from diloco_syncer.replay import (
    build_store,
    newest_keyframes,
    newest_published,
    rewound,
    stage_chosen,
)
from diloco_syncer.store import FragmentStore
from diloco_syncer.store import Staged as StagedArrays

if TYPE_CHECKING:
    from diloco_simulator.syncer_node import SyncerNode

# Between two looks at what the hub has of what it took, in virtual seconds.
LOOK_S = 1.0


class SyncerLife(Process):
    """One process: it leads, or competes for the lease and follows the tape until it does."""

    def __init__(self, node: "SyncerNode", leader: str) -> None:
        super().__init__(node.world)
        self.node = node
        self.leader = leader
        self.process = node.process
        self.hub, self.watch = node.hub, node.watch
        self.shard, self.checks = node.shard, node.checks
        self.spec = node.hub.spec
        self.inbox = Inbox(self)
        self.payloads = self.inbox.payloads
        # By epoch and round.
        self.staged: dict[tuple[int, int], StagedArrays] = {}
        self.installed: dict[tuple[int, int], StagedArrays] = {}
        self.writing: tuple[dict[str, Any], dict[str, Any]] | None = None  # half a snapshot
        self.armed = float("inf")
        self.ended = False
        self.full: set[str] = set()  # streams that took nothing when last asked
        self.horizon = Horizon()
        self.purge = (
            0,
            0,
        )  # newest wish: record covered, and sequence of UP below which all may go
        self.acknowledged, self.up_end = Acknowledged(), 0
        self.machine = Machine(self.spec, History(self.spec, self.shard.number))
        self.store: FragmentStore | None = None
        self.tape_end = 0
        self.following: Following | None = None
        self.checkpointer = Checkpointer(self)

    def begin(self) -> None:
        """Lead at once if there is no other syncer; else compete for the lease."""
        if self.node.alone:
            Lone(self).begin()
        else:
            self.following = Following(self)
            self.following.begin()

    def lead(
        self, history: History, store: FragmentStore | None, reborn: Reborn | None = None
    ) -> None:
        """From a place that has all of the tape."""
        self.store, self.tape_end = store, history.seq
        self.machine = Machine(self.spec, history)
        if store is not None and reborn is None:
            for p in history.owned:
                digest, version = store.anchor_digest(p), history.versions[p]
                self.watch.anchors.held(history.epoch, p, version, digest, self.leader)
        took_over = bool(history.leader) and not history.leader.startswith(self.process)
        self.world.counts["failovers"] += took_over
        manifests = [i.message for i in self.hub.dn.items]
        published = newest_published(history, manifests)
        if history.initialised and any(published[p] < history.versions[p] for p in history.owned):
            self.watch.reached("takeover" if took_over else "restart", "during publication")
        self.watch.leads(self)
        keyframes = newest_keyframes(history, manifests)
        self.give(Led(self.leader, self.wall, published, reborn, keyframes))
        self.wish()
        if self.alive:
            self.inbox.open(self.hub.up.seq if history.initialised else 0)
            self._look()

    def _look(self) -> None:
        """As the edge looks at fullness: whether the hub has what it had acknowledged."""
        self.world.after(LOOK_S, lambda: self.enter(self._look))
        if not (self.machine.leading and self.world.reaches(self.process)):
            return
        was, self.up_end = self.up_end, self.hub.up.seq
        if self.up_end < was:
            self.give(Rewound(None))
        known, h, dn = self.acknowledged, self.machine.history, self.hub.dn
        if known.newest is not None and known.newest[1] not in dn.by_subject:
            known.doubted = True
        if not (self.alive and known.doubted):
            return
        of_epoch = (i for i in dn.items if i.message.epoch == h.epoch)
        mine = [i for i in of_epoch if i.message.fragment in h.owned]
        known.found(max(((i.seq, i.subject) for i in mine), default=None))
        lost = rewound(h, self.machine.published, (i.message for i in mine))
        if lost is not None:
            self.watch.reached("published again after it was lost")
            self.give(lost)

    def up_rewound(self, end: int) -> None:
        """As the leader does: what comes again on UP is not to be purged."""
        self.horizon.rewound(end)
        self.purge = (self.purge[0], min(self.purge[1], end + 1))

    def over(self) -> None:
        """The process dies: what it was writing is torn, perhaps."""
        self.watch.died(self)
        if self.writing is not None and self.world.chance(self.world.options.torn, "torn"):
            self.node.disk.tear(*self.writing, self.world.rng)

    def suspended(self, reason: str) -> None:
        """The lease lapsed, or is renewed again."""
        if self.machine.leading:
            self.give(Suspended(reason))

    def deposed(self) -> None:
        """Another leads: a fresh process stands by."""
        self.world.counts["deposed"] += 1
        self.node.gone(self, 1.0)

    def wish(self) -> None:
        """Look at what the user wants."""
        if self.node.wanted is not None:
            wanted = self.node.wanted
            self.enter(lambda: self.give(wanted))

    def thawed(self, *, noticed: bool) -> None:
        """The edge sees the gap in its own clock: silence in it says nothing."""
        if self.machine.leading or self.machine.appending is not None:  # its term's first record
            self.checks.members.forgiven_at = self.world.now
        if self.machine.leading and noticed:
            self.give(BusBack())

    def away(self) -> None:
        """The bus does not answer."""
        if self.machine.leading:
            self.checks.members.forgiven_at = self.world.now
            self.give(BusBack())

    def give(self, event: Event) -> None:
        """Hand the machine an event, and do what it says; the process may die before any of it."""
        rate = self.world.options.syncer_crash
        for effect in self.machine.handle(event, self.now):
            if self.world.dies("leader", rate, type(effect).__name__):
                self.node.gone(self, self.world.rng.uniform(0.5, 6.0))
                return
            self._perform(effect)
            if not self.alive:
                return
        self._arm()

    def _arm(self) -> None:
        deadline = self.machine.deadline
        if deadline is None or deadline >= self.armed > self.now:
            return
        self.armed = deadline

        def ring() -> None:
            if self.armed == deadline:
                self.armed = float("inf")
                # As in the product, a leader speaks until the run is over for all.
                if not (self.ended and self.watch.ended):
                    self.give(TimePassed())

        self.ring_at(deadline, ring)

    # --- effects -------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        of_syncer_effect(self.watch, self, effect)
        match effect:
            case SendPull():
                r = next(r for r in self.machine.rounds.open if r.n == effect.pull.round)
                self.watch.pulled(self, effect.pull, r.participants)
                self.horizon.pulled(effect.pull.round, self.inbox.up_seq)
                self._broadcast(effect.pull)
            case SendBeat():
                self.watch.beat(self, effect.beat)
                self._broadcast(effect.beat)
            case SendGrant():
                self.watch.granted(self, effect.grant)
                self._send(effect.grant.learner, effect.grant)
            case SendDonate():
                self._send(effect.donate.donor, effect.donate)
            case Append():
                self._append(effect.record)
            case Stage():
                self._stage(effect)
            case Install():
                self._install(effect)
            case InstallInit():
                payloads = {s: self.payloads.pop(s) for s in effect.subjects if s}
                self.store = build_store(self.machine.history, effect.subjects, payloads)
            case Publish():
                self._publish(effect)
            case Drop() | Unstage() | Unload():
                self._forget(effect)
            case Snapshot():
                self._snapshot(effect)
            case Capture():
                self.checkpointer.capture(effect)
            case Seal():
                self.checkpointer.seal(effect)
            case Load():
                self.checkpointer.load(effect.restore)
            case InstallLoaded():
                self.store, self.horizon = self.checkpointer.install(effect.serial), Horizon()
                self.staged.clear()
            case PurgeUp():
                self._purge_up(effect.last_round)
            case PurgeDown():
                self._purge_down(effect)
            case Tell():
                pass
            case Ended():
                self.ended = True

    def _install(self, effect: Install) -> None:
        assert self.store is not None
        place, p = (self.machine.history.epoch, effect.round), effect.fragment
        self.installed[place] = self.staged.pop(place)
        self.store.install(p, self.installed[place])
        if self.checks.numbers is not None:
            fragment = self.store.fragments[p]
            self.checks.numbers.installed(p, fragment.master, fragment.outer)

    def _forget(self, effect: Drop | Unstage | Unload) -> None:
        match effect:
            case Drop():
                self.payloads.pop(effect.key, None)
            case Unstage():
                self.staged.pop((effect.epoch, effect.round), None)
            case Unload():
                self.checkpointer.loaded.pop(effect.serial, None)

    def _send(self, learner: str, message: Any) -> None:
        """As the edge does: nothing is said while another may lead."""
        if self.following is None or not self.following.lease.lapsed(self.now):
            self.hub.send(self.process, learner, message)

    def _broadcast(self, message: Any) -> None:
        for learner in self.node.learners:
            self._send(learner, message)

    def _append(self, record: TapeRecord) -> None:
        """As the tape's edge does: an unknown outcome is settled by reading the tail."""
        expected = self.tape_end

        def act() -> int:
            return self.hub.append(self.shard.number, record, expected)

        def answer(result: int | None) -> None:
            self.enter(lambda: self._appended(record, result))

        self.world.request(self.process, act, answer)

    def _appended(self, record: TapeRecord, result: int | None) -> None:
        if result == FULL:
            self._tape_full(record)
            return
        seq = result if result is not None and result > 0 else 0
        tape = self.shard.tape
        if not seq and len(tape) > self.tape_end:
            if tape[self.tape_end] is not record:
                self.watch.reached("append fenced by the tape")
                self.deposed()
                return
            self.watch.reached("append of unknown outcome that was on the tape")
            seq = self.tape_end + 1
        if not seq:
            self.watch.reached("append of unknown outcome that was not on the tape")
            self._append(record)
            return
        self.tape_end = seq
        self._room("TAPE", "")
        if not self.alive:
            return
        self.give(Appended(seq, self.wall))

    def _tape_full(self, record: TapeRecord) -> None:
        """As the tape's edge does: what a snapshot covers moves to the archive, or it waits."""
        covered = self.machine.history.snapshot_covers
        if covered > self.shard.archived:
            self.shard.archived = covered
            self._append(record)
            return
        self._room("TAPE", "no room")
        self.world.after(FULL_S, lambda: self.enter(lambda: self._append(record)))

    def _room(self, place: str, reason: str) -> None:
        """A stream takes nothing more, or takes something again: told when that changes."""
        if bool(reason) != (place in self.full):
            self.full ^= {place}
            self.give(Full(place, reason))

    def _stage(self, effect: Stage) -> None:
        assert self.store is not None
        payloads = {c.key: self.payloads[c.key] for c in effect.contributions}
        staged = stage_chosen(self.store, effect, payloads)
        self.staged[effect.epoch, effect.round] = staged
        done = Staged(
            effect.epoch,
            effect.round,
            staged.anchor_digest,
            staged.master_digest,
            staged.payload_digest,
        )
        self.world.after(0.01, lambda: self.enter(lambda: self.give(done)))

    def _publish(self, e: Publish) -> None:
        assert self.store is not None
        staged = self.installed.pop((e.epoch, e.round), None)
        manifest, payload = publication(self.spec, e, self.store, staged)
        subject = manifest.blob.subject

        def answer(result: int | None) -> None:
            if result is None:
                put()
            elif result == FULL:
                self._room("DN", "no room")
                self.world.after(FULL_S, lambda: self.enter(put))
            else:
                self._room("DN", "")
                if not self.alive:
                    return
                self.give(Published.of(e))

        def act() -> int:
            stored = self.hub.dn.store(subject, manifest, payload)
            if stored is None:
                return FULL
            self.acknowledged.took(stored.seq, stored.subject)
            self.watch.published(self.leader, manifest, payload)
            return 0

        def put() -> None:
            self.world.request(self.process, act, lambda r: self.enter(lambda: answer(r)))

        if moved_s := self.world.transfer(self.process, len(payload)):
            self.world.after(moved_s, lambda: self.enter(put))
        else:
            put()

    def _snapshot(self, effect: Snapshot) -> None:
        assert self.store is not None
        meta = {"history": self.machine.history.meta(), "store": self.store.meta()}
        arrays = dict(self.store.state_arrays())
        self.writing = meta, arrays

        def written() -> None:
            self.writing = None
            refused = self.world.chance(self.world.options.disk_full, "disk full")
            if refused or self.node.disk_full:
                self.give(SnapshotFailed("no space left on the device"))
                return
            self.node.disk.save(meta, arrays)
            self.give(SnapshotDone(effect.covers, effect.round, "disk"))

        seconds = self.world.rng.uniform(0.05, 1.0) * self.world.options.disk_s
        self.world.after(seconds, lambda: self.enter(written))

    def _purge_up(self, last_round: int) -> None:
        below = self.horizon.below(last_round, self.inbox.up_seq)
        self.purge = (self.machine.history.snapshot_covers, below)
        self._purge_below()

    def _purge_below(self) -> None:
        """Once the standbys that can be seen have executed what the snapshot covers."""
        covers, below = self.purge
        if any(n.behind(covers) for n in self.node.others):
            self.world.counts["purges waited"] += 1
            self.world.after(1.0, lambda: self.enter(self._purge_below))
            return

        def act() -> None:
            owned = self.machine.history.owned
            self.hub.up.purge(lambda i: i.seq < below and i.message.fragment in owned)
            self.checks.limits.purged_up(self.hub.up)

        self.world.request(self.process, act, lambda result: None)

    def _purge_down(self, e: PurgeDown) -> None:
        def replaced(item: Item) -> bool:
            m = item.message
            older = (m.epoch, m.version) < (e.epoch, e.below_version)
            return bool(m.fragment == e.fragment and older)

        self.world.request(self.process, lambda: self.hub.dn.purge(replaced), lambda result: None)
