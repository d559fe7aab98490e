"""Inner moments and counts as one buffer, in the safetensors format: written and read in place.

    [length of the header, u64][header, JSON][data of every array, one after the other]

The arrays are as large as the parameters, or twice that: nothing here holds them a second time. A
leaf goes from the device straight to its place in the buffer, and the arrays read from a buffer
are views of it. The bytes are those of `safetensors.numpy.save`, so that any reader of that format
takes them, and ours takes any writer's.
"""

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from diloco_learner.models import places
from diloco_shared.memory.pages import fill, pages
from diloco_shared.numerics.arrays import DTYPES, HEAD_ALIGN, NAMES, RANK, Arrays
from diloco_shared.numerics.compiled import cores, parallel_for

Buffer = bytes | bytearray | memoryview
State = Buffer | Arrays
# What looks at a state before it is used: ValueError says what is wrong with it.
Check = Callable[[State], None]

# Values looked at together: the answer to "finite?" must not be as large as the array.
_LOOK_VALUES = 1 << 20
# Bytes that a thread copies at a time: it takes a few milliseconds, and is no trouble to begin.
_FILL_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's part of a leaf that holds all layers: fetched only when it is asked for."""

    leaf: Any
    layer: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.leaf.shape[1:])

    @property
    def dtype(self) -> Any:
        return self.leaf.dtype


@jax.jit
def _layer(leaf: jax.Array, layer: Any) -> jax.Array:
    values: jax.Array = jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
    return values


def by_tensor(leaves: Mapping[str, Any], stacked: str | None) -> dict[str, Any]:
    """What is stored: tensors, so that how their layers lie in memory is no part of the format."""
    return {
        name: leaves[p.leaf] if p.layer is None else Layer(leaves[p.leaf], p.layer)
        for name, p in places(leaves, stacked).items()
    }


def size_of(leaves: Mapping[str, Any]) -> int:
    """Bytes of the buffer that `pack` makes of these arrays, or of their shapes."""
    head, spans = header(leaves)
    return len(head) + sum(spans.values())


def pack(leaves: Mapping[str, Any]) -> memoryview:
    """One buffer with a copy of every leaf, fetched from its device one after the other."""
    # Not np.empty: it asks for huge pages, whose clearing takes several times longer.
    data = pages(size_of(leaves))
    at = 0
    for piece in pieces(leaves):
        fill_together(data[at : at + len(piece)], piece)
        at += len(piece)
    return data


