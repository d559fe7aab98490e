"""Whether the message server still has what it took of this leader's publications. Pure.

A power cut takes the newest of a stream that is not synced, and the stream's sequences come again.
So as long as the newest manifest is there all of them are; and one that is taken at a sequence that
was taken before says that something between is gone. Only then everything on DN is looked through.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Acknowledged:
    """Of one leader's term."""

    newest: tuple[int, str] | None = None  # sequence and subject of the newest manifest on DN
    doubted: bool = True  # DN shall be looked through; what an earlier leader left is not known yet

    def took(self, seq: int, subject: str) -> None:
        """The server took a manifest."""
        if self.newest is not None and seq <= self.newest[0]:
            self.doubted = True
        self.newest = (seq, subject)

    def found(self, newest: tuple[int, str] | None) -> None:
        """DN was looked through: the newest manifest of this shard there."""
        self.newest, self.doubted = newest, False


def torn(head: int, whole: int, seen: int, keyframe: bool | None) -> bool:
    """Whether a fragment cannot be had from DN, and its newest version cannot be put there again.

    `head` is the tape's version, `whole` the newest that DN has with all that it builds on, `seen`
    the newest that it has. `keyframe`: whether the publication under way is one; None: none is. A
    subject is taken once: a difference that stands there without its base is not replaced.
    """
    if whole >= head:
        return False
    if keyframe is not None:
        return not keyframe and whole < head - 1
    return seen >= head
