"""Whether the message server still has what it took of this leader's publications. Pure.

A power cut takes the newest of a stream that is not synced, and the stream's sequences come again.
So as long as the newest manifest is there all of them are. One that is taken at a sequence that was
taken before says that something between is gone; so may one that another life of the server takes,
since chunks use up sequences too. Only then everything on DN is looked through.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Acknowledged:
    """Of one leader's term."""

    newest: tuple[int, str] | None = None  # sequence and subject of the newest manifest on DN
    doubted: bool = True  # DN shall be looked through; what an earlier leader left is not known yet
    life: str = ""  # of the server that took or showed the newest

    def took(self, seq: int, subject: str, life: str) -> None:
        """The server took a manifest, in this life of it."""
        again = self.newest is not None and seq <= self.newest[0]
        self.doubted |= again or life != self.life
        self.newest, self.life = (seq, subject), life

    def found(self, newest: tuple[int, str] | None, life: str) -> None:
        """DN was looked through, from this life on: the newest manifest of this shard there."""
        self.newest, self.life, self.doubted = newest, life, False


def with_coming(whole: int, seen: int, coming: Mapping[int, bool]) -> tuple[int, int]:
    """What DN will have of a fragment once the publications on their way to it are there.

    `whole` is the newest version that it has with all that it builds on, `seen` the newest that it
    has; `coming`: by version, whether it is a keyframe.
    """
    for version, keyframe in sorted(coming.items()):
        seen = max(seen, version)
        if keyframe or version == whole + 1:
            whole = max(whole, version)
    return whole, seen


def torn(head: int, whole: int, seen: int) -> bool:
    """Whether a fragment cannot be had from DN, and its newest version cannot be put there again.

    `head` is the tape's version. A subject is taken once: a difference that stands there without
    its base is not replaced.
    """
    return whole < head <= seen