def fill_together(place: memoryview, piece: Buffer) -> None:
    """`fill`, by all processors that this process may use where there is much of it: no step is
    taken meanwhile.

    Of a place that was never written to nine tenths of the time go into clearing its pages, which
    several can do at once.
    """
    whole = memoryview(piece)

    def some(first: int, last: int) -> None:
        part = slice(first * _FILL_BYTES, last * _FILL_BYTES)
        fill(place[part], whole[part])

    parallel_for(some, -(-len(place) // _FILL_BYTES), cores())


def pieces(leaves: Mapping[str, Any]) -> Iterator[Buffer]:
    """The bytes of `pack`, piece by piece: header, then each leaf as it is when it is asked for."""
    head, spans = header(leaves)
    yield head
    for name in spans:
        array = np.ascontiguousarray(fetched(leaves[name]))
        yield array.reshape(-1).view(np.uint8).data


def fetched(leaf: Any) -> NDArray[Any]:
    """The values of a device array, or of a numpy one.

    Through an array on the host that is gone a moment later: asked itself, an array keeps what was
    fetched for as long as it lives, or lends its memory, which then cannot be donated.
    """
    if isinstance(leaf, Layer):
        return np.asarray(_layer(leaf.leaf, leaf.layer))  # an array that is gone a moment later
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    return np.asarray(jax.device_put(leaf, jax.local_devices(backend="cpu")[0], may_alias=False))


def views(data: State) -> Arrays:
    """The arrays of a buffer by name, as views of it; ValueError when it is none.

    Arrays are given back as they are.
    """
    if isinstance(data, dict):
        return data
    whole = memoryview(data).cast("B")
    if len(whole) < HEAD_ALIGN:
        raise ValueError(f"not an inner state: {len(whole)} bytes")
    start = HEAD_ALIGN + int.from_bytes(whole[:HEAD_ALIGN], "little")
    if start > len(whole):
        raise ValueError(f"not an inner state: a header of {start} bytes in {len(whole)}")
    try:
        entries = json.loads(bytes(whole[HEAD_ALIGN:start]))
        spans = {n: _span(e) for n, e in entries.items() if n != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an inner state: a header that cannot be read: {error!r}") from None
    found, at = Arrays(), 0
    for name, (dtype, shape, begin, end) in sorted(spans.items(), key=lambda s: s[1][2]):
        if begin != at or end - begin != dtype.itemsize * math.prod(shape):
            raise ValueError(f"not an inner state: {name} does not lie where its header says")
        at = end
        part = whole[start + begin : start + end]
        if len(part) != end - begin:
            raise ValueError(f"not an inner state: it ends within {name}")
        found[name] = np.frombuffer(part, dtype).reshape(shape)
    if start + at != len(whole):
        raise ValueError(f"not an inner state: {len(whole) - start - at} bytes too many")
    return found


def check(given: Mapping[str, NDArray[Any]], wanted: Mapping[str, Any]) -> None:
    """ValueError when `given` is not a sound state with the shapes and types of `wanted`."""
    wrong = [
        name
        for name in sorted(wanted.keys() | given.keys())
        if name not in wanted
        or name not in given
        or given[name].shape != wanted[name].shape
        or given[name].dtype != wanted[name].dtype
    ]
    if wrong:
        raise ValueError(f"an inner state of another model: {', '.join(wrong[:5])}")
    # A donor may have diverged: its moments would poison every step of the newcomer.
    diverged = [name for name, array in given.items() if not finite(array)]
    if diverged:
        raise ValueError(f"an inner state that is not finite: {', '.join(diverged[:5])}")


def finite(array: NDArray[Any]) -> bool:
    """Whether every value is a finite number."""
    flat = array.reshape(-1)
    parts = (flat[k : k + _LOOK_VALUES] for k in range(0, flat.size, _LOOK_VALUES))
    return all(bool(np.isfinite(part).all()) for part in parts)


@dataclass(frozen=True, slots=True)
class Received:
    """A donor's inner state as it came, and its digest, which the donor tells as well."""

    data: Buffer
    digest: str


class GivenCopy(Protocol):
    """A copy of which every host of an island keeps its share."""

    def let_go(self) -> None:
        """It is not needed any more."""


class Handed:
    """One copy of the inner state on its way out, perhaps to two places.

    There is one at a time: the next is made once this one is `gone`. Made and shared by one thread,
    let go by others.
    """

    def __init__(self, data: Buffer | GivenCopy) -> None:
        self._data: Any = data
        self._places = 1
        self._lock = threading.Lock()

    @property
    def data(self) -> Any:
        """The bytes, or a handle of those that several hosts keep (`hosts.giving_io`)."""
        data = self._data
        assert data is not None, "an inner state that was let go"
        return data

    @property
    def gone(self) -> bool:
        """Whether its memory is free again."""
        return self._data is None

    def share(self) -> bool:
        """It goes to one more place; False if it is gone already."""
        with self._lock:
            self._places += self._places > 0
            return self._places > 0

    def let_go(self) -> None:
        """It has arrived at one of the places, or was given up."""
        with self._lock:
            self._places -= 1
            if self._places:
                return
            data, self._data = self._data, None
        if not isinstance(data, Buffer):
            data.let_go()


def header(leaves: Mapping[str, Any]) -> tuple[bytes, dict[str, int]]:
    """The first bytes, and every array's bytes by name, in the order in which they follow."""
    spans: dict[str, int] = {}
    entries, at = {}, 0
    for name in sorted(leaves, key=lambda n: (RANK[NAMES[np.dtype(leaves[n].dtype)]], n)):
        shape, dtype = tuple(leaves[name].shape), np.dtype(leaves[name].dtype)
        spans[name] = dtype.itemsize * math.prod(shape)
        entries[name] = {
            "dtype": NAMES[dtype],
            "shape": shape,
            "data_offsets": (at, at := at + spans[name]),
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEAD_ALIGN)
    return len(text).to_bytes(HEAD_ALIGN, "little") + text, spans


def _span(entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """(type, shape, where it begins and ends); KeyError, TypeError or ValueError for rubbish."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError("sizes must be whole numbers")
    return DTYPES[entry["dtype"]], shape, begin, end
