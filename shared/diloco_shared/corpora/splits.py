"""Which documents are trained on, and which are held out.

A document's content decides, by a hash of it: wherever it lies, whatever its file is called and
whatever else is added, it stays in its split, and two copies of it never lie on both sides. Two
copies of one text may, where they are cut into passages in different ways (documents.py): under
gzip, and of the only file, shorter texts are cut.

A hash leaves a split of few documents empty now and then. Then, of all documents in the order of
their hashes, the first goes to validation, the second to test and the last to training; the others
stay. So three different documents are always enough.
"""

import hashlib
from collections.abc import Mapping
from typing import Literal

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def check_fraction(fraction: float) -> None:
    """ValueError unless `fraction` for validation and as much for test leave something to train."""
    if not 0 < fraction < 0.5:
        raise ValueError(
            f"a validation fraction of {fraction:g} is not above 0 and below 0.5: as much again is "
            "held out for the test"
        )


class Splitter:
    """Deals documents to splits, and knows in the end whether that was right."""

    def __init__(self, fraction: float, placed: Mapping[bytes, Split] | None = None) -> None:
        """`placed`: split of single documents by their digest, from an earlier `repair`."""
        check_fraction(fraction)
        self.fraction = fraction
        # In 64-bit fixed point, so that no rounding differs anywhere.
        self.validation_below = int(fraction * 2**64)
        self.test_below = 2 * self.validation_below
        self.placed = dict(placed or {})
        self.seen: set[Split] = set()
        self._lowest: list[bytes] = []  # two different digests, in order
        self._highest = b""

    def split(self, content: bytes) -> Split:
        """Where a document with this content belongs."""
        digest = hashlib.blake2b(content, digest_size=16).digest()
        self._remember(digest)
        found = self.placed.get(digest) or self._by_hash(digest)
        self.seen.add(found)
        return found

    def _by_hash(self, digest: bytes) -> Split:
        place = int.from_bytes(digest[:8])
        if place < self.validation_below:
            return "validation"
        return "test" if place < self.test_below else "train"

    def _remember(self, digest: bytes) -> None:
        self._highest = max(self._highest, digest)
        lowest = self._lowest
        if digest in lowest or (len(lowest) == 2 and digest > lowest[1]):
            return
        self._lowest = sorted([*lowest, digest])[:2]

    @property
    def empty(self) -> list[Split]:
        """Splits that got no document."""
        return [split for split in SPLITS if split not in self.seen]

    def repair(self) -> dict[bytes, Split]:
        """Where single documents must go so that no split is empty: then deal all of them again.

        Raises ValueError if there are fewer than three different documents.
        """
        different = {*self._lowest, self._highest} - {b""}
        if len(different) < 3:
            raise ValueError(
                f"{len(different)} different documents cannot be split: training, validation and "
                "test need one each. Give more text, or text with more lines"
            )
        first, second = self._lowest
        return {first: "validation", second: "test", self._highest: "train"}
