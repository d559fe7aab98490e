"""A tokenizer of one's own: byte-level BPE, trained on a corpus.

Every text can be written in its tokens, since single bytes are among them, and a text decodes to
itself. One more token stands for the end of a document.
"""

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterator
from pathlib import Path

from diloco_shared.corpora.documents import Tally
from diloco_shared.corpora.folders import locked
from diloco_shared.corpora.prepare import Progress
from diloco_shared.corpora.sources import Source
from diloco_shared.corpora.tokenizers import CONFIG, JSON, HuggingFace, Tokenizer, load
from diloco_shared.durable import replace, settle_names

END = "<|endoftext|>"
# Single bytes, the end of a document, and at least one pair.
VOCABULARY_MIN = 258
# Above this the table of pairs of the trainer takes many GB, and no model has as many tokens.
VOCABULARY_MAX = 1 << 20
# Text that the trainer sees at most, in bytes of memory. It holds every different word with its
# count: some GB for this much. Of more text a sample is taken, document by document, half as much
# at least; more text hardly changes which pairs are frequent.
TEXT_MAX = 512 << 20
# What a document takes beside its text, in bytes: 33 of its object, which is rounded up to the next
# 16; twice 8 for where it is and for its place; an eighth more of those, for the next ones. Records
# of a few words have several times as much of it as of text.
DOCUMENT_BYTES = 64
# Documents handed over at once.
BATCH = 256


def train_tokenizer(
    source: Source, vocabulary: int, to: Path, progress: Progress | None = None
) -> Tokenizer:
    """Train on the text of `source` and write the tokenizer to the folder `to`.

    A source with little text may give fewer tokens than `vocabulary`. Raises ValueError.
    """
    if not VOCABULARY_MIN <= vocabulary <= VOCABULARY_MAX:
        raise ValueError(
            f"a vocabulary of {vocabulary} is not from {VOCABULARY_MIN} (all bytes, the end of a "
            f"document and a pair) to {VOCABULARY_MAX}"
        )
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            "tokenizers are trained by the package tokenizers, which is not installed: pip install "
            "tokenizers"
        ) from None
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"{to} is there and is not empty: name another folder for the tokenizer")
    with locked(to, wait=False):
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        sample = _sampled(source, progress)
        if not sample.texts:
            raise ValueError(f"source {source.name!r} has no text to train a tokenizer on")
        inner.train_from_iterator(sample.taken(), trainer)
        _written(to, inner.to_str())
    found = load(str(to))
    assert isinstance(found, HuggingFace)
    return found


class _Sample:
    """A fair sample of documents, in at most TEXT_MAX bytes: wherever one stands in the source, it
    is as likely to be among them.

    How much text there is shows in the end: compressed files hold several times their size. So all
    are taken at first, and whenever those are too much, a half of what is drawn goes, and is not
    drawn from then on either.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.bytes = 0  # of memory
        self.below = 1 << 64  # places of those that are drawn
        self.texts: list[bytes] = []
        self.places = array("Q")  # of each of these, evenly spread below 2^64

    def add(self, text: str) -> None:
        """The next document of the source. Not its text decides, of which there may be copies."""
        number, self.seen = self.seen, self.seen + 1
        digest = hashlib.blake2b(number.to_bytes(8), digest_size=8, person=b"tokenizer")
        if (place := int.from_bytes(digest.digest())) >= self.below:
            return
        content = text.encode()
        self.texts.append(content)
        self.places.append(place)
        self.bytes += len(content) + DOCUMENT_BYTES
        while self.bytes > TEXT_MAX:
            self._halve()

    def _halve(self) -> None:
        """Where they lie: beside a copy of those that stay there may be no room."""
        self.below >>= 1
        kept = 0
        for place, content in zip(self.places, self.texts, strict=True):
            if place < self.below:
                self.places[kept], self.texts[kept] = place, content
                kept += 1
            else:
                self.bytes -= len(content) + DOCUMENT_BYTES
        del self.places[kept:], self.texts[kept:]

    def taken(self) -> Iterator[list[str]]:
        """All of them, some at a time, in the order of the source; they are let go of."""
        texts, self.texts, self.places = self.texts, [], array("Q")
        texts.reverse()
        while texts:
            yield [texts.pop().decode() for _ in range(min(BATCH, len(texts)))]


def _written(to: Path, text: str) -> None:
    aside = to.with_name(f".{to.name}.part")
    if aside.exists():  # of a process that died: nobody else has the lock
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    replace(aside / JSON, text)
    config = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    replace(aside / CONFIG, json.dumps(config, indent=1))
    os.rename(aside, to)
    settle_names(to.parent)


def _sampled(source: Source, progress: Progress | None) -> _Sample:
    """Of all documents; reads all of the source."""
    total, done, found = source.bytes, 0, _Sample()
    for document in source.documents(Tally()):
        done += document.read
        found.add(document.text)
        if progress is not None and not found.seen % BATCH:
            progress(min(done, total), total)
    if progress is not None:
        progress(total, total)
    return found
