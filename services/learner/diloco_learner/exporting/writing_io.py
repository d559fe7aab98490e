"""The folder of an export: written beside its place, and there at one stroke or not at all.

Fragments come in their own order and files want tensors in theirs, so all values go through a
*spool* first: one file of fp32, in which every tensor lies in one piece. It is mapped, not read, so
that writing takes memory for `PART_BYTES` of a tensor, and for what its `build` makes anew.

Not for an event loop: every function waits for the disk.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from diloco_learner.exporting.assembling import FP32_BYTES, TensorPlace, Values, places, scattered
from diloco_learner.exporting.files import WeightFile
from diloco_shared import ambient
from diloco_shared.budget.terms import shown
from diloco_shared.durable import free_bytes, settle_names
from diloco_shared.hf.names import HfTensor
from diloco_shared.protocol.exports import Dtype, ExportedFile
from diloco_shared.spec.fragmentation import Layout

# Of a tensor that are converted, hashed and written at a time.
PART_BYTES = 16 << 20
# Of what is copied beside the weights: a tokenizer is some megabytes, and this is no backup.
BESIDE_BYTES_MAX = 1 << 30
# Left free for what everybody else on the disk writes meanwhile.
SPARE_BYTES = 64 << 20
_SPOOL = "spool"
_DTYPES: dict[Dtype, Any] = {"fp32": np.dtype("<f4"), "bf16": np.dtype(ml_dtypes.bfloat16)}

Moved = Callable[[int], None]  # told how many more bytes are written


class CannotWrite(Exception):
    """The folder cannot be, or be filled; the text says why and what to do."""


@contextmanager
def appearing(to: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `to` when the block ends, and is removed if it fails.

    CannotWrite where nothing can be written, or `to` is not absent nor an empty folder by then.
    """
    beside = to.parent / f".{to.name}.{ambient.token(4)}.partial"
    try:
        try:
            beside.mkdir(parents=True)
            yield beside
            (beside / _SPOOL).unlink(missing_ok=True)
            settle_names(beside)
            os.rename(beside, to)
            try:
                settle_names(to.parent)
            except OSError:
                shutil.rmtree(to, ignore_errors=True)  # else the next attempt finds it in its way
                raise
        except OSError as error:
            raise CannotWrite(_why(to, error)) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def check_free(to: Path) -> None:
    """CannotWrite for a place that holds something."""
    if to.is_symlink() or (to.exists() and not to.is_dir()):
        raise CannotWrite(f"{to} is there and is no folder: name another one")
    if to.is_dir() and any(to.iterdir()):
        raise CannotWrite(f"{to} holds something already: name another folder, or an empty one")


def check_room(folder: Path, needed: int) -> None:
    """CannotWrite where fewer than `needed` bytes, and some to spare, are free."""
    free = free_bytes(folder)
    if free is not None and free < needed + SPARE_BYTES:
        raise CannotWrite(
            f"{folder.parent} has {shown(free)} free, and the export takes {shown(needed)} while "
            "it is made: free disk space there, or name another folder"
        )


def _why(to: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {to} is full: free space there, then export again; nothing was left"
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return f"{to} was filled by somebody else meanwhile: name another folder"
    return f"{to} cannot be written: {error}"


# --------------------------------------------------------------------------------------------------
# All values, tensor by tensor.


class Spool:
    """Every tensor of a layout as fp32, in one file of a folder that is being filled."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.layout = layout
        self.places: dict[str, TensorPlace] = places(layout)
        self.path = folder / _SPOOL
        self._put: set[int] = set()

    def put(self, fragment: int, values_F: Values) -> None:
        """The values of a fragment, each where it belongs. Raises OSError."""
        with self.path.open("r+b" if self._put else "w+b") as file:
            for offset, values in scattered(self.layout, fragment, values_F, self.places):
                file.seek(offset)
                file.write(np.ascontiguousarray(values, dtype="<f4").view(np.uint8).data)
        self._put.add(fragment)

    def tensors(self) -> Mapping[str, NDArray[Any]]:
        """Every tensor by name, mapped from the file and not to be written to."""
        absent = set(range(len(self.layout.fragments))) - self._put
        assert not absent, f"fragments {sorted(absent)} were never put"
        # Mapped once: a process may have about a thousand files open, and a model more tensors.
        whole = np.memmap(self.path, "<f4", "r").view(np.ndarray)
        return {
            name: whole[p.offset // FP32_BYTES :][: p.bytes // FP32_BYTES].reshape(p.shape)
            for name, p in self.places.items()
        }


# --------------------------------------------------------------------------------------------------
# Files, each with its digest.


class _Digested:
    """A file that is written from front to back; on disk once it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._hash = hashlib.sha256()

    def __enter__(self) -> "_Digested":
        self._file = self.path.open("xb")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._file:  # closed, whatever the disk says
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    @property
    def written(self) -> ExportedFile:
        return ExportedFile(name=self.path.name, bytes=self.bytes, sha256=self._hash.hexdigest())


def write_weights(
    folder: Path, file: WeightFile, tensors: Mapping[str, NDArray[Any]], dtype: Dtype, moved: Moved
) -> ExportedFile:
    """One file of weights. Raises OSError; ValueError for a tensor of a shape not planned."""
    with _Digested(folder / file.name) as out:
        out.write(file.head)
        for tensor in file.tensors:
            for part in _parts(tensor, tensors, _DTYPES[dtype]):
                out.write(part)
                moved(len(part))
    assert out.bytes == file.bytes, "not as long as it was planned"
    return out.written


def _parts(
    tensor: HfTensor, tensors: Mapping[str, NDArray[Any]], dtype: Any
) -> Iterator[memoryview]:
    """The values of a tensor as bytes, some rows at a time."""
    array = tensor.build({name: tensors[name] for name in tensor.sources})
    if array.shape != tensor.shape:
        raise ValueError(f"{tensor.name} was made with shape {array.shape}, not {tensor.shape}")
    rows = array if array.ndim else array.reshape(1)
    row_bytes = max(rows[:1].size * dtype.itemsize, 1)
    step = max(PART_BYTES // row_bytes, 1)
    for start in range(0, rows.shape[0], step):
        # Values beyond the range of bf16 become infinite, as everywhere.
        with np.errstate(all="ignore"):
            part = np.ascontiguousarray(rows[start : start + step], dtype=dtype)
        yield part.reshape(-1).view(np.uint8).data


def write_json(folder: Path, name: str, content: Any) -> ExportedFile:
    """A file of JSON for people to read. Raises OSError."""
    with _Digested(folder / name) as out:
        out.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    return out.written


def write_beside(folder: Path, contents: Mapping[str, bytes]) -> Iterator[ExportedFile]:
    """Small files whose content is known. Raises OSError and CannotWrite."""
    for name, content in contents.items():
        with _Digested(folder / name) as out:
            out.write(content)
        yield out.written


def copy_beside(folder: Path, sources: Sequence[Path]) -> Iterator[ExportedFile]:
    """Copies of other files, a tokenizer's above all. Raises OSError and CannotWrite."""
    sizes = sum(source.stat().st_size for source in sources)
    if sizes > BESIDE_BYTES_MAX:
        raise CannotWrite(
            f"{len(sources)} files to lie beside the weights have {shown(sizes)} and may have "
            f"{shown(BESIDE_BYTES_MAX)}"
        )
    for source in sources:
        with source.open("rb") as file, _Digested(folder / source.name) as out:
            while part := file.read(PART_BYTES):
                out.write(part)
        yield out.written
