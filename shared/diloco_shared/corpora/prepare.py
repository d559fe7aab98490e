"""Text to a prepared corpus: read, dealt to splits, encoded on several threads, written.

Memory holds a few chunks of text whatever the size of the corpus. Files get their names when they
are whole, and the index comes last, so that whatever dies on the way leaves a folder that nobody
takes for a corpus; preparing it again cleans it first. The result depends on the text, the
tokenizer and the fraction alone, not on the number of threads.
"""

import hashlib
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from diloco_shared.corpora.chat import signed
from diloco_shared.corpora.documents import Spans, Tally
from diloco_shared.corpora.folders import locked
from diloco_shared.corpora.prepared import (
    FORMAT,
    INDEX,
    MASKED_FORMAT,
    SHARDS_MAX,
    TOKENIZER,
    Corpus,
    Described,
    Index,
    PreparedSplit,
    Shard,
    combined,
    is_prepared,
    open_corpus,
)
from diloco_shared.corpora.sources import Source
from diloco_shared.corpora.splits import SPLITS, Split, Splitter
from diloco_shared.corpora.tokenizers import TEMPLATE, Tokenizer, rows_for_text
from diloco_shared.durable import replace, settle_names
from diloco_shared.protocol.messages import sendable

# Bytes of a shard at most: small enough to be copied again after a fault, and a corpus of a
# terabyte is still but four thousand files.
SHARD_BYTES = 256 << 20
# Text encoded at once by one thread, in bytes: some ten milliseconds of work, so that handing it
# over costs nothing beside it.
CHUNK_BYTES = 256 << 10
# Chunks under way for each thread: one in work, one that waits.
AHEAD = 2
# Threads at most: reading and writing, which is one thread's work, supplies no more.
WORKERS_MAX = 64

# Told bytes of the source done, and how many there are.
Progress = Callable[[int, int], None]

# In a folder that is being written, and until it is whole: what else lies there may be removed.
UNFINISHED = "unfinished"
# What preparing leaves behind when it dies.
_OWN = re.compile(
    rf"(train|validation|test)-\d{{5,}}\.bin(\.part)?|index\.json\.part|{TOKENIZER}|{UNFINISHED}"
)


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    to: Path,
    fraction: float,
    workers: int = 0,
    progress: Progress | None = None,
) -> Corpus:
    """Write the corpus of `source` to the folder `to`, and open it.

    `fraction` of the documents are held out for validation, and as many for test. `workers`:
    threads that encode, 0 for one a core. Of conversations (`source.chat`) the corpus is masked: it
    says which tokens are to be predicted. Raises ValueError for bad input, for a folder that holds
    something else and if another process writes it; OSError if it cannot be written.
    """
    with locked(to, wait=False):
        return prepare_locked(source, tokenizer, to, fraction, workers, progress)


def prepare_locked(
    source: Source,
    tokenizer: Tokenizer,
    to: Path,
    fraction: float,
    workers: int = 0,
    progress: Progress | None = None,
) -> Corpus:
    """`prepare`, for a caller who holds the folder's lock."""
    Splitter(fraction)  # before anything is written
    if source.path == to.resolve() or source.path in to.resolve().parents:
        raise ValueError(f"{to} lies in the source {source.path}: name a folder elsewhere")
    if is_prepared(source.path):
        raise ValueError(f"source {source.name!r} is a prepared corpus already")
    _cleaned(to)
    (to / UNFINISHED).touch()
    threads = min(workers or os.cpu_count() or 1, WORKERS_MAX)
    job = _Job(source, tokenizer, to, threads, progress or (lambda done, total: None))
    parts, tally = job.passed(Splitter(fraction))
    index = _index(job, parts, fraction, tally)
    files = dict(tokenizer.files)
    if source.chat is not None:  # whoever writes with the model is to write as this corpus does
        files[TEMPLATE] = source.chat.template.text.encode()
    if files:
        (to / TOKENIZER).mkdir()
        for name, content in files.items():
            replace(to / TOKENIZER / name, content)
    settle_names(to)  # the names in it, before the index that promises them
    # Fields that only masked corpora have are left out of the others.
    replace(to / INDEX, index.model_dump_json(indent=1, exclude_defaults=True))
    (to / UNFINISHED).unlink()
    settle_names(to)
    return open_corpus(to)


def removed(folder: Path) -> None:
    """Remove a corpus, for a caller who holds its lock; what dies half-way can be cleaned."""
    with suppress(OSError):  # of a full disk: then room is what matters
        (folder / UNFINISHED).touch()
    (folder / INDEX).unlink(missing_ok=True)
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name != UNFINISHED:  # last: it says that the rest is ours
                _remove(path)
    shutil.rmtree(folder, ignore_errors=True)


