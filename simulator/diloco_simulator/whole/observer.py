"""Shows the checkers what passes the hub of a whole world: tape, uploads and publications.

Only what the product itself wrote is looked at, by its subjects, at the moment at which the hub
takes it. What a process thinks is not asked for, but for what learners adopt.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from diloco_learner.events import Adopt, Contribute, Evaluate, KeepPart, Unmerged
from diloco_learner.events import Merged as MergedEffect
from diloco_learner.train import TrainLoop
from diloco_shared.config import RunSpec
from diloco_shared.edges.bus import Stored
from diloco_shared.edges.memory_broker import MemoryBroker
from diloco_shared.numerics.digest import digest_array
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import HEADER_INDEX
from diloco_shared.protocol.messages import (
    Blob,
    ContributionManifest,
    InitManifest,
    PublicationManifest,
)
from diloco_shared.protocol.wire import WireError, decode, decode_tape
from diloco_simulator.options import Options
from diloco_simulator.virtual_loop import VirtualLoop
from diloco_simulator.watch import Watch
from diloco_simulator.world import Item


@dataclass(slots=True)
class Scene:
    """What checkers ask of a world."""

    loop: VirtualLoop
    options: Options
    counts: Counter[str] = field(default_factory=Counter)
    faulty: bool = True

    @property
    def now(self) -> float:
        return self.loop.now


class Observer:
    """Of one run. `watch.violations` is what it found."""

    def __init__(self, scene: Scene, spec: RunSpec, broker: MemoryBroker) -> None:
        self.scene = scene
        self.spec = spec
        self.broker = broker
        world: Any = scene
        self.watch = Watch(world, spec)
        self.tapes = {subjects.tape(spec.name, n): n for n in range(spec.algorithm.shards)}
        self.records = [0] * spec.algorithm.shards
        broker.on_store = self.stored

    def stored(self, stream: str, message: Stored) -> None:
        """The hub has taken a message."""
        if message.subject in self.tapes:
            self._recorded(self.tapes[message.subject], message)
        elif not message.subject.endswith(".m"):
            return  # a chunk, a key or an event
        elif stream == subjects.up_stream(self.spec.name):
            self._uploaded(stream, message)
        elif stream == subjects.dn_stream(self.spec.name):
            self._published(stream, message)

    def _recorded(self, shard: int, message: Stored) -> None:
        self.records[shard] += 1
        self.watch.record(shard, self.records[shard], decode_tape(message.payload))

    def _uploaded(self, stream: str, message: Stored) -> None:
        m: ContributionManifest | InitManifest
        try:
            m = decode(message.payload, ContributionManifest)
        except WireError:
            m = decode(message.payload, InitManifest)
        payload = self._payload(stream, m.blob)
        self.watch.stored(Item(message.seq, m.blob.subject, m, payload))

    def _published(self, stream: str, message: Stored) -> None:
        m = decode(message.payload, PublicationManifest)
        self.watch.published(f"term {m.term}", m, self._payload(stream, m.blob))

    def _payload(self, stream: str, blob: Blob) -> bytes:
        """Of several chunks the newest of each, in order; they lie there before their manifest."""
        chunks = {
            int(stored.headers[HEADER_INDEX]): stored.payload
            for stored in self.broker.select(stream, blob.subject, 1)
        }
        return b"".join(chunks[index] for index in sorted(chunks))

    # --- learners ------------------------------------------------------------------------------

    def trains(self, learner: str, loop: TrainLoop) -> None:
        """From now on what the exchange decides is seen."""
        exchange = loop.exchange
        life, handle = f"{learner}/{exchange.incarnation}", exchange.handle
        self.watch.parts.began(life, exchange.joined)

        def watched(event: Any, now: float) -> list[Any]:
            effects = handle(event, now)
            for effect in effects:
                self._decided(learner, life, loop, effect)
            return effects

        exchange.handle = watched  # type: ignore[method-assign]

    def _decided(self, learner: str, life: str, loop: TrainLoop, effect: Any) -> None:
        match effect:
            case Adopt():
                key = (effect.epoch, effect.fragment, effect.version)
                self.watch.anchors.adopted(life, *key, digest_array(loop.anchors[key]))
            case KeepPart() as e:
                moments = bytes(loop.trainer.inner_state())
                self.watch.parts.kept(life, learner, e.number, e.epoch, e.versions, moments)
            case Contribute() as e:
                whose = self.spec.name, learner
                subject = subjects.contribution(*whose, e.epoch, e.fragment, e.round, e.term)
                self.watch.parts.contributed(life, subject)
            case MergedEffect() | Unmerged() | Evaluate():
                self.scene.counts[f"learners: {type(effect).__name__}"] += 1
