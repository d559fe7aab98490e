"""What a run-wide checkpoint says of itself: JSON beside the arrays (paper section 4).

    <root>/<run's folder>/<number>/shard-0.<digest>.json, shard-0.000.<digest>.safetensors, …
                                   learner-<id>.<digest>.json, …
                                   manifest.json        written last: without it there is none
                             tape/                 what left the run's tape (tape_archive_io.py)

The manifest names its parts by digest, each part its arrays: what was read whole is what was meant.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from diloco_shared.protocol.messages import Count, Digest, Message, Reason, Seconds, Stamp, Version
from diloco_shared.protocol.records import ShardLease
from diloco_shared.protocol.subjects import Id

MANIFEST = "manifest.json"
# Beside a run's checkpoints, with what its tape in the stream holds no longer.
TAPE = "tape"
# A reference to a checkpoint: of the root in use, or an address of its own.
_REFERENCE = re.compile(r"(?:(?P<root>.*)/)?(?P<folder>[a-z0-9][a-z0-9.-]*)/(?P<number>[0-9]{6})/?")


class Object(Message):
    """One stored object, beside the manifest: no key leads elsewhere."""

    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]  # name of the object
    bytes: Count  # its length
    digest: Digest  # of those bytes


class ShardPart(Message):
    """A syncer shard as of one tape record."""

    shard: Count  # number of the shard
    history: dict[str, Any]  # `History.meta`, as JSON
    store: dict[str, Any]  # `FragmentStore.meta`, as JSON
    arrays: tuple[Object, ...]  # master, anchor and outer state of the shard's fragments


class LearnerPart(Message):
    """A learner at a step boundary: moments and counts of its optimizer, never parameters."""

    learner: Id
    incarnation: Count
    epoch: Count
    step: Count  # inner steps that this life had taken
    versions: tuple[Version, ...]  # per fragment: what it had adopted
    arrays: tuple[Object, ...]  # the moments, in one object or several


class CheckpointManifest(Message):
    """A whole run as of one cut."""

    version: Literal[1] = 1  # of this format
    run: Id
    run_id: str
    number: Count  # of the checkpoint in its run
    reason: Reason  # why it was made
    at: Seconds  # when it was begun
    epoch: Count
    stamp: Stamp
    versions: tuple[Version, ...]  # one per fragment
    parameters: Count  # of the model
    spec: dict[str, Any]  # the run's specification
    shards: tuple[Object, ...]  # a `ShardPart` of each syncer shard, in their order
    learners: dict[str, Object]  # by learner: its `LearnerPart`
    missing: dict[str, str]  # learners that gave no part, and why
    leases: tuple[ShardLease, ...]  # every data shard ever read
    incarnations: dict[str, int]  # newest, of every learner ever seen
    bytes: Count  # of all parts


def reference(folder: str, number: int) -> str:
    """Of a checkpoint under the root in use."""
    return f"{folder}/{number:06d}"


def parse_reference(text: str) -> tuple[str, str, int]:
    """(root, "" for the one in use; folder; number); ValueError for anything else."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text[:200]!r} names no checkpoint: give FOLDER/NUMBER as 'diloco checkpoint list' "
            "shows it, or an address that ends so"
        )
    return match["root"] or "", match["folder"], int(match["number"])
