"""Sequences that hold a number which is no token: left out of every batch, and counted as read.

One damaged block of a disk must end no learner: it would begin again at the same place and end
again, and so would whoever takes the shard after it. What is left out follows from the corpus
alone, so that all who have the same files read the same.
"""

from dataclasses import dataclass

from diloco_shared.corpora.sequences import WrongToken

# So many in a row are borne. More are no damage: the corpus is of another vocabulary, and there
# may be nothing in it to train on. Sequences of a shard lie all over it.
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

    def wrong(self, error: WrongToken) -> None:
        """One is left out. Raises `error` after too many in a row."""
        self.in_a_row += 1
        if self.in_a_row > LEFT_OUT_MAX:
            raise error
        self.total, self.why = self.total + 1, str(error)
