"""A simulated learner process: the product's recovery, exchange and anchor book, and a trainer."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diloco_learner.anchors import AnchorBook
from diloco_learner.edges.mailbox import Mailbox
from diloco_learner.events import (
    Adopt,
    BeatSeen,
    Begin,
    Checkpoint,
    Contribute,
    DonateSeen,
    Evaluate,
    GiveState,
    GrantSeen,
    KeepPart,
    Leave,
    LoadState,
    Merged,
    PartSettled,
    PullSeen,
    SendInit,
    SendJoin,
    SendProgress,
    StateSeen,
    Stepped,
    Tell,
    TimePassed,
    Unmerged,
)
from diloco_learner.exchange import Exchange
from diloco_learner.leaders import Leaders
from diloco_learner.recovery import Recovery
from diloco_learner.reports import before_training
from diloco_learner.train import Anchored
from diloco_learner.waiting import heavy
from diloco_shared.config import config_hash
from diloco_shared.numerics.digest import digest_array
from diloco_shared.numerics.schedule import inner_rate
from diloco_shared.protocol.messages import (
    Beat,
    Donate,
    Grant,
    Progress,
    PublicationManifest,
    Pull,
)
from diloco_simulator.coverage import of_book, of_learner_effect
from diloco_simulator.learner_parts import hand_out, keep_part, load_state
from diloco_simulator.learner_up import contribute, give_state, send_init
from diloco_simulator.process import Process
from diloco_simulator.world import Item, Reader

if TYPE_CHECKING:
    from diloco_simulator.learner_node import LearnerNode

Values = NDArray[np.float32]
SYNCER = "syncer"
RESTS = {
    "paused": "learner rests while paused",
    "epoch": "learner rests for a new epoch's anchors",
}


class LearnerLife(Process):
    """One process. `begin` joins the run."""

    def __init__(self, node: "LearnerNode") -> None:
        super().__init__(node.world)
        self.node = node
        self.hub, self.watch, self.name = node.hub, node.watch, node.name
        self.spec = node.hub.spec
        self.incarnation = self.hub.next_incarnation(self.name)
        self.life = f"{self.name}/{self.incarnation}"
        self.hash = config_hash(self.spec)
        self.trainer = node.make()
        self.book = AnchorBook(self.trainer.layout.sizes)
        self.anchors: dict[tuple[int, int, int], Values] = {}
        self.states: dict[str, bytes] = {}
        self.recovery = Recovery(
            self.spec,
            self.name,
            self.incarnation,
            has_checkpoint=node.checkpoint is not None,
            nonce_seed=f"{self.name}-{self.incarnation}",
            layout=self.trainer.layout.digest(),
            parameters=sum(self.trainer.layout.sizes),
        )
        self.leaders = Leaders(self.name, self.spec.algorithm.shards)
        self.exchange: Exchange | None = None
        self.mailbox = Mailbox()
        self.in_step = False
        self.handed = 0  # places that a copy of the inner state is on its way to
        self.said: Progress | None = None  # the newest report
        self.armed = float("inf")

    def begin(self) -> None:
        self.watch.recovers(self.name)
        self.hub.listen(self.name, lambda: self.alive, self.receive)
        self.hear(TimePassed())
        Reader(self.hub.dn, self.name, lambda: self.alive, self._published)
        Reader(self.hub.state, self.name, lambda: self.alive, self._state)
        self._heartbeat()

    def thawed(self, *, noticed: bool) -> None:
        """It goes on."""
        self.watch.back(self.name, self.incarnation)

    def drain(self, reason: str) -> bool:
        """Leave as soon as none of its work is unmerged; False if it does not train yet."""
        if self.exchange is None:
            return False
        self.watch.pace.over.add(self.life)  # it may rest from now on
        self.exchange.drain(reason, self.now)
        self.hear(TimePassed())
        return True

    # --- what arrives --------------------------------------------------------------------------

    def receive(self, message: Any) -> None:
        self.enter(lambda: self._receive(message))

    def _receive(self, message: Any) -> None:
        match message:
            case Beat():
                beat = self.leaders.beat(message)
                if beat is not None:
                    self.watch.pace.told(self.life, beat)
                    self.hear(BeatSeen(beat))
            case Grant():
                grant = self.leaders.grant(message)
                if grant is not None:
                    self.hear(GrantSeen(grant))
            case Pull():
                self.hear(PullSeen(message))
            case Donate():
                self.hear(DonateSeen(message))

    def _published(self, item: Item) -> None:
        assert isinstance(item.message, PublicationManifest)
        self.publication(item.message, item.payload)

    def publication(self, manifest: PublicationManifest, payload: bytes) -> None:
        """A publication is fetched."""
        self.enter(lambda: self._offer(manifest, payload))

    def _offer(self, manifest: PublicationManifest, payload: bytes) -> None:
        ready = self.node.take_in(self, manifest, payload)
        of_book(self.watch, self.book)
        if ready is not None:
            key = (ready.epoch, ready.fragment, ready.version)
            self.hear(Anchored(ready, self.book.take(*key)))

    def _state(self, item: Item) -> None:
        m = item.message
        mine = m.newcomer == self.name and m.newcomer_incarnation == self.incarnation
        if mine:
            self.states[m.nonce] = item.payload
            self.enter(lambda: self.hear(StateSeen(m.donor, m.nonce)))

    def hear(self, event: Any) -> None:
        """An event for whatever machine there is."""
        if self.exchange is None:
            if isinstance(event, PullSeen | DonateSeen | PartSettled):
                return
            event = self._keep(event)
            for effect in self.recovery.handle(event, self.now):
                if self._dies(effect):
                    return
                self._perform(effect)
                if not self.alive:
                    return
            if self.exchange is None:
                self._arm(self.recovery.deadline)
        elif self.in_step:
            self.mailbox.put(event)
        else:
            self._handle(event)
            self._boundary()

    def _keep(self, event: Any) -> Any:
        """The values of an anchor, of which the machines hear without them."""
        if not isinstance(event, Anchored):
            return event
        r = event.ready
        self.anchors[r.epoch, r.fragment, r.version] = event.values_F
        return r

    @property
    def values_held(self) -> int:
        """Fragments' values in memory that are not adopted yet."""
        return len(self.anchors) + sum(heavy(event) for event in self.mailbox.waiting)

    def _arm(self, deadline: float | None) -> None:
        if deadline is None or deadline >= self.armed > self.now:
            return
        self.armed = deadline

        def ring() -> None:
            if self.armed == deadline:
                self.armed = float("inf")
                self.hear(TimePassed())

        self.ring_at(deadline, ring)

    def _heartbeat(self) -> None:
        def beat() -> None:
            if self.exchange is None:
                report = before_training(
                    self.name,
                    self.incarnation,
                    self.book.epoch,
                    self.book.versions,
                    self.recovery.restore(self.book.epoch),
                )
                self.hub.send(self.name, SYNCER, report)
                self._heartbeat()

        self.world.after(self.spec.membership.heartbeat_s, lambda: self.enter(beat))

    # --- training ------------------------------------------------------------------------------

    def _boundary(self) -> None:
        """Take in what came during the step, then begin the next one."""
        if self.exchange is None or self.in_step:
            return
        for event in self.mailbox.drain():
            self._handle(event)
            if not self.alive:
                return
        self._handle(TimePassed())
        if not self.alive:
            return
        self.watch.report.looked("I8")
        if not self.exchange.may_step:
            why = self.watch.pace.rests(self.life, self.exchange.left)
            if why in ("paused", "epoch"):
                self.watch.reached(RESTS[why])
            self._arm(self.exchange.deadline)
            return
        self.in_step = True
        share = self.world.options.jitter
        jitter = self.world.rng.uniform(1 - share, 1 + share)
        step_s = self.node.step_s * jitter
        self.world.after(step_s, lambda: self.enter(self._stepped))
        if step_s > self.spec.membership.heartbeat_s:
            self._repeat(self.world.now + step_s)

    def _repeat(self, until: float) -> None:
        """As the reporter does: a step longer than a heartbeat is no silence."""

        def again() -> None:
            if self.in_step and self.world.now < until and self.said is not None:
                self.hub.send(self.name, SYNCER, self.said)
                self._repeat(until)

        self.world.after(self.spec.membership.heartbeat_s, lambda: self.enter(again))

    def _stepped(self) -> None:
        assert self.exchange is not None
        self.in_step = False
        rate = inner_rate(self.spec.inner, self.spec.inner_rate, *self.exchange.position())
        tokens, loss = self.trainer.step(rate)
        self.watch.claims.stepped(self.life, tokens)
        self._handle(Stepped(tokens, loss, self.node.step_s, 0.0, self.trainer.cursor))
        if self.alive:
            self._boundary()

    def _handle(self, event: Any) -> None:
        assert self.exchange is not None
        event = self._keep(event)
        for effect in self.exchange.handle(event, self.now):
            if self._dies(effect):
                return
            self._perform(effect)
            if not self.alive:
                return

    def _dies(self, effect: Any) -> bool:
        rate = self.world.options.learner_crash
        if self.world.dies("learner", rate, type(effect).__name__):
            self.node.gone(self, self.world.rng.uniform(0.5, 8.0))
            return True
        return False

    # --- effects -------------------------------------------------------------------------------

    def _perform(self, effect: Any) -> None:
        of_learner_effect(self.watch, self, effect)
        match effect:
            case SendJoin():
                self.hub.send(self.name, SYNCER, effect.join)
            case SendInit():
                send_init(self)
            case LoadState():
                load_state(self, effect)
            case Begin():
                self._begin(effect)
            case Adopt():
                self._adopt((effect.epoch, effect.fragment, effect.version))
            case Contribute():
                contribute(self, effect)
            case SendProgress():
                if self.exchange is not None:
                    self.watch.of[0].limits.of_learner(self)
                self.said = effect.progress
                self.hub.send(self.name, SYNCER, effect.progress)
            case GiveState():
                give_state(self, effect)
                hand_out(self)
            case KeepPart():
                keep_part(self, effect)
                hand_out(self)
            case Evaluate():
                self.node.on_evaluate(self, effect)
            case Checkpoint():
                self.node.checkpoint = (effect.epoch, self.trainer.inner_state())
                hand_out(self)
            case Merged() | Unmerged():
                self.watch.claims.decided(self.name, self.incarnation, effect)
                merged = isinstance(effect, Merged)
                self.trainer.decided(effect.fragment, effect.round, merged=merged)
            case Leave():
                self._leave(effect.outcome)
            case Tell():
                if effect.kind == "epoch-entered":
                    self.watch.claims.voided(self.life)
            case _:
                self.watch.broken("I8", f"{self.life} is to wait for {type(effect).__name__}")

    def _leave(self, outcome: str) -> None:
        """For good, unless a newer process has the name (then this one just ends), or history has
        gone back: then it begins again."""
        again = outcome in ("superseded", "restored")
        if self.node.life is self and not again:
            self.node.left = outcome
        # The supervisor restarts what it still thinks is the learner's process.
        self.node.gone(self, 1.0 if again else None)

    def _begin(self, begin: Begin) -> None:
        for p, version in enumerate(begin.versions):
            self._adopt((begin.epoch, p, version))
        self.watch.pace.begins(self.life)
        self.exchange = Exchange(
            self.spec,
            self.name,
            self.incarnation,
            begin.epoch,
            begin.versions,
            begin.stamp,
            self.now,
            begin.joined,
            begin.restore,
        )
        self.watch.trains(self.name, self.incarnation, self.node.step_s)
        self.armed = float("inf")
        if self.recovery.beat is not None:
            self._handle(BeatSeen(self.recovery.beat))
        if self.alive:
            self._boundary()

    def _adopt(self, key: tuple[int, int, int]) -> None:
        anchor_F = self.anchors[key]
        self.trainer.adopt(key[1], anchor_F)
        self.watch.anchors.adopted(self.life, *key, digest_array(anchor_F))
        self.watch.claims.adopted(self.life, *key)
        for other in [o for o in self.anchors if o[1] == key[1] and o <= key]:
            del self.anchors[other]
