"""Tokens of a split: one long sequence that may lie in several files.

Nothing is read until somebody looks at it, and then only that part. Numpy arrays do as well
wherever tokens are wanted: see `windows`.

In a *masked* sequence a number below 0 is the bitwise complement of a token (~token) that is read
and not to be predicted.
"""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from diloco_shared.corpora.token_files import Damaged, TokenFile

# Bytes of a sequence that are read at once where all of it is looked at.
BLOCK = 16 << 20

Part = NDArray[Any] | TokenFile


class WrongToken(Damaged):
    """A number that is no token of the vocabulary: the file is damaged, or not what it is said to
    be."""


class Tokens:
    """One sequence of parts that follow each other; like a numpy array of one dimension."""

    def __init__(
        self,
        parts: Sequence[Part],
        vocabulary: int,
        name: str = "tokens",
        *,
        masked: bool = False,
    ) -> None:
        """`name` is for messages; every token must be below `vocabulary`."""
        self.parts = tuple(parts)
        self.vocabulary = vocabulary
        self.name = name
        self.masked = masked
        self._ends = np.cumsum([len(part) for part in self.parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.parts else 0

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> NDArray[Any]: ...
    def __getitem__(self, place: int | slice) -> int | NDArray[Any]:
        """A token, or a stretch [a:b] as one array. Raises Unreadable."""
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            if step != 1:
                raise ValueError("a sequence of tokens is cut without a step: [a:b]")
            return self._stretch(start, stop)
        at = place + len(self) if place < 0 else place
        if not 0 <= at < len(self):
            raise IndexError(f"token {place} of {len(self)}")
        return int(self._stretch(at, at + 1)[0])

    def _stretch(self, start: int, stop: int) -> NDArray[Any]:
        found = []
        while start < stop:
            part, began = self._part(start)
            last = min(stop - began, len(part))
            found.append(part[start - began : last])
            start = began + last
        if not found:
            return np.empty(0, self.parts[0].dtype if self.parts else np.uint16)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _part(self, place: int) -> tuple[Part, int]:
        """The part that holds a place, and where it begins."""
        number = int(np.searchsorted(self._ends, place, side="right"))
        part = self.parts[number]
        return part, int(self._ends[number]) - len(part)

    def windows(self, starts_S: NDArray[np.int64], length: int) -> NDArray[np.int32]:
        """The stretches of `length` tokens that begin at these places, shape (S, length).

        Of a masked sequence with the signs. Raises Damaged: WrongToken if one of them has a number
        that is no token, Unreadable if a part of a file cannot be read.
        """
        starts_S = np.asarray(starts_S, np.int64)
        if len(starts_S) and not 0 <= starts_S.min() <= starts_S.max() <= len(self) - length:
            raise IndexError(f"a window of {length} tokens goes beyond the {len(self)} there are")
        # As wide as the file: the lower half of a damaged number of 64 bits may be a token.
        wide = any(part.dtype.itemsize > 4 for part in self.parts)
        found = np.empty((len(starts_S), length), np.int64 if wide else np.int32)
        offsets_L = np.arange(length)
        first_S = np.searchsorted(self._ends, starts_S, side="right")
        last_S = np.searchsorted(self._ends, starts_S + length - 1, side="right")
        across_S = first_S != last_S
        for number in np.unique(first_S[~across_S]):
            rows = np.flatnonzero(~across_S & (first_S == number))
            part = self.parts[number]
            local = starts_S[rows] - (int(self._ends[number]) - len(part))
            if isinstance(part, TokenFile):
                found[rows] = part.rows(local, length)
            else:
                found[rows] = part[local[:, None] + offsets_L]
        for row in np.flatnonzero(across_S):
            start = int(starts_S[row])
            found[row] = self._stretch(start, start + length)
        self._check(found, starts_S)
        return found.astype(np.int32, copy=False)

    def _check(
        self, found: NDArray[np.int32] | NDArray[np.int64], starts_S: NDArray[np.int64]
    ) -> None:
        # A number above int32 is negative here.
        least = -self.vocabulary if self.masked else 0
        if found.size and not least <= found.min() <= found.max() < self.vocabulary:
            wrong = int(found.max() if found.max() >= self.vocabulary else found.min())
            row, column = np.argwhere(found == wrong)[0]
            place = int(starts_S[row] + column)
            part, _ = self._part(place)
            where = f", in {part.path}" if isinstance(part, TokenFile) else ""
            raise WrongToken(
                f"{self.name} has the number {wrong}, which is no token: there are "
                f"{self.vocabulary}. It is number {place} of this split, counted from 0{where}. "
                "The file is damaged, or was made with another tokenizer"
            )

    def blocks(self, size: int = BLOCK) -> Iterator[NDArray[Any]]:
        """All of it, some bytes at a time. Raises Unreadable."""
        for part in self.parts:
            step = max(size // part.dtype.itemsize, 1)
            for start in range(0, len(part), step):
                yield part[start : start + step]


def windows(
    tokens: NDArray[Any] | Tokens, starts_S: NDArray[np.int64], length: int
) -> NDArray[np.int32]:
    """As `Tokens.windows`, of a numpy array as well."""
    if isinstance(tokens, Tokens):
        return tokens.windows(starts_S, length)
    found: NDArray[np.int32] = tokens[starts_S[:, None] + np.arange(length)].astype(np.int32)
    return found
