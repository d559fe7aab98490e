"""Publications to fragments, fragments to tensors: arrays in, arrays out. Pure.

A fragment is decoded in parts, so that it takes its own 4 bytes per value and its payload, and no
second copy. Where each tensor's rows lie among the fragments is the layout's to say.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol.messages import PublicationManifest
from diloco_shared.spec.fragmentation import Layout

Values = NDArray[np.float32]

# Values decoded at a time: 4 MiB of fp32, which stay in a processor's cache.
PART_VALUES = 1 << 20
FP32_BYTES = 4


class NotAsPublished(ValueError):
    """What was fetched does not make the anchor that its manifest tells."""


def applied(before_F: Values | None, m: PublicationManifest, payload: bytes) -> Values:
    """The anchor that a publication makes, fp32 of shape (F,), in the memory of `before_F`.

    `before_F`: what a delta adds to; of no use afterwards. None for a keyframe. Raises
    NotAsPublished when the digest, or anything about the payload, is not as the manifest says.
    """
    assert (before_F is None) == (m.prev_version < 0), "a delta has something to add to"
    try:
        codec.check(m.codec, payload, m.values)
    except ValueError as error:
        raise NotAsPublished(f"{m.blob.subject}: {error}") from None
    anchor_F = np.empty(m.values, np.float32) if before_F is None else before_F
    for start in range(0, m.values, PART_VALUES):
        stop = min(start + PART_VALUES, m.values)
        part_B = codec.decode_part(m.codec, payload, m.values, start, stop)
        if before_F is None:
            anchor_F[start:stop] = part_B
        else:
            # Infinities may meet; the digest decides whether that is what was published.
            with np.errstate(all="ignore"):
                anchor_F[start:stop] += part_B
    found = digest_array(anchor_F)
    if found != m.anchor_digest:
        raise NotAsPublished(
            f"fragment {m.fragment} at version {m.version} has digest {found}, and was published "
            f"as {m.anchor_digest}"
        )
    return anchor_F


# --------------------------------------------------------------------------------------------------
# Where values belong once all tensors lie one after the other, each in rows as it is.


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor begins among all, in bytes of fp32; its shape."""

    offset: int
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return FP32_BYTES * math.prod(self.shape)


def places(layout: Layout) -> dict[str, TensorPlace]:
    """Of every tensor by name, in the order of the layout."""
    found: dict[str, TensorPlace] = {}
    offset = 0
    for tensor in layout.tensors:
        found[tensor.name] = place = TensorPlace(offset, tuple(tensor.shape))
        offset += place.bytes
    return found


def scattered(
    layout: Layout, fragment: int, values_F: Values, where: dict[str, TensorPlace]
) -> Iterator[tuple[int, Values]]:
    """(offset in bytes, values) of every piece of a fragment: views, each in one stretch."""
    for piece in layout.fragments[fragment]:
        place = where[piece.name]
        row_bytes = place.bytes // (place.shape[0] if place.shape else 1)
        yield (
            place.offset + piece.start * row_bytes,
            values_F[piece.offset : piece.offset + piece.size],
        )
