"""Whether the disk has room for a corpus that is made of text; nobody knows how much it takes.

    CACHE/.<key>.short  that there was none: how many bytes did not do, for how long it is not tried
                        again, what is said of it, and how many it takes, if much of it was written

Streams of a hub, snapshots and checkpoints may lie on the same disk, and must not find it full. So
whoever prepares a corpus stops while some room is left. Before that, corpora of the cache that
nobody uses give way, unless all of them would not do. So the room that they hold counts as free.
They go one by one, and none before others would find too little: a small text may need none of it.
Once they go, more is made free than that: a large text would keep the disk nearly full for hours.
Learners try a run again every half minute: a text that found no room is not begun again before
there is more, or a day is over, or an hour if a quota was at its end. (The file may be removed as
well.) That is known to all learners who share the cache, and after a restart. A check removes no
corpus: where it finds no room and a learner may, it leaves nothing that would keep a learner back.
"""

import errno
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from diloco_learner.data.unused import bytes_of, let_go, unused
from diloco_shared import ambient
from diloco_shared.budget.terms import shown
from diloco_shared.durable import free_bytes, replace

# So much is left to others, or a quarter of what was free where that is less: a small text can be
# prepared on any disk. A checkpoint of a model of 600 million parameters takes as much.
SPARE_BYTES, SPARE_SHARE = 8 << 30, 4
# Between two looks, in chunks of text of 256 KiB each: to ask a network file system takes longer
# than to encode one. That is where so much is left that as many chunks are little beside it; where
# less is, each chunk is followed by a look.
LOOK_CHUNKS, LARGE_BYTES = 16, 1 << 30
# It is begun again once so much more is free, as a part of what did not do: an attempt costs hours.
MORE = 8
# Or after so many seconds. Of a quota no file system tells how much of it is left: it is for its
# user to make room there, who then would wait.
AGAIN_S, QUOTA_S = 86_400.0, 3600.0
# A corpus that was let go counts as free for so many seconds, if the file system does not tell of
# it before: btrfs does so when it commits, each 30 s, and a client of a network file system asks
# once a minute. What is not free by then is not to be had (an earlier build may have it open).
LET_GO_S = 60.0
# Of a full disk the first look may see nothing: files are written through buffers of 1 MiB each, of
# which there are three. Whoever has not written more has lost no work.
FIRST_BYTES = 4 << 20
# What a system says of a place that has no room.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Texts that are remembered, the newest: a run has a few.
SHORT_MAX = 64
SHORT_BYTES_MAX = 1 << 14
# Of a source's name its end says most. Of all that is said the first 400 characters are kept.
NAME_CHARS = 60


