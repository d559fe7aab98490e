"""A learner's part of a run-wide checkpoint: moments and counts, written and read back.

Not for an event loop: every function waits for the vault.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from diloco_learner.events import KeepPart
from diloco_shared.config import RunSpec
from diloco_shared.edges.checkpoints import CheckpointError, Checkpoints
from diloco_shared.numerics.arrays import pack, unpack
from diloco_shared.protocol.checkpoints import LearnerPart, reference


def write_part(
    spec: RunSpec,
    root: str,
    learner: str,
    incarnation: int,
    effect: KeepPart,
    moments: dict[str, Any],
) -> int:
    """Write it whole; its bytes. OSError when the vault cannot be written."""
    there, ref = Checkpoints(root), reference(spec.folder, effect.number)
    arrays = {name: np.asarray(leaf) for name, leaf in moments.items()}
    name = f"learner-{learner}"
    part = LearnerPart(
        learner=learner,
        incarnation=incarnation,
        epoch=effect.epoch,
        step=effect.step,
        versions=effect.versions,
        arrays=there.write_arrays(ref, name, pack(arrays)),
    )
    return there.write_part(ref, name, part).bytes


def read_part(
    root: str, source: str, learner: str, check: Callable[[bytes], None]
) -> tuple[bytes | None, list[str]]:
    """Sound moments as safetensors, this learner's own first, and why others were passed over.

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
            arrays: dict[str, NDArray[Any]] = {}
            for blob in there.blobs(ref, part):
                arrays |= unpack(blob)
            data = save(arrays)
            check(data)
            return data, faults
        except (OSError, ValueError) as error:
            faults.append(f"the part of {name} in {source}: {str(error)[:200]}")
    return None, [*faults, f"{source} holds no part of a learner that can be used"]
