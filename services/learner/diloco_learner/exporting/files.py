"""What the weights' files look like: which tensor goes where, and what stands before them. Pure.

The format is safetensors: eight bytes with the size of a header, the header as JSON, the values of
one tensor after the other. All sizes are known before the first value is, so that a file is written
from front to back, tensor by tensor.
"""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_shared.hf.config import hf_config
from diloco_shared.hf.names import HfTensor, hf_tensors, itself
from diloco_shared.hf.tokenizer import SpecialTokens
from diloco_shared.protocol.exports import DTYPE_BYTES, Dtype
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import shape_of

# Of one file, unless a single tensor is larger: what others cut at, so that a file fits where
# file systems or uploads are limited.
FILE_BYTES_MAX = 5_000_000_000
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_NAMES: dict[Dtype, str] = {"fp32": "F32", "bf16": "BF16"}
_IN_CONFIG: dict[Dtype, str] = {"fp32": "float32", "bf16": "bfloat16"}
# Values begin at a multiple of so many bytes, as readers that map the file expect.
_ALIGN = 8


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file: its name, the bytes before the values, and its tensors in order."""

    name: str
    head: bytes
    tensors: tuple[HfTensor, ...]
    bytes: int


def output_of(spec: RunSpec, layout: Layout) -> tuple[HfTensor, ...]:
    """The tensors of the checkpoint. A model of one's own has them as its factory names them.

    Raises ValueError for a mapping that does not fit the run's tensors.
    """
    shapes = {t.name: tuple(t.shape) for t in layout.tensors}
    if spec.model.factory is not None:
        return tuple(itself(name, shape) for name, shape in shapes.items())
    made = tuple(hf_tensors(shape_of(spec.model)))
    names = [t.name for t in made]
    if len(set(names)) != len(names):
        raise ValueError("two tensors of the checkpoint have one name")
    strange = sorted({s for t in made for s in t.sources} - shapes.keys())
    if strange:
        raise ValueError(f"the run has no tensor {strange[0]!r}, which the checkpoint needs")
    unused = sorted(shapes.keys() - {s for t in made for s in t.sources})
    if unused:
        raise ValueError(f"the checkpoint would leave out the tensor {unused[0]!r} of the run")
    return made


def config_of(spec: RunSpec, dtype: Dtype, tokens: SpecialTokens) -> dict[str, Any] | None:
    """The content of `config.json`; None where no known architecture is the model's."""
    if spec.model.factory is not None:
        return None
    # What was trained on longer sequences before still reads them.
    context = max(spec.model.context_tokens, spec.model.weights_context)
    return hf_config(shape_of(spec.model), context=context, dtype=_IN_CONFIG[dtype], **tokens)


def planned(
    tensors: Iterable[HfTensor], dtype: Dtype, file_bytes_max: int = FILE_BYTES_MAX
) -> tuple[WeightFile, ...]:
    """The files, in order; one file has the plain name, several are numbered."""
    groups: list[list[HfTensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor_bytes(tensor, dtype)
        if not groups or size > room:
            groups.append([])
            room = file_bytes_max
        groups[-1].append(tensor)
        room -= size
    names = ["model.safetensors"]
    if len(groups) > 1:
        count = len(groups)
        names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    return tuple(
        _file(name, tuple(group), dtype) for name, group in zip(names, groups, strict=True)
    )


def tensor_bytes(tensor: HfTensor, dtype: Dtype) -> int:
    """What its values take in a file."""
    return math.prod(tensor.shape) * DTYPE_BYTES[dtype]


def _file(name: str, tensors: tuple[HfTensor, ...], dtype: Dtype) -> WeightFile:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what loaders look for
    offset = 0
    for tensor in tensors:
        end = offset + tensor_bytes(tensor, dtype)
        header[tensor.name] = {
            "dtype": _NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    head = len(text).to_bytes(8, "little") + text
    return WeightFile(name, head, tensors, len(head) + offset)


def index_of(files: Sequence[WeightFile], dtype: Dtype) -> dict[str, Any] | None:
    """Which tensor is in which file; None for a single one."""
    if len(files) < 2:
        return None
    sizes = [tensor_bytes(t, dtype) for f in files for t in f.tensors]
    return {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {t.name: f.name for f in files for t in f.tensors},
    }


def clash(ours: Collection[str], theirs: Iterable[str]) -> str:
    """The first of their names that is ours already; "" for none."""
    return next((name for name in theirs if name in ours), "")
