"""Arrays cut into the parts that processes hold, and put together again."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_learner.hosts import parts
from diloco_learner.hosts.parts import Parts


@dataclass(frozen=True)
class Device:
    process_index: int
    number: int


@dataclass(frozen=True)
class Lies:
    """Of so many processes with so many devices each: the first dimension, or the second, is cut
    among all devices, or among those of each process."""

    processes: int
    devices: int
    dimension: int | None
    copies: bool = False  # each process holds the whole

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[Device, tuple[slice, ...]]:
        found = {}
        many = self.devices if self.copies else self.processes * self.devices
        for n in range(self.processes * self.devices):
            index = [slice(None)] * len(shape)
            if self.dimension is not None:
                size = shape[self.dimension] // many
                at = n % many
                index[self.dimension] = slice(at * size, (at + 1) * size)
            found[Device(n // self.devices, n)] = tuple(index)
        return found


LIES = st.builds(
    Lies,
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([None, 0, 1]),
    st.booleans(),
)


@given(LIES, st.sampled_from([np.float32, np.int32, ml_dtypes.bfloat16]))
def test_what_each_process_tells_once_is_the_whole(lies: Any, dtype: Any) -> None:
    whole = np.arange(12 * 12).reshape(12, 12).astype(dtype)
    found: dict[Any, Any] = {}
    for spans in parts.told(lies, whole.shape).values():
        data = b"".join(parts.cut(whole, spans))
        assert len(data) == parts.size_of(spans, whole.dtype)
        new = parts.split(spans, whole.dtype, data)
        assert not found.keys() & new.keys(), "nobody tells what another one has told"
        found |= new
    again = parts.put_together(whole.shape, whole.dtype, found)
    assert again.tobytes() == whole.tobytes() and again.dtype == whole.dtype


@given(LIES)
def test_a_process_reads_its_own_parts_as_if_it_had_all(lies: Any) -> None:
    whole = np.arange(144.0).reshape(12, 12)
    held = parts.held(lies, whole.shape)
    for device, index in lies.devices_indices_map(whole.shape).items():
        spans = held[device.process_index]
        data = b"".join(parts.cut(whole, spans))
        own = Parts(whole.shape, whole.dtype, parts.split(spans, whole.dtype, data))
        assert (len(own), own.size, own.shape) == (12, 144, (12, 12))
        np.testing.assert_array_equal(own[index], whole[index])


def test_what_is_not_here_is_missed() -> None:
    lies: Any = Lies(2, 1, 0)
    spans = parts.held(lies, (4,))[1]
    own = Parts((4,), np.dtype(np.float32), parts.split(spans, np.dtype(np.float32), bytes(8)))
    assert own[2:4].shape == (2,)
    with pytest.raises(KeyError):
        own[0:2]


def test_an_array_without_dimensions_is_one_part() -> None:
    lies: Any = Lies(2, 2, None)
    count = np.array(7, np.int32)
    told = parts.told(lies, ())
    assert told == {0: [()], 1: []}
    found = parts.split(told[0], count.dtype, b"".join(parts.cut(count, told[0])))
    assert parts.put_together((), count.dtype, found) == count


def test_what_fills_up_is_not_sent() -> None:
    lies: Any = Lies(2, 2, 0)
    spans = parts.held(lies, (8,))
    assert parts.clipped(spans[0], 5) == [((0, 2),), ((2, 4),)]
    assert parts.clipped(spans[1], 5) == [((4, 5),), ((5, 5),)]
    assert parts.span_of(slice(6, 5), (5,)) == ((5, 5),)


def test_bytes_that_are_too_few_or_too_many_are_refused() -> None:
    spans = [((0, 2),)]
    for size in (7, 9):
        with pytest.raises(ValueError, match="its parts take 8"):
            parts.split(spans, np.dtype(np.float32), bytes(size))


def test_an_array_of_which_a_part_is_missing_is_refused() -> None:
    """Its place would hold whatever was in the memory before."""
    whole = np.arange(12, dtype=np.float32)
    found = {((0, 4),): whole[:4], ((8, 12),): whole[8:]}
    with pytest.raises(ValueError, match="parts of 8 values are no array of 12"):
        parts.put_together(whole.shape, whole.dtype, found)
