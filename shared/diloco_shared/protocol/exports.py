"""What an export of a run's parameters says of itself.

    <folder>/model.safetensors, …      the weights
             config.json               where the architecture is one that others know
             diloco.json               an `ExportManifest`: what is in the folder, digest by digest

The process that makes one tells how far it is on its standard output, an `ExportLine` per line.
"""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from diloco_shared.protocol.messages import Count, Digest, Message, Reason, Seconds, Version
from diloco_shared.protocol.subjects import Id
from diloco_shared.protocol.wire import read_line

MANIFEST = "diloco.json"
# What a line may have at most: a reason, in bytes of JSON, and some figures.
LINE_BYTES_MAX = 16 << 10

Dtype = Literal["fp32", "bf16"]
DTYPE_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# One part of a path that means the same everywhere: no folder, nothing hidden, nothing above.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]


class ExportedFile(Message):
    """One file of the folder."""

    name: FileName  # in the folder
    bytes: Count  # its length
    sha256: Sha256  # of its bytes, in hex: as `sha256sum` prints it


class ExportedFragment(Message):
    """The publication that a fragment was taken from."""

    fragment: Count
    version: Count  # of the fragment
    round: Version  # -1 before the first
    steps: Count  # of the run, when it was published
    digest: Digest  # of the fragment's fp32 values, as its publication says


class ExportManifest(Message):
    """What `diloco.json` holds: where the weights come from, and every other file."""

    format: Literal[1] = 1  # version of this format
    run: Id
    run_id: str
    epoch: Count
    fragments: tuple[ExportedFragment, ...]  # one per fragment, in their order
    round: Version  # the newest of them
    steps: Count  # of the newest of them: inner steps per learner
    tokens_merged: Count | None  # as the run's status said at that time; null: it said nothing
    tokens_processed: Count | None  # that learners had trained on, from the same status
    parameters: Count  # of the model
    dtype: Dtype  # of the weights in the files
    config_hash: Digest
    checkpoint: str  # the run-wide checkpoint that it was made from; empty: of what is published
    spec: dict[str, Any]  # the run's specification
    made_at: Seconds  # wall clock, seconds since 1970
    files: tuple[ExportedFile, ...]  # all but this one


Stage = Literal["fetching", "writing"]


class ExportMoved(Message):
    """How far it is: bytes that were fetched and written, of all that will be."""

    kind: Literal["moved"] = "moved"
    stage: Stage  # what it does now
    done: Count  # bytes fetched and written so far, in both stages
    total: Count  # bytes that will be fetched and written in all


class ExportDone(Message):
    """The folder is there."""

    kind: Literal["done"] = "done"


class ExportFailed(Message):
    """It will never be, and nothing is left of it."""

    kind: Literal["failed"] = "failed"
    reason: Reason


ExportLine = Annotated[ExportMoved | ExportDone | ExportFailed, Field(discriminator="kind")]
_LINE: TypeAdapter[ExportMoved | ExportDone | ExportFailed] = TypeAdapter(ExportLine)
# What a line says; None for one that is none of these.
parse_line = partial(read_line, _LINE)
