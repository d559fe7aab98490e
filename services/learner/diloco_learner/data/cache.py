"""Corpora that learners of this machine have prepared of text: each once, for all of them.

    CACHE/<key>/        a prepared corpus; the key is a digest of what it was made of
    CACHE/.<key>.lock   while somebody makes, opens or removes it
    CACHE/.<key>.short  that there was no room for it: see `room`
    CACHE/digests.json  of files of tokens that somebody else made: see `digests`

The text is known by its files' names, sizes and times. Whoever comes while another one prepares
waits for it. Over the cache's limit, corpora that nobody uses are removed, the least recently used
first. They are removed too where a text finds no room, before it is refused: see `unused`.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from diloco_learner.data.digests import KeptDigests
from diloco_learner.data.room import NO_ROOM, CorpusRoom
from diloco_learner.data.unused import bytes_of, hold, kept, let_go
from diloco_shared.corpora.folders import Busy, locked
from diloco_shared.corpora.prepare import Progress, prepare_locked, removed
from diloco_shared.corpora.prepared import FORMAT, INDEX, Corpus, is_prepared, open_corpus, whole
from diloco_shared.corpora.sources import Source
from diloco_shared.corpora.tokenizers import Tokenizer, rows_for_text

# Unless the settings say otherwise: a few corpora of the size that one prepares in passing.
BYTES_MAX = 64 << 30
# Told while a corpus is prepared: so many lines in all.
LINES = 10


def users_cache() -> Path:
    """Of whoever is no learner with a data folder of its own: experiments and benchmarks."""
    return Path.home() / ".cache" / "decoupled-diloco" / "corpora"


def opened(folder: Path) -> Corpus:
    """A prepared corpus; the same object for all of this process who open it."""
    try:
        index = (folder / INDEX).stat()
    except OSError as error:
        raise ValueError(f"{folder / INDEX} cannot be read: {error.strerror or error}") from None
    key = (folder.resolve(), index.st_mtime_ns, index.st_ino)
    # Two threads may open one at the same time: that is two objects of one corpus.
    if (found := _OPEN.get(key)) is None:
        found = _OPEN[key] = open_corpus(folder)
    return found


# As long as somebody has them: what is removed from the disk takes its room while it is open.
_OPEN: WeakValueDictionary[tuple[Path, int, int], Corpus] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class CorpusCache:
    """A folder of prepared corpora, of at most `bytes_max` together, but for those in use.

    `tell` is called with what takes long, in words. `makes_room`: whether corpora that nobody uses
    give way to a text.
    """

    folder: Path
    bytes_max: int = BYTES_MAX
    tell: Callable[[str], None] | None = None
    makes_room: bool = True

    def there(self, source: Source, tokenizer: Tokenizer, fraction: float) -> Corpus | None:
        """The corpus of this text, if it is prepared; nothing waits. Raises ValueError."""
        folder = self._folder(source, tokenizer, fraction)
        with suppress(Busy, OSError), locked(folder, wait=False):
            return self._found(folder)
        return None

    def corpus(
        self,
        source: Source,
        tokenizer: Tokenizer,
        fraction: float,
        check: Callable[[], object] = lambda: None,
    ) -> Corpus:
        """The corpus of this text, prepared now unless it is there. Raises ValueError.

        `check` is called again and again meanwhile, also while another one prepares it. What it
        raises ends the work, which leaves nothing behind: nobody can end a thread from outside.
        """
        folder = self._folder(source, tokenizer, fraction)
        try:
            with locked(folder, wait=True, meanwhile=check):
                check()  # whoever had the lock may have had it for hours
                if (found := self._found(folder)) is None:
                    self._prepare(source, tokenizer, folder, fraction, check)
                    found = _held(folder)
            self._bound(folder)
        except OSError as error:
            raise ValueError(
                f"the corpus of {source.name!r} cannot be written to {self.folder}: "
                f"{error.strerror or error}. Make room there, let learners use another folder "
                "(DILOCO_CORPORA), or name as source what 'diloco data prepare' wrote elsewhere"
            ) from None
        return found

    def _folder(self, source: Source, tokenizer: Tokenizer, fraction: float) -> Path:
        # Earlier builds counted a row for every token, and what they prepared says no other number.
        fewer = rows_for_text(tokenizer) < tokenizer.vocabulary
        counted = ("rows",) if fewer else ()  # all else they prepared is as good as ever
        made_of = repr((FORMAT, source.fingerprint, tokenizer.digest, fraction, *counted))
        return self.folder / hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest()

    def _found(self, folder: Path) -> Corpus | None:
        """Opened, under its lock, if it is prepared."""
        if is_prepared(folder) and not self._damaged(folder):
            os.utime(folder)  # used now
            return _held(folder)
        return None

    def _prepare(
        self,
        source: Source,
        tokenizer: Tokenizer,
        folder: Path,
        fraction: float,
        check: Callable[[], object],
        *,
        before: CorpusRoom | None = None,
    ) -> None:
        """Of a text that is not prepared; `before`: of the first attempt, which is followed by one
        more at most. Raises ValueError and OSError."""
        removed(folder)  # what somebody left who was killed is no room that others took
        room = CorpusRoom(folder, self.tell, makes_room=self.makes_room, before=before)
        told = _told(source.name, self.tell)
        room.check()

        def progress(done: int, total: int) -> None:
            check()
            room.look(done, total)
            told(done, total)

        try:
            corpus = prepare_locked(source, tokenizer, folder, fraction, 0, progress)
        except BaseException as error:
            if is_prepared(folder):  # it is whole, and took hours
                raise
            room.ended(bytes_of(folder))
            removed(folder)  # a full disk would stay full
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                if before is None and room.first_made(error):
                    self._prepare(source, tokenizer, folder, fraction, check, before=room)
                    return
                raise ValueError(room.short(source.name, error)) from None
            raise
        room.found()
        if self.tell is not None and (ends := corpus.ends_within):
            self.tell(f"the text of {source.name} spells the end of a document {ends} times")

    def digest(self, corpus: Corpus, path: Path, check: Callable[[], object] = lambda: None) -> str:
        """Of the corpus that was opened at `path`; of tokens that came without one all is read, if
        that was not done before. `check`: as of `corpus`. Raises ValueError."""
        return corpus.digest or KeptDigests(self.folder, self.tell, check).of(corpus, path)

    def _damaged(self, folder: Path) -> bool:
        """Whether something of it is gone, as by whoever clears caches: then none of it is left."""
        if whole(folder):
            return False
        if self.tell is not None:
            self.tell(f"the prepared corpus {folder} is damaged, and is made anew")
        removed(folder)
        return True

    def _bound(self, newest: Path) -> None:
        """Remove what nobody uses, the least recently used first, until the limit is kept.

        What is in use may be another learner's, whose limit is another one, or of the same mixture.
        To remove it would free nothing while it is open, and it would be prepared anew for hours.
        """
        sizes = {path: bytes_of(path) for path in kept(self.folder)}
        total = sum(sizes.values())
        for path in sizes:
            if total <= self.bytes_max:
                return
            if path == newest or not let_go(path):
                continue
            total -= sizes[path]
            if self.tell is not None:
                self.tell(f"removed the prepared corpus {path}: the cache was full")


def _held(folder: Path) -> Corpus:
    """Opened, under its lock; nobody who makes room removes it while it is in use."""
    found = opened(folder)
    hold(found)
    return found


def _told(name: str, tell: Callable[[str], None] | None) -> Progress:
    said = 0

    def progress(done: int, total: int) -> None:
        nonlocal said
        if tell is not None and (now := LINES * done // max(total, 1)) > said:
            said = now
            tell(f"prepares the corpus of {name}: {100 * now // LINES} % of {total} bytes")

    return progress
