"""Reading the weights of a Hugging Face checkpoint, tensor by tensor, from safetensors files.

The files are mapped: only the tensor that is asked for is read. What is missing, of another size or
type, or not known, is said before any of it is used.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from diloco_shared.hf.config import WrongConfig, context_of_config, shape_of_config
from diloco_shared.hf.names import their_names
from diloco_shared.spec.shapes import Shape, tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# A configuration or an index is some hundred kilobytes at most.
JSON_BYTES_MAX = 64 << 20
# Before the names of a text model, in checkpoints of models with eyes.
_PREFIXES = ("language_model.", "model.language_model.", "")
# What is no weight: buffers that old versions kept, which are computed.
_COMPUTED = ("rotary_emb.inv_freq",)
_HEAD = "lm_head.weight"
_TYPES = {"F32", "F16", "BF16", "F64"}
_DIGESTED = 1 << 22  # bytes read at once


class WrongCheckpoint(ValueError):
    """A folder that holds no checkpoint that a run could begin from."""


@dataclass(frozen=True, slots=True)
class HfWeights:
    """The weights in a folder, by our names; `shape` says what they are the weights of, `context`
    for how many tokens per sequence that was made, 0: it is not known."""

    folder: Path
    shape: Shape
    files: dict[str, str]  # a name of theirs -> file
    names: dict[str, tuple[str, ...]]  # our name -> theirs, one of each expert
    # Called after every few megabytes of a digest and after every tensor; may raise to end it.
    moved: Callable[[], object] = field(default=lambda: None, compare=False)
    context: int = 0

    def read(self, name: str) -> NDArray[np.float32]:
        """One of our tensors as fp32, in a contiguous array of its own."""
        theirs = self.names[name]
        first = np.ascontiguousarray(self._ours(name, theirs[0]), dtype=np.float32)
        if len(theirs) == 1:
            return first
        whole = np.empty((len(theirs), *first.shape), np.float32)
        whole[0] = first
        for n, one in enumerate(theirs[1:], 1):
            whole[n] = self._ours(name, one)
        return whole

    def _ours(self, name: str, theirs: str) -> NDArray[Any]:
        with safe_open(self.folder / self.files[theirs], framework="np") as file:
            found = _values(file, theirs)
        self.moved()
        return found.T if found.ndim == 2 and not name.startswith("embedding/") else found

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)


def open_weights(folder: Path) -> HfWeights:
    """Look at a checkpoint: everything that can be known without its values.

    Raises WrongCheckpoint, which says what is wrong in which file.
    """
    try:
        there = folder.is_dir()
    except OSError as error:
        raise WrongCheckpoint(f"{folder}: {error.strerror or error}") from None
    if not there:
        raise WrongCheckpoint(f"{folder}: there is no such folder")
    try:
        config = _json(folder / "config.json")
        shape, context = shape_of_config(config), context_of_config(config)
    except WrongConfig as error:
        raise WrongCheckpoint(f"{folder / 'config.json'}: {error}") from None
    sizes, files = _there(folder)
    prefix = next(p for p in _PREFIXES if any(n.startswith(f"{p}model.") for n in sizes) or not p)
    # A model with eyes says `model.language_model.layers`, not `model.language_model.model.layers`.
    if any(n.startswith("model.language_model.layers.") for n in sizes):
        prefix = "model.language_model."
    ours = {
        name: tuple(_within(prefix, one) for one in theirs)
        for name, theirs in their_names(shape).items()
    }
    _check(folder, shape, ours, sizes)
    theirs = [one for names in ours.values() for one in names]
    known = {*theirs, _HEAD, f"{prefix}{_HEAD}"}
    strange = [
        name
        for name in sizes
        if name not in known and name.startswith(prefix) and not name.endswith(_COMPUTED)
    ]
    if strange and not (prefix and not strange[0].startswith(prefix)):
        raise WrongCheckpoint(
            f"{folder}: tensors that its config.json does not account for: "
            f"{', '.join(sorted(strange)[:5])}"
        )
    found = {name: files[name] for name in theirs}
    return HfWeights(folder, shape, found, ours, context=context)


def _within(prefix: str, name: str) -> str:
    if prefix == "model.language_model.":
        return prefix + name.removeprefix("model.") if name.startswith("model.") else name
    return prefix + name


def _check(
    folder: Path,
    shape: Shape,
    ours: dict[str, tuple[str, ...]],
    sizes: dict[str, tuple[str, tuple[int, ...]]],
) -> None:
    every = [(spec, name) for spec in tensors(shape) for name in ours[spec.name]]
    for spec, name in every:
        if name not in sizes:
            raise WrongCheckpoint(f"{folder}: there is no tensor {name}")
        dtype, size = sizes[name]
        one = spec.shape[1:] if len(spec.shape) == 3 else spec.shape
        wanted = one if spec.name.startswith("embedding/") or len(one) == 1 else one[::-1]
        if size != wanted:
            raise WrongCheckpoint(
                f"{folder}: {name} is {_by(size)}, and config.json says {_by(wanted)}"
            )
        if dtype not in _TYPES:
            raise WrongCheckpoint(
                f"{folder}: {name} is of type {dtype}: only F32, BF16, F16 and F64 can be read, "
                "no quantised weights"
            )


def _by(size: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in size)


def _there(folder: Path) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, str]]:
    """(type and size, file) of every tensor."""
    index = folder / INDEX
    if index.exists():
        listed = _json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
            raise WrongCheckpoint(f"{index}: weight_map must say which file holds which tensor")
        names = sorted(set(listed.values()))
    elif (folder / SINGLE).exists():
        listed, names = None, [SINGLE]
    else:
        raise WrongCheckpoint(
            f"{folder}: neither {SINGLE} nor {INDEX} is there; weights in other formats (.bin, "
            ".pth, .gguf) must be converted first"
        )
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {}
    files: dict[str, str] = {}
    for name in names:
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise WrongCheckpoint(f"{index}: there is no file {name!r} beside it")
        for tensor, entry in _opened(path):
            sizes[tensor], files[tensor] = entry, name
    missing = sorted(set(listed or ()) - set(sizes))
    if missing:
        raise WrongCheckpoint(f"{index}: {missing[0]} is not in {(listed or {})[missing[0]]}")
    return sizes, files


def _opened(path: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                yield name, (part.get_dtype(), tuple(part.get_shape()))
    except (SafetensorError, OSError) as error:
        raise WrongCheckpoint(f"{path}: not a sound safetensors file: {error}") from None


def _values(file: Any, name: str) -> NDArray[Any]:
    found: NDArray[Any] = np.asarray(file.get_tensor(name))
    if found.dtype == np.dtype("V2"):
        return found.view(ml_dtypes.bfloat16)
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise WrongCheckpoint(f"{path}: larger than {JSON_BYTES_MAX} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongCheckpoint(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise WrongCheckpoint(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise WrongCheckpoint(f"{path}: an object is expected")
    return found


def digest_of(weights: HfWeights) -> str:
    """32 hex digits that two folders share exactly if they hold the same weights, file by file.

    Reads all of it, a few megabytes at a time, and calls `weights.moved` after each. Against
    accidents, not against forgers.
    """
    found = xxhash.xxh3_128()
    for name in sorted({*weights.files.values()}):
        found.update(f"{name}\n".encode())
        with open(weights.folder / name, "rb") as file:
            while part := file.read(_DIGESTED):
                found.update(part)
                weights.moved()
    return found.hexdigest()
