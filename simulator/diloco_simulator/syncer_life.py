"""A simulated syncer process: the product's machine, store, history and replay around the hub."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco_shared.numerics import codec
from diloco_shared.numerics.digest import digest_array
from diloco_shared.protocol.messages import (
    ContributionManifest,
    InitManifest,
    Join,
    Progress,
    TapeRecord,
)
from diloco_simulator.publication import publication
from diloco_simulator.syncer_follow import Following, recover
from diloco_simulator.world import Item, Reader
from diloco_syncer.events import (
    Append,
    Appended,
    BusBack,
    ContributionSeen,
    Drop,
    Effect,
    Ended,
    Event,
    InitSeen,
    Install,
    InstallInit,
    JoinSeen,
    Led,
    Malformed,
    ProgressSeen,
    Publish,
    Published,
    PurgeDown,
    PurgeUp,
    SendBeat,
    SendDonate,
    SendGrant,
    SendPull,
    Snapshot,
    SnapshotDone,
    Stage,
    Staged,
    Suspended,
    Tell,
    TimePassed,
)
from diloco_syncer.history import History
from diloco_syncer.horizon import Horizon
from diloco_syncer.machine import Machine
from diloco_syncer.norms import inspect
from diloco_syncer.replay import build_store, newest_published, stage_chosen
from diloco_syncer.round import Phase
from diloco_syncer.store import FragmentStore
from diloco_syncer.store import Staged as StagedArrays

if TYPE_CHECKING:
    from diloco_simulator.syncer_node import SyncerNode

NAME = "syncer"
# Wall time at virtual time 0, in seconds since 1970.
WALL = 1_700_000_000.0


class SyncerLife:
    """One process: it leads, or competes for the lease and follows the tape until it does."""

    def __init__(self, node: "SyncerNode", leader: str) -> None:
        self.node = node
        self.leader = leader
        self.process = node.process
        self.hub, self.world, self.watch = node.hub, node.world, node.watch
        self.spec = node.hub.spec
        self.alive = True
        self.frozen_until = 0.0
        self.payloads: dict[str, bytes] = {}
        self.staged: dict[int, StagedArrays] = {}
        self.installed: dict[int, StagedArrays] = {}
        self.seen: set[int] = set()  # ids of bad messages, some of which come twice
        self.inits: dict[tuple[str, int], dict[int, InitManifest]] = {}
        self.armed = float("inf")
        self.ended = False
        self.horizon = Horizon()
        self.up_seq = 0
        self.machine = Machine(self.spec, History(self.spec))
        self.store: FragmentStore | None = None
        self.tape_end = 0
        self.following: Following | None = None

    def begin(self) -> None:
        """Lead at once if there is no other syncer; else compete for the lease."""
        if self.node.alone:
            self.lead(*recover(self))
        else:
            self.following = Following(self)
            self.following.begin()

    def lead(self, history: History, store: FragmentStore | None) -> None:
        """From a place that has all of the tape."""
        self.store, self.tape_end = store, history.seq
        self.machine = Machine(self.spec, history)
        self.hub.listen(self.process, lambda: self.alive, self.receive)
        if store is not None:
            for p, version in enumerate(history.versions):
                digest = store.anchor_digest(p)
                self.watch.anchors.held(history.epoch, p, version, digest, self.leader)
        if history.leader and not history.leader.startswith(self.process):
            self.world.counts["failovers"] += 1
        self._give(Led(self.leader, WALL + self.world.now, self._published()))
        self.wish()
        self.up_seq = self.hub.up.seq if history.initialised else 0
        Reader(self.hub.up, self.process, lambda: self.alive, self._arrived, after_seq=self.up_seq)

    def suspended(self, reason: str) -> None:
        """The lease lapsed, or is renewed again."""
        if self.machine.leading:
            self._give(Suspended(reason))

    def deposed(self) -> None:
        """Another leads: a fresh process stands by."""
        self.world.counts["deposed"] += 1
        self.node.gone(self, 1.0)

    def wish(self) -> None:
        """Look at what the user wants."""
        if self.node.wanted is not None:
            wanted = self.node.wanted
            self.enter(lambda: self._give(wanted))

    def _published(self) -> tuple[int, ...]:
        return newest_published(self.machine.history, (i.message for i in self.hub.dn.items))

    def enter(self, action: Callable[[], None]) -> None:
        """Run `action` in this process: later if it stands still, never if it is gone."""
        if not self.alive:
            return
        if self.world.now < self.frozen_until:
            self.world.at(self.frozen_until, lambda: self.enter(action))
            return
        if self.frozen_until:
            # The edge sees the gap in its own clock: silence in it says nothing.
            self.frozen_until = 0.0
            if self.machine.leading:
                self.watch.members.forgiven_at = self.world.now
                self._give(BusBack())
        if self.alive:
            action()

    # --- what arrives --------------------------------------------------------------------------

    def receive(self, message: Any) -> None:
        event: Event
        match message:
            case Progress():
                event = ProgressSeen(message)
            case Join():
                event = JoinSeen(message)
            case _:
                event = Malformed("wire", "somebody", "cannot be decoded")
        self.enter(lambda: self._take(message, event))

    def _arrived(self, item: Item) -> None:
        self.up_seq = max(self.up_seq, item.seq)
        if isinstance(item.message, InitManifest):
            self.enter(lambda: self._initial(item.message))
        else:
            self.enter(lambda: self._contribution(item.message, item.payload))

    def _initial(self, m: InitManifest) -> None:
        parts = self.inits.setdefault((m.learner, m.incarnation), {})
        parts[m.fragment] = m
        if len(parts) < self.spec.algorithm.fragments or self.machine.history.initialised:
            return
        ordered = [parts[p] for p in sorted(parts)]
        digests = []
        for part in ordered:
            item = self.hub.up.by_subject.get(part.blob.subject)
            if item is None:
                return  # purged while this process stood still: another leads by now
            payload = item.payload
            self.payloads[part.blob.subject] = payload
            values_F = codec.decode("fp32", payload, codec.count("fp32", payload))
            digests.append(digest_array(values_F))
        self._give(
            InitSeen(
                m.learner,
                m.incarnation,
                m.config_hash,
                m.layout,
                tuple(part.blob.subject for part in ordered),
                tuple(digests),
                True,
            )
        )

    def _contribution(self, m: ContributionManifest, payload: bytes) -> None:
        if not any(
            r.n == m.round and r.phase is Phase.PULLING and m.learner in r.unanswered
            for r in self.machine.rounds.open
        ):
            self._take(m, ContributionSeen(m, finite=True, norm=0.0))
            return
        try:
            found = inspect(payload, m.codec, m.values)
            finite, norm = found.finite, found.norm
        except ValueError:
            finite, norm = True, 0.0  # sizes that do not fit: the gate sees them too
        self.payloads[m.blob.subject] = payload
        self._take(m, ContributionSeen(m, finite, norm))

    def _take(self, message: object, event: Event) -> None:
        """Give what a message brought; if it is a bad one, look what that changes (I11)."""
        refusals = self.watch.refusals
        if not refusals.is_bad(message) or not self.machine.leading:
            self._give(event)
            return
        before, counted = self.machine.history.meta(), self._refused()
        again = id(message) in self.seen
        self.seen.add(id(message))
        self._give(event)
        after = self.machine.history.meta()
        grown = self._refused() - counted
        refusals.handled(self.watch.describe(message), before, after, 1 if again else grown)

    def _refused(self) -> int:
        """Refusals counted so far: at the door, on the tape, and in the rounds in flight."""
        rounds = self.machine.rounds.open
        verdicts = [v for r in rounds for v in r.verdicts.values() if v.outcome == "refused"]
        history = self.machine.history
        return len(verdicts) + (history.refused + self.machine.refused).total()

    def _give(self, event: Event) -> None:
        for effect in self.machine.handle(event, self.world.now):
            if self.world.chance(self.world.options.syncer_crash, "syncer crashes"):
                self.node.gone(self, self.world.rng.uniform(0.5, 6.0))
                return
            self._perform(effect)
            if not self.alive:
                return
        self._arm()

    def _arm(self) -> None:
        deadline = self.machine.deadline
        if deadline is None or deadline >= self.armed > self.world.now:
            return
        self.armed = deadline

        def ring() -> None:
            if self.armed == deadline:
                self.armed = float("inf")
                if not self.ended:
                    self._give(TimePassed())

        self.world.at(deadline + 1e-6, lambda: self.enter(ring))

    # --- effects -------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendPull():
                r = next(r for r in self.machine.rounds.open if r.n == effect.pull.round)
                self.watch.pulled(self.leader, effect.pull, r.participants)
                self.horizon.pulled(effect.pull.round, self.up_seq)
                self._broadcast(effect.pull)
            case SendBeat():
                self.watch.beat(self.leader, effect.beat)
                self._broadcast(effect.beat)
            case SendGrant():
                self.watch.granted(self.leader, effect.grant)
                self._send(effect.grant.learner, effect.grant)
            case SendDonate():
                self._send(effect.donate.donor, effect.donate)
            case Append():
                self._append(effect.record)
            case Stage():
                self._stage(effect)
            case Install():
                assert self.store is not None
                self.installed[effect.round] = self.staged.pop(effect.round)
                self.store.install(effect.fragment, self.installed[effect.round])
            case InstallInit():
                payloads = {s: self.payloads.pop(s) for s in effect.subjects}
                self.store = build_store(self.machine.history, effect.subjects, payloads)
            case Publish():
                self._publish(effect)
            case Drop():
                self.payloads.pop(effect.key, None)
            case Snapshot():
                self._snapshot(effect)
            case PurgeUp():
                self._purge_up(effect.last_round)
            case PurgeDown():
                self._purge_down(effect)
            case Tell():
                pass
            case Ended():
                self.ended = True

    def _send(self, learner: str, message: Any) -> None:
        """As the edge does: nothing is said while another may lead."""
        if self.following is None or not self.following.lease.lapsed(self.world.now):
            self.hub.send(self.process, learner, message)

    def _broadcast(self, message: Any) -> None:
        for learner in self.node.learners:
            self._send(learner, message)

    def _append(self, record: TapeRecord) -> None:
        """As the tape's edge does: an unknown outcome is settled by reading the tail."""
        expected = self.tape_end

        def act() -> int:
            return self.hub.append(record, expected)

        def answer(result: int | None) -> None:
            self.enter(lambda: self._appended(record, result))

        self.world.request(self.process, act, answer)

    def _appended(self, record: TapeRecord, result: int | None) -> None:
        seq = result if result is not None and result > 0 else 0
        if not seq and len(self.hub.tape) > self.tape_end:
            if self.hub.tape[self.tape_end] is not record:
                self.deposed()
                return
            seq = self.tape_end + 1
        if not seq:
            self._append(record)
            return
        self.tape_end = seq
        self._give(Appended(seq, WALL + self.world.now))

    def _stage(self, effect: Stage) -> None:
        assert self.store is not None
        payloads = {c.key: self.payloads[c.key] for c in effect.contributions}
        staged = stage_chosen(
            self.store, effect.fragment, effect.contributions, payloads, keyframe=effect.keyframe
        )
        self.staged[effect.round] = staged
        done = Staged(
            effect.round, staged.anchor_digest, staged.master_digest, staged.payload_digest
        )
        self.world.after(0.01, lambda: self.enter(lambda: self._give(done)))

    def _publish(self, e: Publish) -> None:
        assert self.store is not None
        p, staged = e.fragment, self.installed.pop(e.round, None)
        manifest, payload = publication(self.spec, e, self.store, staged)
        digest, subject = manifest.anchor_digest, manifest.blob.subject

        def answer(result: Any) -> None:
            if result is None:
                self.world.request(self.process, act, lambda r: self.enter(lambda: answer(r)))
            else:
                self._give(Published(p, e.version))

        def act() -> Item:
            self.watch.anchors.held(e.epoch, p, e.version, digest, self.leader)
            return self.hub.dn.store(subject, manifest, payload)

        self.world.request(self.process, act, lambda r: self.enter(lambda: answer(r)))

    def _snapshot(self, effect: Snapshot) -> None:
        assert self.store is not None
        meta = {"history": self.machine.history.meta(), "store": self.store.meta()}
        arrays = dict(self.store.state_arrays())

        def written() -> None:
            self.node.keep(meta, arrays)
            self._give(SnapshotDone(effect.covers, effect.round, "disk"))

        self.world.after(self.world.rng.uniform(0.1, 2.0), lambda: self.enter(written))

    def _purge_up(self, last_round: int) -> None:
        below = self.horizon.below(last_round, self.up_seq)
        self._purge_below(below, self.machine.history.snapshot_covers)

    def _purge_below(self, below: int, covers: int) -> None:
        """Once the standbys that can be seen have executed what the snapshot covers."""
        if any(n.behind(covers) for n in self.node.others):
            self.world.counts["purges waited"] += 1
            self.world.after(1.0, lambda: self.enter(lambda: self._purge_below(below, covers)))
            return
        up = self.hub.up
        self.world.request(
            self.process, lambda: up.purge(lambda i: i.seq < below), lambda result: None
        )

    def _purge_down(self, e: PurgeDown) -> None:
        def replaced(item: Item) -> bool:
            m = item.message
            older = (m.epoch, m.version) < (e.epoch, e.below_version)
            return bool(m.fragment == e.fragment and older)

        self.world.request(self.process, lambda: self.hub.dn.purge(replaced), lambda result: None)
