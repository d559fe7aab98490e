"""Text for tests of corpora."""

import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from diloco_shared.corpora import prepare as module
from diloco_shared.corpora.prepare import prepare
from diloco_shared.corpora.prepared import Corpus
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.tokenizers import ByteTokenizer, Tokenizer


def folder_of(folder: Path, files: int, words: int = 5) -> Path:
    """Files whose texts differ."""
    folder.mkdir(parents=True)
    for n in range(files):
        (folder / f"{n:04d}.txt").write_text(f"text {n:04d} " * words)
    return folder


def prepared(
    source: Path, to: Path, fraction: float = 0.2, with_: Tokenizer | None = None
) -> Corpus:
    """The corpus of a source."""
    return prepare(find(str(source)), with_ or ByteTokenizer(), to, fraction)


def sentence_piece(folder: Path, words: str) -> Path:
    """A model of SentencePiece that was trained on these words."""
    sentencepiece: Any = pytest.importorskip("sentencepiece")
    (folder / "text.txt").write_text("".join(f"{n} {words}" for n in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "m"),
        vocab_size=50,
        character_coverage=1.0,
        minloglevel=2,
    )
    return folder / "m.model"


@contextmanager
def few_open_files(more: int) -> Iterator[None]:
    """This process is allowed few more files than it has open now, unless it asks for more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A new one gets the least number that is free, and the limit is of numbers.
    there = set(map(int, os.listdir("/proc/self/fd")))
    free = (number for number in count() if number not in there)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, more, None)), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def documents(corpus: Corpus) -> list[list[str]]:
    """Texts of train, validation and test, of a corpus of bytes."""
    return [
        bytes(np.asarray(tokens[:], np.uint8)).decode().split("\0")[:-1]
        for tokens in (corpus.train, corpus.validation, corpus.test)
    ]


class Slow:
    """Bytes that can be made to stop."""

    vocabulary, end_of_document, chat_template = 256, 0, None
    digest = ByteTokenizer().digest
    files: dict[str, bytes] = {}  # noqa: RUF012

    def __init__(self, dies_at: str = "", act: Callable[[], None] | None = None) -> None:
        self.dies_at = dies_at
        self.act = act

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        if self.dies_at and any(self.dies_at in text for text in texts):
            assert self.act is not None
            self.act()
        return ByteTokenizer().encode_batch(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return ByteTokenizer().decode(ids)


def killed(folder: Path, to: Path) -> None:
    """Prepare, in a process of its own, and die in the middle."""
    module.CHUNK_BYTES, module.SHARD_BYTES = 100, 1000
    me = os.getpid()
    prepare(find(str(folder)), Slow("text 0060", lambda: os.kill(me, signal.SIGKILL)), to, 0.2)
