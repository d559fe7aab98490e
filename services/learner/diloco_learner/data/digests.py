"""Digests of files of tokens that somebody else made, kept so that such a file is read once.

    CORPORA/digests.json   by a key, which is made of the file's place, size, times and inode, and
                           of how its tokens were understood

Such a file brings no digest of its own, and may have terabytes. Whoever changes it changes its size
or its times: then it is read again. Of several learners that want the same digest at once one reads
the file, and the others wait for that.
"""

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco_shared.corpora.folders import locked
from diloco_shared.corpora.prepared import Corpus, digest_of
from diloco_shared.corpora.splits import SPLITS
from diloco_shared.corpora.token_files import TokenFile
from diloco_shared.durable import replace

KEPT = "digests.json"
# The number of this format, and of how digests are made: those of another one are none.
FORMAT = 1
# A learner reads a few such files; the ones that were read first are forgotten first.
KEPT_MAX = 256
# Of the file: each entry has some seventy bytes.
KEPT_BYTES_MAX = 1 << 16
# Told while a file is read: so many lines in all.
LINES = 10

_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class KeptDigests:
    """In a folder, which need not be there yet. `tell` is called with what takes long, in words.

    `check` is called again and again while a file is read, here or by another one; what it raises
    ends that.
    """

    folder: Path
    tell: Callable[[str], None] | None = None
    check: Callable[[], object] = lambda: None

    def of(self, corpus: Corpus, path: Path) -> str:
        """The digest of the corpus that was opened at `path`; reads all of it if it is not kept.

        A folder that cannot be written hinders nobody: then it is read each time. Raises ValueError
        if the file is not there any more.
        """
        key = _key(corpus, path)
        if (found := self._kept().get(key)) is not None:
            return found
        try:
            with locked(self.folder / key, wait=True, meanwhile=self.check):
                return self._kept().get(key) or self._read(corpus, key)
        except OSError:
            return self._hashed(corpus)

    def _read(self, corpus: Corpus, key: str) -> str:
        found = self._hashed(corpus)
        # The key is of before. If the file was changed meanwhile, it has another one, for good.
        with suppress(OSError), locked(self.folder / KEPT, wait=True):
            self._keep(key, found)
        return found

    def _hashed(self, corpus: Corpus) -> str:
        total = sum(part.nbytes for name in SPLITS for part in corpus.split(name).parts)
        return digest_of(corpus, _told(corpus.name, total, self.tell, self.check))

    def _kept(self) -> dict[str, str]:
        """By key, oldest first; none where the file is not there, or is not one of ours."""
        path = self.folder / KEPT
        try:
            if path.stat().st_size > KEPT_BYTES_MAX:
                return {}
            body = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            return {}
        kept = body.get("digests")
        if not isinstance(kept, dict):
            return {}
        sound = (_is_digest(key) and _is_digest(digest) for key, digest in kept.items())
        return kept if all(sound) else {}

    def _keep(self, key: str, digest: str) -> None:
        kept = self._kept() | {key: digest}
        newest = dict(list(kept.items())[-KEPT_MAX:])
        replace(self.folder / KEPT, json.dumps({"format": FORMAT, "digests": newest}))


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def _key(corpus: Corpus, path: Path) -> str:
    """Of all that decides the digest. The time of the last change of any kind is part of it: who
    copies a file may set back the other one. The file is the one that is open: another one may have
    its name by now, and would be taken for it ever after."""
    opened = corpus.train.parts[0]
    assert isinstance(opened, TokenFile)
    try:
        where, there = path.resolve(), opened.stat
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    file = (str(where), there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns)
    parts = [(len(part), part.dtype.str) for name in SPLITS for part in corpus.split(name).parts]
    text = repr((FORMAT, file, corpus.vocabulary, parts))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _told(
    name: str, total: int, tell: Callable[[str], None] | None, check: Callable[[], object]
) -> Callable[[int], None]:
    done, said = 0, -1

    def moved(more: int) -> None:
        nonlocal done, said
        check()
        done += more
        if tell is not None and (now := LINES * done // max(total, 1)) > said:
            said = now
            tell(f"reads {name} for its digest: {100 * now // LINES} % of {total} bytes")

    moved(0)
    return moved
