"""Which parts of an array the processes of an island hold: cut, sent, and put together again.

A part is known by where it lies, so that both sides find the same parts in the same order from the
array's shape and sharding alone: nothing but values is sent. Bits are moved, never computed with.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

# Of a part: where it begins and ends along every dimension.
Span = tuple[tuple[int, int], ...]
Buffer = bytes | bytearray | memoryview


def span_of(index: Any, shape: Sequence[int]) -> Span:
    """Of slices, one by one or as a tuple, of an array of that shape."""
    slices = index if isinstance(index, tuple) else (index,)
    given = (*slices, *[slice(None)] * (len(shape) - len(slices)))
    return tuple(s.indices(n)[:2] for s, n in zip(given, shape, strict=True))


def held(sharding: Sharding, shape: tuple[int, ...]) -> dict[int, list[Span]]:
    """By process: the parts that its devices hold, each once, in their order."""
    found: dict[int, set[Span]] = {}
    lying: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in lying.items():
        found.setdefault(device.process_index, set()).add(span_of(index, shape))
    return {process: sorted(spans) for process, spans in sorted(found.items())}


def told(sharding: Sharding, shape: tuple[int, ...]) -> dict[int, list[Span]]:
    """The same, each part by one process only: the first of those that hold it."""
    found, known = dict[int, list[Span]](), set[Span]()
    for process, spans in held(sharding, shape).items():
        found[process] = [span for span in spans if span not in known]
        known |= set(spans)
    return found


def clipped(spans: Iterable[Span], size: int) -> list[Span]:
    """Of an array of one dimension that was filled up: without what is beyond its `size`."""
    return [((min(start, size), min(stop, size)),) for ((start, stop),) in spans]


def cut(array: NDArray[Any], spans: Iterable[Span]) -> list[memoryview]:
    """The bytes of these parts. Views, where a part lies in one piece."""
    return [_bytes(array[_slices(span)]) for span in spans]


def _slices(span: Span) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in span)


def _bytes(part: Any) -> memoryview:
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


def _shape(span: Span) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in span)


def size_of(spans: Iterable[Span], dtype: np.dtype[Any]) -> int:
    """Bytes of these parts."""
    return sum(int(np.prod(_shape(span), dtype=int)) for span in spans) * dtype.itemsize


def split(spans: Iterable[Span], dtype: np.dtype[Any], data: Buffer) -> dict[Span, NDArray[Any]]:
    """The parts in `data`, as views of it. Raises ValueError where it is not as long."""
    spans, whole, at = list(spans), memoryview(data).cast("B"), 0
    if len(whole) != (wanted := size_of(spans, dtype)):
        raise ValueError(f"{len(whole)} bytes came of an array, and its parts take {wanted}")
    found = {}
    for span in spans:
        size = size_of([span], dtype)
        found[span] = np.frombuffer(whole[at : at + size], dtype).reshape(_shape(span))
        at += size
    return found


@dataclass(frozen=True, slots=True)
class Parts:
    """An array of which only some parts are here, to be read as if it were whole."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: Mapping[Span, NDArray[Any]]

    @property
    def size(self) -> int:
        """Values of the whole array."""
        return int(np.prod(self.shape, dtype=int))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """One of its parts, by its slices. KeyError for what is not here."""
        return self.parts[span_of(index, self.shape)]


def own_parts(
    array: jax.Array, spans: Sequence[Span], layer: int | None = None
) -> dict[Span, jax.Array]:
    """Of a device array: these parts of it, where this process holds them. None is fetched yet.

    `layer`: of an array that holds all layers whole along its first dimension, one layer's.
    """
    found: dict[Span, jax.Array] = {}
    for shard in array.addressable_shards:
        span = span_of(shard.index, array.shape)
        span = span if layer is None else span[1:]
        if span in spans and span not in found:
            found[span] = shard.data
    return found


def put_together(
    shape: tuple[int, ...], dtype: np.dtype[Any], parts: Mapping[Span, NDArray[Any]]
) -> NDArray[Any]:
    """The whole array. Parts may overlap only where they are equal.

    ValueError where they cannot be all: what is missing would be whatever the memory held before.
    """
    whole = np.empty(shape, dtype)
    if (there := sum(part.size for part in parts.values())) < whole.size:
        raise ValueError(f"parts of {there} values are no array of {whole.size}: some are missing")
    for span, part in parts.items():
        # With the dots a view also of an array without dimensions.
        place: Any = (..., *_slices(span))
        np.copyto(whole[place], part)
    return whole


def packed(parts: Iterable[Any]) -> list[memoryview]:
    """The bytes of parts that were fetched."""
    return [_bytes(part) for part in parts]