class Full(OSError):
    """Others would find no room."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "others need what is left")


class CorpusRoom:
    """For one corpus, from before it is begun. `folder`: that it gets. `tell` is called with what
    is removed for it, in words; `makes_room`: whether anything may be. `before`: of the attempt
    that `first_made` room for this one."""

    def __init__(
        self,
        folder: Path,
        tell: Callable[[str], None] | None = None,
        *,
        makes_room: bool = True,
        before: "CorpusRoom | None" = None,
    ) -> None:
        self.folder, self.cache, self.tell = folder, folder.parent, tell
        self.makes_room = makes_room
        self.kept = folder.parent / f".{folder.name}.short"
        self.lock = folder.parent / f".{folder.name}.lock"
        # What the file system told last; what of that let go it has not told yet, and since when.
        self.told, self.coming, self.let_go_at = 0, 0, 0.0
        if before is not None:
            self.told, self.coming, self.let_go_at = before.told, before.coming, before.let_go_at
        self.begins, self.unused = self._free(), self._unused()
        # 0 where the file system does not tell
        self.free = 0 if self.begins is None else self.begins + self._gives_way()
        self.spare = min(SPARE_BYTES, (self.begins or 0) // SPARE_SHARE)
        # Below this much free, corpora that nobody uses go; from the first one on it may be more.
        self.wanted = self.spare
        self.every = LOOK_CHUNKS if self.spare >= LARGE_BYTES else 1
        self.chunks, self.done, self.total = 0, 0, 0
        self.written, self.had = 0, self.free
        self.takes = 0  # as an earlier attempt found; 0 where none came far enough to know

    def _unused(self) -> int:
        """What corpora hold that nobody uses."""
        return sum(map(bytes_of, unused(self.cache, self.folder)))

    def _gives_way(self) -> int:
        """As much of that as may be removed for it."""
        return self.unused if self.makes_room else 0

    def _free(self) -> int | None:
        """What is free; with what it let go, of which the file system has not told yet."""
        told = free_bytes(self.cache)
        if told is None:
            return None
        late = ambient.monotonic() >= self.let_go_at + LET_GO_S
        self.coming = 0 if late else max(self.coming - max(told - self.told, 0), 0)
        self.told = told
        return told + self.coming

    def check(self) -> None:
        """ValueError if it found no room before, and there is not more by now."""
        try:
            with self.kept.open("rb") as file:
                body = json.loads(file.read(SHORT_BYTES_MAX))
            free, why = int(body["free"]), str(body["why"])
            again_s = float(body.get("again_s", AGAIN_S))  # earlier builds knew one time alone
            self.takes = int(body.get("takes", 0))  # nor did they keep this
            # The lock was made just now: that is the disk's own clock, whoever shares the disk.
            age_s = self.lock.stat().st_mtime - self.kept.stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):
            return  # there is none, or it is not one of ours
        if 0 <= age_s < again_s and self.free < _wanted(free):
            raise ValueError(why)

    def look(self, done: int, total: int) -> None:
        """After each chunk, of `done` bytes of `total`. Raises Full while there is room left."""
        self.done, self.total = done, total
        self.chunks += 1
        if self.chunks % self.every == 0:
            free = self._free()
            if free is not None and free < self.wanted and not self._made(free):
                raise Full

    def _made(self, free: int) -> bool:
        """Whether others have their room, of which so much is `free`: what nobody uses goes.

        It stays where all of it would not do: somebody may want it again, which takes hours. Others
        then find as much as if what it held had been free from the first.
        """
        self.wanted = self.spare
        if not self.makes_room:
            return False
        to_come = self.total - self.done
        takes = bytes_of(self.folder) * to_come // self.done if self.done else 0
        found = {path: bytes_of(path) for path in unused(self.cache, self.folder)}
        if free + sum(found.values()) < self.spare + takes:
            return free >= self.spare
        wanted = max(self.spare, min(SPARE_BYTES, self.free // SPARE_SHARE))
        for path, size in found.items():
            if free >= wanted:
                break
            if self._gone(path, size):
                free += size
        if free >= wanted:  # or nothing more gives way, and it would be looked for at each chunk
            self.wanted = wanted
        return free >= self.spare

    def first_made(self, error: OSError) -> bool:
        """Whether one that nobody uses has gone, for a corpus that `ended` with its first bytes: it
        can be begun once more.

        None goes where all of them would not do, as far as an earlier attempt knows: each attempt
        would take one, and there is one each day.
        """
        full = error.errno == errno.ENOSPC and not isinstance(error, Full)
        if not full or self.written >= FIRST_BYTES or not self.makes_room:
            return False
        if self.begins is not None and self.free < self.spare + self.takes:
            return False
        first = unused(self.cache, self.folder)[:1]
        return any(self._gone(path, bytes_of(path)) for path in first)

    def _gone(self, path: Path, size: int) -> bool:
        """Whether it gave way, of so many bytes."""
        if not let_go(path):
            return False
        self.coming, self.let_go_at = self.coming + size, ambient.monotonic()
        if self.tell is not None:
            self.tell(f"removed the prepared corpus {path}: another one needed its room")
        return True

    def ended(self, written: int) -> None:
        """So many bytes of it are there, before they are removed. Others may have taken room too,
        for a while: so what it had is not what was free when it was begun."""
        self.written, self.unused = written, self._unused()
        if self.free and (free := self._free()) is not None:
            self.had = written + free + self._gives_way()

    def short(self, name: str, error: OSError) -> str:
        """What to say of a corpus that found no room and has `ended`. It is remembered, unless a
        learner could have made room where this one may not."""
        takes = self.written * self.total / self.done if self.done else 0.0
        # What it had did not do. What was free at first may do, if others have given it back: that
        # is known only where the whole of it would have fitted.
        needs = int(takes) + self.spare if takes else self.free
        # Where it fits, no more is wanted than there was: it might never be there.
        most = self.free if needs >= self.free else self.free * MORE // (MORE + 1)
        failed = max(self.had, min(most, needs))
        quota = error.errno == errno.EDQUOT
        again_s = QUOTA_S if quota else AGAIN_S
        had = f"of which {shown(self.written)} found room" if quota else self._had()
        if self.unused:
            had += f" ({self._held_by_others(quota=quota)})"
        # A learner makes none for a text that is at the end of a quota.
        remembers = self.makes_room or quota or not self.unused
        name = name if len(name) <= NAME_CHARS else f"...{name[-NAME_CHARS:]}"
        # What the reader is to know first, and what may be long last: the end may be cut off.
        text = (
            f"the corpus of {name!r} has no room ({error.strerror}): it takes "
            f"{f'about {shown(takes)}' if takes else 'more'}, {had}. "
            f"{self._again(failed, quota=quota) if remembers else ''}"
            "Make room, name as source what 'diloco data prepare' wrote elsewhere, "
            f"or let DILOCO_CORPORA be another folder than {self.cache}"
        )
        if remembers:
            # Of its first bytes most may be in buffers yet.
            known = int(takes) if self.written >= FIRST_BYTES else self.takes
            self._remember({"free": failed, "again_s": again_s, "why": text, "takes": known})
        return text

    def _again(self, failed: int, *, quota: bool) -> str:
        # What is free on the file system says nothing of a quota.
        once = f"{shown(_wanted(failed))} are free, or " if failed and not quota else ""
        return (
            f"It is tried again once {once}{'an hour' if quota else 'a day'} is over; "
            f"remove {self.kept.name} in DILOCO_CORPORA to try at once. "
        )

    def _remember(self, body: dict[str, object]) -> None:
        with suppress(OSError):  # then it is begun again, and stops again
            replace(self.kept, json.dumps(body))
            remembered = sorted(self.cache.glob(".*.short"), key=lambda p: p.stat().st_mtime_ns)
            for path in remembered[:-SHORT_MAX]:
                path.unlink(missing_ok=True)

    def _had(self) -> str:
        return f"{shown(self.spare)} are left to others, and it could have {shown(self.had)}"

    def _held_by_others(self, *, quota: bool) -> str:
        hold = f"corpora that nobody uses hold {shown(self.unused)}"
        if quota:  # nobody can see how much it leaves: it is for its user to remove them
            return hold
        return f"{hold} of it" if self.makes_room else f"{hold} besides, which a learner removes"

    def found(self) -> None:
        """It is prepared."""
        self.kept.unlink(missing_ok=True)


def _wanted(free: int) -> int:
    return free + max(free // MORE, 1)
