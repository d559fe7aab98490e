"""What a simulated learner uploads: the product's manifests around its trainer's bytes."""

from typing import TYPE_CHECKING

from diloco_learner.events import Contribute, GiveState
from diloco_shared.numerics import codec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import describe
from diloco_shared.protocol.messages import ContributionManifest, InitManifest, StateManifest

if TYPE_CHECKING:
    from diloco_simulator.learner_life import LearnerLife


def send_init(life: "LearnerLife") -> None:
    """Initial parameters of every fragment."""
    for p, values_F in enumerate(life.trainer.initial_fragments()):
        subject = subjects.initial(life.spec.name, life.name, life.incarnation, p)
        payload = codec.encode("fp32", values_F)
        manifest = InitManifest(
            run=life.spec.name,
            learner=life.name,
            incarnation=life.incarnation,
            config_hash=life.hash,
            layout=life.trainer.layout.tensors,
            fragment=p,
            blob=describe(subject, payload),
        )
        life.hub.up.put(life.name, subject, manifest, payload, until=life.world.now + 60)


def contribute(life: "LearnerLife", e: Contribute) -> None:
    """An answer to a pull, which may be tampered with on the way."""
    life.watch.claims.contributed(life.life, e)
    payload = life.trainer.contribution(e.fragment, e.round)
    subject = subjects.contribution(life.spec.name, life.name, e.epoch, e.fragment, e.round, e.term)
    manifest = ContributionManifest(
        run=life.spec.name,
        learner=life.name,
        incarnation=life.incarnation,
        epoch=e.epoch,
        term=e.term,
        round=e.round,
        fragment=e.fragment,
        base=e.base,
        step_from=e.step_from,
        step_to=e.step_to,
        tokens_from=e.tokens_from,
        tokens_to=e.tokens_to,
        cursor=e.cursor,
        codec=life.spec.algorithm.codec_up,
        values=life.trainer.layout.sizes[e.fragment],
        config_hash=life.hash,
        checkpoint=e.checkpoint,
        blob=describe(subject, payload),
    )
    life.watch.parts.contributed(life.life, subject)
    manifest, payload = life.node.tamper(manifest, payload)
    life.hub.up.put(life.name, subject, manifest, payload, until=e.deadline - life.origin)


def give_state(life: "LearnerLife", effect: GiveState) -> None:
    """Inner state for a newcomer."""
    d, payload = effect.donate, life.trainer.inner_state()
    subject = subjects.state(life.spec.name, life.name, d.newcomer, d.nonce)
    manifest = StateManifest(
        run=life.spec.name,
        donor=life.name,
        donor_incarnation=life.incarnation,
        newcomer=d.newcomer,
        newcomer_incarnation=d.newcomer_incarnation,
        nonce=d.nonce,
        epoch=d.epoch,
        versions=effect.versions,
        donor_step=effect.step,
        config_hash=life.hash,
        blob=describe(subject, payload),
    )
    life.hub.state.put(life.name, subject, manifest, payload, until=life.world.now + 60)
