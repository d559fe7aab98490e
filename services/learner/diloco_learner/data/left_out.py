"""Damaged sequences: left out of every batch, and counted as read.

One holds a number which is no token, or lies where the file cannot be read. One damaged block of a
disk must end no learner: it would begin again at the same place and end again, and so would whoever
takes the shard after it. What is left out follows from the files alone, so that all who can read
the same files read the same.
"""

from dataclasses import dataclass

from diloco_shared.corpora.token_files import Damaged

# So many in a row are borne. More are no damaged block: the corpus is of another vocabulary, or
# what it lies on is gone, and there is nothing to train on. Sequences of a shard lie all over it.
LEFT_OUT_MAX = 64


@dataclass(slots=True)
class LeftOut:
    """Of one learner. One thread counts, another may look."""

    total: int = 0  # every time that one was to be read
    in_a_row: int = 0
    why: str = ""  # of the newest

    def sound(self) -> None:
        """One or more were read."""
        self.in_a_row = 0

    def wrong(self, error: Damaged) -> None:
        """One is left out. Raises `error` after too many in a row."""
        self.in_a_row += 1
        if self.in_a_row > LEFT_OUT_MAX:
            raise error
        self.total, self.why = self.total + 1, str(error)
