"""A learner's part of a run-wide checkpoint: its inner state, written and read back as it is.

Not for an event loop: every function waits for the vault.
"""

from diloco_learner import moments
from diloco_learner.events import KeepPart
from diloco_learner.moments import Buffer, Check
from diloco_shared.config import RunSpec
from diloco_shared.edges.checkpoints import CheckpointError, Checkpoints
from diloco_shared.numerics.arrays import Arrays, pack
from diloco_shared.protocol.checkpoints import LearnerPart, reference


def write_part(
    spec: RunSpec,
    root: str,
    learner: str,
    incarnation: int,
    effect: KeepPart,
    data: Buffer,
) -> int:
    """Write it whole; its bytes. OSError when the vault cannot be written."""
    there, ref = Checkpoints(root), reference(spec.folder, effect.number)
    name = f"learner-{learner}"
    part = LearnerPart(
        learner=learner,
        incarnation=incarnation,
        epoch=effect.epoch,
        step=effect.step,
        versions=effect.versions,
        arrays=there.write_arrays(ref, name, pack(moments.views(data))),
    )
    return there.write_part(ref, name, part).bytes


def read_part(
    root: str, source: str, learner: str, check: Check
) -> tuple[Arrays | None, list[str]]:
    """A sound inner state, this learner's own first, and why others were passed over.

    `check` raises ValueError for moments that cannot be used.
    """
    faults: list[str] = []
    try:
        there, ref = Checkpoints.at(source, root)
        manifest, _ = there.manifest(ref)
    except (OSError, CheckpointError) as error:
        return None, [str(error)[:300]]
    # Anybody's moments are better than fresh ones, as with a donor.
    for name in sorted(manifest.learners, key=lambda m: (m != learner, m)):
        try:
            part = there.part(ref, manifest.learners[name], LearnerPart)
            arrays = Arrays()
            for blob in there.blobs(ref, part):
                arrays |= moments.views(blob)  # the blobs stay where they are, once
            check(arrays)
            return arrays, faults
        except (OSError, ValueError) as error:
            faults.append(f"the part of {name} in {source}: {str(error)[:200]}")
    return None, [*faults, f"{source} holds no part of a learner that can be used"]
