"""Balanced tensor fragmentation (paper section 3.7, appendix C): who is in which fragment.

Pieces are sorted by size, largest first, each put into the currently smallest fragment; ties go
by name, then to the lowest fragment. The worst fragment is at most 4/3 of the optimum, and at most
twice the mean where every tensor above that can be cut by rows. A tensor above twice the mean
fragment is cut by rows first, so that an embedding does not set the peak. Every process computes
the same layout from the same tensors. No arrays here: `numerics/arrays.py` moves the values.
"""

import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from diloco_shared.protocol.messages import TensorSpec

# A tensor larger than this many mean fragments is cut by rows.
CUT_ABOVE_MEANS = 2.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a tensor, and where they lie in their fragment's flat values."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    embedding: bool
    start: int
    stop: int
    offset: int
    size: int

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.stop == (self.shape[0] if self.shape else 1)

    @property
    def piece_shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.shape[1:]) if self.shape else ()


@dataclass(frozen=True, slots=True)
class Layout:
    """The pieces of every fragment, in order."""

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[tuple[Piece, ...], ...]

    @classmethod
    def build(cls, tensors: Sequence[TensorSpec], fragments: int) -> Self:
        """Cut `tensors` into `fragments`; ValueError if that cannot be done."""
        names = [t.name for t in tensors]
        if len(set(names)) != len(names):
            raise ValueError("two tensors share a name")
        empty = [t.name for t in tensors if math.prod(t.shape) == 0]
        if empty:
            raise ValueError(f"tensors without values: {', '.join(empty[:5])}")
        total = sum(math.prod(t.shape) for t in tensors)
        pieces = [piece for t in tensors for piece in _cut(t, total / fragments)]
        if len(pieces) < fragments:
            raise ValueError(
                f"{len(pieces)} tensors cannot fill {fragments} fragments: "
                "set algorithm.fragments lower"
            )
        return cls(tuple(tensors), _pack(pieces, fragments))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Values per fragment."""
        return tuple(sum(p.size for p in pieces) for pieces in self.fragments)

    def digest(self) -> str:
        """32 hex digits that two processes share exactly if they cut the tensors alike."""
        text = json.dumps(
            [
                [[p.name, p.shape, p.embedding, p.start, p.stop] for p in pieces]
                for pieces in self.fragments
            ]
        )
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _cut(tensor: TensorSpec, mean: float) -> list[Piece]:
    size = math.prod(tensor.shape)
    rows = tensor.shape[0] if tensor.shape else 1
    parts = 1
    if size > CUT_ABOVE_MEANS * mean and rows > 1:
        parts = min(rows, math.ceil(size / mean))
    bounds = [rows * k // parts for k in range(parts + 1)]
    return [
        Piece(tensor.name, tensor.shape, tensor.embedding, a, b, 0, size // rows * (b - a))
        for a, b in itertools.pairwise(bounds)
    ]


def _pack(pieces: list[Piece], fragments: int) -> tuple[tuple[Piece, ...], ...]:
    packed: list[list[Piece]] = [[] for _ in range(fragments)]
    smallest = [(0, p) for p in range(fragments)]  # a heap of (size, fragment)
    for piece in sorted(pieces, key=lambda x: (-x.size, x.name, x.start)):
        size, p = heapq.heappop(smallest)
        packed[p].append(
            Piece(
                piece.name,
                piece.shape,
                piece.embedding,
                piece.start,
                piece.stop,
                size,
                piece.size,
            )
        )
        heapq.heappush(smallest, (size + piece.size, p))
    return tuple(tuple(f) for f in packed)
