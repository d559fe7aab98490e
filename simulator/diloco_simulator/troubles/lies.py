"""Bad input (I11): contributions that are not finite or lie, and strangers whom nobody asked.

What is bad is marked for the checkers before the hub takes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from diloco_learner.training.train import TrainLoop
from diloco_shared.bus.port import BusError, Delivery, Stored
from diloco_shared.numerics import codec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import describe
from diloco_shared.protocol.messages import Beat, ContributionManifest, Join, Message, Progress
from diloco_shared.protocol.wire import WireError, decode, encode
from diloco_shared.spec.run import RunSpec, shared_keys
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.troubles.chance import Chance
from diloco_simulator.worlds.computing import VirtualTrainer
from diloco_simulator.worlds.constants import CHUNKS

if TYPE_CHECKING:
    from diloco_simulator.inside.observer import Observer

STRANGER = "stranger"

# Lies about a contribution, each of which must be seen.
LIES: tuple[dict[str, Any], ...] = (
    {"config_hash": "f" * 32},
    {"epoch": 7},
    {"term": 99},
    {"incarnation": 99},
    {"fragment": 500},
    {"base": 10**6},
    {"values": 1},
    {"codec": "fp32"},
    {"tokens_to": 10**12},
    {"tokens_to": 0},
    {"step_to": 0},
    {"learner": STRANGER},
    {"round": 10**6},
)
# A run-wide checkpoint that nobody has begun: of all shards but the first each must look for it.
UNKNOWN_MARK = 10**9
# Between two looks of strangers, in virtual seconds.
EVERY_S = 1.0
# What is sent while a leader was heard so lately reaches it, in virtual seconds; and of so many
# bad messages at least one is told of, whatever dies meanwhile.
HEARD_S, TOLD_OF = 2.0, 8


@dataclass(frozen=True, slots=True)
class Poisoned:
    """An encoded contribution that is not finite, once it is fetched."""

    lies: "Lies"
    sent: Any
    size: int

    def fetch(self) -> bytes:
        """The encoded bytes of as many values, none of which is a number."""
        return self.lies.poison(getattr(self.sent, "shared", self.sent).fetch(), self.size)


class Lies:
    """Of one world."""

    def __init__(
        self,
        observer: "Observer",
        spec: RunSpec,
        rng: Random,
        of_marks: Random,
        of_bases: Random,
    ) -> None:
        self.observer = observer
        self.scene, self.options = observer.scene, observer.scene.options
        self.broker: MemoryBroker = observer.broker
        self.refusals = observer.watch.refusals
        self.spec = spec
        self.rng = rng
        self.chance = Chance(self.scene, rng)
        self.mark_lies = Chance(self.scene, of_marks)
        self.base_lies = Chance(self.scene, of_bases)
        self.poisoned: set[str] = set()  # digests of payloads
        # By subject, life and digest: what is sent again is the same lie, or as true.
        self.told: dict[tuple[str, int, str], bytes] = {}
        self.beat: Beat | None = None
        self.heard_at = -HEARD_S
        self.bad: set[bytes] = set()  # manifests, word for word
        self.met = 0  # bad messages that a leader must have met
        self.broker.subscribe(subjects.beat(spec.name), self._heard)

    # --- learners ------------------------------------------------------------------------------

    def trains(self, loop: TrainLoop) -> None:
        """From now on some of what it contributes is not finite."""
        trainer: Any = loop.trainer
        if trainer.program.spec.name != self.spec.name:
            return  # a later run's
        assert isinstance(trainer, VirtualTrainer)
        contribution = trainer.contribution

        def sometimes_poisoned(p: int, round_: int) -> Any:
            sent = contribution(p, round_)
            if self.chance(self.options.nan, "nan"):
                return Poisoned(self, sent, trainer.tiny.layout.sizes[p])
            return sent

        trainer.contribution = sometimes_poisoned  # type: ignore[method-assign]

    def poison(self, payload: bytes, size: int) -> bytes:
        """The same contribution of that many values, with none that is a number."""
        name = self.spec.algorithm.codec_up
        values_F = codec.decode(name, payload, size)
        payload = bytes(codec.encode(name, values_F * np.float32(np.nan)))
        self.poisoned.add(describe("", payload, chunk_bytes=CHUNKS.value).digest)
        return payload

    def sent(self, subject: str, payload: bytes) -> bytes:
        """What a learner sends, or a lie in its place."""
        if not (subject.startswith(f"up.{self.spec.name}.") and subject.endswith(".m")):
            return payload
        try:
            m = decode(payload, ContributionManifest)
        except WireError:
            return payload  # initial parameters
        key = (subject, m.incarnation, m.blob.digest)
        if key not in self.told:
            self.told[key] = self._told(m, payload)
        return self.told[key]

    def _told(self, m: ContributionManifest, payload: bytes) -> bytes:
        if m.blob.digest in self.poisoned:
            self._mark(m)
        elif self.chance(self.options.garbage, "lies"):
            m = m.model_copy(update=self.rng.choice(LIES))
            self._mark(m)
            return encode(m)
        elif self.mark_lies(self.options.garbage, "lies about marks"):
            return encode(m.model_copy(update={"checkpoint": UNKNOWN_MARK}))
        elif m.base == 0 and self.base_lies(self.options.garbage, "lies about bases"):
            # One behind the first version: not too old by number, and nobody has it.
            m = m.model_copy(update={"base": -1})
            self._mark(m)
            return encode(m)
        return payload

    def _mark(self, m: ContributionManifest) -> None:
        self.bad.add(encode(m))
        self.refusals.mark(m, m.learner, m.blob.subject, m.incarnation)

    # --- strangers -----------------------------------------------------------------------------

    def _heard(self, delivery: Delivery) -> None:
        try:
            self.beat, self.heard_at = decode(delivery.payload, Beat), self.scene.now
        except WireError as error:
            self.observer.watch.broken("I11", f"a beat that nobody can read: {error}")

    def begin(self) -> None:
        """Strangers come by once a second or so, as long as anything may go wrong."""
        hub = self.broker.exists(subjects.up_stream(self.spec.name))  # it may have lost its disk
        if self.beat is not None and hub and self.chance(self.options.garbage, "strangers"):
            kinds: tuple[Callable[[Beat], None], ...] = (
                self._noise,
                self._other_configuration,
                self._other_layout,
                self._old_contribution,
            )
            self.rng.choice(kinds)(self.beat)
        if self.scene.faulty:
            self.scene.loop.call_later(EVERY_S, self.begin)

    def heal(self) -> None:
        """Of so much that was bad somebody must have been told."""
        self.observer.watch.report.looked("I11")
        if self.met >= TOLD_OF and not self.scene.counts["refused: told"]:
            self.observer.watch.broken("I11", f"{self.met} bad messages, and not a word of one")

    def _say(self, subject: str, payload: bytes) -> None:
        """To whoever listens."""
        self.met += self.scene.now - self.heard_at < HEARD_S
        self.broker.publish(Delivery(subject, payload))

    def _store(self, subject: str, payload: bytes, headers: dict[str, str]) -> None:
        """On a stream, if there is one and it has room."""
        try:
            self.broker.append(subject, payload, headers, None, None)
        except BusError:
            self.scene.counts["strangers without room"] += 1

    def _noise(self, beat: Beat) -> None:
        """Bytes that are no message, or no message of this kind."""
        run, payload = self.spec.name, self.rng.choice([b"\xff\x00", b"", encode(beat)])
        said = (subjects.progress(run, STRANGER), subjects.join(run, STRANGER))
        stored = (
            subjects.contribution(run, STRANGER, beat.epoch, 0, self.rng.randrange(99), beat.term),
            subjects.initial(run, STRANGER, 0, 0),
        )
        if self.rng.random() < 0.5:
            self._say(self.rng.choice(said), payload)
        else:
            self._store(f"{self.rng.choice(stored)}.m", payload, {})

    def _other_configuration(self, beat: Beat) -> None:
        """A join to another run's configuration: answered, not admitted."""
        keys = shared_keys(self.spec) | {"algorithm.fragments": "77"}
        nonce = f"{STRANGER}-{self.rng.randrange(10**6)}"
        join = Join(learner=STRANGER, incarnation=0, nonce=nonce, config=keys)
        self.broker.publish(Delivery(subjects.join(self.spec.name, STRANGER), encode(join)))

    def _other_layout(self, beat: Beat) -> None:
        """Progress of a model with other fragments, or of a deleted run."""
        progress = Progress(
            learner=STRANGER,
            incarnation=0,
            epoch=beat.epoch,
            state="stepping",
            step=1,
            tokens=1,
            c_steps=(1,) * 99,
            c_tokens=(1,) * 99,
            adopted=(0,) * 99,
            adopted_at=(0,) * 99,
            loss=1.0,
            step_s=1.0,
            wait_s=0.0,
            run_id=self.rng.choice([beat.run_id, ""]),
        )
        self._send(progress, subjects.progress(self.spec.name, STRANGER))

    def _send(self, message: Message, subject: str) -> None:
        self.refusals.mark(message)
        self._say(subject, encode(message))

    def _old_contribution(self, beat: Beat) -> None:
        """What was contributed before comes again, for a round to be."""
        stream, run = subjects.up_stream(self.spec.name), self.spec.name
        known = [m for m in self._contributions(stream)]
        if not known:
            return
        m = self.rng.choice(known)
        round_ = m.round + self.rng.randint(1, 9)
        subject = subjects.contribution(run, STRANGER, m.epoch, m.fragment, round_, m.term)
        blob = m.blob.model_copy(update={"subject": subject})
        late = m.model_copy(update={"round": round_, "learner": STRANGER, "blob": blob})
        self.bad.add(encode(late))
        self.refusals.mark(late, STRANGER, subject, m.incarnation)
        chunks: list[Stored] = list(self.broker.select(stream, m.blob.subject, 1))
        for chunk in chunks:
            self._store(subject, chunk.payload, chunk.headers)
        self._store(f"{subject}.m", encode(late), {})

    def _contributions(self, stream: str) -> list[ContributionManifest]:
        """Those that lie there."""
        found = []
        for stored in self.broker.select(stream, ">", 1):
            if stored.subject.endswith(".m"):
                try:
                    found.append(decode(stored.payload, ContributionManifest))
                except WireError:
                    continue  # initial parameters, or noise
        return found