def _cleaned(to: Path) -> None:
    """An empty folder; what an earlier attempt left is removed, and nothing else ever is."""
    if to.exists() and not to.is_dir():
        raise ValueError(f"{to} is a file: name a folder for the corpus")
    to.mkdir(parents=True, exist_ok=True)
    if is_prepared(to):
        raise ValueError(f"{to} holds a prepared corpus already: remove it, or name another folder")
    there = sorted(to.iterdir())
    ours = (to / UNFINISHED).is_file()
    foreign = [path.name for path in there if not ours or not _OWN.fullmatch(path.name)]
    if foreign:
        raise ValueError(
            f"{to} is not empty and is no corpus (it has {foreign[0]!r}): name another folder"
        )
    for path in there:
        if path.name != UNFINISHED:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Documents on their way: their texts, the split of each, bytes of the source read, and of
    conversations what is to be predicted."""

    texts: list[str] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    spans: list[Spans] = field(default_factory=list)


@dataclass(slots=True)
class _Job:
    """One source on its way to one folder. `largest`: token of what was written."""

    source: Source
    tokenizer: Tokenizer
    to: Path
    workers: int
    progress: Progress
    largest: int = 0

    @property
    def masked(self) -> bool:
        return self.source.chat is not None

    @property
    def dtype(self) -> Literal["uint16", "uint32", "int32"]:
        if self.masked:
            return "int32"
        return "uint16" if self.tokenizer.vocabulary <= 1 << 16 else "uint32"

    def passed(self, splitter: Splitter) -> tuple[dict[Split, PreparedSplit], Tally]:
        """Every document written; a second time if a split would have been empty."""
        tally, total, done = Tally(), self.source.bytes, 0
        writers = {name: _Writer(self.to, name, self.dtype) for name in SPLITS}
        try:
            for chunk, ids in self._encoded(self._chunks(splitter, tally)):
                self._write(writers, chunk, ids)
                done += sum(chunk.read)
                self.progress(min(done, total), total)
            if splitter.empty:
                if not splitter.seen:
                    raise ValueError(_nothing(self.source, tally))
                again = Splitter(splitter.fraction, self._repaired(splitter))
                for writer in writers.values():
                    writer.remove()
                return self.passed(again)
            parts = {name: writer.closed() for name, writer in writers.items()}
            self.largest = max(writer.largest for writer in writers.values())
        finally:
            for writer in writers.values():
                writer.discard()
        self.progress(total, total)
        return parts, tally

    def _repaired(self, splitter: Splitter) -> dict[bytes, Split]:
        try:
            return splitter.repair()
        except ValueError as error:
            raise ValueError(f"source {self.source.name!r}: {error}") from None

    def _chunks(self, splitter: Splitter, tally: Tally) -> Iterator[_Chunk]:
        chunk, size = _Chunk(), 0
        for document in self.source.documents(tally):
            content = document.text.encode()
            chunk.texts.append(document.text)
            chunk.splits.append(splitter.split(content))
            chunk.read.append(document.read)
            chunk.spans.append(document.spans)
            size += len(content)
            if size >= CHUNK_BYTES:
                yield chunk
                chunk, size = _Chunk(), 0
        if chunk.texts:
            yield chunk

    def _tokens(self, chunk: _Chunk) -> list[NDArray[Any]]:
        """Of each document, signed in a masked corpus; without the end of document."""
        if not self.masked:
            return list(self.tokenizer.encode_batch(chunk.texts))
        texts = zip(chunk.texts, chunk.spans, strict=True)
        return [signed(self.tokenizer, text, spans) for text, spans in texts]

    def _encoded(self, chunks: Iterator[_Chunk]) -> Iterator[tuple[_Chunk, list[NDArray[Any]]]]:
        """In the order of the source, some chunks ahead of who asks."""
        waiting: deque[tuple[_Chunk, Future[list[NDArray[Any]]]]] = deque()
        with ThreadPoolExecutor(self.workers, "encode") as pool:
            try:
                for chunk in chunks:
                    waiting.append((chunk, pool.submit(self._tokens, chunk)))
                    if len(waiting) > AHEAD * self.workers:
                        first, encoded = waiting.popleft()
                        yield first, encoded.result()
                while waiting:
                    first, encoded = waiting.popleft()
                    yield first, encoded.result()
            finally:
                for _, encoded in waiting:
                    encoded.cancel()

    def _write(
        self, writers: dict[Split, "_Writer"], chunk: _Chunk, ids: list[NDArray[Any]]
    ) -> None:
        last = self.tokenizer.end_of_document
        end = np.array([~last if self.masked else last], self.dtype)
        for tokens, split in zip(ids, chunk.splits, strict=True):
            # Of many templates it is what ends the last answer: then it stands there already.
            ended = self.masked and len(tokens) and tokens[-1] in (last, ~last)
            if not self.masked:  # conversations have some, by their template
                writers[split].ends_within += int(np.count_nonzero(tokens == last))
            writers[split].write(tokens.astype(self.dtype), *([] if ended else [end]))


class _Writer:
    """The shards of one split."""

    def __init__(self, folder: Path, split: Split, dtype: str) -> None:
        self.folder = folder
        self.split = split
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.digest = hashlib.blake2b(digest_size=16)
        self.masked = self.dtype.kind == "i"
        self.shards: list[Shard] = []
        self.largest = 0  # token so far
        self.ends_within = 0  # of documents
        self._file: IO[bytes] | None = None
        self._begin()

    def _begin(self) -> None:
        self._tokens = self._documents = self._predicted = 0
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def _name(self) -> str:
        return f"{self.split}-{len(self.shards):05d}.bin"

    @property
    def _aside(self) -> Path:
        return self.folder / f"{self._name}.part"

    def write(self, *pieces: NDArray[Any]) -> None:
        """A document, which lies in one shard."""
        self.largest = max(self.largest, *map(_largest, pieces))
        raw = b"".join(piece.astype(self.dtype, copy=False).tobytes() for piece in pieces)
        if self._tokens and self._tokens * self.dtype.itemsize + len(raw) > SHARD_BYTES:
            self._close()
        if self._file is None:
            self._file = self._aside.open("wb", buffering=1 << 20)
        self._file.write(raw)
        self._digest.update(raw)
        self.digest.update(raw)
        self._tokens += len(raw) // self.dtype.itemsize
        self._documents += 1
        if self.masked:
            self._predicted += sum(int(np.count_nonzero(piece >= 0)) for piece in pieces)

    def _close(self) -> None:
        """The shard gets its name, now that it is whole and on disk."""
        assert self._file is not None
        if len(self.shards) >= SHARDS_MAX:
            raise ValueError(f"a corpus has at most {SHARDS_MAX} shards a split")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._aside.rename(self.folder / self._name)
        self._file = None
        shard = Shard(
            file=self._name,
            tokens=self._tokens,
            documents=self._documents,
            digest=self._digest.hexdigest(),
            predicted=self._predicted,
        )
        self.shards.append(shard)
        self._begin()

    def closed(self) -> PreparedSplit:
        """All shards named; what there is."""
        if self._file is not None:
            self._close()
        return PreparedSplit(
            tokens=sum(shard.tokens for shard in self.shards),
            documents=sum(shard.documents for shard in self.shards),
            digest=self.digest.hexdigest(),
            predicted=sum(shard.predicted for shard in self.shards),
            ends_within=self.ends_within,
            shards=self.shards,
        )

    def discard(self) -> None:
        """Close a file that will not be whole."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Take back all that was written."""
        self.discard()
        self._aside.unlink(missing_ok=True)
        for shard in self.shards:
            (self.folder / shard.file).unlink()


