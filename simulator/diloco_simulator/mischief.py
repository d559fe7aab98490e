"""Bad input: contributions that lie, and strangers who send what nobody asked for (I11)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from diloco_shared.config import shared_keys
from diloco_shared.numerics import codec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import ContributionManifest, Join, Progress
from diloco_simulator.hub import Hub
from diloco_simulator.syncer_inbox import NAME
from diloco_simulator.watch import Watch

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


class Mischief:
    """Drawn from the world's dice, and told to the checkers."""

    def __init__(self, hub: Hub, watch: Watch) -> None:
        self.hub = hub
        self.world = hub.world
        self.watch = watch

    def tamper(
        self, manifest: ContributionManifest, payload: bytes
    ) -> tuple[ContributionManifest, bytes]:
        """Sometimes a contribution that is not finite, or lies."""
        options = self.world.options
        if self.world.chance(options.nan, "nan"):
            values_F = codec.decode(manifest.codec, payload, manifest.values)
            payload = codec.encode(manifest.codec, values_F * np.float32(np.nan))
        elif self.world.chance(options.garbage, "lies"):
            manifest = manifest.model_copy(update=self.world.rng.choice(LIES))
        else:
            return manifest, payload
        self.watch.refusals.mark(
            manifest, manifest.learner, manifest.blob.subject, manifest.incarnation
        )
        return manifest, payload

    def plague(self) -> None:
        """Strangers come by once a second or so, as long as anything may go wrong."""
        if self.world.chance(self.world.options.garbage, "strangers"):
            kinds: tuple[Callable[[], Any], ...] = (
                self._noise,
                self._other_configuration,
                self._other_layout,
                self._old_contribution,
            )
            self.world.rng.choice(kinds)()
        if self.world.faulty:
            self.world.after(1.0, self.plague)

    def _send(self, message: Any) -> None:
        self.watch.refusals.mark(message)
        self.hub.send(STRANGER, NAME, message)

    def _noise(self) -> None:
        """Bytes that are no message."""
        self._send(bytearray(b"\xff\x00"))

    def _other_configuration(self) -> None:
        """A join to another run's configuration: answered, not admitted."""
        keys = shared_keys(self.hub.spec) | {"algorithm.fragments": "77"}
        nonce = f"{STRANGER}-{self.world.counter}"
        join = Join(learner=STRANGER, incarnation=0, nonce=nonce, config=keys)
        self.hub.send(STRANGER, NAME, join)

    def _other_layout(self) -> None:
        """Progress of a model with other fragments."""
        self._send(
            Progress(
                learner=STRANGER,
                incarnation=0,
                epoch=0,
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
            )
        )

    def _old_contribution(self) -> None:
        """What was contributed before comes again, for a round to be."""
        known = [i for i in self.hub.up.items if isinstance(i.message, ContributionManifest)]
        if not known:
            return
        item = self.world.rng.choice(known)
        m: ContributionManifest = item.message
        round_ = m.round + self.world.rng.randint(1, 9)
        subject = subjects.contribution("sim", STRANGER, m.epoch, m.fragment, round_, m.term)
        blob = m.blob.model_copy(update={"subject": subject})
        late = m.model_copy(update={"round": round_, "learner": STRANGER, "blob": blob})
        self.watch.refusals.mark(late, STRANGER, subject, m.incarnation)
        self.hub.up.put(STRANGER, subject, late, item.payload, until=self.world.now + 5)
