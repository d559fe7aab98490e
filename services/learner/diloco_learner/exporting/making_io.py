"""One export from beginning to end: read, put in order, written, committed.

Memory, at most: 8 bytes per value of the largest fragment while it is read; then what a tensor of
the checkpoint takes as fp32 where it is made of others (nothing where it is one of the run's as it
is), and `PART_BYTES` thrice. Disk: 4 bytes per parameter while it is made, beside the files.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog

from diloco_learner.exporting.assembling import FP32_BYTES, Values
from diloco_learner.exporting.files import (
    CONFIG,
    INDEX,
    WeightFile,
    clash,
    config_of,
    index_of,
    output_of,
    planned,
)
from diloco_learner.exporting.writing_io import (
    CannotWrite,
    Moved,
    Spool,
    appearing,
    check_free,
    check_room,
    copy_beside,
    write_beside,
    write_json,
    write_weights,
)
from diloco_shared import ambient
from diloco_shared.protocol.exports import (
    MANIFEST,
    Dtype,
    ExportedFile,
    ExportedFragment,
    ExportManifest,
    ExportMoved,
)
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec, config_hash

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Companions:
    """What belongs beside the weights, a tokenizer's files above all.

    `contents`: of files by name; one of `files` with the same name takes its place, since somebody
    asked for it. `tokens`: ids of special tokens, by the name that they have in
    `config.json`.
    """

    files: Sequence[Path] = ()
    contents: Mapping[str, bytes] = field(default_factory=dict)
    tokens: Mapping[str, int | list[int] | None] = field(default_factory=dict)


def nothing(spec: RunSpec) -> Companions:
    """The companions of a run whose tokenizer has no files."""
    return Companions()


@dataclass(frozen=True, slots=True)
class Order:
    """What is wanted. `companions` are asked for once the run's specification is known."""

    to: Path
    dtype: Dtype = "fp32"
    checkpoint: str = ""
    companions: Callable[[RunSpec], Companions] = nothing


class ParameterSource(Protocol):
    """Where parameters are read: what a run publishes, or a checkpoint."""

    spec: RunSpec
    layout: Layout

    @property
    def epoch(self) -> int: ...

    @property
    def fetch_bytes(self) -> int: ...

    async def begin(self) -> None: ...

    def fragments(self) -> AsyncIterator[tuple[ExportedFragment, Values]]:
        """Every fragment with its fp32 values of shape (F,), one at a time. Any order will do."""

    async def tokens(self) -> tuple[int | None, int | None]: ...


class BytesMoved:
    """Bytes fetched and written, of all that there are; told whenever they grow."""

    def __init__(self, told: Callable[[ExportMoved], None]) -> None:
        self.told = told
        self.fetched = self.to_fetch = self.written = self.to_write = 0

    def fetching(self, done: int, total: int) -> None:
        """`total` may change, where a keyframe replaces what was to be fetched."""
        self.fetched, self.to_fetch = done, total
        self._tell("fetching")

    def wrote(self, more: int) -> None:
        self.written += more
        self._tell("writing")

    def _tell(self, stage: Any) -> None:
        done, total = self.fetched + self.written, self.to_fetch + self.to_write
        self.told(ExportMoved(stage=stage, done=min(done, total), total=total))


async def make(source: ParameterSource, order: Order, progress: BytesMoved) -> ExportManifest:
    """Fill `order.to`. Raises CannotWrite, and what the source raises; then nothing is left."""
    await asyncio.to_thread(check_free, order.to)
    await source.begin()
    try:
        files = planned(output_of(source.spec, source.layout), order.dtype)
    except ValueError as error:
        raise CannotWrite(f"the weights cannot be written: {error}") from None
    beside = await asyncio.to_thread(order.companions, source.spec)
    _check_names(files, beside.files)
    progress.to_fetch = source.fetch_bytes
    progress.to_write = sum(file.bytes - len(file.head) for file in files)
    spooled = FP32_BYTES * sum(source.layout.sizes)
    needed = spooled + sum(file.bytes for file in files)
    await asyncio.to_thread(check_room, order.to, needed)
    merged, processed = await source.tokens()
    with appearing(order.to) as folder:
        spool, found = Spool(folder, source.layout), list[ExportedFragment]()
        async with aclosing(source.fragments()) as fragments:  # type: ignore[type-var]
            async for described, values_F in fragments:
                await asyncio.to_thread(spool.put, described.fragment, values_F)
                found.append(described)
                del values_F
        written = await asyncio.to_thread(
            _weights, folder, files, spool, order.dtype, progress.wrote
        )
        written += await asyncio.to_thread(
            _others, folder, index_of(files, order.dtype), source.spec, order.dtype, beside
        )
        manifest = ExportManifest(
            run=source.spec.name,
            run_id=source.spec.id,
            epoch=source.epoch,
            fragments=tuple(sorted(found, key=lambda f: f.fragment)),
            round=max(f.round for f in found),
            steps=max(f.steps for f in found),
            tokens_merged=merged,
            tokens_processed=processed,
            parameters=sum(source.layout.sizes),
            dtype=order.dtype,
            config_hash=config_hash(source.spec),
            checkpoint=order.checkpoint,
            spec=source.spec.model_dump(mode="json"),
            made_at=ambient.wall(),
            files=tuple(written),
        )
        # The last: what is not whole has none.
        await asyncio.to_thread(write_json, folder, MANIFEST, manifest.model_dump(mode="json"))
    log.info("exported", run=manifest.run, folder=str(order.to), steps=manifest.steps)
    return manifest


def _check_names(files: Sequence[WeightFile], beside: Sequence[Path]) -> None:
    ours = {MANIFEST, CONFIG, INDEX, *(file.name for file in files)}
    names = [path.name for path in beside]
    taken = clash(ours, names) or next((n for n in names if names.count(n) > 1), "")
    if taken:
        raise CannotWrite(f"two files of the export would be called {taken!r}")


def _weights(
    folder: Path, files: Sequence[WeightFile], spool: Spool, dtype: Dtype, moved: Moved
) -> list[ExportedFile]:
    """Raises OSError, CannotWrite."""
    tensors = spool.tensors()
    try:
        return [write_weights(folder, file, tensors, dtype, moved) for file in files]
    except ValueError as error:
        raise CannotWrite(f"the weights cannot be written: {error}") from None


def _others(
    folder: Path, index: dict[str, Any] | None, spec: RunSpec, dtype: Dtype, beside: Companions
) -> list[ExportedFile]:
    """All but the weights and what describes everything. Raises OSError, CannotWrite."""
    config = config_of(spec, dtype, dict(beside.tokens))
    found = [
        write_json(folder, name, content)
        for name, content in ((INDEX, index), (CONFIG, config))
        if content is not None
    ]
    given = {path.name for path in beside.files}
    written = write_beside(folder, {n: c for n, c in beside.contents.items() if n not in given})
    return [*found, *written, *copy_beside(folder, beside.files)]
