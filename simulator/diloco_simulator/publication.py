"""What a simulated syncer publishes: the product's manifest around the store's bytes."""

from diloco_shared.config import RunSpec, config_hash
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import describe
from diloco_shared.protocol.messages import PublicationManifest
from diloco_syncer.events import Publish
from diloco_syncer.store import FragmentStore, Staged


def publication(
    spec: RunSpec, e: Publish, store: FragmentStore, staged: Staged | None
) -> tuple[PublicationManifest, bytes]:
    """Of what a round staged; without one, the current anchor exactly."""
    algorithm, p = spec.algorithm, e.fragment
    payload = bytes(store.current_keyframe(p)) if staged is None else staged.payload
    name = algorithm.keyframe_codec if e.prev_version < 0 else algorithm.codec_down
    subject = subjects.publication(spec.name, e.epoch, p, e.version, e.term)
    manifest = PublicationManifest(
        run=spec.name,
        epoch=e.epoch,
        term=e.term,
        round=e.round,
        fragment=p,
        version=e.version,
        prev_version=e.prev_version,
        codec="fp32" if staged is None else name,
        values=store.layout.sizes[p],
        anchor_digest=store.anchor_digest(p),
        config_hash=config_hash(spec),
        checkpoint=e.checkpoint,
        participants=e.participants,
        last_merged=e.last_merged,
        stamp=e.stamp,
        blob=describe(subject, payload),
    )
    return manifest, payload