def _largest(tokens: NDArray[Any]) -> int:
    """Also among those with a sign; 0 of none."""
    if not len(tokens):
        return 0
    return max(int(tokens.max()), ~int(tokens.min()))


def _nothing(source: Source, tally: Tally) -> str:
    if source.chat is not None:
        return f"source {source.name!r} has no conversations: they are in .jsonl or .parquet files"
    if tally.binary:
        return (
            f"source {source.name!r} has no text: {tally.binary} files were left out since they "
            f"are not UTF-8 (the first is {tally.first_binary})"
        )
    return f"source {source.name!r} has no text: all of its {len(source.files)} files are empty"


def _index(job: _Job, parts: dict[Split, PreparedSplit], fraction: float, tally: Tally) -> Index:
    source, tokenizer = job.source, job.tokenizer
    # A template is no tokenizer: `bytes` may have one too.
    of_files = tokenizer.files.keys() - {TEMPLATE}
    kind = Described(kind="files" if of_files else "bytes", digest=tokenizer.digest)
    format_ = MASKED_FORMAT if job.masked else FORMAT
    digests = {name: part.digest for name, part in parts.items()}
    rows = max(rows_for_text(tokenizer), job.largest + 1)
    return Index(
        format=format_,
        digest=combined(tokenizer.digest, digests, format_),
        tokenizer=kind,
        vocabulary=tokenizer.vocabulary,
        rows=rows if rows < tokenizer.vocabulary else None,
        end_of_document=tokenizer.end_of_document,
        dtype=job.dtype,
        masked=job.masked,
        source=sendable(f"{source.name} ({len(source.files)} files, {source.bytes} bytes)"),
        fraction=fraction,
        skipped_files=tally.binary,
        splits=parts,
    )
