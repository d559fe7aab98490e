"""One stream of the hub in memory: its messages, and what a power cut makes of them."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diloco_shared.bus.nats.wire import head_bytes, stored_bytes
from diloco_shared.bus.port import Stored

# Purged messages that a stream which is not synced may have again: those of some rounds.
_PURGED_MAX = 64


def size(message: Stored) -> int:
    return stored_bytes(message.subject, head_bytes(message.headers), len(message.payload))


@dataclass(slots=True)
class MemoryStream:
    """One stream's messages, oldest first."""

    config: dict[str, Any]
    messages: dict[int, Stored] = field(default_factory=dict)
    last_by_subject: dict[str, int] = field(default_factory=dict)
    # message id -> (sequence, time)
    ids: dict[str, tuple[int, float]] = field(default_factory=dict)
    # sequence -> time of expiry
    expiries: dict[int, float] = field(default_factory=dict)
    bytes: int = 0
    last_seq: int = 0
    # What was purged last, the newest last, of one that is not synced.
    purged: deque[Stored] = field(default_factory=partial(deque, maxlen=_PURGED_MAX))

    @property
    def bytes_max(self) -> int:
        return max(int(self.config.get("max_bytes", 0)), 0)

    @property
    def per_subject(self) -> int:
        """How many messages of a subject there may be; 0: as many as fit."""
        return max(int(self.config.get("max_msgs_per_subject", 0)), 0)

    @property
    def synced(self) -> bool:
        """Whether what it acknowledges is on disk."""
        return self.config.get("persist_mode") != "async"

    def fit(self, subjects_: Iterable[str]) -> None:
        """The oldest go that are too many of their subject, or too many bytes."""
        for subject in subjects_ if self.per_subject else ():
            for seq in self.of(subject)[: -self.per_subject]:
                self.remove(seq)
        if self.config.get("discard") == "old" and self.bytes_max:
            while self.messages and self.bytes > self.bytes_max:
                self.remove(next(iter(self.messages)))

    @property
    def first_seq(self) -> int:
        if self.messages:
            return next(iter(self.messages))
        return self.last_seq + 1 if self.last_seq else 0

    def remove(self, seq: int) -> Stored:
        message = self.messages.pop(seq)
        self.bytes -= size(message)
        self.expiries.pop(seq, None)
        if self.last_by_subject.get(message.subject) == seq:
            rest = () if self.per_subject == 1 else self.of(message.subject)
            if rest:
                self.last_by_subject[message.subject] = rest[-1]
            else:
                del self.last_by_subject[message.subject]
        return message

    def take_back(self, count: int) -> list[Stored]:
        """So many that were purged last are there again, unless they were lost since, or there is
        no room: those that are."""
        room = self.bytes_max - self.bytes if self.bytes_max else math.inf
        back = list[Stored]()
        for message in [m for m in reversed(self.purged) if m.seq <= self.last_seq][:count]:
            room -= size(message)
            if room < 0:
                break
            back.append(message)
        self.purged.clear()
        self.messages = dict(sorted((self.messages | {m.seq: m for m in back}).items()))
        for message in back:
            self.bytes += size(message)
            newest = max(self.last_by_subject.get(message.subject, 0), message.seq)
            self.last_by_subject[message.subject] = newest
        return back

    def forget_purged(self) -> None:
        """What comes behind its end: others take these sequences."""
        self.purged = deque((m for m in self.purged if m.seq <= self.last_seq), _PURGED_MAX)

    def remember(self) -> None:
        """What a server that begins reads of message ids: those of messages that are still here."""
        self.ids = {key: at for key, at in self.ids.items() if at[0] in self.messages}

    def of(self, subject: str) -> list[int]:
        """Sequences of a subject's messages."""
        return [s for s, m in self.messages.items() if m.subject == subject]
