"""Text for tests of corpora."""

from pathlib import Path

import numpy as np

from diloco_shared.corpora.prepare import prepare
from diloco_shared.corpora.prepared import Corpus
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.tokenizers import Bytes, Tokenizer


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
    return prepare(find(str(source)), with_ or Bytes(), to, fraction)


def documents(corpus: Corpus) -> list[list[str]]:
    """Texts of train, validation and test, of a corpus of bytes."""
    return [
        bytes(np.asarray(tokens[:], np.uint8)).decode().split("\0")[:-1]
        for tokens in (corpus.train, corpus.validation, corpus.test)
    ]
